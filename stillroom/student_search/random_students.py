"""Int8 graphs of students with random weights, whose speed is that of trained ones."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.examples import Task
from compress.models.initialise import student_config
from compress.models.pretrained import HEADS, Opened
from compress.models.shapes import Shape
from export.graph.exporter import export_graph, quiet
from export.precision.int8 import quantise_static
from export.precision.int8_search import Prepared
from serve.errors import BadInput

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

    Raises:
        BadInput: the family has no such shape.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind: Any = (
        AutoModelForTokenClassification
        if HEADS[task] == "ForTokenClassification"
        else AutoModelForSequenceClassification
    )
    config = student_config(copy.deepcopy(teacher.config), teacher.family, shape)
    config.vocab_size = min(VOCABULARY, config.vocab_size)
    config.num_labels = labels
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind.from_config(config).save_pretrained(folder)
    except ValueError as error:
        raise BadInput(f"{teacher.name}: its family has no encoder of the shape {shape}: {error}") from None
    export_graph(folder, folder / FP32, tokens)
    rows = random_rows(CALIBRATION_ROWS, tokens, config.vocab_size)
    prepared = Prepared.of(folder / FP32, rows)  # type: ignore[arg-type]
    quantise_static(prepared.model, folder / INT8, prepared.ranges)
    (folder / "model.safetensors").unlink()
    return folder / INT8


def random_rows(rows: int, tokens: int, vocabulary: int) -> Sequence[RandomRow]:
    """Rows of ids that any vocabulary of this size has, without the first ones, which are special in every family."""
    drawn = np.random.default_rng(0).integers(min(1_000, vocabulary // 2), vocabulary, size=(rows, tokens))
    return [RandomRow([int(each) for each in row]) for row in drawn]
