"""Losses of outputs against their formulas, written anew in float64: of classes, of several labels, of numbers, of answers to questions."""

import numpy as np
import pytest
import torch

from compress.data.batches import Batch, labelled_rows, part_of
from compress.data.encoded import IGNORED
from compress.distributed import ProcessShare
from compress.losses.outputs import (
    label_loss,
    soft_label_loss,
    soft_loss,
    soft_multi_label_loss,
    soft_number_loss,
    total,
)
from compress.methods import catalogue
from compress.methods.catalogue import labels_and_soft_labels, with_class_weights
from compress.methods.objectives import OutputTerm, output_losses

GENERATOR = torch.Generator().manual_seed(0)
STUDENT = torch.randn(9, 5, generator=GENERATOR)
TEACHER = torch.randn(9, 5, generator=GENERATOR)
TARGETS = torch.tensor([0, 1, IGNORED, 3, 4, IGNORED, 1, 2, 0])
# Any number of labels may apply to a row: none to the third, all to the fourth; of the second and the last it is not known.
SEVERAL = torch.randint(0, 2, (9, 5), generator=GENERATOR).float()
SEVERAL[2], SEVERAL[3], SEVERAL[1], SEVERAL[8] = 0, 1, IGNORED, IGNORED


def mixed(soft_share: float, temperature: float) -> tuple[OutputTerm, ...]:
    return labels_and_soft_labels(soft_share, temperature).objective.outputs


