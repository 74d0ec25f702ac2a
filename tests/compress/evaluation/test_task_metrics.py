import random
import tracemalloc

import numpy as np
import pytest
from seqeval.metrics import f1_score
from sklearn.metrics import accuracy_score
from sklearn.metrics import f1_score as f1_of_classes
from sklearn.preprocessing import MultiLabelBinarizer

from compress.data.examples import Example, clusters_of
from compress.evaluation.metrics import ACCURACY, ENTITY_F1, MICRO_F1, Pairs, Prediction, gain, mean_over_tasks


def spans(seed: int, texts: int = 60) -> list[Prediction]:
    generator = random.Random(seed)
    rows: list[Prediction] = []
    for _ in range(texts):
        starts = sorted(generator.sample(range(20), generator.randint(0, 4)))
        rows.append(frozenset((s, s + 1, generator.choice("ab")) for s in starts))
    return rows


def as_tags(rows: list[Prediction]) -> list[list[str]]:
    tagged = []
    for row in rows:
        tags = ["O"] * 21
        for start, _, label in row:
            tags[start] = f"B-{label}"
        tagged.append(tags)
    return tagged


@pytest.mark.parametrize("seed", range(5))
def test_entity_f1_is_seqevals(seed: int) -> None:
    gold, said = spans(seed), spans(seed + 100)
    mixed = [g if i % 3 else s for i, (g, s) in enumerate(zip(gold, said, strict=True))]
    assert ENTITY_F1.score(gold, mixed).value == pytest.approx(f1_score(as_tags(gold), as_tags(mixed)))


def test_accuracy_is_scikit_learns() -> None:
    generator = random.Random(0)
    gold: list[Prediction] = [generator.choice("abc") for _ in range(200)]
    said: list[Prediction] = [generator.choice("abc") for _ in range(200)]
    assert ACCURACY.score(gold, said).value == pytest.approx(accuracy_score(gold, said))


def test_macro_f1_beside_accuracy_is_scikit_learns() -> None:
    generator = random.Random(2)
    gold: list[Prediction] = [generator.choice("aaaaab") for _ in range(300)]
    said: list[Prediction] = ["a" if generator.random() < 0.9 else generator.choice("abc") for _ in gold]
    macro = ACCURACY.further_scores(gold, said)["macro_f1"]
    assert macro.value == pytest.approx(f1_of_classes(gold, said, average="macro", zero_division=0))
    assert macro.low < macro.value < macro.high
    assert macro.value < ACCURACY.score(gold, said).value - 0.2  # the rare class is missed
    assert ACCURACY.further_scores(gold, gold)["macro_f1"].value == 1


def test_the_memory_of_macro_f1_does_not_grow_with_texts_times_classes() -> None:
    names: list[Prediction] = [f"class {i % 2_000}" for i in range(6_000)]
    tracemalloc.start()
    try:
        assert ACCURACY.further_scores(names, names)["macro_f1"].value == 1
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20  # a count of each text and class is 144 MB
    finally:
        tracemalloc.stop()


def test_micro_f1_of_several_labels_is_scikit_learns_and_so_is_each_labels() -> None:
    generator = random.Random(0)
    gold: list[Prediction] = [frozenset(generator.sample("abcd", generator.randint(0, 3))) for _ in range(200)]
    said: list[Prediction] = [frozenset(generator.sample("abcd", generator.randint(0, 3))) for _ in range(200)]
    columns = MultiLabelBinarizer(classes=list("abcd"))
    theirs, ours = columns.fit_transform(gold), columns.transform(said)
    assert MICRO_F1.score(gold, said).value == pytest.approx(f1_of_classes(theirs, ours, average="micro"))
    each = f1_of_classes(theirs, ours, average=None)
    assert [MICRO_F1.per_label(gold, said)[label]["f1"] for label in "abcd"] == pytest.approx(list(each))


