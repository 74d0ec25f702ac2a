"""The answers of a teacher that can only be asked, as a stage of a run: the file that `label` would write, then learned as such."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compress import distributed
from compress.data.examples import Example
from compress.data.teacher_labels import read_teacher_labels
from compress.labelling.by_model import ask_model
from compress.labelling.journal import Journal
from compress.models.answering import AnsweringModel, load_answering, on_device
from compress.progress import advancing
from compress.runs.answered import with_answers
from compress.runs.hardware import device_here
from stillroom.inputs.preflight import RunInputs

ANSWERS_FILE = "answers.jsonl"
TIMED_TEXTS = 32


def asked_texts(inputs: RunInputs) -> list[Example]:
    """The texts that the teacher is asked about, each once: those of all splits, and those that it alone labels."""
    splits = inputs.splits
    texts = [*splits.train, *splits.validation, *splits.test, *inputs.in_domain_texts]
    # Answers are matched by the text, so one that is marked in two ways is asked about once.
    by_text = {(text.text_read, text.text_pair or ""): text for text in reversed(texts)}
    return [replace(text, label=None, entities=None) for text in reversed(by_text.values())]


def make_answers(folder: Path, inputs: RunInputs) -> None:
    """Save the teacher's answers to `asked_texts`; what is answered is kept if this is interrupted."""
    texts = asked_texts(inputs)
    model = _loaded(inputs)
    if not distributed.main():
        for _ in ask_model(model, texts, distributed.broadcast(None)):
            pass
        return
    with Journal(folder / ANSWERS_FILE, texts, {}) as journal:
        missing = distributed.broadcast(journal.missing)
        with advancing(inputs.notify, "teacher's answers") as shown:
            for answers in ask_model(model, texts, missing):
                journal.add(answers)
                shown(len(journal.rows), len(texts))
        journal.finish()


def with_teachers_answers(inputs: RunInputs, folder: Path) -> RunInputs:
    """`inputs` with the answers that `make_answers` saved.

    Raises:
        BadInput: they are not shown to be better than chance, or none can be learned.
    """
    asked = inputs.answering
    assert asked
    answers = read_teacher_labels([folder / ANSWERS_FILE], inputs.task)
    found = with_answers(inputs, replace(answers, asked=(f"--teacher {asked.name}", asked.public_name)))
    assert isinstance(found, RunInputs)
    assert found.answers
    # Those of the texts that are learned are kept as soft labels alone.
    scored = found.answers.only([*found.splits.validation, *found.splits.test])
    return replace(found, answers=scored)


def seconds_to_ask(inputs: RunInputs) -> float:
    """The seconds that the teacher's answers will take, from those of a few texts; 0 where no teacher is asked so."""
    if not inputs.answering:
        return 0.0
    texts = asked_texts(inputs)
    few = texts[:: max(1, len(texts) // TIMED_TEXTS)][:TIMED_TEXTS]
    model = _loaded(inputs)
    _ask(model, few[:1])
    started = time.perf_counter()
    _ask(model, few)
    return (time.perf_counter() - started) / len(few) * len(texts)


def _ask(model: AnsweringModel, texts: Sequence[Example]) -> None:
    for _ in ask_model(model, texts, range(len(texts))):
        pass


def _loaded(inputs: RunInputs) -> AnsweringModel:
    assert inputs.answering
    return on_device(load_answering(inputs.answering), device_here(inputs.recipe.device))
