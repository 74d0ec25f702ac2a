"""The divergence of attentions against the formula, written out in float64 by numpy."""

import numpy as np
import pytest
import torch

from compress.evaluation.layer_analysis import divergence, mean_divergence


def attention(heads: int, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(heads, tokens, tokens, generator=generator)).softmax(dim=-1)


def by_hand(teacher: np.ndarray, student: np.ndarray) -> float:
    """The mean over queries of the sum over keys, one number after another."""
    total = 0.0
    for theirs, ours in zip(teacher, student, strict=True):
        total += sum(float(p) * float(np.log(np.float64(p) / np.float64(q))) for p, q in zip(theirs, ours, strict=True))
    return total / len(teacher)


def test_each_head_has_the_divergence_of_the_formula() -> None:
    teacher, student = attention(3, 7, seed=0), attention(3, 7, seed=1)
    expected = [by_hand(a, b) for a, b in zip(teacher.double().numpy(), student.double().numpy(), strict=True)]
    assert divergence(teacher, student).tolist() == pytest.approx(expected, rel=1e-12)
    # The teacher's attention is the distribution that is expected: the two directions differ.
    assert divergence(student, teacher).tolist() != pytest.approx(expected, rel=1e-3)


def test_heads_are_averaged_before_models_with_other_numbers_of_heads_are_compared() -> None:
    teacher, student = attention(4, 5, seed=2), attention(3, 5, seed=3)
    expected = by_hand(teacher.double().numpy().mean(axis=0), student.double().numpy().mean(axis=0))
    assert mean_divergence(teacher, student) == pytest.approx(expected, rel=1e-12)
    assert mean_divergence(teacher, teacher[[2, 0, 3, 1]]) == pytest.approx(0, abs=1e-15)


def test_an_attention_is_at_no_distance_from_itself() -> None:
    same = attention(2, 6, seed=4)
    assert divergence(same, same).tolist() == [0, 0]


def test_a_key_without_attention_counts_0_in_the_teacher_and_is_finite_in_the_student() -> None:
    none, half = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.5, 0.5]]])
    assert divergence(none, half).item() == pytest.approx(np.log(2))
    least = float(torch.finfo(torch.float32).tiny)
    assert divergence(half, none).item() == pytest.approx(0.5 * np.log(0.5) + 0.5 * np.log(0.5 / least))
