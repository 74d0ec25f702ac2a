"""Which spans are clustered, their vectors, how far clusters agree with labels; and the divergence of attentions, in float64 by numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Encoding, Tokenizer

from compress.data.examples import Entity, Example
from compress.evaluation.layer_analysis import (
    UNLABELLED,
    choose_spans,
    cluster_agreement,
    divergence,
    mean_divergence,
    span_vectors,
)
from serve.text.tokenizer import load_tokenizer

TEXTS = [
    Example("the kettle from Lisbon", entities=(Entity(0, 10, "item"), Entity(16, 22, "city"))),
    Example("refund xyz", entities=(Entity(7, 10, "item"),)),
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder, 32)


def encodings(examples: list[Example], tokenizer: Tokenizer) -> list[Encoding]:
    return [tokenizer.encode(example.text) for example in examples]


def test_spans_are_entities_and_all_other_short_runs_of_words(tokenizer: Tokenizer) -> None:
    found = choose_spans(TEXTS, encodings(TEXTS, tokenizer), labelled=100, unlabelled=100, seed=0)
    of_label = {(span.text, span.first_token, span.last_token): span.label for span in found}
    # Token 0 is [CLS]. "kettle" and "Lisbon" are one token each; "xyz" has three.
    assert {place: label for place, label in of_label.items() if label} == {
        (0, 1, 2): "item", (0, 4, 4): "city", (1, 2, 4): "item",
    }  # fmt: skip
    assert sum(label == UNLABELLED for label in of_label.values()) == (4 + 3 + 2 + 1 - 2) + (2 + 1 - 1)
    assert len(found) == len(of_label)


def test_entities_that_the_limit_cuts_off_are_left_out(tokenizer: Tokenizer) -> None:
    short = Tokenizer.from_str(tokenizer.to_str())
    short.enable_truncation(5)  # [CLS] refund x ##y [SEP]: "xyz" is cut
    assert not choose_spans(TEXTS[1:], encodings(TEXTS[1:], short), labelled=9, unlabelled=0, seed=0)


def test_the_order_of_texts_decides_nothing_about_the_draw(tokenizer: Tokenizer) -> None:
    texts = [Example(f"the kettle {i}", entities=(Entity(4, 10, "item"),)) for i in range(20)]
    forwards = choose_spans(texts, encodings(texts, tokenizer), labelled=5, unlabelled=7, seed=0)
    turned = texts[::-1]
    backwards = choose_spans(turned, encodings(turned, tokenizer), labelled=5, unlabelled=7, seed=0)
    assert [span._replace(text=19 - span.text) for span in backwards] == forwards
    assert len(forwards) == 12
    other = choose_spans(texts, encodings(texts, tokenizer), labelled=5, unlabelled=7, seed=1)
    assert other != forwards


def test_a_span_is_its_ends_their_product_and_their_difference() -> None:
    first, last = np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]])
    assert span_vectors(first, last).tolist() == [[1, 2, 3, 5, 3, 10, -2, -3]]


def test_separate_kinds_of_spans_agree_wholly_with_their_clusters_and_noise_does_not() -> None:
    chance = np.random.default_rng(0)
    labels = ["NP", "VP", "PP"] * 40
    centres = {"NP": [0.0, 0.0], "VP": [9.0, 0.0], "PP": [0.0, 9.0]}
    apart = np.array([centres[label] for label in labels]) + 0.1 * chance.normal(size=(120, 2))
    assert cluster_agreement(apart, labels, seed=0) == pytest.approx(1)
    noise = chance.normal(size=(120, 2))
    assert cluster_agreement(noise, labels, seed=0) < 0.1


def test_a_seed_gives_the_same_clusters_again_and_another_seed_may_not() -> None:
    noise = np.random.default_rng(1).normal(size=(150, 4))
    labels = list("abcde") * 30
    found = [cluster_agreement(noise, labels, seed) for seed in (0, 0, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


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
