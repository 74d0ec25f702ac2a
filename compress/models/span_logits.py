"""Models that answer questions give their logits under one name, as the models of the other tasks do."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class SpanLogits(ModelOutput):  # type: ignore[misc]  # transformers gives it no type
    """The `logits` of each token, (texts, tokens, 2): of an answer's start and of its end; the rest as transformers gives it."""

    logits: Tensor
    hidden_states: Any = None
    attentions: Any = None


def with_span_logits(model: Any) -> Any:
    """`model`, a `...ForQuestionAnswering` of transformers, whose outputs have both of its logits as `logits`.

    Its class is replaced by one of the same name, so that it is saved, and copied to a student, as before.
    """
    kind = type(model)
    if kind not in _MADE:
        _MADE[kind] = _of(kind)
    model.__class__ = _MADE[kind]
    return model


# By the class of transformers, and by itself: one class for each, so that two models of one kind have one class.
_MADE: dict[type, type] = {}


def _of(kind: Any) -> type:
    """The class for `kind`."""

    @functools.wraps(kind.forward)  # who asks for its arguments finds those of transformers
    def forward(self: Any, *inputs: Any, **named: Any) -> SpanLogits:
        said = kind.forward(self, *inputs, **{**named, "return_dict": True})
        logits = torch.stack([said.start_logits, said.end_logits], dim=-1)
        return SpanLogits(logits, said.hidden_states, said.attentions)

    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})
    _MADE[made] = made
    return made
