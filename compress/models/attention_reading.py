"""Reads what a model does with one text: each layer's attention, hidden vectors and values, and the logits of its head.

Texts are read one at a time, so nothing is padded, and what is read of a text does not depend on the others.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.data.batches import collate, inputs_for
from compress.data.encoded import Encoded
from compress.data.task import Task
from compress.losses.vectors import dot_scores, split_heads
from compress.models.activations import Activations, Part, read
from compress.models.pretrained import Opened, load, load_encoder


class Reader(NamedTuple):
    """A model that gives its attention, with its sizes."""

    model: Any
    layers: int
    heads: int
    width: int


class TextRead(NamedTuple):
    """What a model did with one text. Layers count from 1."""

    activations: Activations
    attentions: tuple[Tensor, ...]

    def attention(self, layer: int) -> Tensor:
        """(heads, tokens, tokens): how much each token attends to each, a row sums to 1."""
        return self.attentions[layer - 1][0]

    def hidden(self, layer: int) -> Tensor:
        """(tokens, width)."""
        return self.activations["hidden", layer][0]

    def value_relation(self, layer: int, heads: int) -> Tensor:
        """(heads, tokens, tokens): the softmax of the scaled products of values with each other (MiniLM, section 3.2)."""
        values = split_heads(self.activations["values", layer].float(), heads)
        return dot_scores(values, values).softmax(dim=-1)[0]

    @property
    def logits(self) -> Tensor:
        """(tokens, labels), or (1, labels) of a whole text. Only models with a head for a task have them."""
        return self.activations.output.logits.reshape(-1, self.activations.output.logits.shape[-1])  # type: ignore[no-any-return]


def open_reader(opened: Opened, task: Task | None) -> Reader:
    """The model of `opened` on the CPU, in float32, with its own head for `task`, or none.

    Its attention is the plain one of transformers (`eager`), since the fast kernels do not give their weights.
    """
    model = load(opened, task) if task else load_encoder(opened, seed=0)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    config = model.config
    return Reader(model.eval(), config.num_hidden_layers, config.num_attention_heads, config.hidden_size)


def read_text(reader: Reader, encoded: Encoded, index: int) -> TextRead:
    """What the model does with the text `index`."""
    wanted = [Part(of, layer) for of in ("hidden", "values") for layer in range(1, reader.layers + 1)]
    inputs = inputs_for(reader.model, collate(encoded, [index]).inputs)
    with torch.inference_mode():
        found = read(reader.model, inputs, wanted, output=True)
    return TextRead(found, found.output.attentions)


def relation_heads(teacher: Reader, student: Reader) -> int:
    """The heads that values are compared in: the largest number that divides both widths, at most the teacher's heads."""
    return next(
        heads for heads in range(teacher.heads, 0, -1) if teacher.width % heads == 0 and student.width % heads == 0
    )
