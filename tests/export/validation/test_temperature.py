from itertools import pairwise

import numpy as np
import pytest
import torch
from small_checkpoints import MAX_LENGTH, TAGS, Exported

from compress.data.encoded import IGNORED, Encoded
from compress.data.examples import Entity, Example
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from export.validation.temperature import (
    choose_confidence,
    describe_confidence,
    expected_calibration_error,
    fit_temperature,
    labelled_rows,
    reliability,
    threshold_between,
    threshold_keeping,
)
from serve.text.answers import sigmoid, softmax
from serve.text.tokenizer import load_tokenizer

CLASSES = ("a", "b", "c", "d", "e", "f")


def drawn(temperature: float, rows: int = 4_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits (rows, 6), float32, and labels drawn from the probabilities that they mean at `temperature`."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(0, 3, (rows, len(CLASSES))).astype(np.float32)
    cumulative = softmax(logits / temperature).cumsum(axis=-1)
    return logits, (chance.random((rows, 1)) > cumulative).sum(axis=-1).clip(max=len(CLASSES) - 1)


def drawn_apart(temperature: float, rows: int = 2_000) -> tuple[np.ndarray, np.ndarray]:
    """The same where each label is decided on its own: targets (rows, 6), 1 for each that applies."""
    chance = np.random.default_rng(0)
    logits = chance.normal(-1, 3, (rows, len(CLASSES))).astype(np.float32)
    return logits, (chance.random(logits.shape) < sigmoid(logits / temperature)).astype(np.float32)


def loss_at(temperature: float, logits: np.ndarray, targets: np.ndarray) -> float:
    """torch's own losses, float64."""
    scaled, given = torch.from_numpy(logits).double() / temperature, torch.from_numpy(targets)
    if targets.ndim == 2:
        return torch.nn.functional.binary_cross_entropy_with_logits(scaled, given.double()).item()
    return torch.nn.functional.cross_entropy(scaled, given).item()


def as_texts(logits: np.ndarray, targets: np.ndarray, *, multi_label: bool = False) -> tuple[Encoded, list[np.ndarray]]:
    """Texts of one row each, as the split of a task holds them."""
    count = len(logits)
    wanted = [np.asarray(target)[None] for target in targets]
    nothing = [np.zeros(1, dtype=np.int64)] * count
    encoded = Encoded(
        TEXT_CLASSIFICATION.with_multi_label(multi_label), CLASSES, [""] * count, [], nothing, nothing, wanted, 0, 0
    )
    return encoded, list(logits[:, None])


@pytest.mark.parametrize("draw", [drawn, drawn_apart])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_is_the_one_of_least_loss_on_a_grid_and_near_the_one_that_drew_the_labels(
    draw: object, temperature: float
) -> None:
    logits, targets = draw(temperature)  # type: ignore[operator]
    found = fit_temperature(logits, targets)
    assert found == pytest.approx(temperature, rel=0.08)
    near = found * np.linspace(0.99, 1.01, 201)
    assert found == pytest.approx(min(near, key=lambda each: loss_at(each, logits, targets)), rel=1e-4 + 1e-12)
    assert found == round(found, 4)
    for far in np.geomspace(0.05, 20, 60):
        assert loss_at(far, logits, targets) >= loss_at(found, logits, targets) - 1e-9


def test_a_temperature_that_no_data_asks_for_is_not_made_up() -> None:
    logits, targets = drawn(1.0, rows=50)
    assert fit_temperature(logits, logits.argmax(axis=-1)) is None  # all right: the surer the likelier
    assert fit_temperature(logits, logits.argmin(axis=-1)) is None  # all wrong: the less sure the likelier
    assert fit_temperature(np.zeros_like(logits), targets) is None
    assert fit_temperature(logits[:0], targets[:0]) is None
    assert fit_temperature(logits, (logits > 0).astype(np.float32)) is None
    assert fit_temperature(logits * 1_000, targets) is None  # beyond the bounds
    encoded, said = as_texts(logits, logits.argmax(axis=-1))
    chosen = choose_confidence(encoded, said)
    assert (chosen.temperature, chosen.fitted) == (1.0, False)
    assert chosen.validation.ece == chosen.validation.ece_uncalibrated > 0


def test_the_calibration_error_is_the_papers_sum_over_bins() -> None:
    logits, targets = drawn(2.0, rows=500)
    sure, right = softmax(logits.astype(np.float64) / 0.7).max(axis=-1), logits.argmax(axis=-1) == targets
    expected = 0.0
    for low, high in pairwise(np.arange(16) / 15):
        inside = (sure > low) & (sure <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    assert expected_calibration_error(logits, targets, 0.7) == pytest.approx(expected, abs=1e-12)
    # Two labels at half each, in the bin from 7/15 to 8/15: said 0.5, and right a quarter of the times.
    even = np.zeros((4, 2))
    assert expected_calibration_error(even, np.array([0, 1, 1, 1])) == 0.25
    # A third is in the bin below it, from 4/15, with 0.3: one of the two right.
    two = np.log([[1, 1, 1, 1e-300], [0.3, 0.25, 0.25, 0.2]])
    assert expected_calibration_error(two, np.array([0, 1])) == pytest.approx((1 - 1 / 3 - 0.3) / 2)
    # Each label on its own: of four that are said to apply with 0.5 one does.
    assert expected_calibration_error(even[:2], np.array([[1, 0], [0, 0]])) == 0.25
    assert expected_calibration_error(even[:0], np.zeros(0, dtype=np.int64)) == 0


@pytest.mark.parametrize("draw", [drawn, drawn_apart])
def test_calibration_takes_the_error_away(draw: object) -> None:
    logits, targets = draw(2.5)  # type: ignore[operator]
    encoded, said = as_texts(logits, targets, multi_label=targets.ndim == 2)
    chosen = choose_confidence(encoded, said)
    assert chosen.fitted
    assert chosen.validation.ece < 0.03
    assert chosen.validation.ece_uncalibrated > 0.1
    assert chosen.validation.rows == targets.size
    assert choose_confidence(encoded, said) == chosen
    # Where any number of labels may apply there is no one answer to withhold.
    assert (chosen.abstain_below is None) is (targets.ndim == 2)


def test_the_threshold_keeps_the_share_of_right_answers_that_was_asked_for_and_no_more() -> None:
    logits, targets = drawn(2.0)
    encoded, said = as_texts(logits, targets)
    for share in (1.0, 0.95, 0.5):
        chosen = choose_confidence(encoded, said, kept_right=share)
        assert chosen.abstain_below is not None
        sure = softmax(logits.astype(np.float64) / chosen.temperature).max(axis=-1)
        right = sure[logits.argmax(axis=-1) == targets]
        assert (right >= chosen.abstain_below).mean() >= share > (right >= chosen.abstain_below + 1e-4).mean() - 1e-12
        assert chosen.validation.right_abstained == (right < chosen.abstain_below).mean() <= 1 - share
        assert chosen.validation.wrong_abstained > chosen.validation.right_abstained or share == 1  # type: ignore[operator]
        assert chosen.validation.in_scope_abstained == (sure < chosen.abstain_below).mean()
        assert (chosen.validation.out_of_scope_texts, chosen.validation.out_of_scope_abstained) == (0, None)
    assert choose_confidence(encoded, said, kept_right=0).abstain_below is None
    assert threshold_keeping(np.array([0.2, 0.30005, 0.9]), 2 / 3) == 0.3
    assert threshold_keeping(np.ones(3), 0.95) == 0.9999  # a probability of 1 is refused by nothing but rounding
    assert threshold_keeping(np.zeros(0), 0.95) is None


def test_the_threshold_against_texts_out_of_scope_tells_the_two_apart_best() -> None:
    chance = np.random.default_rng(3)
    inside, outside = chance.beta(6, 2, 400), chance.beta(2, 3, 37)
    found = threshold_between(inside, outside)

    def youden(threshold: float) -> float:
        return float((outside < threshold).mean() - (inside < threshold).mean())

    assert youden(found) == pytest.approx(max(youden(each) for each in np.arange(0, 1, 1e-4)), abs=1e-12)
    assert 0.3 < youden(found) < 1
    # How many there are of each does not count.
    assert threshold_between(np.tile(inside, 5), outside) == found
    # Between two heaps that are well apart it lies in the middle.
    assert threshold_between(np.array([0.8, 0.9]), np.array([0.1, 0.2])) == pytest.approx(0.5, abs=1e-3)


def test_texts_out_of_scope_are_what_the_threshold_is_chosen_on_where_there_are_some() -> None:
    logits, targets = drawn(1.0)
    encoded, said = as_texts(logits, targets)
    strange = list(np.random.default_rng(1).normal(0, 1, (100, 1, len(CLASSES))))
    alone, chosen = choose_confidence(encoded, said), choose_confidence(encoded, said, strange)
    assert chosen.temperature == alone.temperature
    assert chosen.abstain_below != alone.abstain_below
    assert chosen.validation.out_of_scope_texts == 100
    below = [softmax(each[0] / chosen.temperature).max() < chosen.abstain_below for each in strange]
    assert chosen.validation.out_of_scope_abstained == np.mean(below) > 0.7
    assert chosen.validation.in_scope_abstained < 0.5  # type: ignore[operator]
    assert chosen.on(encoded, said, strange) == chosen.validation
    assert chosen.on(encoded, said).out_of_scope_abstained is None


def test_rows_without_a_label_of_the_models_are_left_out() -> None:
    for draw, multi_label in ((drawn, False), (drawn_apart, True)):
        logits, targets = draw(1.4, rows=600)
        unknown = targets.copy()
        unknown[:200] = IGNORED
        chosen = choose_confidence(*as_texts(logits, unknown, multi_label=multi_label))
        assert chosen == choose_confidence(*as_texts(logits[200:], targets[200:], multi_label=multi_label))
    nothing = choose_confidence(*as_texts(logits, np.full(600, IGNORED)))
    assert (nothing.temperature, nothing.abstain_below, nothing.validation.rows) == (1.0, None, 0)


def test_only_the_first_token_of_a_word_counts(bert: Exported) -> None:
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    examples = [Example("fly to zürich tomorrow", entities=(Entity(7, 13, "city"),)), Example("unlabelled text")]
    encoded = TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS)
    assert len(encoded.ids[0]) > 4 + 2  # some word is in several pieces
    logits = [np.random.default_rng(0).normal(0, 2, (len(rows), len(TAGS))) for rows in encoded.rows]
    rows, targets = labelled_rows(encoded, logits)
    assert targets.tolist() == [0, 0, TAGS.index("B-city"), 0]
    assert (rows == logits[0]).all()
    chosen = choose_confidence(encoded, logits)
    assert chosen.validation.rows == 4
    assert chosen.abstain_below is None


def test_entities_have_a_calibration_error_of_their_own(bert: Exported) -> None:
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    examples = [Example("fly to rome", entities=(Entity(7, 11, "city"),)), Example("fly to oslo", entities=())]
    encoded = TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS)
    city, other = TAGS.index("B-city"), TAGS.index("O")
    # Of each text the last word is said to be a city, with probabilities of 0.9 and 0.6: right once.
    logits = []
    for probability in (0.9, 0.6):
        rows = np.full((3, len(TAGS)), -50.0)
        rows[:, other] = (0, 0, np.log(1 - probability))
        rows[2, city] = np.log(probability)
        logits.append(rows)
    found = reliability(encoded, logits, 1.0, None, examples=examples)
    assert found.ece_of_entities == pytest.approx((0.1 + 0.6) / 2)
    assert found.ece == pytest.approx((0.1 + 0.6) / 6)
    assert reliability(encoded, logits, 1.0, None).ece_of_entities is None
    nothing = [np.where(np.arange(len(TAGS)) == other, 0.0, -50.0) * np.ones((3, 1))] * 2
    assert reliability(encoded, nothing, 1.0, None, examples=examples).ece_of_entities is None
    (line,) = describe_confidence({"int8": choose_confidence(encoded, logits, examples=examples)}, {})
    assert "of words; of the entities that it gives it is" in line


def test_a_line_tells_the_choice_and_its_effect_on_test_or_else_on_validation() -> None:
    logits, targets = drawn(2.0)
    encoded, said = as_texts(logits, targets)
    strange = list(np.zeros((8, 1, len(CLASSES))))
    chosen = choose_confidence(encoded, said, strange)
    (line,) = describe_confidence({"int8": chosen}, {})
    for told in (
        f"int8: dividing the logits by the temperature {chosen.temperature:g}",
        f"{chosen.abstain_below:g} it abstains",
    ):
        assert told in line
    assert line.endswith("100.0% of 8 texts out of scope.")
    test = reliability(encoded, said, chosen.temperature, chosen.abstain_below)
    (line,) = describe_confidence({"int8": chosen}, {"int8": test})
    assert "on test" in line
    assert "out of scope" not in line
    (line,) = describe_confidence({"fp32": choose_confidence(encoded, said, kept_right=0)}, {})
    assert "abstains" not in line
