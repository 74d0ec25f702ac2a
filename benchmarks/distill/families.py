"""Check that every objective trains every family on real text: the loss must fall within 20 steps.

    python benchmarks/distill/families.py --tokenizer FOLDER --corpus FILE --data FOLDER [--method M]... [--family F]...

Teacher and student are tiny, with random weights, as in the tests, and with the vocabulary of `--tokenizer`. Plain text comes from
`--corpus`, the task's text from ten classes of `--data`. Each loss is the mean over the same five batches before and after the
steps, without dropout. Prints a table on stdout, and a line per stage and family on stderr. Exit code 1 if one did not fall.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "tests" / "compress")]
from encoders import encoder  # noqa: E402 - the tests are no package

from compress.data.batches import TaskText  # noqa: E402
from compress.data.corpus import CorpusText, chunks, masking_of  # noqa: E402
from compress.data.encoded import pad_id_of  # noqa: E402
from compress.data.splits import read_splits  # noqa: E402
from compress.data.texts import stream_texts  # noqa: E402
from compress.losses.outputs import total  # noqa: E402
from compress.methods.catalogue import METHODS, Sizes, Stage, stages_of  # noqa: E402
from compress.methods.objectives import Projections  # noqa: E402
from compress.models.families import FAMILIES  # noqa: E402
from compress.models.initialise import student_of  # noqa: E402
from compress.models.shapes import Shape  # noqa: E402
from compress.tasks import TEXT_CLASSIFICATION  # noqa: E402
from compress.training.loop import StageSettings  # noqa: E402
from compress.training.stage import step_losses, train_stage  # noqa: E402
from serve.text.tokenizer import load_tokenizer  # noqa: E402

SIZES = Sizes(4, 2, 24, 24)
SHAPE = Shape(2, 24, 4, 48)
STEPS, BATCH, LONGEST, CLASSES = 20, 16, 32, 10


def texts_of(stage: Stage, given: argparse.Namespace) -> Any:
    """Batches of plain text or of the task's text, as the stage needs."""
    return task_text(given.tokenizer, given.data) if stage.text != "corpus" else plain_text(given, stage)


@cache
def task_text(tokenizer: str, data: str) -> TaskText:
    train = read_splits(data, TEXT_CLASSIFICATION).train
    labels = sorted({str(example.label) for example in train})[:CLASSES]
    examples = [example for example in train if example.label in labels]
    return TaskText(TEXT_CLASSIFICATION.encode(examples, load_tokenizer(Path(tokenizer), LONGEST), labels), BATCH, 0)


def plain_text(given: argparse.Namespace, stage: Stage) -> CorpusText:
    tokenizer = load_tokenizer(Path(given.tokenizer), LONGEST)
    masking = masking_of(tokenizer, tokenizer.get_vocab_size()) if stage.objective.masks_tokens else None
    return CorpusText(pieces(given.tokenizer, given.corpus), pad_id_of(tokenizer), BATCH, 0, masking)


@cache
def pieces(tokenizer: str, corpus: str) -> Any:
    return chunks(islice(stream_texts(Path(corpus)), 400), load_tokenizer(Path(tokenizer), LONGEST), LONGEST)


def models(kind: str, stage: Stage, vocabulary: int) -> tuple[Any, Any]:
    """A teacher with distinct outputs, and a new student."""
    heads = {term.of for term in stage.objective.outputs}
    head = "ForMaskedLM" if "vocabulary" in heads else "ForSequenceClassification" if "classes" in heads else ""
    teacher = encoder(kind, head, vocab_size=vocabulary, num_labels=CLASSES)
    with torch.no_grad():  # with small random weights, attention and outputs would be nearly uniform
        for name, parameter in teacher.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(60 if name.startswith("classifier") else 6)
    student, _ = student_of(teacher, SHAPE, seed=1, new_layers=True)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name.startswith("classifier") and parameter.ndim == 2:
                parameter.mul_(0.01)  # copied from the teacher: both would give the same class equally high scores
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # with only 20 steps, its noise could hide or cause a fall
    return teacher, student


def before_and_after(kind: str, stage: Stage, given: argparse.Namespace) -> tuple[float, float]:
    text = texts_of(stage, given)
    vocabulary = load_tokenizer(Path(given.tokenizer), LONGEST).get_vocab_size()
    teacher, student = models(kind, stage, vocabulary)
    torch.manual_seed(0)
    maps = Projections(stage.objective, teacher.config, student.config)

    def loss() -> float:
        student.eval()
        with torch.no_grad():
            said = [
                total(step_losses(stage.objective, teacher, student, text.at(step), maps, None)).item()
                for step in range(5)
            ]
        return sum(said) / len(said)

    before = loss()
    with tempfile.TemporaryDirectory() as folder:
        settings = StageSettings(STEPS, learning_rate=1e-3)
        train_stage(stage, teacher, student, text, settings, folder=Path(folder), projections=maps)
    return before, loss()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer.json")
    parser.add_argument("--corpus", required=True, help="file of plain text")
    parser.add_argument("--data", required=True, help="folder of labelled texts")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    given = parser.parse_args(arguments)
    kinds = given.family or sorted(FAMILIES)
    started = time.monotonic()
    print(
        f"torch {version('torch')}, transformers {version('transformers')}: loss after {STEPS} steps over the loss before\n"
    )
    print(f"| stage of a method | {' | '.join(kinds)} |\n|---|{'---:|' * len(kinds)}")
    failed = 0
    found: dict[tuple[Stage, str], tuple[float, float]] = {}  # methods share stages
    for method in given.method or METHODS:
        for number, stage in enumerate(stages_of(method, SIZES), 1):
            ratios = []
            for kind in kinds:
                key = (replace(stage, name="", share=1.0, learning_rate=0.0), kind)
                found[key] = before, after = found.get(key) or before_and_after(kind, stage, given)
                ratios.append(after / before)
                failed += not after < before
                print(
                    f"{method} {number} {stage.name}, {kind}: {before:.5g} -> {after:.5g}", file=sys.stderr, flush=True
                )
            name = method if stage.name == method else f"{method}: {stage.name}"
            print(f"| {name} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |", flush=True)
    print(f"\n{failed} did not fall; {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
