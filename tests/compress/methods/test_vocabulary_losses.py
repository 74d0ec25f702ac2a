"""Losses over a vocabulary, some rows at a time: what they are over all rows at once, without all logits in memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from encoders import encoder, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compress.data.batches import Batch, part_of
from compress.data.encoded import IGNORED
from compress.distributed import ProcessShare
from compress.methods import objectives
from compress.methods.objectives import Objective, OutputTerm, Projections, output_losses, vocabulary_losses
from compress.models.activations import Unprojected, read
from compress.models.families import FAMILIES, kept_apart
from compress.training.stage import step_losses

WORDS, WIDE, NARROW = 37, 12, 8
SOFT = OutputTerm("soft labels", "vocabulary", 0.7, temperature=2.0)
LABELS = OutputTerm("labels", "vocabulary", 0.3)
LOGITS = OutputTerm("logits", "vocabulary")
OBJECTIVES = [(SOFT,), (LABELS,), (SOFT, LABELS, LOGITS)]
# What of the student trains: all, or a head whose matrix is the frozen embeddings.
TRAINS = [("vectors", "weight", "bias"), ("vectors", "bias")]


class Sides:
    """Teacher and student on the same rows, and labels of some of them."""

    def __init__(self, rows: int, seed: int, trains: Sequence[str] = TRAINS[0]) -> None:
        torch.manual_seed(seed)
        self.theirs = Unprojected(torch.randn(rows, WIDE), nn.Linear(WIDE, WORDS))
        projection = nn.Linear(NARROW, WORDS)
        self.ours = Unprojected(torch.randn(rows, NARROW), projection)
        parts = {"vectors": self.ours.vectors, "weight": projection.weight, "bias": projection.bias}
        for name, part in parts.items():
            part.requires_grad_(name in trains)
        self.trained = [parts[name] for name in trains]
        self.targets = torch.randint(0, WORDS, (rows,))
        self.targets[torch.rand(rows) < 0.3] = IGNORED

    def sliced(self, terms: Sequence[OutputTerm], at_once: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The terms, and the gradients of a sum in which each weighs differently."""
        found = vocabulary_losses(terms, self.ours, self.theirs, self.targets, rows_at_once=at_once)
        return found, self._gradients(found)

    def reference(self, terms: Sequence[OutputTerm]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The same in float64 by the formulas, over all rows at once."""
        weight, bias = self.ours.projection.weight, self.ours.projection.bias
        ours = self.ours.vectors.double() @ weight.double().T + bias.double()
        with torch.no_grad():
            theirs = self.theirs.projection.double()(self.theirs.vectors.double())
        rows = max(1, len(ours))
        known = self.targets != IGNORED
        right = ours.log_softmax(1)[known].gather(1, self.targets[known][:, None])
        p, q = (theirs / 2).softmax(1), (ours / 2).softmax(1)
        all_terms = {
            SOFT.name: 0.7 * 4 * (p * (p / q).log()).sum() / rows,
            LABELS.name: -0.3 * right.sum() / max(1, int(known.sum())),
            LOGITS.name: (ours - theirs).square().sum() / 2 / rows,
        }
        found = {term.name: all_terms[term.name] for term in terms}
        return found, self._gradients(found)

    def _gradients(self, found: dict[str, Tensor]) -> list[Tensor]:
        whole = torch.stack([(i + 1.5) * loss for i, loss in enumerate(found.values())]).sum()
        return list(torch.autograd.grad(whole, self.trained))


@given(
    rows=st.integers(0, 30),
    at_once=st.integers(1, 31),
    terms=st.sampled_from(OBJECTIVES),
    trains=st.sampled_from(TRAINS),
    seed=st.integers(0, 1000),
)
def test_any_number_of_rows_at_once_gives_the_same(
    rows: int, at_once: int, terms: tuple[OutputTerm, ...], trains: tuple[str, ...], seed: int
) -> None:
    sides = Sides(rows, seed, trains)
    found, gradients = sides.sliced(terms, at_once)
    expected, expected_gradients = sides.reference(terms)
    assert list(found) == list(expected)
    for name, loss in found.items():
        torch.testing.assert_close(loss.double(), expected[name], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("at_once", [7, 41])
def test_rows_that_weigh_alike_have_the_gradient_of_a_plain_mean_to_the_bit(at_once: int) -> None:
    sides = Sides(41, 3)
    terms = (SOFT, OutputTerm("labels", "vocabulary", 0.3, smoothing=0.1))
    known = sides.targets != IGNORED
    means = []
    for rows in torch.arange(41).split(at_once):
        found = output_losses(
            terms, sides.ours.projection(sides.ours.vectors[rows]), sides.theirs.projection(sides.theirs.vectors[rows]).detach(),
            sides.targets[rows],
        )  # fmt: skip
        shares = (len(rows) / 41, known[rows].sum() / known.sum())
        means.append(torch.stack([share * loss for share, loss in zip(shares, found.values(), strict=True)]))
    expected = sides._gradients(dict(enumerate(torch.stack(means).sum(dim=0))))
    for ours, theirs in zip(sides.sliced(terms, at_once)[1], expected, strict=True):
        assert torch.equal(ours, theirs)


def test_in_bfloat16_rows_at_once_add_only_rounding() -> None:
    sides = Sides(64, 0)
    with torch.autocast("cpu", torch.bfloat16):
        whole, whole_gradients = sides.sliced(OBJECTIVES[2], 64)
        found, gradients = sides.sliced(OBJECTIVES[2], 5)
    for name, loss in found.items():
        torch.testing.assert_close(loss, whole[name], rtol=1e-5, atol=0)  # logits are the same to the bit
    for ours, theirs in zip(gradients, whole_gradients, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


class Counting(nn.Linear):
    """It keeps the most rows that it was asked about, and how often."""

    most = calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.most, self.calls = max(self.most, len(x)), self.calls + 1
        return super().forward(x)


def test_no_more_logits_are_made_than_of_the_rows_at_once() -> None:
    ours, theirs = Counting(NARROW, WORDS), Counting(WIDE, WORDS)
    sides = Sides(30, 0)
    found = vocabulary_losses(
        (SOFT,), Unprojected(sides.ours.vectors, ours), Unprojected(sides.theirs.vectors, theirs), sides.targets,
        rows_at_once=8,
    )  # fmt: skip
    assert (ours.calls, theirs.calls) == (4, 4)
    found[SOFT.name].backward()  # type: ignore[no-untyped-call]
    assert (ours.calls, theirs.calls) == (7, 7)  # the last eight rows are not computed again
    assert ours.most == theirs.most == 8
    assert ours.weight.grad is not None
    assert theirs.weight.grad is None


def test_fewer_rows_are_taken_at_once_of_a_larger_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "LOGITS_AT_ONCE", 5 * WORDS + 1)
    projection = Counting(NARROW, WORDS)
    sides = Sides(12, 0)
    vocabulary_losses((LABELS,), Unprojected(sides.ours.vectors, projection), None, sides.targets)
    assert (projection.most, projection.calls) == (5, 3)


def test_the_forward_pass_keeps_the_logits_of_the_last_rows_alone() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[1:] == (WORDS,) and len(tensor) != NARROW:  # the matrix, transposed, is kept too
            kept.append(len(tensor))
        return tensor

    sides = Sides(42, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocabulary_losses((SOFT,), sides.ours, sides.theirs, sides.targets, rows_at_once=4)
    assert set(kept) == {2}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_words_of_every_family_have_the_logits_of_its_head(kind: str) -> None:
    model: Any = encoder(kind, "ForMaskedLM")
    given_ = inputs()
    rows = torch.tensor([0, 4, 11])
    with torch.no_grad():
        expected = model(**given_).logits.flatten(0, 1)[rows]
        found = read(model, given_, [], output=True, rows=rows)
        assert found.words is not None
        assert found.output is None
        torch.testing.assert_close(found.words.logits(slice(0, 3)), expected)
        torch.testing.assert_close(found.words.logits(slice(1, 2)), expected[1:2])
        assert torch.equal(model(**given_).logits.flatten(0, 1)[rows], expected)  # nothing is left on the model


# Rows of a text of 9 tokens, of texts of 3 and 4, and of one of 5; the flat indices of their masked tokens.
MASK = torch.tensor([[1] * 9, [1] * 3 + [2] * 4 + [0] * 2, [1] * 5 + [0] * 4])
MASKED = {0: [1, 2, 5, 7, 8], 1: [10, 13, 15], 2: [19]}


def ragged() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, MASK.shape, generator=generator)
    rows = torch.tensor([row for masked in MASKED.values() for row in masked])
    positions = torch.tensor([[*range(9)], [*range(3), *range(4), 0, 0], [*range(5), 0, 0, 0, 0]])
    given_ = {"input_ids": ids, "attention_mask": MASK, "position_ids": positions}
    return Batch(given_, rows, torch.randint(5, 60, rows.shape, generator=generator))


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_mean_is_over_the_rows_of_a_text_and_then_over_texts(everywhere: bool) -> None:
    soft = OutputTerm("soft labels", "vocabulary", everywhere=everywhere)
    objective = Objective(outputs=(soft,) if everywhere else (soft, OutputTerm("labels", "vocabulary")))
    teacher, student = (encoder("bert", "ForMaskedLM", seed=seed).eval() for seed in (1, 2))
    batch, maps = ragged(), Projections(objective, teacher.config, student.config)
    with torch.no_grad():
        found = step_losses(objective, teacher, student, batch, maps, None)
        words = [
            read(each, kept_apart(each, batch.inputs), [], output=True, rows=torch.arange(27)).words
            for each in (teacher, student)
        ]
        theirs, ours = (each.logits(slice(0, 27)).double() for each in words if each)
    p = theirs.softmax(1)
    divergence = (p * (p.log() - ours.log_softmax(1))).sum(1)
    texts = [range(9), range(9, 12), range(12, 16), range(18, 23)]
    asked = [[row for row in text if everywhere or row in batch.row_index] for text in texts]
    expected = torch.stack([divergence[rows].mean() for rows in asked]).mean()
    assert found[soft.name].item() == pytest.approx(expected.item(), rel=1e-5)
    if not everywhere:
        answers = dict(zip(batch.row_index.tolist(), batch.targets.tolist(), strict=True))
        of_texts = [torch.stack([-ours[row].log_softmax(0)[answers[row]] for row in rows]).mean() for rows in asked]
        assert found["vocabulary labels"].item() == pytest.approx(torch.stack(of_texts).mean().item(), rel=1e-5)
    for count in (2, 3):
        parts = [part_of(batch, ProcessShare(number, count)) for number in range(count)]
        with torch.no_grad():
            sums = [step_losses(objective, teacher, student, part, maps, None) for part in parts]
        for name, loss in found.items():
            assert sum(each[name].item() for each in sums) == pytest.approx(loss.item(), rel=1e-5)
