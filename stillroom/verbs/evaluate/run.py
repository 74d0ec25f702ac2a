"""`stillroom evaluate`: the task metric of a bundle or a checkpoint on labelled examples, as a whole and for each label."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from serve.bundle.manifest import MANIFEST
from serve.bundle.remote_files import is_url, shown
from serve.errors import BadInput
from stillroom.inputs.folders import local_bundle
from stillroom.verbs.evaluate import Evaluation
from stillroom.verbs.evaluate.foreign_settings import refuse_revision, refuse_variant
from stillroom.verbs.evaluate.generator import generates, generation_document, refuse_for_others
from stillroom.verbs.evaluate.texts import examples_of, file_of
from stillroom.verbs.evaluate.vectors import gives_vectors, vector_document

if TYPE_CHECKING:
    from compress.data.encoded import Encoded
    from compress.data.examples import Example
    from compress.data.task import Task
    from compress.evaluation.metrics import Prediction

T = TypeVar("T")

LABEL_COLUMNS = ["label", "precision", "recall", "F1", "number"]
LANGUAGE_COLUMNS = ["language", "score", "low", "high", "texts"]


class _Answered(NamedTuple):
    """Examples, the predictions of a model for them, and facts of the model."""

    examples: "list[Example]"
    said: "list[Prediction]"
    task: "Task"
    labels: Sequence[str]  # by index
    variant: str
    warnings: list[str]


def evaluate_on(model: str, given: Evaluation) -> dict[str, Any]:
    """See `stillroom.evaluate`."""
    folder = str(local_bundle(model)) if is_url(model) else model
    if generates(folder, given):
        return generation_document(folder, given)
    refuse_for_others(model, given)
    if given.teacher or gives_vectors(folder):
        return vector_document(model, folder, given)
    answer = _of_bundle if (Path(folder) / MANIFEST).is_file() else _of_checkpoint
    found = answer(folder, Path(given.data), given)
    task, metric = found.task, found.task.metric
    gold = [task.gold_of(example) for example in found.examples]
    reached = metric.score(gold, found.said)
    known = task.answer_labels(found.labels)
    languages = metric.by_language([example.language for example in found.examples], gold, found.said)
    counted = Counter(example.language for example in found.examples)
    document = {
        "model": shown(model),
        "variant": found.variant,
        "task": task.name,
        "metric": metric.name,
        "value": reached.value,
        "low": reached.low,
        "high": reached.high,
        "examples": len(found.examples),
        "labels": [{"label": name, **scores} for name, scores in metric.per_label(gold, found.said).items()],
        "unknown_labels": [name for name in task.labels_in(found.examples) if name not in known]
        if task.names_labels
        else [],
        "warnings": found.warnings,
    }
    if further := metric.further_scores(gold, found.said):
        document["scores"] = {name: asdict(each) for name, each in further.items()}
    if languages:
        document["languages"] = [
            {"language": name, "value": each.value, "low": each.low, "high": each.high, "examples": counted[name]}
            for name, each in languages.items()
        ]
        document["mean_of_languages"] = sum(each.value for each in languages.values()) / len(languages)
    return document


def language_rows(document: dict[str, Any]) -> list[list[str]]:
    """The rows of a table of each language's score, under `LANGUAGE_COLUMNS`, from what `evaluate` returned."""
    return [
        [
            row["language"] or "not named",
            *(f"{row[name]:.4f}" for name in ("value", "low", "high")),
            str(row["examples"]),
        ]
        for row in document.get("languages", [])
    ]


def label_rows(document: dict[str, Any]) -> list[list[str]]:
    """The rows of a table of each label's scores, under `LABEL_COLUMNS`, from what `evaluate` returned."""
    return [
        [row["label"], *(f"{row[name]:.4f}" for name in ("precision", "recall", "f1")), str(row["support"])]
        for row in document["labels"]
    ]


