"""Weights and files that would change the answers are used, or the model is refused; what changes nothing passes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.models.pretrained import open_model
from serve.errors import BadInput

Weights = Callable[[Callable[[dict[str, Any]], object]], None]
SELF = "bert.encoder.layer.0.attention.self"

UNUSED = {
    "relative positions": (f"{SELF}.distance_embedding.weight", "position_embedding_type"),
    "an adapter within": (f"{SELF}.query.lora_A.default.weight", "Merge the adapter"),
    "one layer more": ("bert.encoder.layer.9.output.dense.weight", "take these weights away"),
    "a norm of the embeddings": ("bert.embeddings.norm.weight", "take these weights away"),
    "a second map in the head": ("classifier.dense.weight", "take these weights away"),
    "a map behind the head": ("crf.transitions", "take these weights away"),
}


@pytest.mark.parametrize("kind", UNUSED)
def test_weights_that_change_answers_and_are_not_used_are_refused_by_name(
    kind: str, checkpoint: Path, change_weights: Weights
) -> None:
    key, advice = UNUSED[kind]
    change_weights(lambda held: held.update({key: torch.ones(2, 2)}))
    with pytest.raises(BadInput, match=rf"its weights hold {key}, which BertForSequenceClassification .*{advice}"):
        open_model(str(checkpoint))


def test_positions_that_transformers_does_not_have_are_refused_without_their_weights(
    checkpoint: Path, change_json: Callable[..., None]
) -> None:
    change_json("config.json", position_embedding_type="relative_key_query")
    with pytest.raises(BadInput, match=r"position_embedding_type is relative_key_query|distance_embedding"):
        open_model(str(checkpoint))


def test_weights_that_no_answer_needs_pass(checkpoint: Path, change_weights: Weights) -> None:
    keys = [
        "bert.embeddings.position_ids",
        "cls.predictions.bias",
        "qa_outputs.weight",
        "lm_head.dense.weight",
        "loss_fct.weight",
    ]
    change_weights(lambda held: held.update({key: torch.ones(2, 2) for key in keys}))
    assert open_model(str(checkpoint)).has_head


def test_weights_of_any_head_pass_in_a_model_that_gets_a_new_one(
    checkpoint: Path, change_weights: Weights, change_json: Callable[..., None]
) -> None:
    change_weights(lambda held: held.update({"crf.transitions": torch.ones(2, 2)}))
    change_json("config.json", architectures=["BertCrfForNer"])
    assert not open_model(str(checkpoint)).has_head


def test_a_file_of_weights_that_is_not_read_is_told(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("model_head.pkl", "optimizer.pt", "training_args.bin", "pytorch_model.bin"):
        (checkpoint / name).write_bytes(b"")
    open_model(str(checkpoint))
    assert "the folder holds model_head.pkl, which is not read" in caplog.text


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_is_refused_by_name(alone: bool, checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (checkpoint / "adapter_model.safetensors").write_bytes(b"")
    if alone:
        (checkpoint / "config.json").unlink()
    with pytest.raises(
        BadInput, match=r"adapter \(adapter_config\.json, adapter_model\.safetensors\).*merge_and_unload"
    ):
        open_model(str(checkpoint))
