"""Training on a GPU: run with `pytest -m gpu`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import BertConfig, BertForTokenClassification

from compress.data.corpus import CorpusText, Piece
from compress.methods.catalogue import Sizes, minilmv2
from compress.models.families import FAMILIES
from compress.training.stage import StageSettings, train_stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PIECES = [Piece(np.random.default_rng(i).integers(5, 50, 4 + i % 9), np.arange(4 + i % 9)) for i in range(40)]


def trained(folder: Path, report: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A student of its teacher's relations, and its progress."""
    torch.manual_seed(0)
    teacher = BertForTokenClassification(BertConfig(**CONFIG))
    student = BertForTokenClassification(BertConfig(**(CONFIG | {"num_hidden_layers": 2})))
    stage = minilmv2(Sizes(3, 2, 24, 24, relation_heads=4, teacher_layer=2))[0]
    text = CorpusText(PIECES, 0, 8, 0)
    given = StageSettings(60, learning_rate=5e-3, checkpoint_every_s=0, **settings)
    return student, train_stage(stage, teacher, student, FAMILIES["bert"], text, given, folder=folder, report=report)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_relations_come_to_agree_on_a_gpu(tmp_path: Path, precision: str) -> None:
    student, progress = trained(tmp_path, precision=precision)
    assert progress.loss[-1][1] < 0.5 * progress.loss[0][1]
    assert next(student.parameters()).is_cuda


def test_in_float16_gradients_are_scaled_and_the_scale_is_gone_on_with(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def dying(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        if done == 30:
            raise Killed

    whole, progress = trained(tmp_path / "a", precision="fp16")
    with pytest.raises(Killed):
        trained(tmp_path / "b", dying, precision="fp16")
    with safe_open(tmp_path / "b" / "checkpoint.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["scaler"])["scale"] > 1
    resumed, again = trained(tmp_path / "b", precision="fp16")
    assert [value for _, value in again.loss] == pytest.approx([value for _, value in progress.loss], rel=1e-2)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-2, atol=1e-2)
