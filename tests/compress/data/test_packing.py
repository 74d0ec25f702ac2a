"""Which texts a step reads, in which rows: packed, or of languages with different numbers of texts; and a subset for a whole file."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.corpus import CorpusText, Masking, Piece, tokenised
from compress.data.sampler import LEAST_STEPS, Sampler, language_counts, packed_rows, rows_a_step, subset
from serve.text.tokenizer import load_tokenizer

MASK, SIZE, ROW = 4, 60, 32


def pieces(lengths: list[int]) -> list[Piece]:
    """Two special tokens around words of two tokens; no two pieces are alike."""
    made = []
    for i, length in enumerate(lengths):
        ids = np.random.default_rng([i, 1]).integers(5, SIZE, length - 2)
        made.append(Piece(np.array([2, *ids, 3]), np.array([-1, *(np.arange(length - 2) // 2), -1])))
    return made


LENGTHS = [3 + i * 7 % 20 for i in range(150)] + [ROW] * 3


def packed(seed: int = 0, masking: Masking | None = None, batch: int = 4) -> CorpusText:
    return CorpusText(pieces(LENGTHS), 0, batch, seed, masking, row_tokens=ROW)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=200), seed=st.integers(0, 100))
def test_each_piece_is_in_one_row_and_no_row_is_too_long(lengths: list[int], seed: int) -> None:
    rows = packed_rows(np.array(lengths), 24, seed)
    found = [piece for row in range(len(rows)) for piece in rows[row].tolist()]
    assert sorted(found) == list(range(len(lengths)))
    assert [sum(lengths[piece] for piece in rows[row]) for row in range(len(rows))] == rows.tokens.tolist()
    assert rows.tokens.max() <= 24
    # No two rows could have shared one, so fewer than half of all rows are at most half full.
    assert sorted([*rows.tokens.tolist(), 25])[:2][-1] + rows.tokens.min() > 24


@pytest.mark.parametrize(("low", "high"), [(5, 30), (5, 128), (128, 128)])
def test_rows_are_almost_full(low: int, high: int) -> None:
    """More pieces than are packed together, of lengths as in a corpus of short lines, of lines of any length, and of books."""
    lengths = np.random.default_rng(0).integers(low, high + 1, 40_000)
    rows = packed_rows(lengths, 128, 0)
    assert rows.tokens.sum() / (128 * len(rows)) > 0.98


def test_rows_of_a_file_are_almost_full(tiny_teacher: Path, tmp_path: Path) -> None:
    lines = ["where is my lovely kettle " * (1 + i % 4) for i in range(600)]
    made = tokenised(lines, load_tokenizer(tiny_teacher, 64), 64, tmp_path / "corpus", fingerprint="")
    text = CorpusText(made, 0, 4, 0, row_tokens=64)
    masks = [text.at(step).inputs["attention_mask"] for step in range(text.sampler.steps_per_epoch)]
    real = sum(int((mask > 0).sum()) for mask in masks)
    assert real == made.lengths.sum() == sum(text.sampler.tokens_at(step) for step in range(len(masks)))
    assert real / (64 * sum(len(mask) for mask in masks)) > 0.95
    assert text.tokens_per_step == real / len(masks)


def test_an_epoch_reads_every_piece_once_with_positions_of_its_own() -> None:
    text, made = packed(), pieces(LENGTHS)
    seen = []
    for step in range(text.sampler.steps_per_epoch):
        inputs, rows = text.at(step).inputs, text.pieces_at(step)
        for row, numbers in enumerate(rows):
            for number, piece in enumerate(numbers, 1):
                inside = inputs["attention_mask"][row] == number
                assert inputs["input_ids"][row][inside].tolist() == made[piece].ids.tolist()
                assert inputs["position_ids"][row][inside].tolist() == list(range(LENGTHS[piece]))
            assert int((inputs["attention_mask"][row] > 0).sum()) == sum(LENGTHS[piece] for piece in numbers)
            seen += numbers
    assert sorted(seen) == list(range(len(LENGTHS)))
    again = [piece for step in range(len(seen)) for row in text.pieces_at(step) for piece in row]
    assert again[: len(seen)] == seen  # asking again changes nothing
    assert again[len(seen) : 2 * len(seen)] != seen  # the next epoch has another order


def test_the_batch_of_a_step_depends_on_seed_and_step_alone() -> None:
    first, second, other = packed(3), packed(3), packed(4)
    first.at(0), first.at(1)
    a, b, c = (text.at(17).inputs for text in (first, second, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["input_ids"].tolist() != c["input_ids"].tolist()


def test_words_of_packed_pieces_are_masked_apart() -> None:
    """Whole words of two tokens: if pieces shared word numbers, the words of all would be masked together."""
    text = packed(masking=Masking(MASK, SIZE, whole_words=True))
    alike = total = 0
    apart = packed()
    for step in range(5 * text.sampler.steps_per_epoch):
        batch, plain = text.at(step), apart.at(step)
        ids = plain.inputs["input_ids"].flatten()
        assert torch.equal(ids[batch.row_index], batch.targets)
        assert not set(batch.targets.tolist()) & {0, 2, 3}
        chosen = torch.zeros_like(ids).index_fill_(0, batch.row_index, 1).view(plain.inputs["input_ids"].shape)
        for row, mask in zip(chosen, plain.inputs["attention_mask"], strict=True):
            first, *others = [row[mask == number][1:3].tolist() for number in range(1, int(mask.max()) + 1)]
            alike += sum(first == other for other in others if first[0])
            total += sum(first[0] for _ in others)
    assert total > 20
    assert alike < total / 2


def test_a_step_has_fewer_rows_where_the_text_would_be_read_in_too_few_steps() -> None:
    for tokens in (1_000, 50_000, 400_000, 3_000_000):
        rows = rows_a_step(32, tokens, 128)
        steps = tokens / (rows * 128)
        assert rows == 32 or steps >= LEAST_STEPS or rows == 1
        assert rows in (1, 32) or tokens / ((rows + 1) * 128) < LEAST_STEPS  # no fewer than needed
    assert rows_a_step(32, 3_000_000, 128) == 32


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


@pytest.mark.parametrize(("labelled", "each"), [(300, 3), (3, 1), (3_190, 31)])
def test_every_step_has_as_many_labelled_texts_and_each_is_read_alike(labelled: int, each: int) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 3_200)
    sampler = Sampler(lengths, 32, 7, labelled=labelled)
    assert sampler.steps_per_epoch == 100
    steps = [sampler.at(step) for step in range(300)]
    assert {len(step) for step in steps} == {32}
    assert {int((step < labelled).sum()) for step in steps} == {each}
    read = np.bincount(np.concatenate(steps), minlength=3_200)
    for part, reads in zip((read[:labelled], read[labelled:]), np.split(sampler.reads, [labelled]), strict=True):
        assert np.ptp(part) <= 3  # an epoch reads each as often, or once more
        assert part.mean() == pytest.approx(300 * reads.mean())
    assert np.array_equal(sampler.at(250), steps[250])
    if each > 1:  # of few texts lengths cannot agree
        plain = Sampler(lengths, 32, 7)
        longest, before = (sum(lengths[each.at(step)].max() for step in range(300)) for each in (sampler, plain))
        assert longest < 1.07 * before


@pytest.mark.parametrize(("texts", "again"), [(2_049, 0.25), (320, 0.6), (33, 1), (5, 1)])
def test_even_steps_differ_by_one_text_at_most_and_texts_meet_others_in_every_epoch(texts: int, again: float) -> None:
    lengths = np.random.default_rng(0).integers(5, 60, texts)
    sampler = Sampler(lengths, 32, 7, even=True)
    epochs = [
        [sampler.at(step) for step in range(e, e + sampler.steps_per_epoch)] for e in (0, sampler.steps_per_epoch)
    ]
    for steps in epochs:
        assert sorted(np.concatenate(steps).tolist()) == list(range(texts))
        assert max(map(len, steps)) - min(map(len, steps)) <= 1
    assert sampler.reads.tolist() == pytest.approx([1 / sampler.steps_per_epoch] * texts)
    mates = [{(int(a), int(b)) for step in steps for a in step for b in step if a < b} for steps in epochs]
    assert len(mates[0] & mates[1]) <= again * len(mates[0])


def test_a_subset_keeps_the_order_and_has_rows_of_every_label_of_a_sorted_file() -> None:
    rows = [(label, i) for label in range(4) for i in range(250)]
    found = subset(rows, 100, seed=1)
    assert {label for label, _ in found} == {0, 1, 2, 3}
    assert found == sorted(set(found))
    assert len(found) == 100
    assert found == subset(rows, 100, seed=1) != subset(rows, 100, seed=2)
    assert subset("abc", 5) == ["a", "b", "c"]
