"""Training on a GPU: run with `pytest -m gpu`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from compress.corpus import CorpusText, Piece
from compress.distill import Settings, distil
from compress.families import FAMILIES
from compress.methods import Sizes, minilmv2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PIECES = [Piece(np.random.default_rng(i).integers(5, 50, 4 + i % 9), np.arange(4 + i % 9)) for i in range(40)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_relations_come_to_agree_on_a_gpu(tmp_path: Path, precision: str) -> None:
    torch.manual_seed(0)
    teacher = BertForTokenClassification(BertConfig(**CONFIG))
    student = BertForTokenClassification(BertConfig(**(CONFIG | {"num_hidden_layers": 2})))
    stage = minilmv2(Sizes(3, 2, 24, 24, relation_heads=4, teacher_layer=2))[0]
    settings = Settings(60, precision=precision, learning_rate=5e-3)
    text = CorpusText(PIECES, 0, 8, 0)
    progress = distil(stage, teacher, student, FAMILIES["bert"], text, settings, folder=tmp_path)
    assert progress.loss[-1][1] < 0.5 * progress.loss[0][1]
    assert next(student.parameters()).is_cuda
