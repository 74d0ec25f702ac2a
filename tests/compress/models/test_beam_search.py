"""Beam search, against trying every target."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models.generator import beam_search, length_penalty

END = 0
WORDS = 4


class Table:
    """Log-probabilities of the next token drawn for each beginning, as a model would give them."""

    def __init__(self, seed: int, texts: int, beams: int) -> None:
        self.seed, self.beams = seed, beams
        self.begun: list[tuple[int, ...]] = [()] * (texts * beams)
        self.calls = 0

    def of(self, text: int, begun: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, text, begun)) % 2**31)
        return (torch.randn(WORDS, generator=generator, dtype=torch.float64) * 2).log_softmax(0)

    def __call__(self, last: torch.Tensor | None, origins: torch.Tensor | None) -> torch.Tensor:
        self.calls += 1
        if last is not None and origins is not None:
            self.begun = [
                (*self.begun[row], int(token)) for row, token in zip(origins.tolist(), last.tolist(), strict=True)
            ]
        return torch.stack([self.of(row // self.beams, begun) for row, begun in enumerate(self.begun)])


def best_of_all(table: Table, text: int, longest: int, power: float) -> tuple[list[int], float]:
    """The best target of those with `longest` tokens, or that end before."""
    found: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        for target in itertools.product(range(WORDS), repeat=length):
            if END in target[:-1] or (target[-1] != END and length < longest):
                continue
            total = sum(float(table.of(text, target[:i])[token]) for i, token in enumerate(target))
            found.append((total / ((5 + length) / 6) ** power, [token for token in target if token != END]))
    score, target = max(found)
    return target, score


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), power=st.sampled_from([0.0, 0.7, 1.3]))
def test_enough_beams_find_the_best_of_all_targets(seed, power):
    longest, beams, texts = 3, WORDS**3, 2
    found = beam_search(Table(seed, texts, beams), texts, beams=beams, end_id=END, longest=longest, power=power)
    table = Table(seed, texts, beams)
    assert found == [best_of_all(table, text, longest, power)[0] for text in range(texts)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), power=st.sampled_from([0.0, 1.3]))
def test_one_beam_takes_the_likeliest_token_each_time(seed, power):
    table = Table(seed, 1, 1)
    greedy: list[int] = []
    while len(greedy) < 6 and (token := int(table.of(0, tuple(greedy)).argmax())) != END:
        greedy.append(token)
    assert beam_search(Table(seed, 1, 1), 1, beams=1, end_id=END, longest=6, power=power) == [greedy]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), beams=st.integers(1, 5))
def test_a_text_is_answered_as_it_is_alone(seed, beams):
    together = beam_search(Table(seed, 3, beams), 3, beams=beams, end_id=END, longest=8, power=1.0)
    alone = beam_search(Table(seed, 1, beams), 1, beams=beams, end_id=END, longest=8, power=1.0)
    assert together[0] == alone[0]


def test_a_vocabulary_smaller_than_the_beams_is_searched_whole():
    found = beam_search(Table(3, 1, 50), 1, beams=50, end_id=END, longest=2, power=0.0)
    assert found == [best_of_all(Table(3, 1, 50), 0, 2, 0.0)[0]]


def test_the_search_ends_when_nothing_under_way_can_be_better():
    def certain(_last: torch.Tensor | None, _origins: torch.Tensor | None) -> torch.Tensor:
        """Ends at once, almost surely."""
        certain.calls += 1
        return torch.tensor([[0.999, 0.0005, 0.0003, 0.0002]]).log().expand(2, -1)

    certain.calls = 0
    assert beam_search(certain, 1, beams=2, end_id=END, longest=50, power=1.0) == [[]]
    assert certain.calls == 1


def test_the_penalty_is_that_of_the_paper():
    assert length_penalty(7, 1.3) == pytest.approx(math.pow(12 / 6, 1.3))
    assert length_penalty(100, 0) == 1
