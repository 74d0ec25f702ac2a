"""The task metric of a bundle or a checkpoint on labelled examples, as a whole, for each label and for each language."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from compress.data.columns import columns_of
from compress.data.file_formats import SUFFIXES
from compress.data.hub import is_saved_dataset
from compress.data.labelled_files import check_there, read_examples
from compress.data.splits import check_no_single, read_splits, split_files, what_is_in
from compress.input_errors import Faults
from serve.bundle.manifest import MANIFEST
from serve.bundle.remote_files import shown
from serve.errors import BadInput
from serve.text.entity_markers import knows_markers
from serve.text.tokenizer import load_tokenizer
from stillroom.verbs.evaluate import Evaluation

if TYPE_CHECKING:
    from compress.data.encoded import Encoded
    from compress.data.examples import Example
    from compress.data.task import Task
    from compress.evaluation.metrics import Prediction


class _Model(NamedTuple):
    """A bundle or a checkpoint for a task, opened."""

    task: "Task"
    labels: Sequence[str]
    """By index."""
    variant: str
    tokenizer: Tokenizer
    max_length: int
    predictions: "Callable[[list[Example], Encoded], list[Prediction]]"


def labelled_document(model: str, folder: str, given: Evaluation) -> dict[str, Any]:
    """The document of a model that answers a task, whose bundle or checkpoint is `folder` or has that name on the Hub."""
    from compress.data.encoded import text_warnings
    from compress.data.examples import check_kind, clusters_of

    is_bundle = (Path(folder) / MANIFEST).is_file()
    opened = _open_bundle(folder, given) if is_bundle else _open_checkpoint(folder, given)
    task, metric = opened.task, opened.task.metric
    warnings: list[str] = []
    examples = examples_of(Path(given.data), given, task, warnings)
    if task.has_kinds:
        check_kind(examples, folder, multi_label=task.multi_label, markers=knows_markers(opened.tokenizer))
    encoded = task.encode(examples, opened.tokenizer, task.model_labels(()) if is_bundle else opened.labels)
    said = opened.predictions(examples, encoded)
    # What `run` says of such data.
    warnings += task.label_warnings(examples)
    warnings += text_warnings(encoded, examples, opened.max_length, file_of(Path(given.data), given.split).name)
    gold = [task.gold_of(example) for example in examples]
    clusters = clusters_of(examples)
    reached = metric.score(gold, said, clusters=clusters)
    known = task.answer_labels(opened.labels)
    languages = metric.by_language([example.language for example in examples], gold, said, clusters)
    counted = Counter(example.language for example in examples)
    document = {
        "model": shown(model),
        "variant": opened.variant,
        "task": task.name,
        "metric": metric.name,
        "value": reached.value,
        "low": reached.low,
        "high": reached.high,
        "examples": len(examples),
        "labels": [{"label": name, **scores} for name, scores in metric.per_label(gold, said).items()],
        "unknown_labels": [name for name in task.labels_in(examples) if name not in known] if task.names_labels else [],
        "warnings": warnings,
    }
    if further := metric.further_scores(gold, said, clusters=clusters):
        document["scores"] = {name: asdict(each) for name, each in further.items()}
    if languages:
        document["languages"] = [
            {"language": name, "value": each.value, "low": each.low, "high": each.high, "examples": counted[name]}
            for name, each in languages.items()
        ]
        document["mean_of_languages"] = sum(each.value for each in languages.values()) / len(languages)
    return document


def _open_bundle(model: str, given: Evaluation) -> _Model:
    """The bundle in the folder `model`. BadInput tells what is wrong with it, and whether the data is missing."""
    from compress.tasks import task_named
    from serve.model.pipeline import Pipeline

    refuse_revision(model, given)
    faults = Faults()
    pipeline = faults.check(lambda: Pipeline(model, given.variant, device=given.device))
    faults.check(lambda: file_of(Path(given.data), given.split))
    faults.raise_if_any()
    assert pipeline is not None
    manifest = pipeline.manifest
    task = task_named(manifest.task, multi_label=manifest.multi_label)
    if given.task and given.task != task.name:
        raise BadInput(f"--task is {given.task}, but {model} is a bundle for {task.name}.")

    def predictions(examples: "list[Example]", _: "Encoded") -> "list[Prediction]":
        said: list[Prediction] = [""] * len(examples)
        # A text without a second text differs from one with an empty second text: each kind has its own call.
        for kind in (True, False):
            if not (chosen := [i for i, example in enumerate(examples) if bool(example.text_pair) is kind]):
                continue
            pairs = [examples[i].text_pair or "" for i in chosen] if kind else None
            # Truncated, as in training and in the evaluation of checkpoints.
            answers = pipeline([examples[i].text_read for i in chosen], text_pair=pairs, truncate=True)
            for i, answer in zip(chosen, answers, strict=True):
                said[i] = task.prediction_of(answer, examples[i])
        return said

    tokenizer = load_tokenizer(pipeline.bundle.path, manifest.max_length)
    return _Model(task, manifest.labels, pipeline.variant, tokenizer, manifest.max_length, predictions)


def _open_checkpoint(model: str, given: Evaluation) -> _Model:
    """The checkpoint `model`. BadInput tells what is wrong with it, and whether the data is missing."""
    from compress.evaluation.predictions import row_logits
    from compress.models.pretrained import check_labels, head_fault, load, open_model, open_tokenizer
    from compress.runs.hardware import device_here
    from compress.tasks import task_of

    refuse_variant(model, given)
    device = device_here(given.device)
    wanted = "a bundle or a transformers folder"
    faults = Faults()
    opened = faults.check(partial(open_model, model, role="MODEL", wanted=wanted, revision=given.revision))
    faults.check(lambda: file_of(Path(given.data), given.split))
    faults.raise_if_any()
    assert opened is not None
    task = task_of(opened.config)
    if task is None or given.task not in (None, task.name):
        why = f"has no head for {given.task}" if opened.has_head else head_fault(opened.config)
        raise BadInput(f"{model} {why}; `stillroom run` gives it one.")
    labels = opened.head_for(task) or ()
    check_labels(labels, task, f"MODEL {model}")
    tokenizer = open_tokenizer(opened)
    longest = (tokenizer.truncation or {}).get("max_length", opened.max_length)

    def predictions(_: "list[Example]", encoded: "Encoded") -> "list[Prediction]":
        return task.predictions(encoded, row_logits(load(opened, task).to(device), encoded))

    return _Model(task, labels, "torch", tokenizer, longest, predictions)


def refuse_revision(model: str, given: Evaluation) -> None:
    """BadInput for a revision of the bundle `model`."""
    if given.revision:
        raise BadInput(
            f"--revision {given.revision}: {model} is a bundle, and only models of the Hub have revisions. Leave it out."
        )


def refuse_variant(model: str, given: Evaluation) -> None:
    """BadInput for a variant of the checkpoint `model`."""
    if given.variant:
        raise BadInput(f"--variant {given.variant}: {model} is not a bundle, and only bundles have variants.")


def examples_of(data: Path, given: Evaluation, task: "Task", notes: list[str] | None = None) -> "list[Example]":
    """The labelled examples of `data`: a file, or the split that is asked for of a folder. `notes` gets what was left out.

    BadInput if it has none.
    """
    file, columns = file_of(data, given.split), columns_of(given)
    if file.is_dir() and not is_saved_dataset(file):
        return read_examples(split_files(file, given.split), task, columns, notes)
    if file.is_dir():
        splits = read_splits(str(file), task, columns)
        if given.split == "validation" and splits.held_out:
            raise BadInput(
                f"--data {data} has no validation split. Give another --split, or a file of labelled examples."
            )
        found: list[Example] = getattr(splits, given.split)
        if notes is not None:
            notes.extend(splits.notes)
        return found
    return read_examples(file, task, columns, notes)


def file_of(data: Path, split: str) -> Path:
    """The file of examples: `data` itself, or the file of `split` in the folder `data`; the folder if its split has several files, or
    `datasets` wrote it.
    """
    if not data.is_dir():
        check_there(data)
        if split != "test":
            raise BadInput(
                f"--split is {split}, and --data {data} is one file. Leave it out, or give a folder of splits."
            )
        return data
    if is_saved_dataset(data):
        return data
    check_no_single(data)
    if files := split_files(data, split):
        return files[0] if len(files) == 1 else data
    raise BadInput(
        f"--data {data} has no file {split} with one of the endings {', '.join(SUFFIXES)}. "
        f"Give another --split, or a file of labelled examples.{what_is_in(data)}"
    )
