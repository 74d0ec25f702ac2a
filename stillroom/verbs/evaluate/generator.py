"""A model that generates texts, scored against the targets of the data."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from compress.data.examples import GENERATION, GENERATOR
from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput
from stillroom.verbs.evaluate import Evaluation
from stillroom.verbs.evaluate.labelled import file_of, refuse_variant

OF_GENERATION = ("beams", "length_penalty", "target_column")
OF_OTHERS = (
    "teacher", "text_pair_column", "tokens_column", "label_column", "entities_column", "tags_column", "question_column",
    "context_column", "answers_column",
)  # fmt: skip


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
    except (ValueError, TypeError, KeyError):  # damaged: whoever opens it says so
        return False


def generation_document(model: str, given: Evaluation) -> dict[str, Any]:
    """The document of a model that generates: ROUGE-L, with ROUGE-1, ROUGE-2 and BLEU in `scores`."""
    from compress.data.columns import columns_of
    from compress.data.text_pairs import read_pairs
    from compress.evaluation.generated import METRIC, generation_scores
    from compress.input_errors import Faults
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
