"""Scores of generated texts against definitions written anew, and the libraries' own scores of a whole file."""

import random
from collections import Counter

import numpy as np
import pytest
from sacrebleu import corpus_bleu

from compress.evaluation.generated import generation_scores, rouge_f1

# The stemmer leaves these as they are.
WORDS = ("lamp", "oslo", "red", "kettle", "at", "big", "porto", "to", "from", "by")


def texts(count: int, seed: int, longest: int = 12) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, longest))) for _ in range(count)]


def f1(same: int, gold: int, said: int) -> float:
    return 2 * same / (gold + said) if same else 0.0


def groups(words: list[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(size)), strict=False))


def longest_common(a: list[str], b: list[str]) -> int:
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=int)
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if one == other else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_rouge_is_its_definition_on_random_pairs():
    gold, said = texts(300, 0), texts(300, 1)
    expected = []
    for one, other in zip(gold, said, strict=True):
        a, b = one.split(), other.split()
        row = [
            f1(sum((groups(a, n) & groups(b, n)).values()), max(0, len(a) - n + 1), max(0, len(b) - n + 1))
            for n in (1, 2)
        ]
        expected.append([*row, f1(longest_common(a, b), len(a), len(b))])
    np.testing.assert_allclose(rouge_f1(gold, said), expected, atol=1e-12)


def test_bleu_is_that_of_the_whole_file():
    gold, said = texts(300, 2), texts(300, 3)
    assert generation_scores(gold, said)["bleu"].value == pytest.approx(corpus_bleu(said, [gold]).score / 100)


def test_equal_texts_score_one_and_empty_ones_zero():
    gold = [*texts(20, 4, 12), "from the big red lamp at porto"]
    perfect, empty = generation_scores(gold, gold), generation_scores(gold, [""] * len(gold))
    for name in ("rouge_1", "rouge_l", "bleu"):
        assert (perfect[name].low, perfect[name].value, perfect[name].high) == pytest.approx((1, 1, 1))
    assert {each.value for each in empty.values()} == {0.0}


def test_capital_letters_do_not_count():
    assert generation_scores(["The Lamp to Oslo is Red"], ["the lamp to oslo is red"])["bleu"].value == pytest.approx(1)


def test_the_interval_holds_the_value_and_narrows_with_more_texts():
    few = generation_scores(texts(30, 5), texts(30, 6))["rouge_l"]
    many = generation_scores(texts(600, 5), texts(600, 6))["rouge_l"]
    assert few.low < few.value < few.high
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("где моя лампа для осло сегодня", "верните деньги за чайник"),
        ("ランプはどこですか", "返金してください"),
        ("मेरा दीपक कहाँ है", "कृपया पैसे लौटाएँ"),
        ("größe und gewicht der lampe", "grüße aus ghent"),
    ],
)
def test_texts_of_other_scripts_are_compared_by_their_words(text: str, other: str):
    same, different = generation_scores([text], [text]), generation_scores([text], [other])
    assert (same["rouge_l"].value, same["bleu"].value) == pytest.approx((1, 1))
    assert different["rouge_l"].value < 0.3


def test_words_of_english_are_those_of_the_library():
    from rouge_score.rouge_scorer import RougeScorer

    gold = ["The cats' running_times (2.5 s) were MEASURED, easily!", "a generously-sized lamp"]
    said = ["cat runs; times measuring 2.5 easy", "the general size of lamps"]
    library = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    expected = [[each.fmeasure for each in library.score(a, b).values()] for a, b in zip(gold, said, strict=True)]
    np.testing.assert_allclose(rouge_f1(gold, said), expected)
