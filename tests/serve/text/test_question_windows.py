"""Windows over contexts, and the likeliest answer, against a search of all stretches."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_bundles import VOCABULARY, write_tokenizer
from tokenizers import Encoding, Tokenizer

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
def test_the_answer_is_the_best_of_all_stretches_of_whole_words(
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
