import copy

import numpy as np
import pytest
import torch
from encoders import encoder

from compress.families import FAMILIES
from compress.initialise import student_of, truncated, uniform_layers
from compress.students import Shape
from serve.errors import BadInput

TEACHERS = sorted(FAMILIES)
IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def teacher_of(kind: str):
    return encoder(kind, "ForTokenClassification", seed=1, num_labels=3)


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_student_of_the_teachers_shape_is_the_teacher(kind: str) -> None:
    teacher = teacher_of(kind)
    student, _ = student_of(teacher, FAMILIES[kind], Shape(4, 24, 4, 48), seed=0)
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits)


@pytest.mark.parametrize("kind", TEACHERS)
def test_dropping_units_that_do_nothing_changes_nothing(kind: str) -> None:
    """Half of the feed-forward units are silenced; the narrower student keeps the others and so answers alike."""
    teacher, family = teacher_of(kind), FAMILIES[kind]
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if name.endswith(f"{family.ffn_out}.weight"):
                parameter[:, ::2] = 0
    student, origin = student_of(teacher, family, Shape(4, 24, 4, 24), seed=0)
    assert "24 feed-forward units of largest norm" in origin["layers"]
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits)


def test_layers_are_taken_evenly_and_end_with_the_last() -> None:
    assert uniform_layers(12, 3) == (4, 8, 12)
    assert uniform_layers(6, 3) == (2, 4, 6)
    assert uniform_layers(6, 4)[-1] == 6
    teacher = teacher_of("bert")
    student, _ = student_of(teacher, FAMILIES["bert"], Shape(2, 24, 4, 48), seed=0)
    for ours, theirs in zip(
        student.bert.encoder.layer, (teacher.bert.encoder.layer[1], teacher.bert.encoder.layer[3]), strict=True
    ):
        torch.testing.assert_close(ours.attention.self.query.weight, theirs.attention.self.query.weight)


def test_chosen_layers_are_copied_and_those_that_are_not_there_refused() -> None:
    teacher = teacher_of("bert")
    student, origin = student_of(teacher, FAMILIES["bert"], Shape(2, 24, 4, 48), seed=0, chosen=(1, 3))
    assert origin["layers"] == "teacher layers 1, 3"
    torch.testing.assert_close(
        student.bert.encoder.layer[1].output.dense.weight, teacher.bert.encoder.layer[2].output.dense.weight
    )
    with pytest.raises(BadInput, match=r"Layers 1, 5 were asked for; .* has 1 to 4"):
        student_of(teacher, FAMILIES["bert"], Shape(2, 24, 4, 48), seed=0, chosen=(1, 5))
    _, fresh = student_of(teacher, FAMILIES["bert"], Shape(2, 24, 4, 48), seed=0, new_layers=True)
    assert (fresh["layers"], fresh["embeddings"]) == ("new", "the teacher's")


def test_an_encoder_without_a_head_gives_the_layers_that_are_named() -> None:
    teacher = teacher_of("bert").bert
    student, origin = student_of(teacher, FAMILIES["bert"], Shape(2, 24, 4, 48), seed=0)
    assert origin["layers"] == "teacher layers 2, 4"
    for ours, number in zip(student.encoder.layer, (2, 4), strict=True):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, teacher.encoder.layer[number - 1].state_dict()[name])


def test_a_narrower_student_has_the_best_embedding_of_its_rank() -> None:
    table = torch.randn(60, 24, generator=torch.Generator().manual_seed(3))
    ours = truncated(table, 8).numpy().astype(np.float64)
    u, s, _ = np.linalg.svd(table.numpy().astype(np.float64), full_matrices=False)
    # Columns agree up to sign, so products of rows agree exactly.
    np.testing.assert_allclose(ours @ ours.T, (u[:, :8] * s[:8]) @ (u[:, :8] * s[:8]).T, atol=1e-4)


def test_a_narrower_or_deeper_student_is_new_where_shapes_forbid_and_says_so() -> None:
    teacher = teacher_of("bert")
    narrow, origin = student_of(teacher, FAMILIES["bert"], Shape(2, 12, 4, 24), seed=0)
    assert origin["embeddings"].startswith("truncated SVD")
    assert (origin["layers"], origin["head"]) == ("new", "new")
    assert narrow(IDS).logits.shape == (2, 9, 3)
    _, deeper = student_of(teacher, FAMILIES["bert"], Shape(6, 24, 4, 48), seed=0)
    assert (deeper["embeddings"], deeper["layers"], deeper["head"]) == ("the teacher's", "new", "the teacher's")


def test_a_seed_fixes_what_is_new_and_the_teacher_stays_as_it_was() -> None:
    teacher = teacher_of("bert")
    before = copy.deepcopy(teacher.state_dict())
    first, second, other = (
        student_of(teacher, FAMILIES["bert"], Shape(2, 12, 4, 24), seed=s)[0].state_dict() for s in (1, 1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["bert.encoder.layer.0.output.dense.weight"], other["bert.encoder.layer.0.output.dense.weight"]
    )
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