def _of_bundle(model: str, data: Path, given: Evaluation) -> _Answered:
    from compress.data.examples import check_kind
    from compress.tasks import task_named
    from serve.model.pipeline import Pipeline
    from serve.text.entity_markers import knows_markers
    from serve.text.tokenizer import load_tokenizer

    refuse_revision(model, given)
    pipeline = _with_data(lambda: Pipeline(model, given.variant, device=given.device), data, given.split)
    task = task_named(pipeline.manifest.task, multi_label=pipeline.manifest.multi_label)
    if given.task and given.task != task.name:
        raise BadInput(f"--task is {given.task}, but {model} is a bundle for {task.name}.")
    notes: list[str] = []
    examples = examples_of(data, given, task, notes)
    if task.has_kinds:
        check_kind(examples, model, multi_label=task.multi_label, markers=knows_markers(pipeline.tokenizer))
    said: list[Prediction] = [""] * len(examples)
    # A text without a second text differs from one with an empty second text: each kind has its own call.
    for kind in (True, False):
        chosen = [i for i, example in enumerate(examples) if bool(example.text_pair) is kind]
        pairs = [examples[i].text_pair or "" for i in chosen] if kind else None
        for i, answer in zip(
            chosen,
            # Truncated, as in training and in the evaluation of checkpoints.
            pipeline([examples[i].text_read for i in chosen], text_pair=pairs, truncate=True) if chosen else [],
            strict=True,
        ):
            said[i] = task.prediction_of(answer, examples[i])
    tokenizer = load_tokenizer(pipeline.bundle.path, pipeline.manifest.max_length)
    encoded = task.encode(examples, tokenizer, task.model_labels(()))
    warnings = notes + _warnings(examples, encoded, pipeline.manifest.max_length, file_of(data, given.split))
    return _Answered(examples, said, task, pipeline.manifest.labels, pipeline.variant, warnings)


def _of_checkpoint(model: str, data: Path, given: Evaluation) -> _Answered:
    from compress.data.examples import check_kind
    from compress.evaluation.predictions import row_logits
    from compress.models.pretrained import check_labels, head_fault, load, open_model, open_tokenizer
    from compress.runs.hardware import device_here
    from compress.tasks import task_of
    from serve.text.entity_markers import knows_markers

    refuse_variant(model, given)
    device = device_here(given.device)
    wanted = "a bundle or a transformers folder"
    opener = partial(open_model, str(model), role="MODEL", wanted=wanted, revision=given.revision)
    opened = _with_data(opener, data, given.split)
    task = task_of(opened.config)
    if task is None or given.task not in (None, task.name):
        why = f"has no head for {given.task}" if opened.has_head else head_fault(opened.config)
        raise BadInput(f"{model} {why}; `stillroom run` gives it one.")
    notes: list[str] = []
    examples = examples_of(data, given, task, notes)
    labels = opened.head_for(task) or ()
    check_labels(labels, task, f"MODEL {model}")
    tokenizer = open_tokenizer(opened)
    if task.has_kinds:
        check_kind(examples, model, multi_label=task.multi_label, markers=knows_markers(tokenizer))
    encoded = task.encode(examples, tokenizer, labels)
    said = task.predictions(encoded, row_logits(load(opened, task).to(device), encoded))
    longest = (tokenizer.truncation or {}).get("max_length", opened.max_length)
    warnings = notes + _warnings(examples, encoded, longest, file_of(data, given.split))
    return _Answered(examples, said, task, labels, "torch", warnings)


def _warnings(examples: "Sequence[Example]", encoded: "Encoded", max_length: int, file: Path) -> list[str]:
    """What `run` says of such data."""
    from compress.data.text_checks import text_warnings

    return [*encoded.task.label_warnings(examples), *text_warnings(encoded, examples, max_length, file.name)]


def _with_data(open_it: Callable[[], T], data: Path, split: str) -> T:
    """What `open_it` returns. One BadInput names what is wrong with it and whether `data` is missing."""
    from compress.input_errors import Faults

    faults = Faults()
    opened = faults.check(open_it)
    faults.check(lambda: file_of(data, split))
    faults.raise_if_any()
    assert opened is not None
    return opened