@pytest.mark.parametrize("kind", ["one label", "several labels", "numbers"])
def test_each_row_counts_alike_and_a_labelled_one_has_its_share_of_soft_labels(kind: str) -> None:
    share, temperature = 0.9, 2.0
    targets = {"one label": TARGETS, "several labels": SEVERAL, "numbers": torch.full((9,), torch.nan)}[kind]
    if kind == "numbers":
        targets[[0, 4]] = torch.tensor([1.5, -0.5])
    ours, theirs = (side[:, :1] if kind == "numbers" else side for side in (STUDENT, TEACHER))
    found = output_losses(mixed(share, temperature), ours, theirs, targets)
    expected = 0.0
    for i in range(9):
        row = slice(i, i + 1)
        soft = soft_loss(theirs[row].double(), ours[row].double(), targets[row], temperature).item()
        hard = label_loss(ours[row].double(), targets[row].double() if kind != "one label" else targets[row]).item()
        known = bool(labelled_rows(targets[row]).any())
        expected += ((share * soft + (1 - share) * hard) if known else soft) / 9
    assert sum(term.item() for term in found.values()) == pytest.approx(expected, rel=1e-5)
    at_teacher = output_losses(mixed(share, temperature), theirs, theirs, torch.full_like(targets, IGNORED))
    assert at_teacher["soft_labels"].item() == pytest.approx(0, abs=1e-5)
    (hard_only, _) = output_losses(mixed(0, temperature), ours, theirs, targets).values()
    assert hard_only.item() > 0
    assert output_losses(mixed(0, temperature), ours, theirs, targets)["soft_labels"].item() == 0


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x.astype(np.float64) - x.max(axis=0))
    return raised / raised.sum(axis=0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def test_label_loss_is_the_mean_over_rows_that_have_a_label() -> None:
    kept = TARGETS != IGNORED
    right = softmax(STUDENT.numpy().T).T[kept.numpy(), TARGETS[kept].numpy()]
    assert label_loss(STUDENT, TARGETS).item() == pytest.approx(-np.log(right).mean(), rel=1e-6)
    assert label_loss(STUDENT, torch.full((9,), IGNORED)).item() == 0


def test_class_weights_let_each_class_count_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.tensor([0] * 9 + [2] * 3 + [IGNORED])  # 9 of one class, 3 of another, none of label 1
    logits = torch.randn(13, 3, generator=generator)
    (term,) = with_class_weights(catalogue.LABELS, right.numpy()).objective.outputs
    assert term.class_weights == pytest.approx((12 / 18, 0, 2))
    (found,) = output_losses([term], logits, None, right).values()
    each = -logits.double().log_softmax(1)[torch.arange(12), right[:12]]
    assert found.item() == pytest.approx((each[:9].mean() + each[9:].mean()).item() / 2, rel=1e-6)
    parts = [(slice(0, 5), 5 / 12), (slice(5, 13), 7 / 12)]  # of a batch that is computed in parts
    sums = [share * output_losses([term], logits[part], None, right[part])["labels"].item() for part, share in parts]
    assert sum(sums) == pytest.approx(found.item(), rel=1e-6)
    even = with_class_weights(catalogue.LABELS, np.array([0, 1, 0, 1])).objective.outputs[0]
    assert even.class_weights == (1, 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_soft_label_loss_is_hintons_formula(temperature: float) -> None:
    p, q = (softmax(side.numpy().T / temperature).T for side in (TEACHER, STUDENT))
    expected = temperature**2 * (p * np.log(p / q)).sum(axis=1).mean()
    assert soft_label_loss(TEACHER, STUDENT, temperature).item() == pytest.approx(expected, rel=1e-5)
    for same in (TEACHER.clone(), TEACHER + 3):  # a constant says nothing
        assert soft_label_loss(TEACHER, same, temperature).item() == pytest.approx(0, abs=1e-4)


def test_label_loss_of_several_labels_is_the_mean_over_labels_of_the_rows_that_have_them() -> None:
    known = [0, 2, 3, 4, 5, 6, 7]
    p, y = sigmoid(STUDENT.numpy()[known]), SEVERAL.numpy()[known]
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert label_loss(STUDENT, SEVERAL).item() == pytest.approx(expected, rel=1e-6)
    assert label_loss(STUDENT, torch.full((9, 5), float(IGNORED))).item() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_soft_loss_of_several_labels_is_the_divergence_of_each_yes_and_no(temperature: float) -> None:
    p, q = (sigmoid(side.numpy() / temperature) for side in (TEACHER, STUDENT))
    each = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    found = soft_multi_label_loss(TEACHER, STUDENT, temperature).item()
    assert found == pytest.approx(temperature**2 * each.mean(), rel=1e-5)


def test_soft_loss_of_several_labels_is_zero_at_the_teacher_alone() -> None:
    assert soft_multi_label_loss(TEACHER, TEACHER.clone(), 2).item() == 0
    # Where one label is chosen a constant changes nothing; here each label is a decision of its own.
    assert soft_multi_label_loss(TEACHER, TEACHER + 3, 2).item() > 0.1
    certain = torch.tensor([[200.0, -200.0]])
    assert soft_multi_label_loss(certain, -certain, 1).item() == pytest.approx(200, rel=1e-6)


@pytest.mark.parametrize("targets", [pytest.param(TARGETS, id="one label"), pytest.param(SEVERAL, id="several")])
def test_terms_are_weighted_and_their_gradients_are_those_of_the_values(targets: torch.Tensor) -> None:
    student, teacher = STUDENT.double().requires_grad_(), TEACHER.double()
    right = targets if targets is TARGETS else targets.double()

    def terms(of: torch.Tensor) -> dict[str, torch.Tensor]:
        return output_losses(mixed(0.7, 2), of, teacher, right)

    found = terms(student)
    share = (targets != IGNORED).float().mean().item()
    assert found["labels"].item() == pytest.approx(0.3 * share * label_loss(STUDENT, targets).item(), rel=1e-6)
    assert total(found).item() == pytest.approx(sum(term.item() for term in found.values()))
    assert torch.autograd.gradcheck(lambda of: total(terms(of)), (student,))
    total(found).backward()
    assert student.grad is not None
    assert (student.grad.abs().sum(dim=1) > 0).all()  # rows without a label have soft ones


NUMBERS = np.random.default_rng(0)
SAID, RIGHT, TAUGHT = (NUMBERS.normal(3, 2, 12) for _ in range(3))


def rows(numbers: np.ndarray) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None]


def test_the_loss_of_numbers_is_the_mean_squared_error_over_the_texts_that_have_one() -> None:
    known = RIGHT.copy()
    known[[2, 7]] = np.nan
    said = rows(SAID).requires_grad_()
    loss = label_loss(said, torch.tensor(known, dtype=torch.float32))
    assert float(loss.detach()) == pytest.approx(np.nanmean((SAID - known) ** 2), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, said)
    slopes = np.where(np.isnan(known), 0, 2 * (SAID - np.nan_to_num(known)) / 10)
    np.testing.assert_allclose(gradient[:, 0], slopes, atol=1e-6)
    assert float(label_loss(rows(SAID), torch.full((12,), torch.nan))) == 0
    # The number of labels that are ignored is a number as others are.
    assert float(label_loss(rows(np.array([-98.0])), torch.tensor([-100.0]))) == 4


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_numbers_and_soft_numbers_are_mixed_by_their_share_at_any_temperature(temperature: float) -> None:
    right = torch.tensor(RIGHT, dtype=torch.float32)
    terms = output_losses(mixed(0.3, temperature), rows(SAID), rows(TAUGHT), right)
    assert float(terms["labels"]) == pytest.approx(0.7 * np.mean((SAID - RIGHT) ** 2), rel=1e-6)
    assert float(terms["soft_labels"]) == pytest.approx(0.3 * np.mean((SAID - TAUGHT) ** 2), rel=1e-6)
    assert float(soft_number_loss(rows(TAUGHT), rows(TAUGHT))) == 0


@pytest.mark.parametrize("of", [1, 2, 5, 12])
def test_the_parts_of_a_batch_of_numbers_add_up_to_the_whole(of: int) -> None:
    right = torch.tensor(RIGHT, dtype=torch.float32)
    right[[0, 1, 5]] = torch.nan
    ones = torch.ones(12, 4, dtype=torch.int64)
    batch = Batch({"input_ids": ones, "attention_mask": ones}, torch.arange(12), right, whole_texts=True)
    parts = [part_of(batch, ProcessShare(number, of)) for number in range(of)]
    first = [0, *np.cumsum([len(part.targets) for part in parts])]
    found = sum(
        part.weights.labelled * float(label_loss(rows(SAID[start : start + len(part.targets)]), part.targets))
        for part, start in zip(parts, first, strict=False)
        if part.weights.texts
    )
    assert found == pytest.approx(float(label_loss(rows(SAID), right)), rel=1e-6)


SIZES = (4, 1, 7, 3)  # rows of each window of a question
LABELS = ((2, 3), (0, 0), None, (0, 0))  # start and end in each; None: unknown
OURS, THEIRS = (NUMBERS.normal(0, 3, (sum(SIZES), 2)) for _ in range(2))
FIRSTS = np.cumsum([0, *SIZES[:-1]])


def spans(labels: tuple[tuple[int, int] | None, ...] = LABELS) -> torch.Tensor:
    made = np.zeros((sum(SIZES), 3), dtype=np.int64)
    for first, label in zip(FIRSTS, labels, strict=True):
        made[first, 0] = 1
        if label:
            made[first + label[0], 1] = made[first + label[1], 2] = 1
    return torch.from_numpy(made)


def shares(logits: np.ndarray) -> list[np.ndarray]:
    """The softmax over the rows of each window, by window."""
    return [softmax(logits[first : first + size]) for first, size in zip(FIRSTS, SIZES, strict=True)]


def test_the_loss_of_answers_is_the_mean_of_both_ends_over_the_windows_that_are_labelled() -> None:
    known = [(share, label) for share, label in zip(shares(OURS), LABELS, strict=True) if label]
    expected = np.mean([-np.log(share[label[end], end]) for share, label in known for end in (0, 1)])
    said = torch.tensor(OURS, requires_grad=True)
    loss = label_loss(said, spans())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, said)
    slopes = np.concatenate(shares(OURS)) - spans().numpy()[:, 1:]
    slopes[FIRSTS[2] : FIRSTS[2] + SIZES[2]] = 0  # its label is not known
    np.testing.assert_allclose(gradient, slopes / 6, atol=1e-12)
    assert float(label_loss(torch.tensor(OURS), spans((None,) * 4))) == 0
    assert labelled_rows(spans()).nonzero()[:, 0].tolist() == [2, 4, 12]  # where answers start


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_soft_loss_of_answers_is_the_mean_divergence_of_both_ends_over_the_windows(temperature: float) -> None:
    sides = zip(shares(THEIRS / temperature), shares(OURS / temperature), strict=True)
    expected = temperature**2 * sum((p * np.log(p / q)).sum() for p, q in sides) / (2 * len(SIZES))

    def loss(ours: np.ndarray) -> float:
        return float(soft_loss(torch.tensor(THEIRS), torch.tensor(ours), spans(), temperature))

    assert loss(OURS) == pytest.approx(expected, rel=1e-12)
    assert loss(THEIRS) == 0
    # A number added to all logits of an end in a window says nothing.
    moved = OURS.copy()
    moved[FIRSTS[2] : FIRSTS[2] + SIZES[2]] += (3.0, -40.0)
    assert loss(moved) == pytest.approx(expected)


