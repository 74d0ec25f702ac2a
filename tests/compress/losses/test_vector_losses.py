"""Losses between the vectors of texts: their formulas in float64, and what must not change them."""

import numpy as np
import pytest
import torch

from compress.losses.vectors import TEMPERATURE, pooled, similarity_loss, vector_loss


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def cosines(vectors: np.ndarray) -> np.ndarray:
    sizes = np.sqrt((vectors**2).sum(axis=-1))
    return np.asarray(vectors @ vectors.T / np.outer(sizes, sizes))


def test_similarities_are_compared_as_distributions_over_the_other_texts() -> None:
    teacher, student = normal(6, 8), normal(6, 5, seed=1)
    expected = 0.0
    theirs, ours = cosines(teacher.double().numpy()), cosines(student.double().numpy())
    for i in range(6):
        others = [j for j in range(6) if j != i]
        p, q = (np.exp(row[i, others] / TEMPERATURE) for row in (theirs, ours))
        p, q = p / p.sum(), q / q.sum()
        expected += float((p * np.log(p / q)).sum()) / 6
    assert similarity_loss(teacher, student).item() == pytest.approx(expected, rel=1e-5)


def test_directions_are_compared_by_one_minus_the_cosine() -> None:
    teacher, student = normal(6, 8), normal(6, 8, seed=1)
    a, b = teacher.double().numpy(), student.double().numpy()
    cosine = (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert vector_loss(teacher, student).item() == pytest.approx(float((1 - cosine).mean()), rel=1e-5)


def test_both_are_nothing_at_the_teacher_whatever_the_length_of_its_vectors() -> None:
    teacher = normal(6, 8)
    for loss in (similarity_loss, vector_loss):
        assert loss(teacher, 3 * teacher).item() == pytest.approx(0, abs=1e-6)


def test_a_rotation_changes_no_similarity_and_every_direction() -> None:
    teacher = normal(6, 8)
    rotation = torch.linalg.qr(normal(8, 8, seed=2))[0]
    assert similarity_loss(teacher, teacher @ rotation).item() == pytest.approx(0, abs=1e-5)
    assert vector_loss(teacher, teacher @ rotation).item() > 0.3


@pytest.mark.parametrize("texts", [1, 2])
def test_too_few_texts_have_no_similarities_to_compare(texts: int) -> None:
    student = normal(texts, 5, seed=1).requires_grad_()
    loss = similarity_loss(normal(texts, 8), student)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(student.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_changes_no_vector(pooling: str) -> None:
    states = normal(3, 5, 8)
    mask = torch.ones(3, 5, dtype=torch.long)
    wide = torch.cat([states, torch.full((3, 2, 8), 7.0)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(3, 2, dtype=torch.long)], dim=1)
    expected = states.mean(dim=1) if pooling == "mean" else states[:, 0]
    torch.testing.assert_close(pooled(states, mask, pooling), expected)  # type: ignore[arg-type]
    torch.testing.assert_close(pooled(wide, wide_mask, pooling), expected)  # type: ignore[arg-type]
