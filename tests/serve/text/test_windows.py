"""Windows over long texts, and over contexts behind a question."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_bundles import VOCABULARY, write_tokenizer
from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors

from serve.errors import BadInput
from serve.text.questions import (
    MOST_ANSWER_TOKENS,
    MOST_QUESTION_TOKENS,
    SHARED_TOKENS,
    QuestionRow,
    QuestionWindows,
    found_answer,
    question_rows,
    tokens_of_windows,
)
from serve.text.spans import words
from serve.text.windows import TokenRow, Windows, content, cut, deciding, marked_window, window_starts

texts = st.lists(st.sampled_from(["ab", "c", "😀", "é", "東京", "abcdeabcde", ","]), min_size=1, max_size=40).map(
    " ".join
)


def wordpiece() -> Tokenizer:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", *"abcdeé東京,", *(f"##{letter}" for letter in "abcde")]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, trim_offsets=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 257), ("<s>", 256), trim_offsets=False)
    return tokenizer


def bare() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


TOKENIZERS = {"wordpiece": wordpiece(), "byte-level": byte_level(), "no-special-tokens": bare()}


def columns(row: object) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in ("ids", "attention_mask", "type_ids", "offsets", "word_ids"))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(text=texts, pair=st.one_of(st.none(), texts), max_length=st.integers(6, 60))
def test_a_text_is_cut_as_its_tokenizer_cuts_it(name: str, text: str, pair: str | None, max_length: int) -> None:
    given_texts = (text,) if pair is None else (text, pair)
    cutting = Tokenizer.from_str(TOKENIZERS[name].to_str())
    cutting.enable_truncation(max_length)

    row = cut(TOKENIZERS[name].encode(*given_texts), max_length)

    assert columns(row) == columns(cutting.encode(*given_texts))
    assert isinstance(row, TokenRow) == bool(cutting.encode(*given_texts).overflowing)


@given(tokens=st.integers(2, 3_000), room=st.integers(1, 600))
def test_windows_cover_the_text_and_share_a_quarter(tokens: int, room: int) -> None:
    if tokens <= room:
        return
    starts = window_starts(tokens, room)
    steps = np.diff(starts)
    assert starts[0] == 0
    assert starts[-1] == tokens - room
    assert steps.min() > 0
    assert steps.max() <= room - room // 4
    assert (len(starts) - 2) * (room - room // 4) + room < tokens  # one fewer would not do


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(text=texts, max_length=st.integers(4, 30))
def test_a_window_is_a_part_of_the_texts_tokens_between_special_ones(name: str, text: str, max_length: int) -> None:
    encoding = TOKENIZERS[name].encode(text)
    if len(encoding) <= max_length:
        return
    windows = Windows(text, encoding, max_length)
    first, last = content(encoding)
    before, after = first, len(encoding) - last
    assert (before, after) == ((0, 0) if name == "no-special-tokens" else (1, 1))
    assert columns(windows.tokens) == columns(encoding)
    for window, start in enumerate(windows.starts):
        row = windows.row(window)
        assert len(row) == max_length
        for found, whole in zip(columns(row), columns(encoding), strict=True):
            assert isinstance(found, list)
            assert isinstance(whole, list)
            own = whole[first + start : first + start + max_length - before - after]
            assert found == [*whole[:first], *own, *whole[last:]]


@given(data=st.data(), room=st.integers(1, 24), tokens=st.integers(2, 90))
def test_a_stretch_is_decided_where_it_has_the_most_context(data: st.DataObject, room: int, tokens: int) -> None:
    if tokens <= room:
        return
    starts = window_starts(tokens, room)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=tokens, max_size=tokens))
    firsts = [first for first in np.cumsum([0, *lengths]).tolist() if first < tokens]
    lasts = [min(tokens, following) - 1 for following in [*firsts[1:], tokens]]

    found = deciding(starts, room, np.array(firsts), np.array(lasts))

    for first, last, window in zip(firsts, lasts, found.tolist(), strict=True):
        # The text's own edges cut off no context.
        context = {
            index: min(
                float("inf") if start == 0 else first - start,
                float("inf") if start + room == tokens else start + room - 1 - last,
            )
            for index, start in enumerate(starts)
            if start <= first and last < start + room
        }
        assert window == (max(context, key=context.__getitem__) if context else -1)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(text=texts, max_length=st.integers(8, 30))
def test_all_tokens_of_a_word_are_decided_by_one_window_that_holds_it(name: str, text: str, max_length: int) -> None:
    encoding = TOKENIZERS[name].encode(text)
    if len(encoding) <= max_length:
        return
    windows = Windows(text, encoding, max_length)
    room = max_length - len(encoding) + content(encoding)[1] - content(encoding)[0]
    for window in range(len(windows)):  # each says its own number of every token, and its place
        said = np.stack([np.full(max_length, window + 1), np.arange(max_length)], axis=1).astype(np.float32)
        merged = windows.take(window, said)
        assert (merged is None) == (window + 1 < len(windows))
    assert merged is not None
    first = content(encoding)[0]
    for word in words(text, encoding.offsets, encoding.word_ids):
        tokens = range(word.first_token, word.last_token + 1)
        deciders = {int(merged[token, 0]) - 1 for token in tokens}
        for token in tokens:  # the place in the window is the token's
            assert windows.starts[int(merged[token, 0]) - 1] == token - merged[token, 1]
        if len(tokens) <= room // 4:  # what any two windows share
            (window,) = deciders
            assert windows.starts[window] <= word.first_token - first
            assert word.last_token - first < windows.starts[window] + room
        assert min(deciders) >= 0


def test_classes_have_the_mean_of_the_windows_by_the_tokens_they_decide() -> None:
    text = "a b c d e a b c d e"
    windows = Windows(text, wordpiece().encode(text), 6)  # 4 own tokens: 0-3, 3-6, 6-9
    assert windows.starts == [0, 3, 6]
    logits = np.array([[1.0, 0.0], [0.0, 2.0], [4.0, 4.0]], dtype=np.float32)
    assert windows.take(0, logits[0]) is None
    assert windows.take(1, logits[1]) is None
    # 0-3 are the first one's (3 it shares, and has at its very edge in both: the earlier), 4-6 the second's, 7-9 the third's.
    np.testing.assert_allclose(windows.take(2, logits[2]), (4 * logits[0] + 3 * logits[1] + 3 * logits[2]) / 10)


@settings(max_examples=50, deadline=None)
@given(before=st.integers(0, 30), between=st.integers(0, 30), after=st.integers(0, 30))
def test_the_window_of_marked_parts_holds_them_in_its_middle(before: int, between: int, after: int) -> None:
    encoding = wordpiece().encode(" ".join(["a"] * before + ["b"] + ["a"] * between + ["b"] + ["a"] * after))
    marker, max_length = encoding.ids[1 + before], 20  # 18 own tokens
    if len(encoding) <= max_length:
        return
    if between + 2 > 18:
        with pytest.raises(BadInput, match=rf"span {between + 2} tokens, markers included, and the model reads 18"):
            marked_window(encoding, max_length, [marker])
        return
    row = marked_window(encoding, max_length, [marker])
    assert len(row) == max_length
    assert (row.ids[0], row.ids[-1]) == (1, 2)
    first, last = (place for place, token in enumerate(row.ids) if token == marker)
    assert last - first == between + 1
    left, right = first - 1, 18 - last
    if abs(left - right) > 1:  # only where the text ends
        assert row.offsets[1][0] == 0 or row.offsets[-2] == encoding.offsets[-2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    return made


WORDS = [word for word in VOCABULARY[4:] if not word.startswith("##")] + ["flys", "newer", "strange"]


@settings(max_examples=60)
@given(question=st.integers(1, 90), context=st.integers(0, 400), max_length=st.integers(12, 200), data=st.randoms())
def test_every_token_of_a_context_is_in_a_window_behind_the_question(
    tokenizer: Tokenizer, question: int, context: int, max_length: int, data: random.Random
) -> None:
    asked = " ".join(data.choices(WORDS, k=question))
    text = " ".join(data.choices(WORDS, k=context))
    encoding = tokenizer.encode(asked, text)
    rows = question_rows(encoding, text, max_length)
    own = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence == 1]
    asks = encoding.sequence_ids.count(0)
    kept = min(asks, MOST_QUESTION_TOKENS)
    if len(encoding) > max_length:
        kept = min(kept, max(1, (max_length - 3) // 2))
    seen: set[int] = set()
    for row in rows:
        assert len(row) <= max(max_length, kept + 4)
        assert row.ids[: kept + 2].tolist() == [*encoding.ids[: kept + 1], 3]
        assert row.first == kept + (2 if own else 3)
        assert row.ids[row.last :].tolist() == ([3] if own else [])
        places = own[row.start : row.start + row.last - row.first]
        assert row.ids[row.first : row.last].tolist() == [encoding.ids[place] for place in places]
        assert row.type_ids.tolist() == (
            [0] * row.first + [1] * (len(row) - row.first) if own else [0, *[0] * kept, 0, 1]
        )
        assert len(row.attention_mask) == len(row)
        seen |= set(places)
    assert seen == set(own)
    room = max_length - kept - 3
    if len(own) <= room:
        assert len(rows) == 1
    for before, after in pairwise(rows):
        assert before.start + before.last - before.first - after.start >= min(SHARED_TOKENS, max(1, room) // 2)
    assert tokens_of_windows(asks, len(own), max_length) == sum(map(len, rows))


def likeliest(context: str, encoding: Encoding, rows: list[QuestionRow], logits: list[np.ndarray]) -> tuple[float, str]:
    """The best sum of all stretches of whole words, less the least sum for none, and the stretch."""
    best, text = -math.inf, ""
    for row, of_row in zip(rows, logits, strict=True):
        first_token = encoding.sequence_ids.index(1) + row.start
        inside = slice(first_token, first_token + row.last - row.first)
        found = words(context, encoding.offsets[inside], encoding.word_ids[inside])
        for i, first in enumerate(found):
            for last in found[i:]:
                if last.last_token - first.first_token < MOST_ANSWER_TOKENS:
                    total = float(of_row[1 + first.first_token, 0]) + float(of_row[1 + last.last_token, 1])
                    if total > best:
                        best, text = total, context[first.start : last.end]
    return best - min(float(each[0].sum()) for each in logits), text


@settings(max_examples=40)
@given(context=st.integers(1, 60), max_length=st.integers(14, 40), seed=st.integers(0, 10**6))
def test_the_answer_is_the_best_of_all_stretches(
    tokenizer: Tokenizer, context: int, max_length: int, seed: int
) -> None:
    chance, generator = random.Random(seed), np.random.default_rng(seed)
    text = " ".join(chance.choices(WORDS, k=context))
    encoding = tokenizer.encode("fly to", text)
    rows = question_rows(encoding, text, max_length)
    logits = [generator.normal(0, 2, (len(row.places), 2)).astype(np.float32) for row in rows]
    found = found_answer(rows, logits)
    margin, expected = likeliest(text, encoding, rows, logits)
    assert text[found.start : found.end] == expected
    assert found.score == pytest.approx(1 / (1 + math.exp(-margin)), rel=1e-6)
    # Windows may come in any order.
    windows = QuestionWindows(rows)
    order = list(range(len(rows)))
    chance.shuffle(order)
    for place in order:
        whole = np.zeros((len(rows[place]), 2), dtype=np.float32)
        whole[rows[place].places] = logits[place]
        answer = windows.take(place, whole)
    assert answer == found


def test_a_context_without_a_word_has_no_answer(tokenizer: Tokenizer) -> None:
    for text in ("", "   "):
        rows = question_rows(tokenizer.encode("fly to", text), text, 32)
        assert len(rows) == 1
        found = found_answer(rows, [np.zeros((1, 2), dtype=np.float32)])
        assert (found.start, found.end, found.score) == (0, 0, 0)
