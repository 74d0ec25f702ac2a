"""Stages on packed rows: the loss and the gradients are those of the pieces alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from encoders import VOCABULARY
from every_stage import SIZES, models
from torch import Tensor
from torch.nn import functional

from compress.data.batches import part_of
from compress.data.corpus import CorpusText, Piece
from compress.distributed import ProcessShare
from compress.losses.outputs import total
from compress.methods.catalogue import METHODS, Stage, stages_of
from compress.methods.objectives import DIRECT, LayerTerm, Projections
from compress.models.activations import Activations, read
from compress.models.families import FAMILIES
from compress.training.stage import step_losses

PACKED = sorted(kind for kind in FAMILIES if kind != "modernbert")
METHODS_THAT_PACK = [name for name in METHODS if any(stage.pack for stage in stages_of(name, SIZES))]
ROW = 24
# Rows of many pieces, of one short piece and of one that fills it.
LENGTHS = [*np.random.default_rng(0).integers(2, 15, 40).tolist(), *[ROW] * 4, 13]
PIECES = [
    Piece(np.random.default_rng(i).integers(5, VOCABULARY, length), np.arange(length))
    for i, length in enumerate(LENGTHS)
]


def stage_of(method: str) -> Stage:
    return next(stage for stage in stages_of(method, SIZES) if stage.text == "corpus")


def prepared(kind: str, stage: Stage) -> tuple[Any, Any, Projections]:
    teacher, student = models(kind, stage)
    maps = Projections(stage.objective, teacher.config, student.config)
    return teacher.double(), student.double().eval(), maps.double()


def gradients(loss: Tensor, *modules: torch.nn.Module) -> list[Tensor]:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if slope is None else slope for p, slope in zip(parameters, found, strict=True)]


def by_the_paper(term: LayerTerm, theirs: Activations, ours: Activations, heads: int, maps: Projections) -> Tensor:
    """One term on one text without padding, all scores in memory."""

    def split(x: Tensor, parts: int) -> Tensor:
        return x[0].unflatten(-1, (parts, -1)).transpose(0, 1)  # (heads, tokens, width)

    def attention(found: Activations, layer: int) -> Tensor:
        if term.of == "scores":
            return found.scores[layer].scores()[0].log_softmax(dim=-1)
        x = split(found[term.of, layer], term.heads or heads)
        return (x @ x.transpose(1, 2) / x.shape[-1] ** 0.5).log_softmax(dim=-1)

    if term.loss in ("kl", "relation"):
        target = attention(theirs, term.teacher_layer)
        apart = functional.kl_div(attention(ours, term.student_layer), target, reduction="none", log_target=True)
        return apart.sum(dim=-1).mean()
    teacher, student = theirs[term.of, term.teacher_layer], ours[term.of, term.student_layer]
    if term.loss == "products":
        (t, s) = (split(x, heads) for x in (teacher, student))
        return (s @ s.transpose(1, 2) - t @ t.transpose(1, 2)).square().mean(dim=(1, 2)).sum()
    if term.loss in DIRECT:
        apart = split(teacher, heads) - split(student, heads) @ maps.maps[f"from {term.projection}"].weight
        return apart.square().mean(dim=(1, 2)).sum()
    assert term.loss == "mse"
    return (teacher - student).square().mean()


# BERT by every method; the other families by one, as methods differ in losses and families in attention.
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(kind, method, marks=() if kind == "bert" or method == "minilmv2" else pytest.mark.slow)
        for kind in PACKED
        for method in METHODS_THAT_PACK
    ],
)
def test_losses_and_gradients_are_the_means_over_the_pieces_alone(kind: str, method: str) -> None:
    stage = stage_of(method)
    teacher, student, maps = prepared(kind, stage)
    text = CorpusText(PIECES, 1, 8, 0, row_tokens=ROW)
    kinds_of_rows = set()
    for step in range(text.sampler.steps_per_epoch):
        chosen = text.pieces_at(step)
        kinds_of_rows |= {len(row) > 1 for row in chosen}
        loss = total(step_losses(stage.objective, teacher, student, text.at(step), maps, None))
        alone = []
        for piece in np.concatenate(chosen):
            given = {"input_ids": torch.from_numpy(PIECES[piece].ids)[None]}
            theirs = read(teacher, given, stage.objective.teacher_parts())
            ours = read(student, given, stage.objective.student_parts())
            terms = [term.weight * by_the_paper(term, theirs, ours, 4, maps) for term in stage.objective.layers]
            alone.append(torch.stack(terms).sum())
        expected = torch.stack(alone).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        pairs = zip(gradients(loss, student, maps), gradients(expected, student, maps), strict=True)
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-11)
    assert kinds_of_rows == {True, False}


@pytest.mark.parametrize("method", ["hidden-states", "tinybert-general", "distilbert", "mlm-kd", "mlm"])
def test_stages_that_do_not_pack_by_default_could(method: str) -> None:
    """The same pieces packed and apart; masked tokens are chosen by place, so each is compared on masks that mask nothing."""
    stage = stage_of(method)
    teacher, student, maps = prepared("bert", stage)
    packed = CorpusText(PIECES, 0, 100, 0, row_tokens=ROW).at(0)
    apart = CorpusText(PIECES, 0, 100, 0).at(0)
    losses = []
    for batch in (packed, apart):
        real = batch.inputs["attention_mask"].flatten().nonzero().flatten()
        asked = {"row_index": real, "targets": batch.inputs["input_ids"].flatten()[real]}
        losses.append(total(step_losses(stage.objective, teacher, student, replace(batch, **asked), maps, None)))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)


def test_neither_padding_nor_the_order_in_a_row_changes_anything() -> None:
    stage = stage_of("minilmv2")
    teacher, student, maps = prepared("bert", stage)
    batch = CorpusText(PIECES, 0, 100, 0, row_tokens=ROW).at(0)
    loss = total(step_losses(stage.objective, teacher, student, batch, maps, None))
    turned = {}
    for name, value in batch.inputs.items():
        rows = []
        for row, numbers in zip(value, batch.inputs["attention_mask"], strict=True):
            order = sorted(range(1, int(numbers.max()) + 1), reverse=True)
            rows.append(torch.cat([row[numbers == number] for number in order]))
            if name == "attention_mask":
                rows[-1] = numbers.max() + 1 - rows[-1]
        turned[name] = torch.nn.utils.rnn.pad_sequence([*rows, torch.zeros(ROW + 5).long()], batch_first=True)[:-1]
    moved = replace(batch, inputs=turned)
    again = total(step_losses(stage.objective, teacher, student, moved, maps, None))
    torch.testing.assert_close(again, loss, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["minilmv2", "minilm-value-mse", "directminilm"])
@pytest.mark.parametrize("parts", [2, 3, 50])
def test_parts_of_a_packed_batch_add_up_to_it(method: str, parts: int) -> None:
    """Rows hold different numbers of pieces, so a part's weight is its share of the pieces, not of the rows."""
    stage = stage_of(method)
    teacher, student, maps = prepared("bert", stage)
    batch = CorpusText(PIECES, 0, 100, 0, row_tokens=ROW).at(0)

    def loss(share: ProcessShare) -> Tensor:
        return total(step_losses(stage.objective, teacher, student, part_of(batch, share), maps, None))

    together = torch.stack([loss(ProcessShare(number, parts)) for number in range(parts)]).sum()
    torch.testing.assert_close(together, loss(ProcessShare()), rtol=1e-9, atol=1e-12)
