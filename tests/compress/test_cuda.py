"""Training on a GPU: run with `pytest -m gpu`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from compress.distill import RelationDistillation, distil_relations
from compress.families import FAMILIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PIECES = [np.random.default_rng(i).integers(5, 50, 4 + i % 9) for i in range(40)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_relations_come_to_agree_on_a_gpu(tmp_path: Path, precision: str) -> None:
    torch.manual_seed(0)
    teacher = BertForTokenClassification(BertConfig(**CONFIG))
    student = BertForTokenClassification(BertConfig(**(CONFIG | {"num_hidden_layers": 2})))
    settings = RelationDistillation(
        60, learning_rate=5e-3, batch=8, relation_heads=4, teacher_layer=2, precision=precision
    )
    progress = distil_relations(teacher, student, FAMILIES["bert"], PIECES, 0, settings, folder=tmp_path)
    assert progress.loss[-1][1] < 0.5 * progress.loss[0][1]
    assert next(student.parameters()).is_cuda
