"""Relation loss and training losses, forward and backward, by length. Each also checks that the gradient is finite."""

import pytest
import torch

from compress.relations import relation_loss, split_heads


@pytest.mark.parametrize("tokens", [32, 128, 256, 512])
def test_relation_loss(benchmark, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(4, tokens, 768, generator=generator)
    student = torch.randn(4, tokens, 384, generator=generator, requires_grad=True)
    mask = torch.ones(4, tokens, dtype=torch.long)

    def step() -> torch.Tensor:
        student.grad = None
        loss = relation_loss(split_heads(teacher, 48), split_heads(student, 48), mask)
        loss.backward()
        return loss

    loss = benchmark(step)
    assert loss.item() > 0
    assert torch.isfinite(student.grad).all()
