"""Int8 graphs of students with random weights, whose speed is that of trained ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.task import Task
from compress.models.initialise import student_config
from compress.models.pretrained import Opened
from compress.models.shapes import Shape
from export.graph.exporter import export_graph, quiet
from export.precision.int8 import quantise_static
from export.precision.int8_search import Prepared

# Rows of a table of embeddings: a call reads one for each token, however many there are.
VOCABULARY = 2_000
CALIBRATION_ROWS = 4  # their values decide scales, which take the same time whatever they are
FP32, INT8 = "model.onnx", "model_quantized.onnx"


@dataclass(frozen=True)
class RandomRow:
    """Token ids of no text, with the attributes of a tokenizer's `Encoding`."""

    ids: list[int]

    @property
    def attention_mask(self) -> list[int]:
        """1 for each token."""
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        """0 for each token."""
        return [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def write_random_graph(folder: Path, teacher: Opened, shape: Shape, task: Task, labels: int, tokens: int) -> Path:
    """Write the int8 graph of a student of `shape` in the teacher's family, for up to `tokens` tokens, and return its file.

    Products are quantised as those of a bundle. Nothing else of its weights decides its time.
    """
    import torch

    assert task.head
    kind = task.head.model_class
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(random_config(teacher, shape, labels)).save_pretrained(folder)
    export_graph(folder, folder / FP32, tokens)
    prepared = Prepared.of(folder / FP32, random_rows(teacher, CALIBRATION_ROWS, tokens))  # type: ignore[arg-type]
    quantise_static(prepared.model, folder / INT8, prepared.ranges)
    for left in (FP32, "model.safetensors"):
        (folder / left).unlink()
    return folder / INT8


def random_config(teacher: Opened, shape: Shape, labels: int) -> Any:
    """The configuration of a student in the teacher's family, with a head for `labels` labels and a small vocabulary."""
    config = student_config(teacher.config, teacher.family, shape)
    config.vocab_size = min(VOCABULARY, config.vocab_size)
    config.pad_token_id = min(config.pad_token_id or 0, config.vocab_size - 1)  # ModernBERT's is one of its last tokens
    config.num_labels = labels
    return config


def parameters(teacher: Opened, shape: Shape) -> int:
    """The parameters of an encoder of `shape` in the teacher's family, with the teacher's vocabulary and without a head."""
    import torch
    from transformers import AutoModel

    with quiet(), torch.device("meta"):
        return sum(
            each.numel()
            for each in AutoModel.from_config(student_config(teacher.config, teacher.family, shape)).parameters()
        )


def random_rows(teacher: Opened, rows: int, tokens: int) -> Sequence[RandomRow]:
    """Rows of ids of the small vocabulary, without its first ones and its last, one of which is the padding."""
    vocabulary = min(VOCABULARY, teacher.config.vocab_size)
    drawn = np.random.default_rng(0).integers(vocabulary // 2, vocabulary - 1, size=(rows, tokens))
    return [RandomRow([int(each) for each in row]) for row in drawn]
