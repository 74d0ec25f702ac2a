"""Tiled losses against the same losses written whole, in `whole_relations`, which are held against the papers' formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from whole_relations import attention_loss, attention_square_loss, relation_loss, score_loss

from compress.losses import tiled_relations as tiled
from compress.losses.tiled_relations import RelationFactors, tiled_loss

WHOLE = {"kl": attention_loss, "squares": attention_square_loss, "mse": score_loss}
EVERY = pytest.mark.parametrize("loss", WHOLE)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few tokens of a test fall into many tiles, of one head and of several, and are seen by `Largest`."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(tiled, "ROWS", 4)
    monkeypatch.setattr(tiled, "NUMBERS", 80)


def drawn(
    seed: int, tokens: int, width: int, *, bias: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and, if asked for, a bias: two sequences, three heads; all of which want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, tokens, width)] * 2 + [(3, tokens, tokens)] * bias
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


def fixed(parts: tuple[torch.Tensor, ...]) -> RelationFactors:
    return RelationFactors(*(part.detach() for part in parts))


@EVERY
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 13),
    biases=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
def test_value_and_gradients_are_those_of_the_whole(
    loss: str, seed: int, tokens: int, biases: tuple[bool, bool], data: st.DataObject
) -> None:
    theirs, ours = biases  # teacher and student may be of two families
    teacher, student = fixed(drawn(seed, tokens, 8, bias=theirs)), drawn(seed + 1, tokens, 6, bias=ours)
    # Real tokens need not stand side by side.
    rows = st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens).filter(any)
    first = data.draw(rows)
    mask = torch.tensor([first, data.draw(st.one_of(st.permutations(first), rows))])  # often of one length
    whole = WHOLE[loss](teacher.scores(), RelationFactors(*student).scores(), mask)
    value = tiled_loss(loss, teacher, RelationFactors(*student), mask)
    assert value.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    expected = torch.autograd.grad(2 * whole, student)
    for found, wanted in zip(torch.autograd.grad(2 * value, student), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_fewer_bits_it_is_computed_in_float32(loss: str, dtype: torch.dtype) -> None:
    teacher, student = fixed(drawn(2, 9, 8, dtype=dtype)), drawn(3, 9, 6, dtype=dtype)
    mask = torch.ones(2, 9, dtype=torch.long)
    exactly = [tuple(part.detach().double().requires_grad_() for part in parts) for parts in (teacher[:2], student)]
    whole = WHOLE[loss](RelationFactors(*exactly[0]).scores(), RelationFactors(*exactly[1]).scores(), mask)
    ours = tiled_loss(loss, teacher, RelationFactors(*student), mask)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(whole.item(), rel=1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2  # gradients go back as the numbers came
    expected = torch.autograd.grad(whole, exactly[1])
    for found, wanted in zip(torch.autograd.grad(ours, student), expected, strict=True):
        assert found.dtype == dtype
        assert (found.double() - wanted).abs().max() < tolerance * wanted.abs().max()


@EVERY
def test_it_is_nothing_at_the_teacher(loss: str) -> None:
    teacher = drawn(4, 9, 8, dtype=torch.float32)
    student = tuple(part.detach().clone().requires_grad_() for part in teacher)
    value = tiled_loss(loss, fixed(teacher), RelationFactors(*student), torch.ones(2, 9, dtype=torch.long))
    assert value.item() == 0
    assert all(not slope.any() for slope in torch.autograd.grad(value, student))


@EVERY
@pytest.mark.parametrize("loud", [50.0, float("nan")])
def test_padding_changes_no_bit(loss: str, loud: float) -> None:
    teacher, student = drawn(5, 7, 8, dtype=torch.float32), drawn(6, 7, 6, dtype=torch.float32)
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    before = tiled_loss(loss, fixed(teacher), RelationFactors(*student), mask)

    def wider(part: torch.Tensor) -> torch.Tensor:
        more = torch.full((2, 3, 12, part.shape[-1]), loud)
        more[:, :, :7] = part.detach()
        more[1, :, 3:] = loud
        return more.requires_grad_()

    longer = tuple(map(wider, student))
    after = tiled_loss(
        loss, RelationFactors(*map(wider, teacher)), RelationFactors(*longer), torch.nn.functional.pad(mask, (0, 5))
    )
    assert after.item() == before.item()
    for found, wanted in zip(torch.autograd.grad(after, longer), torch.autograd.grad(before, student), strict=True):
        assert torch.equal(found[0, :, :7], wanted[0])
        assert torch.equal(found[1, :, :3], wanted[1, :, :3])
        assert not found[0, :, 7:].any()
        assert not found[1, :, 3:].any()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 13), data=st.data())
def test_a_relation_is_an_attention_whose_queries_are_its_keys(seed: int, tokens: int, data: st.DataObject) -> None:
    teacher, student = drawn(seed, tokens, 8)[0].detach(), drawn(seed + 1, tokens, 6)[0]
    mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens).filter(any))] * 2)
    found = tiled_loss("kl", RelationFactors(teacher), RelationFactors(student), mask)
    whole = relation_loss(teacher, student, mask)
    assert found.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    slopes = [torch.autograd.grad(value, student)[0] for value in (found, whole)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-13)
    same = tiled_loss("kl", RelationFactors(student.detach().float()), RelationFactors(student.float()), mask)
    assert same.item() == 0
    assert not torch.autograd.grad(same, student)[0].any()


def test_without_gradients_none_are_made() -> None:
    student = drawn(9, 5, 4)
    with torch.no_grad(), Largest() as seen:
        value = tiled_loss("kl", fixed(drawn(8, 5, 4)), RelationFactors(*student), torch.ones(2, 5, dtype=torch.long))
    assert not value.requires_grad
    assert "zeros_like" not in seen.names


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that was computed within it, and by what names."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        self.names.add(function.__name__.partition(".")[0])
        return result


@EVERY
def test_nothing_as_large_as_tokens_times_tokens_is_ever_held(loss: str) -> None:
    teacher, student = fixed(drawn(7, 64, 8)), drawn(8, 64, 6)
    with Largest() as seen:
        tiled_loss(loss, teacher, RelationFactors(*student), torch.ones(2, 64, dtype=torch.long)).backward()
    assert seen.numbers == 2 * 3 * 64 * 8  # the teacher's queries
    with Largest() as seen:
        WHOLE[loss](
            teacher.scores(), RelationFactors(*student).scores(), torch.ones(2, 64, dtype=torch.long)
        ).backward()
    assert seen.numbers == 2 * 3 * 64 * 64
