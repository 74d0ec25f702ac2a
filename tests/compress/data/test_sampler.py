"""Which texts a step reads, where languages have different numbers of them; and a subset that stands for a whole file."""

from collections import Counter

import numpy as np
import pytest

from compress.data.sampler import Sampler, language_counts, subset

LANGUAGES = ["en"] * 700 + ["de"] * 250 + ["mt"] * 50


def shares(counts: np.ndarray) -> dict[str, float]:
    """The share of each language in an epoch."""
    return {name: float(counts[[each == name for each in LANGUAGES]].sum() / len(LANGUAGES)) for name in set(LANGUAGES)}


def test_a_language_gets_the_share_of_its_number_of_texts_to_the_power_of_one_over_the_temperature() -> None:
    powers = {name: number**0.3 for name, number in Counter(LANGUAGES).items()}  # XLM-R, section 3.1
    expected = {name: power / sum(powers.values()) for name, power in powers.items()}
    assert shares(language_counts(LANGUAGES, 1 / 0.3)) == pytest.approx(expected)
    assert shares(language_counts(LANGUAGES, 1e9)) == pytest.approx(dict.fromkeys(powers, 1 / 3))
    assert language_counts(LANGUAGES, 1).tolist() == pytest.approx([1.0] * 1000)


def test_an_epoch_has_as_many_texts_as_before_and_each_as_often_as_it_should() -> None:
    counts = language_counts(LANGUAGES, 3)
    sampler = Sampler(np.random.default_rng(0).integers(5, 40, 1000), 8, 4, counts)
    plain = Sampler(sampler.lengths, 8, 4)
    assert sampler.steps_per_epoch == plain.steps_per_epoch == 125
    seen = [np.concatenate([sampler.at(step) for step in range(125 * e, 125 * (e + 1))]) for e in range(20)]
    for read in seen:
        assert len(read) == 1000
        found = Counter(read.tolist())
        for i, count in enumerate(counts):
            assert found[i] in (int(np.floor(count)), int(np.ceil(count)))
    assert not np.array_equal(seen[0], seen[1])
    together = np.bincount(np.concatenate(seen), minlength=1000) / 20
    assert np.abs(together[:700].mean() - counts[0]) < 0.01
    assert np.abs(together[950:].mean() - counts[-1]) < 0.1
    assert np.array_equal(seen[3], np.concatenate([sampler.at(step) for step in range(375, 500)]))  # again, the same


def test_equal_counts_read_every_text_once() -> None:
    sampler = Sampler(np.arange(1, 101), 10, 0, np.ones(100))
    assert sorted(np.concatenate([sampler.at(step) for step in range(10)]).tolist()) == list(range(100))


def test_a_subset_keeps_the_order_and_has_rows_of_every_label_of_a_sorted_file() -> None:
    rows = [(label, i) for label in range(4) for i in range(250)]
    found = subset(rows, 100, seed=1)
    assert {label for label, _ in found} == {0, 1, 2, 3}
    assert found == sorted(set(found))
    assert len(found) == 100
    assert found == subset(rows, 100, seed=1) != subset(rows, 100, seed=2)
    assert subset("abc", 5) == ["a", "b", "c"]
