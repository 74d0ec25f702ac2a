import numpy as np
import pytest
import torch

from compress.data.encoded import IGNORED
from compress.losses.outputs import label_loss, soft_label_loss, soft_multi_label_loss, total
from compress.methods.catalogue import labels_and_soft_labels
from compress.methods.objectives import output_losses

GENERATOR = torch.Generator().manual_seed(0)
STUDENT = torch.randn(9, 5, generator=GENERATOR)
TEACHER = torch.randn(9, 5, generator=GENERATOR)
TARGETS = torch.tensor([0, 1, IGNORED, 3, 4, IGNORED, 1, 2, 0])
# Any number of labels may apply to a row: none to the third, all to the fourth; of the second and the last it is not known.
SEVERAL = torch.randint(0, 2, (9, 5), generator=GENERATOR).float()
SEVERAL[2], SEVERAL[3], SEVERAL[1], SEVERAL[8] = 0, 1, IGNORED, IGNORED


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (
        x - np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - x.max(axis=1, keepdims=True)
    )


def test_label_loss_is_the_mean_over_rows_that_have_a_label() -> None:
    kept = TARGETS != IGNORED
    rows = log_softmax(STUDENT.numpy())[kept.numpy(), TARGETS[kept].numpy()]
    assert label_loss(STUDENT, TARGETS).item() == pytest.approx(-rows.mean(), rel=1e-6)


def test_label_loss_of_no_labels_is_zero_and_not_nan() -> None:
    assert label_loss(STUDENT, torch.full((9,), IGNORED)).item() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_soft_label_loss_is_hintons_formula(temperature: float) -> None:
    p, q = log_softmax(TEACHER.numpy() / temperature), log_softmax(STUDENT.numpy() / temperature)
    expected = temperature**2 * (np.exp(p) * (p - q)).sum(axis=1).mean()
    assert soft_label_loss(TEACHER, STUDENT, temperature).item() == pytest.approx(expected, rel=1e-5)


def test_soft_label_loss_is_zero_at_the_teacher_and_where_only_a_constant_differs() -> None:
    assert soft_label_loss(TEACHER, TEACHER.clone(), 2).item() == pytest.approx(0, abs=1e-7)
    assert soft_label_loss(TEACHER, TEACHER + 3, 2).item() == pytest.approx(0, abs=1e-6)


def test_gradients_are_those_of_the_values() -> None:
    student = STUDENT.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: total(output_losses(labels_and_soft_labels(0.7, 2).objective.outputs, s, TEACHER.double(), TARGETS)),
        (student,),
    )


def test_the_terms_are_weighted_and_add_up() -> None:
    terms = output_losses(labels_and_soft_labels(0.9, 2).objective.outputs, STUDENT, TEACHER, TARGETS)
    assert terms["labels"].item() == pytest.approx(0.1 * label_loss(STUDENT, TARGETS).item(), rel=1e-6)
    assert terms["soft_labels"].item() == pytest.approx(0.9 * soft_label_loss(TEACHER, STUDENT, 2).item(), rel=1e-6)
    assert total(terms).item() == pytest.approx(sum(term.item() for term in terms.values()), rel=1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def test_label_loss_of_several_labels_is_the_mean_over_labels_of_the_rows_that_have_them() -> None:
    known = [0, 2, 3, 4, 5, 6, 7]
    p, y = sigmoid(STUDENT.numpy()[known]), SEVERAL.numpy()[known]
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert label_loss(STUDENT, SEVERAL).item() == pytest.approx(expected, rel=1e-6)
    assert label_loss(STUDENT, torch.full((9, 5), float(IGNORED))).item() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_soft_loss_of_several_labels_is_the_divergence_of_each_yes_and_no(temperature: float) -> None:
    p, q = sigmoid(TEACHER.numpy() / temperature), sigmoid(STUDENT.numpy() / temperature)
    each = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    found = soft_multi_label_loss(TEACHER, STUDENT, temperature).item()
    assert found == pytest.approx(temperature**2 * each.mean(), rel=1e-5)


def test_soft_loss_of_several_labels_is_zero_at_the_teacher_alone() -> None:
    assert soft_multi_label_loss(TEACHER, TEACHER.clone(), 2).item() == 0
    # Where one label is chosen a constant changes nothing; here each label is a decision of its own.
    assert soft_multi_label_loss(TEACHER, TEACHER + 3, 2).item() > 0.1
    certain = torch.tensor([[200.0, -200.0]])
    assert soft_multi_label_loss(certain, -certain, 1).item() == pytest.approx(200, rel=1e-6)


def test_gradients_of_several_labels_are_those_of_the_values_and_rows_without_labels_have_soft_ones() -> None:
    student = STUDENT.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: total(
            output_losses(labels_and_soft_labels(0.7, 2).objective.outputs, s, TEACHER.double(), SEVERAL.double())
        ),
        (student,),
    )
    terms = output_losses(labels_and_soft_labels(0.7, 2).objective.outputs, student, TEACHER.double(), SEVERAL.double())
    assert terms["labels"].item() == pytest.approx(0.3 * label_loss(STUDENT, SEVERAL).item(), rel=1e-6)
    assert terms["soft_labels"].item() == pytest.approx(
        0.7 * soft_multi_label_loss(TEACHER, STUDENT, 2).item(), rel=1e-6
    )
    total(terms).backward()
    assert student.grad is not None
    assert (student.grad.abs().sum(dim=1) > 0).all()
