"""The losses of answers to questions against a reference in float64, and their properties."""

import numpy as np
import pytest
import torch

from compress.data.batches import Batch, labelled_rows, part_of
from compress.distributed import ProcessShare
from compress.losses.outputs import label_loss, soft_loss
from compress.methods.catalogue import labels_and_soft_labels
from compress.methods.objectives import output_losses

GENERATOR = np.random.default_rng(0)
SIZES = (4, 1, 7, 3)  # rows of each window
LABELS = ((2, 3), (0, 0), None, (0, 0))  # start and end in each; None: unknown
ROWS = sum(SIZES)
OURS, THEIRS = (GENERATOR.normal(0, 3, (ROWS, 2)) for _ in range(2))
FIRSTS = np.cumsum([0, *SIZES[:-1]])


def targets(labels: tuple[tuple[int, int] | None, ...] = LABELS) -> torch.Tensor:
    made = np.zeros((ROWS, 3), dtype=np.int64)
    for first, label in zip(FIRSTS, labels, strict=True):
        made[first, 0] = 1
        if label:
            made[first + label[0], 1] = made[first + label[1], 2] = 1
    return torch.from_numpy(made)


def shares(logits: np.ndarray) -> list[np.ndarray]:
    """The softmax over the rows of each window, by window."""
    found = []
    for first, size in zip(FIRSTS, SIZES, strict=True):
        raised = np.exp(logits[first : first + size] - logits[first : first + size].max(axis=0))
        found.append(raised / raised.sum(axis=0))
    return found


def test_the_loss_is_the_mean_of_both_ends_over_the_windows_that_are_labelled() -> None:
    expected = np.mean([
        -np.log(share[label[end], end]) for share, label in zip(shares(OURS), LABELS, strict=True) if label for end in (0, 1)
    ])  # fmt: skip
    said = torch.tensor(OURS, requires_grad=True)
    loss = label_loss(said, targets())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, said)
    slopes = np.concatenate(shares(OURS)) - targets().numpy()[:, 1:]
    slopes[FIRSTS[2] : FIRSTS[2] + SIZES[2]] = 0  # its label is not known
    np.testing.assert_allclose(gradient, slopes / 6, atol=1e-12)
    assert float(label_loss(torch.tensor(OURS), targets((None,) * 4))) == 0


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_soft_loss_is_the_mean_divergence_of_both_ends_over_the_windows(temperature: float) -> None:
    divergences = [
        (theirs * np.log(theirs / ours)).sum()
        for theirs, ours in zip(shares(THEIRS / temperature), shares(OURS / temperature), strict=True)
    ]
    expected = temperature**2 * np.sum(divergences) / (2 * len(SIZES))
    loss = soft_loss(torch.tensor(THEIRS), torch.tensor(OURS), targets(), temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert float(soft_loss(torch.tensor(THEIRS), torch.tensor(THEIRS), targets(), temperature)) == 0
    # A number added to all logits of an end in a window says nothing.
    moved = OURS.copy()
    moved[FIRSTS[2] : FIRSTS[2] + SIZES[2]] += (3.0, -40.0)
    assert float(soft_loss(torch.tensor(THEIRS), torch.tensor(moved), targets(), temperature)) == pytest.approx(
        expected
    )


def test_large_logits_overflow_nothing() -> None:
    said = torch.tensor(OURS * 1e4, dtype=torch.float32, requires_grad=True)
    loss = label_loss(said, targets()) + soft_loss(torch.tensor(THEIRS * 1e4), said, targets(), 1.0)
    assert torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss, said)
    assert torch.isfinite(gradient).all()


def test_the_parts_of_a_batch_add_up_to_the_whole() -> None:
    """Of windows of unequal size, some without a label, in parts of which one is empty."""
    width, texts = max(SIZES), len(SIZES)
    rows = np.concatenate([np.arange(size) + place * width for place, size in enumerate(SIZES)])
    mask = torch.tensor([[1] * size + [0] * (width - size) for size in SIZES])
    batch = Batch(
        {"input_ids": torch.zeros(texts, width, dtype=torch.long), "attention_mask": mask},
        torch.from_numpy(rows),
        targets(),
        torch.tensor(THEIRS),
    )
    whole = output_losses(
        labels_and_soft_labels(0.5, 2.0).objective.outputs, torch.tensor(OURS), batch.soft, batch.targets
    )
    of_row = {int(row): place for place, row in enumerate(rows)}
    for parts in (2, 3, 6):
        sums = {"labels": 0.0, "soft_labels": 0.0}
        for number in range(parts):
            share = ProcessShare(number, parts)
            part = part_of(batch, share)
            first, last = share.bounds(texts)
            empty = first == last
            first = 0 if empty else first
            chosen = [of_row[int(row) + first * width] for row in part.row_index]
            terms = output_losses(
                labels_and_soft_labels(0.5, 2.0).objective.outputs, torch.tensor(OURS[chosen]), part.soft, part.targets
            )
            sums["labels"] += part.weights.labelled * float(terms["labels"])
            sums["soft_labels"] += part.weights.rows * float(terms["soft_labels"])
        for name, term in whole.items():
            assert sums[name] == pytest.approx(float(term), rel=1e-9), (parts, name)


def test_a_window_is_labelled_where_its_answer_starts() -> None:
    assert labelled_rows(targets()).nonzero()[:, 0].tolist() == [2, 4, 12]
