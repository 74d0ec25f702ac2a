"""An encoder of sentences, compared with its teacher."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.bundle.manifest import MANIFEST, open_bundle
from serve.bundle.remote_files import is_url, shown
from serve.errors import BadInput
from stillroom.commands.evaluate.texts import file_of
from stillroom.inputs.local_bundle import local_bundle
from stillroom.settings.evaluate import Evaluation

if TYPE_CHECKING:
    import numpy as np

    from compress.data.examples import Example

LEAST_TEXTS = 3


def vector_document(model: str, folder: str, given: Evaluation) -> dict[str, Any]:
    """The document of an encoder of sentences."""
    from compress.evaluation.vector_scores import vector_scores
    from compress.evaluation.vectors import neighbour_accuracy

    if not given.teacher:
        raise BadInput(
            f"{shown(model)} gives vectors, which have no right answer of their own. Give --teacher, the model that they should agree with."
        )
    if given.task:
        raise BadInput(f"--task is {given.task}, but {shown(model)} gives vectors. Leave it out.")
    teacher = str(local_bundle(given.teacher)) if is_url(given.teacher) else given.teacher
    known, asked = _texts_of(given)
    if len(asked) < LEAST_TEXTS:
        raise BadInput(f"--data {given.data} has {len(asked)} texts; similarities need {LEAST_TEXTS} or more.")
    ours, variant = _vectors(folder, [*asked, *known], given, "MODEL")
    theirs, _ = _vectors(teacher, [*asked, *known], replace(given, variant=None, revision=""), "--teacher")
    scores = vector_scores(theirs[: len(asked)], ours[: len(asked)])
    reached = scores.pop("similarity_spearman")
    document = {
        "model": shown(model), "variant": variant, "task": "feature-extraction", "metric": "similarity_spearman",
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


def _texts_of(given: Evaluation) -> "tuple[list[Example], list[Example]]":
    """The texts of train, if they have one label each, and those that are compared."""
    from compress.data.columns import columns_of
    from compress.data.examples import Example
    from compress.data.splits import read_splits
    from compress.data.texts import read_texts

    file = file_of(Path(given.data), given.split)
    if not Path(given.data).is_dir():
        return [], [Example(text) for text in read_texts(file, columns_of(given))]
    splits = read_splits(given.data, "text-classification", columns_of(given))
    asked = getattr(splits, given.split)
    return ([] if splits.multi_label or given.split == "train" else list(splits.train)), list(asked)


def gives_vectors(folder: str) -> bool:
    """Whether the bundle or checkpoint in `folder` is an encoder of sentences."""
    from compress.models.sentence_pooling import MODULES

    if (Path(folder) / MANIFEST).is_file():
        return open_bundle(folder).manifest.vector_width > 0
    return (Path(folder) / MODULES).is_file() and not _names_head(Path(folder))


def _names_head(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and any(
        name in file.read_text(encoding="utf-8") for name in ("ForSequenceClassification", "ForTokenClassification")
    )


def _vectors(model: str, texts: "Sequence[Example]", given: Evaluation, role: str) -> "tuple[list[np.ndarray], str]":
    """The vector of each text by the bundle or encoder `model`, which the flag `role` names, and what made them."""
    if (Path(model) / MANIFEST).is_file():
        from compress.evaluation.metrics import prediction_of
        from serve.model.pipeline import Pipeline

        pipeline = Pipeline(model, given.variant, device=given.device)
        if not pipeline.manifest.vector_width:
            raise BadInput(f"{role} {model} is a bundle for {pipeline.manifest.task}; give an encoder of sentences.")
        answers = pipeline([each.text_read for each in texts], truncate=True)
        return [prediction_of(answer, multi_label=False) for answer in answers], pipeline.variant  # type: ignore[misc]
    from compress.engine.hardware import device_here
    from compress.models.sentence_encoder import on_device, open_encoder, sentence_vectors

    if given.variant:
        raise BadInput(f"--variant {given.variant}: {model} is not a bundle, and only bundles have variants.")
    encoder = on_device(open_encoder(model, role=role, revision=given.revision), device_here(given.device))
    return list(sentence_vectors(encoder, texts)), "torch"
