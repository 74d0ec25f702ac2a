"""Generation by UniLM's mask: who sees whom, the kept keys and values, and the search for the likeliest target."""

import numpy as np
import pytest
import torch
from encoders import VOCABULARY, encoder

from compress.data.corpus import Masking
from compress.data.text_pairs import SOURCE, TARGET, MaskedTargets, TokenPair
from compress.models.generator import FAMILIES_THAT_GENERATE
from compress.models.unilm import asked_words, next_logits, read_sources, sees

MASK, END = 4, 3


def pairs(lengths: list[tuple[int, int]], seed: int = 0) -> list[TokenPair]:
    generator = np.random.default_rng(seed)
    return [
        TokenPair(
            np.append(generator.integers(5, VOCABULARY, s - 1), END),
            np.append(generator.integers(5, VOCABULARY, t - 1), END),
        )
        for s, t in lengths
    ]


def test_the_source_sees_itself_and_the_target_what_is_before_it():
    kinds = torch.tensor([[SOURCE, SOURCE, TARGET, TARGET, 0]])
    assert sees(kinds)[0].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES_THAT_GENERATE)
def test_tokens_from_kept_keys_are_those_of_one_pass_over_everything(kind, segments):
    """Each next token of targets of two texts of other lengths, two beams each, against the training's forward pass."""
    model = encoder(kind, "ForMaskedLM", type_vocab_size=segments, initializer_range=0.3)
    texts = pairs([(9, 5), (4, 5)])
    beams = 2
    generator = np.random.default_rng(1)
    targets = generator.integers(5, VOCABULARY, (4, 5))  # rows: both beams of a text side by side
    ids = torch.zeros(2, 9, dtype=torch.long)
    for row, pair in enumerate(texts):
        ids[row, : len(pair.source)] = torch.from_numpy(pair.source)
    there = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    with torch.no_grad():
        kept = read_sources(model, ids, there, beams)
        for length in range(5):
            last = None if length == 0 else torch.from_numpy(targets[:, length - 1])
            found = next_logits(model, kept, last, MASK)
            for row in range(4):
                source = texts[row // beams].source
                whole = np.concatenate([source, targets[row, :length], [MASK]])
                inputs = {
                    "input_ids": torch.from_numpy(whole)[None],
                    "attention_mask": torch.tensor([[SOURCE] * len(source) + [TARGET] * (length + 1)]),
                    "token_type_ids": torch.tensor([[0] * len(source) + [1] * (length + 1)]),
                    "position_ids": torch.arange(len(whole))[None],
                }
                expected = asked_words(model, inputs, torch.tensor([len(whole) - 1])).logits(slice(None))[0]
                torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_reordered_beams_go_on_from_the_rows_they_were_given():
    model = encoder("bert", "ForMaskedLM", initializer_range=0.3)
    ids = torch.from_numpy(pairs([(6, 2)])[0].source)[None]
    there = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        kept = read_sources(model, ids, there, 2)
        next_logits(model, kept, None, MASK)
        next_logits(model, kept, torch.tensor([7, 8]), MASK)
        kept.reorder(torch.tensor([1, 1]))
        both = next_logits(model, kept, torch.tensor([9, 9]), MASK)
        other = read_sources(model, ids, there, 1)
        next_logits(model, other, None, MASK)
        next_logits(model, other, torch.tensor([8]), MASK)
        alone = next_logits(model, other, torch.tensor([9]), MASK)
    torch.testing.assert_close(both, alone.expand_as(both), rtol=1e-4, atol=1e-5)


def test_masked_tokens_are_of_targets_alone_and_the_same_at_each_call():
    texts = MaskedTargets(pairs([(9, 6), (5, 12), (7, 1), (3, 4)]), 4, 7, Masking(MASK, VOCABULARY), 0)
    batch, again, later = texts.at(3), texts.at(3), texts.at(4)
    kinds = batch.inputs["attention_mask"].flatten()
    assert (kinds[batch.row_index] == TARGET).all()
    assert torch.equal(batch.inputs["input_ids"], again.inputs["input_ids"])
    assert not torch.equal(batch.inputs["input_ids"], later.inputs["input_ids"])
    assert {int(row) for row in batch.row_index // batch.inputs["input_ids"].shape[1]} == {0, 1, 2, 3}
    shown = batch.inputs["input_ids"].flatten()
    unasked = torch.ones(len(shown), dtype=torch.bool)
    unasked[batch.row_index] = False
    assert not (shown[unasked] == MASK).any()


def test_a_token_of_each_target_is_asked_for_however_short_it_is():
    texts = MaskedTargets(pairs([(5, 1)] * 8), 8, 0, Masking(MASK, VOCABULARY), 0)
    assert all(len(texts.at(step).row_index) == 8 for step in range(5))


def test_seven_tenths_of_the_targets_are_asked_for_and_eight_tenths_of_these_hidden():
    texts = MaskedTargets(pairs([(5, 30)] * 64), 64, 0, Masking(MASK, VOCABULARY), 0)
    asked = hidden = every = 0
    for step in range(20):
        batch = texts.at(step)
        asked += len(batch.row_index)
        hidden += int((batch.inputs["input_ids"] == MASK).sum())
        every += int((batch.inputs["attention_mask"] == TARGET).sum())
    assert asked / every == pytest.approx(0.7, abs=0.01)
    assert hidden / asked == pytest.approx(0.8, abs=0.02)
