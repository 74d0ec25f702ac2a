"""What a student is to agree on with its teacher. An objective is data, a list of terms; this computes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.losses.hidden import cosine_loss, hidden_loss, summed_hidden_loss
from compress.losses.outputs import full, label_loss, logit_loss, soft_loss
from compress.losses.relations import check_relation_heads, direct_loss, split_heads
from compress.losses.tiled_relations import Dots, tiled_loss
from compress.models.activations import Activations, Part
from serve.errors import BadInput

# Of vectors, (batch, tokens, width).
VECTOR_LOSSES = {"mse": hidden_loss, "half squares": summed_hidden_loss, "cosine": cosine_loss}


@dataclass(frozen=True)
class LayerTerm:
    """One thing of one student layer, drawn towards the same thing of one teacher layer.

    `of` is hidden, queries, keys, values or scores (see `compress.models.activations.Part`); `loss` one of
    `compress.losses.tiled_relations.TILE_LOSSES` for scores, and of `VECTOR_LOSSES`, `relation` or `direct` for the others. `projection`
    names the learned map from the student's width to the teacher's; terms that name the same one share it, and with no
    name the widths must agree.
    """

    loss: str
    of: str
    teacher_layer: int
    student_layer: int
    weight: float = 1.0
    # Relation heads; 0 is the attention's own.
    heads: int = 0
    projection: str = ""
    bias: bool = False

    @property
    def name(self) -> str:
        """What logs call it: terms of several layers are added up under one name."""
        if self.of == "scores" and self.loss != "mse":
            return f"attention {self.loss}"
        return f"{'embeddings' if self.student_layer == 0 else self.of} {self.loss}"


@dataclass(frozen=True)
class OutputTerm:
    """Agreement on answers: with the labels (`labels`), the teacher's softened (`soft labels`) or its bare `logits`.

    `of` is `classes`, what the task head says of each text or word, or `vocabulary`, what the masked language model's
    head says of each masked token, or with `everywhere` of every real token.
    """

    loss: Literal["labels", "soft labels", "logits"]
    of: Literal["classes", "vocabulary"]
    weight: float = 1.0
    temperature: float = 1.0
    everywhere: bool = False

    @property
    def name(self) -> str:
        """What logs call it."""
        return self.loss if self.of == "classes" else f"vocabulary {self.loss}"


@dataclass(frozen=True)
class Objective:
    """A sum of terms."""

    layers: tuple[LayerTerm, ...] = ()
    outputs: tuple[OutputTerm, ...] = ()

    @property
    def masks_tokens(self) -> bool:
        """Whether it needs tokens hidden behind the mask token, as a masked language model is trained."""
        return any(term.of == "vocabulary" for term in self.outputs)

    @property
    def asks_teacher(self) -> bool:
        """Whether the teacher's answer is needed, and not only what it computes on the way."""
        return any(term.loss != "labels" for term in self.outputs)

    @property
    def can_be_kept(self) -> bool:
        """Whether what it reads of the teacher is the same each time a text is read: vectors, of text that nothing is hidden from."""
        return bool(self.layers) and not self.masks_tokens and not self.asks_teacher

    def teacher_parts(self) -> set[Part]:
        """What has to be read of the teacher."""
        return {Part(term.of, term.teacher_layer) for term in self.layers}

    def student_parts(self) -> set[Part]:
        """What has to be read of the student."""
        return {Part(term.of, term.student_layer) for term in self.layers}


def check_objective(objective: Objective, teacher: Any, student: Any) -> None:
    """Nothing, when a student of this configuration can be trained on `objective` by a teacher of that one.

    Raises:
        BadInput: heads that do not fit, a layer that is not there, or widths that differ where nothing maps them.
    """
    for term in objective.layers:
        for layer, config, whose in (
            (term.teacher_layer, teacher, "teacher"),
            (term.student_layer, student, "student"),
        ):
            if not (0 if term.of == "hidden" else 1) <= layer <= config.num_hidden_layers:
                raise BadInput(f"The {whose} has layers 1 to {config.num_hidden_layers}; layer {layer} was asked for.")
        if term.loss == "relation" and term.heads:
            check_relation_heads(term.heads, teacher.hidden_size, student.hidden_size)
        elif (
            term.of == "scores" or term.loss in {"relation", "direct"}
        ) and teacher.num_attention_heads != student.num_attention_heads:
            theirs, ours = teacher.num_attention_heads, student.num_attention_heads
            raise BadInput(
                f"This method needs as many attention heads in the student as in the teacher; they have {ours} and {theirs}. "
                f"Take a student of {theirs} heads, or minilmv2, which re-splits them."
            )
        unmapped = term.of != "scores" and term.loss in VECTOR_LOSSES and not term.projection
        if unmapped and teacher.hidden_size != student.hidden_size:
            raise BadInput(
                "This method compares hidden states as they are, so the student must be as wide as its teacher: "
                f"{student.hidden_size} is not {teacher.hidden_size}. Take such a student, or a method with a learned map "
                "(hidden-states, tinybert)."
            )


