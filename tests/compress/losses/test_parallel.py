"""Work on several cores: each piece by one thread, the same bits whatever their number."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compress.losses.tiled_relations import TILE_LOSSES, RelationFactors, on_cores, tiled_loss
from compress.models.dropout_attention import dropout_attention


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_piece_has_one_thread_and_the_process_keeps_its_own() -> None:
    torch.set_num_threads(3)

    def work(number: int) -> tuple[int, int, bool]:
        torch.ones(1 << 20).exp().sum()  # large enough for torch to divide it, if it might
        return number, torch.get_num_threads(), torch.is_grad_enabled()

    for _ in range(2):
        assert on_cores(work, range(20)) == [(number, 1, False) for number in range(20)]
        assert torch.get_num_threads() == 3


def test_an_error_of_one_piece_is_raised() -> None:
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        on_cores(lambda number: 1 // number, [2, 1, 0])


def on(cores: int, *parts: Tensor, loss: str) -> list[Tensor]:
    """A value and its gradients, of tiles that are large enough for torch to divide what it does on them."""
    torch.set_num_threads(cores)
    torch.manual_seed(0)
    ours = [part.clone().requires_grad_() for part in parts]
    if loss == "dropout":
        value = dropout_attention(ours[0], ours[1], ours[0], None, 0.1).square().sum()
    else:
        value = tiled_loss(
            loss,
            RelationFactors(parts[1], parts[0]),
            RelationFactors(*ours),
            torch.ones(parts[0].shape[::2], dtype=torch.long),
        )
    return [value.detach(), *torch.autograd.grad(value, ours)]


@pytest.mark.parametrize("loss", [*TILE_LOSSES, "dropout"])
def test_the_number_of_threads_changes_no_bit(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 6, 300, 8, generator=generator) for _ in range(2)]
    first, *others = [on(cores, *parts, loss=loss) for cores in (1, 2, 3)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
