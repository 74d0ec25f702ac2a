"""Objectives: on what a student must agree with its teacher, as lists of terms, and their computation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

from compress.data.encoded import IGNORED
from compress.losses.outputs import full, label_loss, label_rows, logit_loss, logit_rows, soft_label_rows, soft_loss
from compress.losses.tiled_relations import RelationFactors, products_loss, tiled_loss
from compress.losses.vectors import (
    Pooling,
    check_relation_heads,
    cosine_loss,
    direct_loss,
    hidden_loss,
    pooled,
    similarity_loss,
    split_heads,
    summed_hidden_loss,
    vector_loss,
)
from compress.models.activations import Activations, Part, Unprojected
from serve.errors import BadInput

# Losses of vectors (batch, tokens, width).
VECTOR_LOSSES = {"mse": hidden_loss, "half squares": summed_hidden_loss, "cosine": cosine_loss}
# Losses of one vector a text (texts, width), which `LayerTerm.pooling` makes of its hidden states.
TEXT_LOSSES = {"text cosine": vector_loss, "similarities": similarity_loss}
# Losses of queries, keys or values through a matrix per head, which is any, or has orthonormal rows.
DIRECT = ("direct", "orthogonal")
# Logits over a vocabulary that are held at once: 72 MB of float32, 589 rows of 30,522 words. glibc gives blocks back to the
# system when they are above 32 MB; with blocks below, which it scattered, the peak was as high as with all logits.
LOGITS_AT_ONCE = 18_000_000


@dataclass(frozen=True)
class LayerTerm:
    """Agreement of one part of a student layer with the same part of a teacher layer.

    `of` is hidden, queries, keys, values or scores (see `compress.models.activations.Part`). `loss` is one of
    `compress.losses.tiled_relations.TILE_LOSSES` for scores; for the others one of `VECTOR_LOSSES`, `TEXT_LOSSES`,
    `relation`, `products` or one of `DIRECT`.
    `projection` names the learned map from the student's width to the teacher's. Terms with the same name share the map;
    without a name the widths must agree.
    """

    loss: str
    of: str
    teacher_layer: int
    student_layer: int
    weight: float = 1.0
    # Relation heads; 0 takes the number of attention heads.
    heads: int = 0
    projection: str = ""
    bias: bool = False
    pooling: Pooling = "mean"  # for `TEXT_LOSSES`

    @property
    def name(self) -> str:
        """The term's name in metrics; terms of several layers with one name are added up."""
        if self.of == "scores" and self.loss != "mse":
            return f"attention {self.loss}"
        if self.loss in TEXT_LOSSES:
            return self.loss
        return f"{'embeddings' if self.student_layer == 0 else self.of} {self.loss}"


@dataclass(frozen=True)
class OutputTerm:
    """Agreement of outputs: with the labels (`labels`), the teacher's soft labels (`soft labels`) or its `logits`. `kept soft labels`
    come with the batches, so that the teacher is not run.

    `of` is `classes`, the task head's output for each text or word, or `vocabulary`, the masked-language-model head's output for
    each masked token, or with `everywhere` for every real token.
    """

    loss: Literal["labels", "soft labels", "kept soft labels", "logits"]
    of: Literal["classes", "vocabulary"]
    weight: float = 1.0
    temperature: float = 1.0
    everywhere: bool = False
    # Whether soft labels beside labels have the weight `weight` on labelled rows alone and 1 on the others, and labels their weight of
    # all rows, so that each row counts alike.
    shared: bool = False
    # Of one label: the share of the target that all labels have evenly (Szegedy et al. 2016, section 7).
    smoothing: float = 0.0
    # Of one label: the weight of each by index; empty: all alike.
    class_weights: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The term's name in metrics."""
        if self.loss == "kept soft labels":
            return "soft_labels"
        return self.loss if self.of == "classes" else f"vocabulary {self.loss}"


@dataclass(frozen=True)
class Objective:
    """A sum of terms."""

    layers: tuple[LayerTerm, ...] = ()
    outputs: tuple[OutputTerm, ...] = ()

    @property
    def masks_tokens(self) -> bool:
        """Whether it trains on masked tokens, as a masked language model does."""
        return any(term.of == "vocabulary" for term in self.outputs)

    @property
    def asks_teacher(self) -> bool:
        """Whether it needs the teacher's output, not only its activations."""
        return any(term.loss not in ("labels", "kept soft labels") for term in self.outputs)

    @property
    def can_be_kept(self) -> bool:
        """Whether a cache can hold all that it reads of the teacher: activations on unmasked text."""
        return bool(self.layers) and not self.masks_tokens and not self.asks_teacher

    @property
    def pooling(self) -> Pooling | None:
        """How it makes the vector of a text; None if it compares no such vectors."""
        return next((term.pooling for term in self.layers if term.loss in TEXT_LOSSES), None)

    def teacher_parts(self) -> set[Part]:
        """The parts of the teacher that it reads."""
        return {Part(term.of, term.teacher_layer) for term in self.layers}

    def student_parts(self) -> set[Part]:
        """The parts of the student that it reads."""
        return {Part(term.of, term.student_layer) for term in self.layers}