def test_the_interval_holds_the_value_and_narrows_with_more_texts() -> None:
    gold: list[Prediction] = ["a"] * 1600
    said: list[Prediction] = ["a" if i % 5 else "b" for i in range(1600)]
    few, many = ACCURACY.score(gold[:100], said[:100]), ACCURACY.score(gold, said)
    assert few.low < few.value < few.high
    # The normal approximation of a share of 0.8: 1.96 sqrt(0.8 * 0.2 / n) to either side.
    assert many.high - many.low == pytest.approx(2 * 1.96 * np.sqrt(0.16 / 1600), rel=0.1)
    assert few.high - few.low > 3 * (many.high - many.low)


def test_a_model_does_not_differ_from_itself() -> None:
    gold, said = spans(1), spans(2)
    found = ENTITY_F1.difference(gold, said, said)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_a_real_difference_is_supported_and_points_the_right_way() -> None:
    gold = spans(1, 400)
    worse = [g if i % 2 else frozenset() for i, g in enumerate(gold)]
    assert ENTITY_F1.difference(gold, gold, worse).low > 0
    assert ENTITY_F1.difference(gold, worse, gold).high < 0


def test_nothing_to_find_and_nothing_said_is_perfect() -> None:
    assert ENTITY_F1.score([frozenset()], [frozenset()]).value == 1


def test_chance_is_far_below_a_model_that_looks_and_equals_one_that_does_not() -> None:
    gold: list[Prediction] = ["a", "b", "c", "d"] * 250
    assert 0.2 < ACCURACY.chance(gold, gold) < 0.3
    blind: list[Prediction] = ["a"] * 1_000
    assert ACCURACY.chance(gold, blind) == ACCURACY.score(gold, blind).value == 0.25
    assert ACCURACY.chance(gold, gold, [["a"] * 500 + ["b"] * 500]) == pytest.approx(0.25, abs=0.05)


def test_chance_is_the_same_for_texts_that_stand_sorted_by_label() -> None:
    gold: list[Prediction] = [label for label in "abcd" for _ in range(250)]
    assert 0.2 < ENTITY_F1.chance(gold, gold) < 0.3
    everything = [frozenset([(0, 1, label)]) for label in "abcd" for _ in range(250)]
    assert 0.2 < ENTITY_F1.chance(everything, everything) < 0.3


