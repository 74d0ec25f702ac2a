"""An encoder of sentences, compared with its teacher."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.settings import VECTORS
from serve.bundle.manifest import MANIFEST
from serve.bundle.remote_files import shown
from serve.errors import BadInput
from serve.tasks import open_bundle
from stillroom.inputs.folders import local_bundle
from stillroom.verbs.evaluate import Evaluation
from stillroom.verbs.evaluate.labelled import examples_of, file_of, refuse_revision, refuse_variant

if TYPE_CHECKING:
    import numpy as np

    from compress.data.examples import Example

LEAST_TEXTS = 3


def vector_document(model: str, folder: str, given: Evaluation) -> dict[str, Any]:
    """The document of an encoder of sentences, `model`, whose bundle or checkpoint is `folder` or has that name on the Hub."""
    from compress.evaluation.vectors import neighbour_accuracy, vector_scores
    from compress.input_errors import Faults

    if not given.teacher:
        raise BadInput(
            f"{shown(model)} gives vectors, which have no right answer of their own. Give --teacher, the model that they should agree with."
        )
    faults = Faults()
    if given.task:
        faults.messages.append(f"--task is {given.task}, but {shown(model)} gives vectors. Leave it out.")
    student = faults.check(lambda: _encoding(folder, given, "MODEL"))
    teacher = faults.check(
        lambda: _encoding(str(local_bundle(given.teacher)), replace(given, variant=None, revision=""), "--teacher")
    )
    texts = faults.check(lambda: _texts_of(given))
    faults.raise_if_any()
    assert student
    assert teacher
    assert texts
    known, asked = texts
    ours, theirs = (encode([*asked, *known]) for encode, _ in (student, teacher))
    scores = vector_scores(theirs[: len(asked)], ours[: len(asked)])
    reached = scores.pop("similarity_spearman")
    document = {
        "model": shown(model), "variant": student[1], "task": VECTORS, "metric": "similarity_spearman",
        "value": reached.value, "low": reached.low, "high": reached.high, "examples": len(asked), "labels": [], "unknown_labels": [],
        "teacher": shown(given.teacher), "scores": {name: asdict(each) for name, each in scores.items()},
    }  # fmt: skip
    if known:
        labels, gold = ([str(each.label) for each in some] for some in (known, asked))
        document["neighbour_accuracy"] = {
            name: neighbour_accuracy(vectors[len(asked) :], labels, vectors[: len(asked)], gold)
            for name, vectors in (("model", ours), ("teacher", theirs))
        }
    return document


def gives_vectors(folder: str) -> bool:
    """Whether the bundle or checkpoint in `folder` is an encoder of sentences; False for a name on the Hub."""
    from export.graph.exporter import is_of_vectors

    if (Path(folder) / MANIFEST).is_file():
        return open_bundle(folder).manifest.vector_width > 0
    return (Path(folder) / "config.json").is_file() and is_of_vectors(Path(folder))


def _texts_of(given: Evaluation) -> "tuple[list[Example], list[Example]]":
    """The texts of train, if they have one label each, and those that are compared. BadInput for too few, and for pairs."""
    from compress.data.columns import columns_of
    from compress.data.examples import Example
    from compress.data.splits import read_splits
    from compress.data.texts import read_texts
    from compress.tasks import TEXT_CLASSIFICATION

    file = file_of(Path(given.data), given.split)
    known: list[Example] = []
    if Path(given.data).is_dir():
        asked = examples_of(Path(given.data), given, TEXT_CLASSIFICATION)
        splits = read_splits(given.data, TEXT_CLASSIFICATION, columns_of(given))
        known = [] if splits.multi_label or given.split == "train" else list(splits.train)
    else:
        asked = [Example(text) for text in read_texts(file, columns_of(given))]
    if any(each.text_pair for each in (*known, *asked)):
        raise BadInput(f"--data {given.data} has pairs of texts, and a vector is of one text. Give texts alone.")
    if len(asked) < LEAST_TEXTS:
        raise BadInput(f"--data {given.data} has {len(asked)} texts; similarities need {LEAST_TEXTS} or more.")
    return known, asked


def _encoding(
    model: str, given: Evaluation, role: str
) -> "tuple[Callable[[Sequence[Example]], list[np.ndarray]], str]":
    """What gives texts their vectors by the bundle or encoder `model`, which the flag `role` names, and its variant."""
    if (Path(model) / MANIFEST).is_file():
        return _by_bundle(model, given, role)
    from compress.models.heads import head_of
    from compress.models.sentence_encoder import on_device, open_encoder, sentence_vectors
    from compress.runs.hardware import device_here

    refuse_variant(model, given)
    encoder = open_encoder(model, role=role, revision=given.revision)
    if head_of(encoder.model.config):
        raise BadInput(f"{role} {model} answers a task, and --teacher compares vectors. Give encoders of sentences.")
    encoder = on_device(encoder, device_here(given.device))
    return lambda texts: list(sentence_vectors(encoder, texts)), "torch"


def _by_bundle(
    model: str, given: Evaluation, role: str
) -> "tuple[Callable[[Sequence[Example]], list[np.ndarray]], str]":
    from compress.tasks import FEATURE_EXTRACTION
    from serve.model.pipeline import Pipeline

    refuse_revision(model, given)
    pipeline = Pipeline(model, given.variant, device=given.device)
    if not pipeline.manifest.vector_width:
        raise BadInput(
            f"{role} {model} is a bundle for {pipeline.manifest.task}, and --teacher compares vectors. Give encoders of sentences."
        )

    def encode(texts: "Sequence[Example]") -> "list[np.ndarray]":
        answers = pipeline([each.text_read for each in texts], truncate=True)
        return [FEATURE_EXTRACTION.prediction_of(answer, each) for answer, each in zip(answers, texts, strict=True)]  # type: ignore[misc]

    return encode, pipeline.variant
