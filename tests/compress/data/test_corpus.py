import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from compress.data.corpus import CorpusFile, CorpusText, Masking, Piece, chunks, masked, masking_of, tokenised
from compress.data.encoded import IGNORED
from compress.data.examples import Example, examples_fingerprint
from compress.data.texts import TextFiles
from serve.errors import BadInput
from serve.text.tokenizer import load_tokenizer

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
def test_only_words_are_masked_and_targets_are_the_original_tokens(seed: int, whole: bool) -> None:
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


def test_masking_uses_berts_shares() -> None:
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


LINES = ["where is my lovely kettle " * (1 + i % 9) for i in range(300)] + ["", "  ", "thank you"]


def in_file(folder: Path, teacher: Path) -> CorpusFile:
    return tokenised(LINES, load_tokenizer(teacher, 64), 16, folder, fingerprint="lines")


@pytest.mark.parametrize("whole_words", [False, True])
def test_batches_from_a_file_equal_those_from_memory(tiny_teacher: Path, tmp_path: Path, whole_words: bool) -> None:
    tokenizer = load_tokenizer(tiny_teacher, 64)
    held, read = chunks(LINES, tokenizer, 16), in_file(tmp_path / "corpus", tiny_teacher)
    assert len(read) == len(held) > 600
    masking = Masking(MASK, tokenizer.get_vocab_size(), whole_words)
    ours, theirs = (CorpusText(pieces, 0, 8, 3, masking) for pieces in (read, held))
    assert ours.tokens_per_step == theirs.tokens_per_step
    for step in (0, 1, 77, ours.sampler.steps_per_epoch - 1, ours.sampler.steps_per_epoch):
        a, b = ours.at(step), theirs.at(step)
        assert ours.sampler.tokens_at(step) == theirs.sampler.tokens_at(step)
        pairs = [(a.row_index, b.row_index), (a.targets, b.targets), *((a.inputs[n], b.inputs[n]) for n in b.inputs)]
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)
    assert np.array_equal(np.unique(np.concatenate(ours.ids)), np.unique(np.concatenate(theirs.ids)))


def test_a_file_of_pieces_is_a_sequence_of_them(tiny_teacher: Path, tmp_path: Path) -> None:
    held, read = chunks(LINES, load_tokenizer(tiny_teacher, 64), 16), in_file(tmp_path / "corpus", tiny_teacher)
    for i in (0, 255, 256, 511, 513, -1):
        assert (read[i].ids.tolist(), read[i].words.tolist()) == (held[i].ids.tolist(), held[i].words.tolist())
    assert [piece.ids.tolist() for piece in read[254:259]] == [piece.ids.tolist() for piece in held[254:259]]
    with pytest.raises(IndexError):
        read[len(held)]


def test_tokenised_text_is_reused_while_its_inputs_are_the_same(tiny_teacher: Path, tmp_path: Path) -> None:
    tokenizer, read = load_tokenizer(tiny_teacher, 64), []

    def texts() -> Iterator[str]:
        read.append(1)
        yield from LINES

    for longest, mark, times in ((16, "a", 1), (16, "a", 1), (12, "a", 2), (12, "b", 3)):
        made = tokenised(texts(), tokenizer, longest, tmp_path / "corpus", fingerprint=mark)
        assert len(read) == times
        assert made.lengths.max() <= longest
    lower = type(tokenizer).from_str(tokenizer.to_str().replace("kettle", "kittle"))
    tokenised(texts(), lower, 12, tmp_path / "corpus", fingerprint="b")
    assert len(read) == 4


def test_an_interrupted_corpus_is_made_anew(tiny_teacher: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_teacher, 64)

    def dying() -> Iterator[str]:
        yield from LINES * 3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenised(dying(), tokenizer, 16, tmp_path / "corpus", fingerprint="lines")
    assert not (tmp_path / "corpus").exists()
    assert len(in_file(tmp_path / "corpus", tiny_teacher)) == len(chunks(LINES, tokenizer, 16))
    assert not (tmp_path / "corpus.partial").exists()


def test_two_processes_tokenise_a_text_once(tiny_teacher: Path, tmp_path: Path) -> None:
    read = []

    def texts() -> Iterator[str]:
        read.append(1)
        time.sleep(0.05)  # the other one comes while it is made
        yield from LINES

    def make(_: int) -> int:
        return len(tokenised(texts(), load_tokenizer(tiny_teacher, 64), 16, tmp_path / "corpus", fingerprint="lines"))

    with ThreadPoolExecutor(2) as pool:
        lengths = list(pool.map(make, range(2)))
    assert lengths[0] == lengths[1] > 600
    assert len(read) == 1


def test_a_folder_with_other_things_in_it_is_left_alone(tiny_teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadInput, match="holds no tokenised text; nothing was written"):
        in_file(tmp_path / "mine", tiny_teacher)
    assert (tmp_path / "mine" / "thesis.tex").is_file()


def test_a_corpus_of_words_that_no_vocabulary_of_two_bytes_holds_keeps_its_ids(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = tokenised(["w69999 w3 w65536"], tokenizer, 8, tmp_path / "corpus", fingerprint="")
    assert made[0].ids.tolist() == [69_999, 3, 65_536]
    assert made.ids_in_use.tolist() == [3, 65_536, 69_999]


def test_a_corpus_of_files_is_iterated_again(tiny_teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one kettle\n\n two \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n', encoding="utf-8")
    texts = TextFiles((tmp_path / "a.txt", tmp_path / "b.jsonl"))
    assert list(texts) == list(texts) == ["one kettle", "two", "three"]
    mark = examples_fingerprint(map(Example, texts))
    made = tokenised(texts, load_tokenizer(tiny_teacher, 64), 16, tmp_path / "corpus", fingerprint=mark)
    assert len(made) == 3
