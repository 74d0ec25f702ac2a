"""Thresholds that keep a precision or a recall: against exact bounds, on random splits, and from a bundle's answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.data.examples import Entity, Example
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from export.settings import VariantSettings
from export.validation.promises import (
    NO_CONFIDENCE,
    THRESHOLDS,
    Answers,
    answers_of,
    describe_promises,
    kept,
    least_answers,
    make_promise,
    with_outside,
)
from serve.errors import BadInput


def classes(generator: np.random.Generator, texts: int) -> Answers:
    """Answers of a calibrated model, one a text."""
    scores = generator.beta(8, 0.8, texts)
    return Answers(scores, generator.random(texts) < scores, np.arange(texts), np.ones(texts))


def entities(generator: np.random.Generator, texts: int) -> Answers:
    """Answers of which some texts have several, mostly all right or all wrong together, and some wanted ones missing."""
    counts = generator.integers(0, 6, texts)
    quality = np.repeat(generator.beta(6, 0.6, texts), counts)
    found = generator.random(counts.sum()) < 0.95
    scores = np.clip(quality + generator.normal(0, 0.05, len(quality)), 0, 1)
    right = generator.random(len(quality)) < quality
    return Answers(scores[found], right[found], np.repeat(np.arange(texts), counts)[found], counts.astype(float))


@pytest.mark.parametrize(
    ("draw", "promise"),
    [(classes, "precision=0.93"), (classes, "recall=0.8"), (entities, "precision=0.93"), (entities, "recall=0.75")],
)
def test_a_promise_holds_on_other_texts_as_often_as_it_says(draw: object, promise: str) -> None:
    generator = np.random.default_rng(0)
    asked = promise.partition("=")[2]
    others = draw(generator, 20_000)  # type: ignore[operator]
    made, broken, given = 0, 0, []
    for _ in range(200):
        try:
            found = make_promise(promise, draw(generator, 500), 0.95)  # type: ignore[operator]
        except BadInput:
            continue
        made += 1
        broken += found.on(others).reached < float(asked)
        given.append(found.on(others).given)
    assert made >= 40
    # 0.05 are expected at most; more than this happen once in a thousand times.
    assert broken <= binom.ppf(0.999, made, 0.05)
    assert np.mean(given) > 0.3


def test_the_test_is_the_exact_one_of_the_binomial_distribution() -> None:
    # Of 100 equally sure answers 97 are right: P(X >= 97) for X ~ Bin(100, p) crosses 0.05 between 0.924 and 0.925.
    sure = Answers(np.full(100, 0.9), np.arange(100) >= 3, np.arange(100), np.ones(100))
    assert binom.sf(96, 100, 0.924) < 0.05 < binom.sf(96, 100, 0.925)
    assert make_promise("recall=0.924", sure, 0.95).min_score <= 0.9
    with pytest.raises(BadInput, match=r"recall=0.92 could be promised"):
        make_promise("recall=0.925", sure, 0.95)


def test_a_threshold_that_passes_hands_its_risk_to_the_next() -> None:
    # Of 500 answers the 16 least sure are wrong: P(X >= 484) for X ~ Bin(500, 0.95) is between a quarter of 0.05 and 0.05.
    scores = np.linspace(0.5, 0.99, 500)
    answers = Answers(scores, np.arange(500) >= 16, np.arange(500), np.ones(500))
    assert 0.05 / 4 < binom.sf(483, 500, 0.95) < 0.05
    assert make_promise("precision=0.95", answers, 0.95).made_on.given == 1
    # A wrong answer among the surest uses up what its threshold was tested at.
    wrong_above = Answers(scores, answers.right & (np.arange(500) < 496), answers.texts, answers.wanted)
    with pytest.raises(BadInput, match="could be promised"):
        make_promise("precision=0.96", wrong_above, 0.95)


@pytest.mark.parametrize(
    ("promise", "confidence", "answers"), [("precision=0.95", 0.95, 59), ("recall=0.99", 0.9, 230)]
)
def test_so_many_right_answers_show_a_promise_and_one_fewer_does_not(
    promise: str, confidence: float, answers: int
) -> None:
    assert least_answers(promise, confidence) == answers
    sure = [Answers(np.full(n, 0.9), np.ones(n, dtype=bool), np.arange(n), np.ones(n)) for n in (answers, answers - 1)]
    assert make_promise(promise, sure[0], confidence).made_on.reached == 1
    with pytest.raises(BadInput, match="could be promised"):
        make_promise(promise, sure[1], confidence)


def test_answers_of_one_text_count_for_less_than_those_of_as_many_texts() -> None:
    alone = Answers(np.full(200, 0.9), np.arange(200) >= 10, np.arange(200), np.ones(200))
    together = Answers(alone.scores, alone.right, np.arange(200) // 10, np.full(20, 10.0))
    make_promise("recall=0.9", alone, 0.95)
    with pytest.raises(BadInput, match="cannot be kept"):
        make_promise("recall=0.9", together, 0.95)
    # 40 texts of 30 right answers each say as much as 40 answers: 0.9 ** 40 < 0.05, and 0.95 ** 40 is not.
    right = Answers(np.full(1200, 0.9), np.ones(1200, dtype=bool), np.arange(1200) // 30, np.full(40, 30.0))
    make_promise("recall=0.9", right, 0.95)
    with pytest.raises(BadInput, match=r"recall=0\.925 could"):
        make_promise("recall=0.95", right, 0.95)


def test_answers_to_texts_out_of_scope_are_wrong_and_none_of_them_is_wanted() -> None:
    answers = Answers(np.array([0.9]), np.array([True]), np.array([0]), np.ones(1))
    logits = [np.array([[3.0, 0.0]]), np.array([[0.0, 0.0]])]
    found = with_outside(answers, logits, 1.0)
    assert found.right.tolist() == [True, False, False]
    assert found.wanted.tolist() == [1, 0, 0]
    np.testing.assert_allclose(found.scores, [0.9, 1 / (1 + np.exp(-3)), 0.5])
    assert (kept("precision", found, 0.6).reached, kept("recall", found, 0.6).reached) == (0.5, 1)
    assert with_outside(answers, [], 1.0) is answers


@given(seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_the_order_of_texts_changes_nothing_and_less_is_kept_at_no_higher_a_price(seed: int, order: object) -> None:
    answers = entities(np.random.default_rng(seed), 200)
    shuffled = np.random.default_rng(seed).permutation(len(answers.scores))
    other = Answers(answers.scores[shuffled], answers.right[shuffled], answers.texts[shuffled], answers.wanted)
    thresholds = []
    for asked in ("recall=0.5", "recall=0.6", "recall=0.7"):
        try:
            thresholds.append(make_promise(asked, answers, 0.9).min_score)
        except BadInput:
            continue
        assert make_promise(asked, other, 0.9) == make_promise(asked, answers, 0.9)
    assert thresholds == sorted(thresholds, reverse=True)


def test_answers_with_the_score_or_more_are_given() -> None:
    answers = Answers(
        np.array([0.2, 0.5, 0.9]), np.array([False, True, True]), np.array([0, 1, 1]), np.array([1.0, 2.0])
    )
    assert kept("precision", answers, 0.0).reached == pytest.approx(2 / 3)
    assert (kept("precision", answers, 0.5).reached, kept("recall", answers, 0.5).reached) == (1, pytest.approx(2 / 3))
    assert kept("precision", answers, 0.9).given == pytest.approx(1 / 3)
    assert kept("precision", answers, 0.95).reached == 1
    assert THRESHOLDS[0] == 0
    assert (np.diff(THRESHOLDS) > 0).all()


@pytest.mark.parametrize("promise", ["precision=0.99", "recall=0.5"])
def test_without_answers_nothing_is_promised(promise: str) -> None:
    none = Answers(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64), np.full(30, 2.0))
    with pytest.raises(BadInput, match="could be promised"):
        make_promise(promise, none, 0.95)


@pytest.mark.parametrize("promise", ["precision", "precision=1", "precision=0", "f1=0.9", "recall=x", "recall=nan", ""])
def test_words_that_are_no_promise_are_refused_as_a_setting(promise: str) -> None:
    with pytest.raises(BadInput, match=r"is not a promise\. Give precision or recall"):
        VariantSettings(promises=(promise,))


def tokenizer_of(*words: str) -> Tokenizer:
    vocabulary = {"[UNK]": 0} | {word: number for number, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_answers_are_those_that_the_server_gives_with_its_scores() -> None:
    tokenizer = tokenizer_of("rome", "oslo", "to")
    examples = [
        Example("to rome oslo", entities=(Entity(3, 7, "city"),)),
        Example("to", entities=()),
        Example("oslo", entities=(Entity(0, 4, "city"),)),
    ]
    encoded = TOKEN_CLASSIFICATION.encode(examples, tokenizer, ("O", "B-city", "I-city"))
    logits = [np.array([[9.0, 0, 0], [0, 3, 0], [0, 2, 0]]), np.array([[9.0, 0, 0]]), np.array([[5.0, 0, 0]])]
    found = answers_of(examples, encoded, logits, 2.0)
    assert (found.right.tolist(), found.texts.tolist(), found.wanted.tolist()) == ([True, False], [0, 0], [1, 0, 1])
    expected = [np.exp(x) / (np.exp(x) + 2) for x in (1.5, 1.0)]
    np.testing.assert_allclose(found.scores, expected, rtol=1e-6)
    texts = [Example("rome", label="a"), Example("oslo", label="b")]
    encoded = TEXT_CLASSIFICATION.encode(texts, tokenizer, ("a", "b"))
    of_classes = answers_of(texts, encoded, [np.array([[2.0, 0]]), np.array([[1.0, 0]])], 1.0)
    assert (of_classes.right.tolist(), of_classes.wanted.tolist()) == ([True, False], [1, 1])


def test_entities_of_data_that_came_as_words_are_right_if_the_words_that_they_touch_are() -> None:
    tokenizer = tokenizer_of("rome", "oslo", "-")
    example = Example("rome-oslo oslo", entities=(Entity(0, 9, "city"), Entity(10, 14, "city")), blanks_in_words=())
    encoded = TOKEN_CLASSIFICATION.encode([example], tokenizer, ("O", "B-city", "I-city"))
    # rome, then oslo of the same word, then oslo: three spans of a server, the second of which is in the word of the first.
    logits = [np.array([[0.0, 5, 0], [5, 0, 0], [0, 3, 0], [0, 4, 0]])]
    found = answers_of([example], encoded, logits, 1.0)
    (said,) = encoded.task.predictions(encoded, logits)
    assert (found.right.tolist(), found.wanted.tolist()) == ([True, True], [2])
    assert len(said) == len(found.right)
    np.testing.assert_allclose(found.scores, [np.exp(x) / (np.exp(x) + 2) for x in (5, 4)], rtol=1e-6)


def test_a_promise_is_told_with_what_it_came_to() -> None:
    made = make_promise("precision=0.9", classes(np.random.default_rng(0), 500), 0.9)
    (line,) = describe_promises({"int8": [made]}, {})
    for told in ("int8: precision=0.9", NO_CONFIDENCE, f"{made.min_score:g}", f"{made.made_on.reached:.4f}"):
        assert told in line
    apart = make_promise("precision=0.9", classes(np.random.default_rng(0), 500), 0.9, apart="other texts")
    (line,) = describe_promises({"int8": [apart]}, {})
    assert "with a confidence of 0.9. " in line
    assert "like those of other texts; on other texts precision is" in line