def check_objective(objective: Objective, teacher: Any, student: Any) -> None:
    """Check that a student of this configuration can train on `objective` with a teacher of that one.

    Raises:
        BadInput: heads that do not fit, a layer that does not exist, different widths without a learned map, or last layers of
            the student that no term trains.
    """
    top = max((term.student_layer for term in objective.layers), default=student.num_hidden_layers)
    if top < student.num_hidden_layers and not objective.outputs:
        raise BadInput(
            f"This layer map has no teacher layer for the student's last layers, {top + 1} to {student.num_hidden_layers} of "
            f"{student.num_hidden_layers}: nothing would train them. Give --layer-map spread, which fits any depth."
        )
    for term in objective.layers:
        for layer, config, whose in (
            (term.teacher_layer, teacher, "teacher"),
            (term.student_layer, student, "student"),
        ):
            if not (0 if term.of == "hidden" else 1) <= layer <= config.num_hidden_layers:
                raise BadInput(f"The {whose} has no layer {layer}. Give a layer from 1 to {config.num_hidden_layers}.")
        if term.loss == "relation" and term.heads:
            check_relation_heads(term.heads, teacher.hidden_size, student.hidden_size)
        elif (
            term.of == "scores" or term.loss in {"relation", "products", *DIRECT}
        ) and teacher.num_attention_heads != student.num_attention_heads:
            theirs, ours = teacher.num_attention_heads, student.num_attention_heads
            raise BadInput(
                f"This method needs as many attention heads in the student as in the teacher, but the student has {ours} and the "
                f"teacher {theirs}. Give a student with {theirs} heads, or the method minilmv2, which re-splits them."
            )
        if term.loss == "orthogonal" and teacher.hidden_size < student.hidden_size:
            raise BadInput(
                f"Orthonormal rows need a student no wider than its teacher, but the widths are {student.hidden_size} and "
                f"{teacher.hidden_size}. Give a narrower student, or the method directminilm."
            )
        compared = term.loss in VECTOR_LOSSES or term.loss == "text cosine"
        unmapped = term.of != "scores" and compared and not term.projection
        if unmapped and teacher.hidden_size != student.hidden_size:
            raise BadInput(
                "This method compares hidden states without a learned map, so the student must be as wide as its teacher, but the "
                f"widths are {student.hidden_size} and {teacher.hidden_size}. Give a student as wide, or a method with a learned map "
                "(hidden-states or tinybert)."
            )