def test_per_label_counts_what_was_missed_and_what_was_made_up() -> None:
    gold: list[Prediction] = [frozenset([(0, 1, "city"), (2, 3, "name")]), frozenset([(0, 1, "city")])]
    said: list[Prediction] = [frozenset([(0, 1, "city")]), frozenset([(0, 1, "date")])]
    found = ENTITY_F1.per_label(gold, said)
    assert found["city"] == {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "support": 2}
    assert found["name"]["f1"] == 0
    assert found["date"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


def test_a_mean_over_tasks_counts_each_task_once_and_is_paired_within_it() -> None:
    gold = {"small": spans(1, 40), "large": spans(2, 400)}
    said = {
        name: [
            ENTITY_F1.counts(rows, [g if (i + seed) % 3 else frozenset() for i, g in enumerate(rows)])
            for seed in range(2)
        ]
        for name, rows in gold.items()
    }
    tasks, metrics = [*said.values()], [ENTITY_F1, ENTITY_F1]
    whole, parts = mean_over_tasks(metrics, tasks), [ENTITY_F1.mean_score(rows) for rows in tasks]
    assert whole.value == pytest.approx(np.mean([part.value for part in parts]))
    # Independent texts: the variance of a mean of two is a quarter of the sum of theirs.
    expected = np.sqrt(sum((part.high - part.low) ** 2 for part in parts)) / 2
    assert whole.high - whole.low == pytest.approx(expected, rel=0.1)
    nothing = gain([[Pairs(ENTITY_F1, rows, rows) for rows in tasks]])
    assert (nothing.value, nothing.low, nothing.high, nothing.supported) == (0, 0, 0, False)
    worse = [[ENTITY_F1.counts(rows, [frozenset()] * len(rows))] * 2 for rows in gold.values()]
    better = gain([[Pairs(ENTITY_F1, *both) for both in zip(tasks, worse, strict=True)]])
    assert better.supported
    assert better.value == pytest.approx(whole.value)
    assert gain([[Pairs(ENTITY_F1, *both) for both in zip(worse, tasks, strict=True)]]).value == pytest.approx(
        -whole.value
    )


def right_of(generator: np.random.Generator, texts: int, share: float) -> np.ndarray:
    """What accuracy counts of so many texts, each right with this chance."""
    gold: list[Prediction] = ["a"] * texts
    return ACCURACY.counts(gold, ["a" if right else "b" for right in generator.random(texts) < share])


def test_of_one_pair_of_trainings_the_interval_is_that_of_the_texts_and_nothing_is_supported() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = right_of(generator, 500, 0.95), right_of(generator, 500, 0.8)
    found, apart = gain([[Pairs(ACCURACY, [ours], [theirs])]]), ACCURACY.mean_score([ours], less=[theirs])
    assert (found.value, found.low, found.high) == pytest.approx((apart.value, apart.low, apart.high))
    assert found.low > 0
    assert not found.supported


def test_a_gain_is_of_other_draws_and_seeds_too() -> None:
    generator = np.random.default_rng(1)
    worse = [right_of(generator, 2_000, 0.8) for _ in range(3)]
    steady = [right_of(generator, 2_000, 0.86) for _ in range(3)]
    unsteady = [right_of(generator, 2_000, share) for share in (0.79, 0.86, 0.93)]
    same, varied = (gain([[Pairs(ACCURACY, ours, worse)]]) for ours in (steady, unsteady))
    assert same.supported
    assert varied.high - varied.low > 2 * (same.high - same.low)
    assert varied.seeds == pytest.approx(
        [ACCURACY.value(a) - ACCURACY.value(b) for a, b in zip(unsteady, worse, strict=True)]
    )
    # The variance of a mean over three seeds, of which resampling sees two thirds, is added to that of the texts.
    expected = 2 * 1.96 * np.sqrt(np.var(varied.seeds) / 3)
    assert varied.high - varied.low == pytest.approx(expected, rel=0.35)
    lost = [right_of(generator, 2_000, 0.79) for _ in range(3)]
    draws = gain([[Pairs(ACCURACY, steady, worse)]] * 9 + [[Pairs(ACCURACY, lost, worse)]])
    assert draws.low > 0
    assert not draws.supported  # the mean of one draw is below 0


def test_texts_of_a_cluster_are_drawn_together() -> None:
    generator = np.random.default_rng(2)
    of_cluster = generator.random(100) < 0.7
    gold: list[Prediction] = ["a"] * 500
    said: list[Prediction] = ["a" if right else "b" for right in np.repeat(of_cluster, 5)]
    clusters = np.repeat(np.arange(100), 5)
    once = ACCURACY.score(gold[:100], ["a" if right else "b" for right in of_cluster])
    whole = ACCURACY.score(gold, said, clusters=clusters)
    assert (whole.value, whole.low, whole.high) == pytest.approx((once.value, once.low, once.high))
    apart = ACCURACY.score(gold, said)
    assert apart.high - apart.low == pytest.approx((whole.high - whole.low) / np.sqrt(5), rel=0.1)
    assert ACCURACY.score(gold, said, clusters=np.arange(500)) == apart
    # Of one cluster alone nothing could be drawn: an interval without width would call every difference shown.
    assert ACCURACY.score(gold, said, clusters=np.zeros(500, dtype=np.int64)) == apart
    difference = ACCURACY.difference(gold, said, gold, clusters=clusters)
    assert difference.high - difference.low == pytest.approx(whole.high - whole.low)


def test_questions_of_a_context_pairs_of_a_premise_and_copies_of_a_text_are_a_cluster() -> None:
    questions = [
        Example("who", "a b", answers=((0, 1),)),
        Example("what", "c", answers=()),
        Example("where", "A b.", answers=()),
    ]
    assert clusters_of(questions).tolist() == [0, 1, 0]
    assert clusters_of(
        [Example("a", "x", label="p"), Example("b", "x", label="p"), Example("A", "y", label="q")]
    ).tolist() == [0, 1, 0]
