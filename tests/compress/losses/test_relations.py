import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_relations import relation_loss as by_head

from compress.losses.vectors import check_relation_heads, split_heads
from serve.errors import BadInput


def relation_loss(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor, heads: int) -> torch.Tensor:
    return by_head(split_heads(teacher, heads), split_heads(student, heads), mask)


def reference(teacher: np.ndarray, student: np.ndarray, mask: np.ndarray, heads: int) -> float:
    """MiniLMv2, eqs 7-9, in float64 and loops: one sequence, one head, one query at a time."""
    sequences = []
    for t, s, m in zip(teacher, student, mask, strict=True):
        n = int(m.sum())
        rows = []
        for a in range(heads):
            relations = []
            for x in (t[:n], s[:n]):
                d = x.shape[1] // heads
                part = x[:, a * d : (a + 1) * d].astype(np.float64)
                scores = part @ part.T / np.sqrt(d)
                exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
                relations.append(exponents / exponents.sum(axis=1, keepdims=True))
            p, q = relations
            rows += [(p[i] * (np.log(p[i]) - np.log(q[i]))).sum() for i in range(n)]
        sequences.append(np.mean(rows))
    return float(np.mean(sequences))


def case(seed: int, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(3, tokens, 24, generator=generator)
    student = torch.randn(3, tokens, 12, generator=generator)
    lengths = torch.tensor([tokens, max(1, tokens // 2), 1])
    return teacher, student, (torch.arange(tokens)[None] < lengths[:, None]).long()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), heads=st.sampled_from([1, 2, 3, 6, 12]), tokens=st.integers(1, 12))
def test_it_is_the_papers_formula(seed: int, heads: int, tokens: int) -> None:
    teacher, student, mask = case(seed, tokens)
    ours = relation_loss(teacher, student, mask, heads).item()
    expected = reference(teacher.numpy(), student.numpy(), mask.numpy(), heads)
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_it_is_zero_when_the_student_relates_as_the_teacher_does() -> None:
    teacher, _, mask = case(0)
    assert relation_loss(teacher, teacher.clone(), mask, 6).item() == pytest.approx(0, abs=1e-7)


def test_a_rotation_inside_each_head_changes_no_relation() -> None:
    teacher, student, mask = case(1)
    q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))
    rotated = (student.view(3, 7, 3, 4) @ q).reshape(3, 7, 12)
    assert relation_loss(teacher, rotated, mask, 3).item() == pytest.approx(
        relation_loss(teacher, student, mask, 3).item(), rel=1e-5
    )


def test_what_stands_in_padding_changes_nothing() -> None:
    teacher, student, mask = case(3)
    loud = torch.where(mask.bool()[..., None], student, torch.full_like(student, 50.0))
    more = [torch.cat([x, torch.randn(3, 4, x.shape[2])], dim=1) for x in (teacher, loud)]
    longer = torch.cat([mask, torch.zeros(3, 4, dtype=torch.long)], dim=1)
    before = relation_loss(teacher, student, mask, 6).item()
    assert relation_loss(*more, longer, 6).item() == pytest.approx(before, rel=1e-6)


def test_the_order_of_sequences_changes_nothing() -> None:
    teacher, student, mask = case(4)
    order = torch.tensor([2, 0, 1])
    before = relation_loss(teacher, student, mask, 6).item()
    assert relation_loss(teacher[order], student[order], mask[order], 6).item() == pytest.approx(before, rel=1e-6)


def test_its_gradient_is_that_of_its_values() -> None:
    teacher, student, mask = (x.double() if x.is_floating_point() else x for x in case(5, tokens=4))
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: relation_loss(teacher, s, mask, 3), (student,))


def test_heads_that_do_not_divide_name_those_that_would() -> None:
    with pytest.raises(
        BadInput,
        match=r"--relation-heads is 48, which does not divide the widths 768 and 320 .* 1, 2, 4, 8, 16, 32, 64",
    ):
        check_relation_heads(48, 768, 320)
