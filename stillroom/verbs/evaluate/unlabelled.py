"""Models whose answers are no labels: an encoder of sentences, compared with its teacher, and a model that generates texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.columns import columns_of
from compress.data.examples import GENERATION, GENERATOR, Example
from compress.data.splits import read_splits
from compress.data.texts import read_texts
from compress.input_errors import Faults
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

OF_GENERATION = ("beams", "length_penalty", "target_column")
OF_OTHERS = (
    "teacher", "text_pair_column", "tokens_column", "label_column", "entities_column", "tags_column", "question_column",
    "context_column", "answers_column",
)  # fmt: skip
LEAST_TEXTS = 3


def vector_document(model: str, folder: str, given: Evaluation) -> dict[str, Any]:
    """The document of an encoder of sentences, `model`, whose bundle or checkpoint is `folder` or has that name on the Hub."""
    from compress.evaluation.vectors import neighbour_accuracy, vector_scores

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
    if (Path(folder) / MANIFEST).is_file():
        return open_bundle(folder).manifest.vector_width > 0
    from compress.models.heads import stated_head
    from compress.models.pretrained import config_in
    from compress.models.sentence_pooling import pooling_in

    if not (Path(folder) / "config.json").is_file() or stated_head(
        config_in(Path(folder), f"MODEL {folder}", any_family=True)
    ):
        return False
    return pooling_in(Path(folder)) is not None


def _texts_of(given: Evaluation) -> "tuple[list[Example], list[Example]]":
    """The texts of train, if they have one label each, and those that are compared. BadInput for too few, and for pairs."""
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


def generates(folder: str, given: Evaluation) -> bool:
    """Whether the checkpoint in `folder` generates texts; of a name on the Hub, whether `given` says so. torch is not loaded."""
    config = Path(folder) / "config.json"
    if (Path(folder) / MANIFEST).is_file():
        return False
    if not config.is_file():
        return given.task == GENERATION
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        return GENERATOR in found and any(str(name).endswith("ForMaskedLM") for name in found["architectures"])
    except (ValueError, TypeError, KeyError, RecursionError):  # damaged: whoever opens it says so
        return False


def generation_document(model: str, given: Evaluation) -> dict[str, Any]:
    """The document of a model that generates: ROUGE-L, with ROUGE-1, ROUGE-2 and BLEU in `scores`."""
    from compress.data.text_pairs import read_pairs
    from compress.evaluation.generated import METRIC, generation_scores
    from compress.models.generator import Generator
    from compress.runs.hardware import device_here

    faults = Faults()
    faults.check(partial(refuse_variant, model, given))
    if given.task not in (None, GENERATION):
        faults.messages.append(f"--task is {given.task}, but {model} generates text. Leave it out.")
    if strange := [name for name in OF_OTHERS if getattr(given, name)]:
        faults.messages.append(_without_effect(strange, f"{model}, which generates text"))
    device = faults.check(partial(device_here, given.device))
    file = faults.check(partial(file_of, Path(given.data), given.split))
    pairs = faults.check(lambda: read_pairs(file, columns_of(given), given.target_column or "target")) if file else None
    generator = faults.check(lambda: Generator(model, device=device.type if device else "cpu", revision=given.revision))
    faults.raise_if_any()
    assert pairs
    assert generator
    said = generator([pair.text for pair in pairs], beams=given.beams, length_penalty=given.length_penalty)
    scores = generation_scores([pair.text_pair or "" for pair in pairs], said)
    reached = scores.pop(METRIC)
    return {
        "model": model, "variant": "torch", "task": GENERATION, "metric": METRIC, "value": reached.value, "low": reached.low,
        "high": reached.high, "examples": len(pairs), "labels": [], "unknown_labels": [],
        "scores": {name: asdict(each) for name, each in scores.items()},
    }  # fmt: skip


def refuse_for_others(model: str, given: Evaluation) -> None:
    """BadInput for settings of generation, where `model` does not generate."""
    if given.task == GENERATION:
        raise BadInput(
            f"{model} was not trained to generate text. Train it: stillroom finetune --model {model} --task {GENERATION} ..."
        )
    usual = Evaluation(data=given.data)
    if strange := [name for name in OF_GENERATION if getattr(given, name) != getattr(usual, name)]:
        raise BadInput(_without_effect(strange, f"{model}, which does not generate text"))


def _without_effect(names: list[str], model: str) -> str:
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{flags} {'have' if names[1:] else 'has'} no effect on {model}. Leave {'them' if names[1:] else 'it'} out."