class Projections(nn.Module):
    """The learned maps of an objective from the student's width to the teacher's, thrown away after training.

    A square map starts as the identity, so a student that starts as its teacher starts at zero loss; any other starts as
    `torch.nn.Linear` does.
    """

    def __init__(self, objective: Objective, teacher: Any, student: Any) -> None:
        super().__init__()
        self.maps = nn.ModuleDict()
        heads = student.num_attention_heads
        for term in objective.layers:
            if not term.projection or _key(term) in self.maps:
                continue
            wide, narrow = teacher.hidden_size, student.hidden_size
            if term.loss == "direct":
                self.maps[_key(term)] = _HeadMaps(heads, narrow // heads, wide // heads)
            else:
                linear = nn.Linear(narrow, wide, bias=term.bias)
                if narrow == wide:
                    nn.init.eye_(linear.weight)
                if term.bias:
                    nn.init.zeros_(linear.bias)
                self.maps[_key(term)] = linear


def _key(term: LayerTerm) -> str:
    return f"from {term.projection}"  # a bare `keys` would hide the dictionary's own


class _HeadMaps(nn.Module):
    """A matrix a head."""

    def __init__(self, heads: int, narrow: int, wide: int) -> None:
        super().__init__()
        start = torch.eye(narrow) if narrow == wide else torch.randn(narrow, wide) / narrow**0.5
        self.weight = nn.Parameter(start.repeat(heads, 1, 1))  # (heads, narrow, wide)


def layer_losses(
    terms: Sequence[LayerTerm],
    theirs: Activations,
    ours: Activations,
    mask: Tensor,
    heads: int,
    projections: Projections,
) -> dict[str, Tensor]:
    """The weighted terms by name; each is 0 when the student agrees with the teacher.

    Args:
        terms: what is compared.
        theirs: the parts of the teacher that they name.
        ours: those of the student.
        mask: (batch, tokens), 1 for a real token.
        heads: attention heads, for terms that do not give their own.
        projections: the learned maps that the terms name.
    """
    # Matrix products too are in full precision here: a divergence is a small difference of large numbers.
    with torch.autocast(mask.device.type, enabled=False):
        return _layer_losses(terms, theirs, ours, mask, heads, projections)


def _layer_losses(
    terms: Sequence[LayerTerm],
    theirs: Activations,
    ours: Activations,
    mask: Tensor,
    heads: int,
    projections: Projections,
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for term in terms:
        loss = term.weight * _loss(term, theirs, ours, mask, heads, projections)
        found[term.name] = found[term.name] + loss if term.name in found else loss
    return found


def _loss(
    term: LayerTerm, theirs: Activations, ours: Activations, mask: Tensor, heads: int, projections: Projections
) -> Tensor:
    if term.of == "scores":
        return tiled_loss(term.loss, theirs.scores[term.teacher_layer], ours.scores[term.student_layer], mask)
    teacher, student = theirs[term.of, term.teacher_layer], ours[term.of, term.student_layer]
    if term.loss == "relation":
        teacher, student = split_heads(teacher, term.heads or heads), split_heads(student, term.heads or heads)
        return tiled_loss("kl", Dots(teacher), Dots(student), mask)
    teacher, student = full(teacher), full(student)
    if term.loss == "direct":
        weight = projections.maps[_key(term)].weight
        assert isinstance(weight, Tensor)
        return direct_loss(split_heads(teacher, heads), split_heads(student, heads), weight, mask)
    mapped = projections.maps[_key(term)](student) if term.projection else student
    return VECTOR_LOSSES[term.loss](teacher, mapped, mask)


def output_losses(
    terms: Sequence[OutputTerm], ours: Tensor, theirs: Tensor | None, targets: Tensor
) -> dict[str, Tensor]:
    """The weighted terms by name.

    Args:
        terms: all of one head.
        ours: the student's logits (rows, labels).
        theirs: the teacher's of the same rows, no gradient; None when no term asks for it.
        targets: as `compress.losses.outputs.label_loss` takes them.
    """
    found: dict[str, Tensor] = {}
    for term in terms:
        if term.loss == "labels":
            loss = label_loss(ours, targets)
        else:
            assert theirs is not None, f"{term.name} needs the teacher's logits"
            loss = (
                logit_loss(theirs, ours)
                if term.loss == "logits"
                else soft_loss(theirs, ours, targets, term.temperature)
            )
        found[term.name] = term.weight * loss
    return found