def test_each_window_counts_alike_and_a_labelled_one_has_its_share_of_soft_labels() -> None:
    found = output_losses(mixed(0.9, 1.0), torch.tensor(OURS), torch.tensor(THEIRS), spans())
    expected = 0.0
    for label, p, q in zip(LABELS, shares(THEIRS), shares(OURS), strict=True):
        soft = (p * np.log(p / q)).sum() / 2
        hard = -np.mean([np.log(q[label[end], end]) for end in (0, 1)]) if label else 0.0
        expected += (0.9 * soft + 0.1 * hard if label else soft) / len(SIZES)
    assert sum(float(term) for term in found.values()) == pytest.approx(expected, rel=1e-9)


def test_large_logits_of_answers_overflow_nothing() -> None:
    said = torch.tensor(OURS * 1e4, dtype=torch.float32, requires_grad=True)
    loss = label_loss(said, spans()) + soft_loss(torch.tensor(THEIRS * 1e4), said, spans(), 1.0)
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, said)[0]).all()


def test_the_parts_of_a_batch_of_windows_add_up_to_the_whole() -> None:
    """Of windows of unequal size, some without a label, in parts of which one is empty."""
    width, texts = max(SIZES), len(SIZES)
    places = np.concatenate([np.arange(size) + place * width for place, size in enumerate(SIZES)])
    mask = torch.tensor([[1] * size + [0] * (width - size) for size in SIZES])
    inputs = {"input_ids": torch.zeros(texts, width, dtype=torch.long), "attention_mask": mask}
    batch = Batch(inputs, torch.from_numpy(places), spans(), torch.tensor(THEIRS))
    whole = output_losses(mixed(0.5, 2.0), torch.tensor(OURS), batch.soft, batch.targets)
    of_row = {int(row): place for place, row in enumerate(places)}
    for parts in (2, 3, 6):
        sums = {"labels": 0.0, "soft_labels": 0.0}
        for number in range(parts):
            part, (first, last) = part_of(batch, ProcessShare(number, parts)), ProcessShare(number, parts).bounds(texts)
            first = 0 if first == last else first
            chosen = [of_row[int(row) + first * width] for row in part.row_index]
            terms = output_losses(mixed(0.5, 2.0), torch.tensor(OURS[chosen]), part.soft, part.targets)
            sums["labels"] += part.weights.rows * float(terms["labels"])
            sums["soft_labels"] += part.weights.rows * float(terms["soft_labels"])
        for name, term in whole.items():
            assert sums[name] == pytest.approx(float(term), rel=1e-9), (parts, name)
