"""Every objective against its formula, written anew in float64 and loops, one sequence of real tokens at a time."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.losses.outputs import logit_loss
from compress.losses.tiled_relations import RelationFactors, products_loss, tiled_loss
from compress.losses.vectors import cosine_loss, direct_loss, hidden_loss, summed_hidden_loss
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import OutputTerm, Projections, check_objective, output_losses
from serve.errors import BadInput

HEADS, WIDE, NARROW = 3, 8, 4  # widths of one head
Array = np.ndarray


def softmax(x: Array) -> Array:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def kl(p: Array, q: Array) -> float:
    """Mean over rows of sum p log(p / q)."""
    return float(
        np.mean([sum(a * np.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)])
    )


# One sequence: teacher and student (heads, n, width), or scores (heads, n, n); the formulas of the papers.
def minilm_attention(t: Array, s: Array) -> float:
    return float(np.mean([kl(softmax(t[a]), softmax(s[a])) for a in range(HEADS)]))


def relation(t: Array, s: Array) -> float:
    one = [softmax(x @ x.swapaxes(1, 2) / np.sqrt(x.shape[2])) for x in (t, s)]
    return float(np.mean([kl(one[0][a], one[1][a]) for a in range(HEADS)]))


def xtremedistil_attention(t: Array, s: Array) -> float:
    n = t.shape[1]
    return sum(((softmax(t[a]) - softmax(s[a])) ** 2).sum() for a in range(HEADS)) / (2 * HEADS * n)


def attention_mean_squares(t: Array, s: Array) -> float:
    return float(np.mean([(softmax(t[a]) - softmax(s[a])) ** 2 for a in range(HEADS)]))


def tinybert_scores(t: Array, s: Array) -> float:
    return float(np.mean([((t[a] - s[a]) ** 2).mean() for a in range(HEADS)]))


def hidden_mse(t: Array, s: Array) -> float:
    return float(((t - s) ** 2).mean())


def xtremedistil_hidden(t: Array, s: Array) -> float:
    return sum(float((x - y) @ (x - y)) for x, y in zip(t, s, strict=True)) / (2 * len(t))


def cosine(t: Array, s: Array) -> float:
    return float(np.mean([1 - x @ y / np.sqrt(x @ x) / np.sqrt(y @ y) for x, y in zip(t, s, strict=True)]))


W = torch.randn(HEADS, NARROW, WIDE, generator=torch.Generator().manual_seed(9))


def directminilm(t: Array, s: Array) -> float:
    return sum(float(((s[a] @ W[a].double().numpy() - t[a]) ** 2).mean()) for a in range(HEADS))


def direct(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    projection = W.to(student.dtype) if student.shape[-1] == NARROW else torch.eye(WIDE).repeat(HEADS, 1, 1)
    return direct_loss(teacher, student, projection.to(student.dtype), mask)


def products(t: Array, s: Array) -> float:
    return sum(float(((s[a] @ s[a].T - t[a] @ t[a].T) ** 2).mean()) for a in range(HEADS))


def relation_in_tiles(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tiled_loss("kl", RelationFactors(teacher), RelationFactors(student), mask)


def in_tiles(loss: str) -> Callable[..., torch.Tensor]:
    """A loss of scores that takes what scores are made from, as one that takes scores."""

    def made(scores: torch.Tensor) -> RelationFactors:
        # Any scores are products of themselves and the identity; there alone would nan in one column spoil the others.
        tokens = scores.shape[-1]
        return RelationFactors(
            scores.nan_to_num() * tokens**0.5, torch.eye(tokens, dtype=scores.dtype).expand_as(scores)
        )

    return lambda teacher, student, mask: tiled_loss(loss, made(teacher), made(student), mask)


# Loss, its formula, and what it takes: scores, heads, heads of two widths, or hidden states.
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., float], str]] = {
    "attention kl": (in_tiles("kl"), minilm_attention, "scores"),
    "attention squares": (in_tiles("squares"), xtremedistil_attention, "scores"),
    "attention mean squares": (in_tiles("mean squares"), attention_mean_squares, "scores"),
    "scores mse": (in_tiles("mse"), tinybert_scores, "scores"),
    "relation kl": (relation_in_tiles, relation, "heads"),
    "direct": (direct, directminilm, "heads"),
    "products": (products_loss, products, "heads"),
    "hidden mse": (hidden_loss, hidden_mse, "hidden"),
    "hidden half squares": (summed_hidden_loss, xtremedistil_hidden, "hidden"),
    "hidden cosine": (cosine_loss, cosine, "hidden"),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def drawn(name: str, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Teacher, student and mask of three sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "scores": ((3, HEADS, tokens, tokens),) * 2,
        "heads": ((3, HEADS, tokens, WIDE), (3, HEADS, tokens, NARROW)),
        "hidden": ((3, tokens, WIDE),) * 2,
    }[LOSSES[name][2]]
    teacher, student = (torch.randn(shape, generator=generator) for shape in shapes)
    lengths = torch.tensor([tokens, max(1, tokens // 2), 1])
    return teacher, student, (torch.arange(tokens)[None] < lengths[:, None]).long()


def real(name: str, x: torch.Tensor, length: int) -> Array:
    """One sequence without its padding."""
    y = x.double().numpy()
    takes = LOSSES[name][2]
    if takes == "hidden":
        return y[:length]
    return y[:, :length] if takes == "heads" else y[:, :length, :length]


def wider(name: str, x: torch.Tensor, more: int, loud: float) -> torch.Tensor:
    """`x` with `more` padded tokens, all of them `loud`."""
    tokens = x.shape[1] if x.ndim == 3 else x.shape[2]
    shape = {
        "hidden": (3, tokens + more, x.shape[-1]),
        "heads": (3, HEADS, tokens + more, x.shape[-1]),
        "scores": (3, HEADS, tokens + more, tokens + more),
    }[LOSSES[name][2]]
    new = torch.full(shape, loud)
    new[tuple(slice(0, size) for size in x.shape)] = x
    return new


@EVERY
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 11))
def test_it_is_the_papers_formula(name: str, seed: int, tokens: int) -> None:
    loss, formula, _ = LOSSES[name]
    teacher, student, mask = drawn(name, seed, tokens)
    lengths = mask.sum(dim=1).tolist()
    one = [formula(real(name, t, n), real(name, s, n)) for t, s, n in zip(teacher, student, lengths, strict=True)]
    assert loss(teacher, student, mask).item() == pytest.approx(float(np.mean(one)), rel=1e-5, abs=1e-6)


@EVERY
def test_it_is_zero_at_the_teacher(name: str) -> None:
    teacher, _, mask = drawn(name, 0, 7)
    assert LOSSES[name][0](teacher, teacher.clone(), mask).item() == pytest.approx(0, abs=1e-6)


@EVERY
@pytest.mark.parametrize("loud", [50.0, float("nan")])
def test_padding_changes_nothing(name: str, loud: float) -> None:
    loss = LOSSES[name][0]
    teacher, student, mask = drawn(name, 1, 7)
    before = loss(teacher, student, mask).item()
    longer = torch.cat([mask, torch.zeros(3, 5, dtype=torch.long)], dim=1)

    after = loss(wider(name, teacher, 5, loud), wider(name, student, 5, loud), longer).item()
    assert after == pytest.approx(before, rel=1e-6)


@EVERY
def test_the_order_of_sequences_changes_nothing(name: str) -> None:
    teacher, student, mask = drawn(name, 2, 7)
    order = torch.tensor([2, 0, 1])
    loss = LOSSES[name][0]
    assert loss(teacher[order], student[order], mask[order]).item() == pytest.approx(
        loss(teacher, student, mask).item(), rel=1e-6
    )


@EVERY
def test_its_gradient_is_that_of_its_values(name: str) -> None:
    teacher, student, mask = drawn(name, 3, 4)
    loss = LOSSES[name][0]
    assert torch.autograd.gradcheck(lambda s: loss(teacher.double(), s, mask), (student.double().requires_grad_(),))


@EVERY
def test_going_towards_the_teacher_makes_it_smaller(name: str) -> None:
    teacher, _, mask = drawn(name, 4, 7)
    away = torch.randn(teacher.shape, generator=torch.Generator().manual_seed(5))
    values = [LOSSES[name][0](teacher, teacher + share * away, mask).item() for share in (1.0, 0.5, 0.25, 0.0)]
    assert all(further > nearer for further, nearer in pairwise(values))


def test_logit_loss_is_half_the_squared_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(6, 5, generator=generator) for _ in range(2))
    rows = ((student.double() - teacher.double()) ** 2).sum(dim=1) / 2
    assert logit_loss(teacher, student).item() == pytest.approx(rows.mean().item(), rel=1e-6)
    assert logit_loss(teacher, teacher.clone()).item() == 0
    assert torch.autograd.gradcheck(lambda s: logit_loss(teacher.double(), s), (student.double().requires_grad_(),))


def test_answers_of_several_labels_are_compared_label_by_label() -> None:
    ours, theirs = torch.randn(6, 3), torch.randn(6, 3)
    targets = torch.randint(0, 2, (6, 3)).float()
    terms = [
        OutputTerm("labels", "classes"),
        OutputTerm("soft labels", "classes", temperature=2.0),
        OutputTerm("logits", "classes"),
    ]
    found = output_losses(terms, ours, theirs, targets)
    p, q = (torch.sigmoid(x.double() / 2) for x in (theirs, ours))
    expected = {
        "labels": torch.nn.functional.binary_cross_entropy(ours.double().sigmoid(), targets.double()),
        "soft labels": 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean(),
        "logits": (ours - theirs).double().square().sum(dim=1).mean() / 2,
    }
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-5), name


def test_matrices_of_orthonormal_rows_stay_so_and_leave_products_as_they_are() -> None:
    from transformers import BertConfig

    teacher, student = (BertConfig(hidden_size=HEADS * width, num_attention_heads=HEADS) for width in (WIDE, NARROW))
    objective = stages_of("directminilm-orthogonal", Sizes(12, 12, teacher.hidden_size, student.hidden_size))[
        0
    ].objective
    maps = Projections(objective, teacher, student).double()
    steps = torch.optim.AdamW(maps.parameters(), lr=0.1)
    t, s, mask = (each.double() if each.is_floating_point() else each for each in drawn("direct", 0, 5))
    losses = []
    for _ in range(20):
        steps.zero_grad()
        loss = direct_loss(t, s, maps.maps["from keys"].weight, mask)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    w = maps.maps["from keys"].weight.detach()
    assert losses[-1] < losses[0]
    torch.testing.assert_close(w @ w.mT, torch.eye(NARROW).double().expand(HEADS, -1, -1), rtol=0, atol=1e-6)
    assert products_loss(s @ w, s, mask).item() < 1e-9
    with pytest.raises(BadInput, match="a student no wider than its teacher"):
        check_objective(objective, student, teacher)
