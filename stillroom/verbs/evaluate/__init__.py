"""The task metric of a bundle or checkpoint on labelled data.

The score comes with a bootstrap interval.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from compress.settings import FineTuning, HubModel, RowColumns
from serve.bundle.remote_files import is_url
from serve.bundle.runtimes import Device
from serve.options import again, make, setting
from serve.settings import ServeSettings
from stillroom.console import result, say, table
from stillroom.inputs.folders import local_bundle
from stillroom.verb import Argument, Document, Verb


@dataclass(frozen=True, kw_only=True)
class Evaluation(HubModel, RowColumns):
    """The data that a model is scored on, and which of its files is scored."""

    data: str = setting(help="A file of labelled examples, or a folder of splits.")
    split: Literal["train", "validation", "test"] = setting("test", help="Which split of a folder is scored.")
    variant: str | None = again(
        ServeSettings, "variant", help="Exported file of a bundle to score.", shown="the bundle's"
    )
    device: Device = again(
        ServeSettings,
        "device",
        help="Where the model runs; cuda is an NVIDIA GPU, and a bundle needs onnxruntime-gpu there.",
    )
    teacher: str = setting(
        "", help="Model with whose vectors those of an encoder of sentences are compared: a bundle, a transformers folder or a Hub name.",
        metavar="MODEL", shown="none",
    )  # fmt: skip
    task: str | None = again(FineTuning, "task", None, help="Task of a checkpoint.", shown="that of its head")
    beams: int = setting(5, help="Targets under way in the search of a model that generates.", at_least=1, at_most=64)
    length_penalty: float = setting(
        1.0,
        help="Power of the length penalty of that search; a higher one prefers longer texts.",
        at_least=0,
        at_most=10,
    )
    target_column: str = again(FineTuning, "target_column", help="Column of the text to generate.")
    layout: ClassVar = {"Options": "data split variant device teacher task beams length_penalty revision"}


def evaluate(model: str, data: Path | str, **settings: Any) -> dict[str, Any]:
    """The task metric of a bundle, or of a checkpoint with a head, on a labelled file, or on a split of a folder of them.

    Settings are the fields of `Evaluation`: variant, device, task, split, teacher, revision.

    Returns `{model, variant, task, metric, value, low, high, examples, labels, unknown_labels, warnings}`, where `labels` has for each
    label its `precision`, `recall`, `f1` and `support` (its count in the data). `unknown_labels` are labels of the data that the
    model lacks, `warnings` what `run` says of such data. Where rows name two languages or more, `languages` has for each `value`,
    `low`, `high` and `examples`, and `mean_of_languages` is the mean of the values. Where each text has one class, `scores` has the
    `value`, `low` and `high` of `macro_f1`; of a model that gives numbers those of `spearman` and `mean_squared_error`, and `labels`
    is empty; of one that answers questions those of `exact_match`, and where only some questions have an answer of `f1_with_answer` and
    `f1_without_answer`. For a bundle, torch is not
    imported.

    An encoder of sentences is compared with its `teacher`: the metric is Spearman's rho between both models' similarities of texts,
    `scores` has `recall_at_10`, and where a folder of splits has one label a text, `neighbour_accuracy` has for the `model` and the
    `teacher` the share of texts whose nearest text of train has their label. `data` may be a file of texts without labels.

    Of a model that generates texts the metric is ROUGE-L, and `scores` has `rouge_1`, `rouge_2` and `bleu`.

    Raises:
        BadInput: the model, the data or a setting cannot be used.
    """
    from stillroom.verbs.evaluate.labelled import labelled_document
    from stillroom.verbs.evaluate.unlabelled import (
        generates,
        generation_document,
        gives_vectors,
        refuse_for_others,
        vector_document,
    )

    given = make(Evaluation, settings | {"data": data}, verb="evaluate")
    folder = str(local_bundle(model)) if is_url(model) else os.path.expanduser(model)
    if generates(folder, given):
        return generation_document(folder, given)
    refuse_for_others(model, given)
    if given.teacher or gives_vectors(folder):
        return vector_document(model, folder, given)
    return labelled_document(model, folder, given)


def show_evaluation(document: Document) -> None:
    """Prints a row per label, then the score."""
    against = f", against {document['teacher']}" if "teacher" in document else ""
    if document["labels"]:
        rows = [
            [row["label"], *(f"{row[name]:.4f}" for name in ("precision", "recall", "f1")), str(row["support"])]
            for row in document["labels"]
        ]
        table("each label", ["label", "precision", "recall", "F1", "number"], rows)
    for name, each in document.get("scores", {}).items():
        result(f"{name} {each['value']:.4f} [{each['low']:.4f}, {each['high']:.4f}]")
    if "neighbour_accuracy" in document:
        result(
            "nearest text of train has the label: "
            + ", ".join(f"{k} {v:.4f}" for k, v in document["neighbour_accuracy"].items())
        )
    if "languages" in document:
        rows = [
            [
                row["language"] or "not named",
                *(f"{row[name]:.4f}" for name in ("value", "low", "high")),
                str(row["examples"]),
            ]
            for row in document["languages"]
        ]
        table("each language", ["language", "score", "low", "high", "texts"], rows)
        result(f"mean of {len(document['languages'])} languages: {document['mean_of_languages']:.4f}")
    result(
        f"{document['metric']} {document['value']:.4f} [{document['low']:.4f}, {document['high']:.4f}] on "
        f"{document['examples']} texts, by {document['variant']}{against}"
    )
    if document["unknown_labels"]:
        say(f"warning: the data has labels that the model lacks: {', '.join(document['unknown_labels'])}")
    for warning in document.get("warnings", []):
        say(f"warning: {warning}")


VERB = Verb(
    "evaluate",
    evaluate,
    Evaluation,
    help=__doc__,
    arguments=(Argument("model", "Bundle (folder or URL), checkpoint folder or Hub name.", type=click.Path()),),
    show=show_evaluation,
    examples=("stillroom evaluate ner.bundle --data my-data/test.jsonl --variant int8",),
)
