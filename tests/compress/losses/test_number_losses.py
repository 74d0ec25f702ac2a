"""The losses of numbers against a reference in float64."""

import numpy as np
import pytest
import torch

from compress.data.batches import Batch, part_of
from compress.distributed import ProcessShare
from compress.losses.outputs import label_loss, soft_number_loss
from compress.methods.catalogue import labels_and_soft_labels
from compress.methods.objectives import output_losses

GENERATOR = np.random.default_rng(0)
SAID, RIGHT, TEACHER = (GENERATOR.normal(3, 2, 12) for _ in range(3))


def rows(numbers: np.ndarray) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def test_the_loss_is_the_mean_squared_error_over_the_texts_that_have_a_number() -> None:
    known = RIGHT.copy()
    known[[2, 7]] = np.nan
    expected = np.nanmean((SAID - known) ** 2)
    said = rows(SAID).requires_grad_()
    loss = label_loss(said, torch.tensor(known, dtype=torch.float32))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, said)
    slopes = np.where(np.isnan(known), 0, 2 * (SAID - np.nan_to_num(known)) / 10)
    np.testing.assert_allclose(gradient[:, 0], slopes, atol=1e-6)
    assert float(label_loss(rows(SAID), torch.full((12,), torch.nan))) == 0


def test_a_text_whose_number_is_that_of_ignored_labels_is_learned() -> None:
    assert float(label_loss(rows(np.array([-98.0])), torch.tensor([-100.0]))) == 4


def test_the_soft_loss_is_the_squared_distance_from_the_teacher_and_0_where_they_agree() -> None:
    assert float(soft_number_loss(rows(TEACHER), rows(SAID))) == pytest.approx(np.mean((SAID - TEACHER) ** 2), rel=1e-6)
    assert float(soft_number_loss(rows(TEACHER), rows(TEACHER))) == 0


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_labels_and_soft_labels_are_mixed_by_their_share_at_any_temperature(temperature: float) -> None:
    terms = output_losses(
        labels_and_soft_labels(0.3, temperature).objective.outputs,
        rows(SAID),
        rows(TEACHER),
        torch.tensor(RIGHT, dtype=torch.float32),
    )
    assert float(terms["labels"]) == pytest.approx(0.7 * np.mean((SAID - RIGHT) ** 2), rel=1e-6)
    assert float(terms["soft_labels"]) == pytest.approx(0.3 * np.mean((SAID - TEACHER) ** 2), rel=1e-6)


@pytest.mark.parametrize("of", [1, 2, 5, 12])
def test_the_parts_of_a_batch_add_up_to_the_whole(of: int) -> None:
    right = torch.tensor(RIGHT, dtype=torch.float32)
    right[[0, 1, 5]] = torch.nan
    ones = torch.ones(12, 4, dtype=torch.int64)
    batch = Batch({"input_ids": ones, "attention_mask": ones}, torch.arange(12), right, whole_texts=True)
    parts = [part_of(batch, ProcessShare(number, of)) for number in range(of)]
    first = [0, *np.cumsum([len(part.targets) for part in parts])]
    total = sum(
        part.weights.labelled * float(label_loss(rows(SAID[start : start + len(part.targets)]), part.targets))
        for part, start in zip(parts, first, strict=False)
        if part.weights.texts
    )
    assert total == pytest.approx(float(label_loss(rows(SAID), right)), rel=1e-6)
