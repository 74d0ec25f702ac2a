import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compress.corpus import CorpusText, Masking, Piece, chunks, masked, masking_of
from compress.losses import IGNORED
from serve.encoding import load_tokenizer
from serve.errors import BadInput

MASK, SIZE = 4, 60


def pieces(count: int = 40) -> list[Piece]:
    """Two special tokens around 3 to 12 tokens, of which each second continues the word before it."""
    made = []
    for i in range(count):
        length = 3 + i % 10
        ids = np.random.default_rng(i).integers(5, SIZE, length)
        made.append(Piece(np.array([2, *ids, 3]), np.array([-1, *(np.arange(length) // 2), -1])))
    return made


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), whole=st.booleans())
def test_only_words_are_hidden_and_what_is_asked_is_what_stood_there(seed: int, whole: bool) -> None:
    text = CorpusText(pieces(), 0, 8, seed, Masking(MASK, SIZE, whole))
    plain = CorpusText(pieces(), 0, 8, seed)
    for step in range(3):
        batch, before = text.at(step), plain.at(step)
        ids, shown = before.inputs["input_ids"].flatten(), batch.inputs["input_ids"].flatten()
        assert (batch.inputs["attention_mask"] == before.inputs["attention_mask"]).all()
        assert (ids[batch.row_index] == batch.targets).all()
        assert not set(ids[batch.row_index].tolist()) & {0, 2, 3}
        untouched = np.setdiff1d(np.arange(len(ids)), batch.row_index.numpy())
        assert (ids[untouched] == shown[untouched]).all()
        assert len(batch.row_index) > 0


def test_the_shares_are_berts() -> None:
    ids, words = np.tile(np.arange(5, 55), (400, 1)), np.tile(np.arange(50), (400, 1))
    wanted, shown = masked(ids, words, Masking(MASK, SIZE), np.random.default_rng(0))
    chosen = wanted != IGNORED
    assert chosen.mean() == pytest.approx(0.15, abs=0.01)
    assert (shown[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.02)
    kept = shown[chosen] == ids[chosen]
    assert kept.mean() == pytest.approx(0.1, abs=0.02)


def test_whole_words_are_hidden_whole() -> None:
    ids, words = np.tile(np.arange(5, 55), (50, 1)), np.tile(np.arange(50) // 3, (50, 1))
    wanted, _ = masked(ids, words, Masking(MASK, SIZE, whole_words=True), np.random.default_rng(0))
    for row, numbers in zip(wanted != IGNORED, words, strict=True):
        for word in range(17):
            assert len(set(row[numbers == word].tolist())) == 1


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    first, second = (CorpusText(pieces(), 0, 8, 3, Masking(MASK, SIZE)) for _ in range(2))
    first.at(0), first.at(1)
    for a, b in zip(first.at(7).inputs.values(), second.at(7).inputs.values(), strict=True):
        assert (a == b).all()


def test_a_long_text_is_cut_into_pieces_that_lose_nothing(tiny_teacher) -> None:
    tokenizer: Tokenizer = load_tokenizer(tiny_teacher, 64)
    long = " ".join(["where is my lovely kettle"] * 12)
    made = chunks([long, "", "   ", "thank you"], tokenizer, 16)
    whole = [i for i in tokenizer.encode(long).ids if i not in (2, 3)]
    assert [i for piece in made[:-1] for i in piece.ids.tolist() if i not in (2, 3)] == whole[: len(whole)]
    assert all(len(piece.ids) <= 16 for piece in made)
    assert all((piece.words >= 0).sum() == len(piece.ids) - 2 for piece in made)
    assert len(made[-1].ids) == 4


def test_a_tokenizer_without_a_mask_token_is_refused(tiny_teacher) -> None:
    tokenizer = load_tokenizer(tiny_teacher, 64)
    assert masking_of(tokenizer, SIZE).mask_id == 4
    plain = Tokenizer.from_str(tokenizer.to_str().replace("[MASK]", "[HIDE]"))
    with pytest.raises(BadInput, match="no mask token"):
        masking_of(plain, SIZE)
