"""Time every loss, forward and backward, by length; losses computed in tiles also beside the same loss computed whole.

    pytest benchmarks/distill/test_losses.py --benchmark-only -o addopts= --benchmark-group-by=func,param:tokens

Two texts of width 768 and 384, 48 relation heads, 12 attention heads, one core. `held` in the extra information is the peak memory
of tensors, forward and backward, above the inputs. Each benchmark also checks its result: tiles against whole, gradients included,
and a loss of 0 where the student equals the teacher.
"""

from collections.abc import Callable

import pytest
import torch
from held import Held
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from whole_relations import attention_loss, attention_square_loss, relation_loss, score_loss

from compress.losses.outputs import label_loss, logit_loss, soft_label_loss
from compress.losses.tiled_relations import RelationFactors, tiled_loss
from compress.losses.vectors import cosine_loss, direct_loss, hidden_loss, split_heads, summed_hidden_loss

TEXTS = 2
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # of vectors (texts, tokens, width) of teacher and student, and a mask


def dots(x: Tensor) -> RelationFactors:
    """Queries and keys of twelve heads: two halves of `x`."""
    queries, keys = x.chunk(2, dim=-1)
    return RelationFactors(split_heads(queries, 12), split_heads(keys, 12))


def relation(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    return tiled_loss("kl", RelationFactors(split_heads(teacher, 48)), RelationFactors(split_heads(student, 48)), mask)


def whole_relation(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    return relation_loss(split_heads(teacher, 48), split_heads(student, 48), mask)


def of_scores(name: str) -> Way:
    return lambda teacher, student, mask: tiled_loss(name, dots(teacher), dots(student), mask)


def of_whole_scores(loss: Way) -> Way:
    return lambda teacher, student, mask: loss(dots(teacher).scores(), dots(student).scores(), mask)


IN_TILES: dict[str, tuple[Way, Way]] = {
    "relation": (relation, whole_relation),
    "attention": (of_scores("kl"), of_whole_scores(attention_loss)),
    "attention squares": (of_scores("squares"), of_whole_scores(attention_square_loss)),
    "scores": (of_scores("mse"), of_whole_scores(score_loss)),
}
# Of vectors as wide as the teacher's, such as those of a learned map.
OF_VECTORS: dict[str, Way] = {"hidden": hidden_loss, "half squares": summed_hidden_loss, "cosine": cosine_loss}


def drawn(tokens: int, student_width: int = 384) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(TEXTS, tokens, width, generator=generator) for width in (768, student_width))
    return teacher, student.requires_grad_(), torch.ones(TEXTS, tokens, dtype=torch.long)


def measure(benchmark: BenchmarkFixture, loss: Callable[[Tensor], Tensor], student: Tensor) -> tuple[float, Tensor]:
    """Measures time and peak memory of forward and backward; returns the loss and its gradient."""
    torch.set_num_threads(1)

    def step() -> float:
        student.grad = None
        value = loss(student)
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    with Held() as held:
        step()
    benchmark.extra_info["held"] = held.bytes
    value = benchmark(step)
    assert student.grad is not None
    return value, student.grad


@pytest.mark.parametrize("tokens", [32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("way", ["tiles", "whole"])
@pytest.mark.parametrize("name", IN_TILES)
def test_between_tokens(benchmark: BenchmarkFixture, name: str, way: str, tokens: int) -> None:
    teacher, student, mask = drawn(tokens)
    loss, other = IN_TILES[name][:: 1 if way == "tiles" else -1]
    value, slope = measure(benchmark, lambda x: loss(teacher, x, mask), student)
    if tokens <= 256:
        expected = other(teacher, student, mask)
        assert value == pytest.approx(expected.item(), rel=1e-5)
        wanted = torch.autograd.grad(expected, student)[0]
        assert (slope - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert loss(student.detach(), student, mask).item() == 0


@pytest.mark.parametrize("tokens", [32, 128, 512, 1024])
@pytest.mark.parametrize("name", OF_VECTORS)
def test_of_vectors(benchmark: BenchmarkFixture, name: str, tokens: int) -> None:
    teacher, student, mask = drawn(tokens, 768)
    value, slope = measure(benchmark, lambda x: OF_VECTORS[name](teacher, x, mask), student)
    assert value > 0
    assert slope.isfinite().all()
    assert OF_VECTORS[name](student.detach(), student, mask).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("tokens", [32, 128, 512, 1024])
def test_direct(benchmark: BenchmarkFixture, tokens: int) -> None:
    teacher, student, mask = drawn(tokens)
    maps = torch.randn(12, 32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return direct_loss(split_heads(teacher, 12), split_heads(x, 12), maps, mask)

    value, slope = measure(benchmark, loss, student)
    assert value > 0
    assert slope.isfinite().all()
    assert maps.grad is not None


@pytest.mark.parametrize("rows", [32, 128, 512])
@pytest.mark.parametrize("name", ["labels", "soft labels", "logits"])
def test_of_answers(benchmark: BenchmarkFixture, name: str, rows: int) -> None:
    """On the logits of a whole vocabulary, the largest case."""
    generator = torch.Generator().manual_seed(0)
    theirs, ours = (torch.randn(rows, 30_522, generator=generator) for _ in range(2))
    targets = torch.randint(30_522, (rows,), generator=generator)

    def loss(x: Tensor) -> Tensor:
        if name == "labels":
            return label_loss(x, targets)
        return logit_loss(theirs, x) if name == "logits" else soft_label_loss(theirs, x, 2.0)

    value, slope = measure(benchmark, loss, ours.requires_grad_())
    assert value > 0
    assert slope.isfinite().all()
