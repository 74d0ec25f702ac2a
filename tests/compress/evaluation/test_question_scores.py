"""Exact match and F1 of answers: against a second implementation, on known hard cases, and the score from which answers are given."""

import random
import re
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.data.examples import Example
from compress.evaluation.metrics import Acceptable
from compress.evaluation.questions import ANSWER_F1, Said, best_answer_from, exact, normal, word_f1
from compress.evaluation.questions import given as answered
from compress.tasks import QUESTION_ANSWERING

WORDS = ["the", "a", "An", "Rome", "rome,", "1,000", "U.S.", "--", "fast", "Fast!", "new york", "then", "", "théâtre", "«oui»"]  # fmt: skip


def theirs(gold: str, said: str) -> tuple[float, float]:
    """Exact match and F1 of one pair, written from the definition of SQuAD, word by word."""
    bags = []
    for text in (gold, said):
        small = "".join(each for each in text.lower() if each not in string.punctuation)
        bags.append([word for word in re.split(r"\s+", small) if word and word not in ("a", "an", "the")])
    if not bags[0] or not bags[1]:
        return (float(bags[0] == bags[1]),) * 2
    left = Counter(bags[0])
    same = 0
    for word in bags[1]:
        if left[word]:
            left[word] -= 1
            same += 1
    precision, recall = same / len(bags[1]), same / len(bags[0])
    return float(bags[0] == bags[1]), 0.0 if not same else 2 * precision * recall / (precision + recall)


def test_both_scores_are_those_of_a_second_implementation_on_a_thousand_random_cases() -> None:
    chance = random.Random(0)

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(0, 5)))

    for _ in range(1000):
        golds, said = [text() for _ in range(chance.randint(0, 3))], text()
        kept = [gold for gold in golds if theirs(gold, "")[0] == 0] or [""]
        pairs = [theirs(gold, said) for gold in kept]
        assert exact(Acceptable(tuple(golds)), said) == max(pair[0] for pair in pairs)
        assert word_f1(Acceptable(tuple(golds)), said) == pytest.approx(max(pair[1] for pair in pairs))


@pytest.mark.parametrize(
    ("golds", "said", "em", "f1"),
    [
        (["The Eiffel Tower!"], "eiffel  tower", 1, 1),
        (["Denver Broncos"], "the Denver Broncos of Colorado", 0, 2 * 2 / (2 + 4)),
        ([], "", 1, 1),  # no answer, and none said
        ([], "Rome", 0, 0),
        (["Rome"], "", 0, 0),
        (["the", "a"], "", 1, 1),  # articles alone are no answer
        (["the", "Rome"], "", 0, 0),
        (["Rome", "city of Rome"], "Rome city", 0, 0.8),
        (["1,000"], "1000", 1, 1),
        (["bad bad"], "bad", 0, 2 / 3),
    ],
)
def test_known_cases(golds: list[str], said: str, em: float, f1: float) -> None:
    gold = Acceptable(tuple(golds))
    assert exact(gold, said) == em
    assert word_f1(gold, said) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("", "the “Louvre”", "“louvre”"),  # SQuAD knows the punctuation of ASCII alone
        ("en", "the “Louvre”", "louvre"),
        ("de", "Die Stadt, der Fluss", "stadt fluss"),
        ("es", "¿Los días del año?", "días del año"),
        ("vi", "những con mèo của tôi", "con mèo tôi"),
        ("ar", "في البيت", "في بيت"),
        ("zh", "在2009年,Rome。", "在 2009 年 rome"),
        ("hi", "भारत की राजधानी।", "भारत की राजधानी"),
    ],
)
def test_articles_and_words_are_those_of_the_language(language: str, text: str, expected: str) -> None:
    assert normal(text, language) == expected


def test_the_mean_f1_has_an_interval_and_the_other_scores_beside_it() -> None:
    examples = [
        Example("q", "in Rome today", answers=((3, 7),)),
        Example("q", "in Rome today", answers=()),
        Example("q", "in Rome today", answers=((3, 7), (3, 13))),
        Example("q", "in Rome today", answers=((8, 13),)),
    ]
    gold = [QUESTION_ANSWERING.gold_of(example) for example in examples]
    said = ["Rome", "Rome", "Rome today", ""]
    assert ANSWER_F1.of(ANSWER_F1.counts(gold, said).sum(axis=0)) == 0.5
    found = ANSWER_F1.score(gold, said)
    assert found.low < found.value < found.high
    others = ANSWER_F1.further_scores(gold, said)
    assert [others[name].value for name in ("exact_match", "f1_with_answer", "f1_without_answer")] == [0.5, 2 / 3, 0]
    assert list(ANSWER_F1.further_scores(gold[::2], said[::2])) == ["exact_match"]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 19)), min_size=1, max_size=12))
def test_answers_are_given_from_where_the_f1_is_highest(rows: list[tuple[bool, bool, int]]) -> None:
    gold = [Acceptable(("rome",) if there else ()) for there, _, _ in rows]
    said = [Said("rome" if right else "oslo", place / 20) for _, right, place in rows]

    def reached(answer_from: float) -> float:
        return float(ANSWER_F1.of(ANSWER_F1.counts(gold, answered(said, answer_from)).sum(axis=0)))

    best = best_answer_from(gold, said)
    assert reached(best) == pytest.approx(max(reached(each / 40) for each in range(42)))
    if all(there for there, _, _ in rows):
        assert best == 0


def test_of_equal_thresholds_the_one_nearest_a_half_is_taken() -> None:
    gold = [Acceptable(("rome",)), Acceptable(()), Acceptable(())]
    said = [Said("rome", 0.9), Said("rome", 0.3), Said("oslo", 0.1)]
    assert best_answer_from(gold, said) == pytest.approx(0.6)
    assert best_answer_from(gold[1:], said[1:]) == pytest.approx(1.0, abs=0.7)
    assert np.isfinite(best_answer_from(gold, said))