class Projections(nn.Module):
    """The learned maps of an objective from the student's width to the teacher's, discarded after training.

    A square map starts as the identity, so a student equal to its teacher starts at a loss of 0. Other maps start as
    `torch.nn.Linear` does; those of `direct` start normal, with variance 1 / student's width of a head,
    and those of `orthogonal` made orthonormal by QR, which they stay.
    """

    def __init__(self, objective: Objective, teacher: Any, student: Any) -> None:
        super().__init__()
        self.maps = nn.ModuleDict()
        heads = student.num_attention_heads
        for term in objective.layers:
            if not term.projection or _key(term) in self.maps:
                continue
            wide, narrow = teacher.hidden_size, student.hidden_size
            if term.loss in DIRECT:
                maps = _HeadMaps(heads, narrow // heads, wide // heads)
                # Of its ways the Householder reflections break under weight decay.
                self.maps[_key(term)] = maps if term.loss == "direct" else orthogonal(maps, orthogonal_map="matrix_exp")
            else:
                linear = nn.Linear(narrow, wide, bias=term.bias)
                if narrow == wide:
                    nn.init.eye_(linear.weight)
                if term.bias:
                    nn.init.zeros_(linear.bias)
                self.maps[_key(term)] = linear


def _key(term: LayerTerm) -> str:
    return f"from {term.projection}"  # a module named `keys` would hide the method of `ModuleDict`


class _HeadMaps(nn.Module):
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
    """The weighted terms by name; each is 0 if the student agrees with the teacher.

    Args:
        terms: what is compared.
        theirs: the teacher's parts.
        ours: the student's parts.
        mask: (batch, tokens), 1 for a real token.
        heads: attention heads, for terms without a number of heads.
        projections: the learned maps that the terms name.
    """
    found: dict[str, Tensor] = {}
    # Full precision, also in matrix products: a divergence is a small difference of large numbers.
    with torch.autocast(mask.device.type, enabled=False):
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
        return tiled_loss("kl", RelationFactors(teacher), RelationFactors(student), mask)
    teacher, student = full(teacher), full(student)
    if term.loss == "products":
        return products_loss(split_heads(teacher, heads), split_heads(student, heads), mask)
    if term.loss in DIRECT:
        weight = projections.maps[_key(term)].weight
        assert isinstance(weight, Tensor)
        return direct_loss(split_heads(teacher, heads), split_heads(student, heads), weight, mask)
    if term.loss in TEXT_LOSSES:
        teacher, student = pooled(teacher, mask, term.pooling), pooled(student, mask, term.pooling)
    mapped = projections.maps[_key(term)](student) if term.projection else student
    if term.loss in TEXT_LOSSES:
        return TEXT_LOSSES[term.loss](teacher, mapped)
    return VECTOR_LOSSES[term.loss](teacher, mapped, mask)


def output_losses(
    terms: Sequence[OutputTerm], ours: Tensor, theirs: Tensor | None, targets: Tensor
) -> dict[str, Tensor]:
    """The weighted terms by name.

    Args:
        terms: all of one head.
        ours: the student's logits (rows, labels).
        theirs: the teacher's of the same rows, no gradient; None if no term needs them.
        targets: as `compress.losses.outputs.label_loss` takes them.
    """
    found: dict[str, Tensor] = {}
    for term in terms:
        if term.loss == "labels":
            weights = ours.new_tensor(term.class_weights, dtype=torch.float32) if term.class_weights else None
            loss = term.weight * label_loss(ours, targets, term.smoothing, weights, of_all=term.shared)
        elif term.shared:
            assert theirs is not None
            loss = soft_loss(theirs, ours, targets, term.temperature, labelled_weight=term.weight)
        else:
            assert theirs is not None, f"{term.name} needs the teacher's logits"
            loss = term.weight * (
                logit_loss(theirs, ours)
                if term.loss == "logits"
                else soft_loss(theirs, ours, targets, term.temperature)
            )
        found[term.name] = loss
    return found


def vocabulary_losses(
    terms: Sequence[OutputTerm],
    ours: Unprojected,
    theirs: Unprojected | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    rows_at_once: int = 0,
) -> dict[str, Tensor]:
    """The weighted terms of the vocabulary, some rows at a time, so that the logits of all are never held.

    They are computed once more in the backward pass, except those of the last rows, whose turn comes first there.

    Args:
        terms: all of them.
        ours: the student's rows.
        theirs: the teacher's of the same rows; None if no term needs them.
        targets: (rows,), or of the masked tokens alone where no term needs it.
        weights: (rows,), the share of each row in a mean; None: all alike. Of labels those without one count for nothing.
        rows_at_once: 0 takes as many as have `LOGITS_AT_ONCE` logits.
    """
    count = len(ours.vectors)
    rows_at_once = rows_at_once or max(1, LOGITS_AT_ONCE // ours.words)
    parts = [slice(first, first + rows_at_once) for first in range(0, max(1, count), rows_at_once)]
    shares = full(ours.vectors).new_ones(count) if weights is None else weights.to(full(ours.vectors).dtype)

    def of_part(part: slice) -> Tensor:  # (terms,)
        with torch.no_grad():
            expected = None if theirs is None else theirs.logits(part)
        logits = ours.logits(part)
        found = []
        for term in terms:
            if term.loss == "labels":
                rows = label_rows(logits, targets[part], term.smoothing)
            else:
                assert expected is not None, f"{term.name} needs the teacher's logits"
                rows = (
                    logit_rows(expected, logits)
                    if term.loss == "logits"
                    else soft_label_rows(expected, logits, term.temperature)
                )
            # The mean of these rows, times their share of all. With equal weights it has the bits of a plain mean.
            every = torch.where(targets != IGNORED, shares, 0) if term.loss == "labels" else shares
            here, least = every[part], torch.finfo(shares.dtype).tiny
            found.append(
                here.sum()
                / every.sum().clamp(min=least)
                * (term.weight * ((rows * here).sum() / here.sum().clamp(min=least)))
            )
        return torch.stack(found)

    again = partial(checkpoint, of_part, use_reentrant=False, preserve_rng_state=False)
    losses = torch.stack([*map(again, parts[:-1]), of_part(parts[-1])]).sum(dim=0)
    return {term.name: loss for term, loss in zip(terms, losses, strict=True)}
