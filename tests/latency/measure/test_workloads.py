import numpy as np
import pytest
from tokenizers import Tokenizer

from latency.measure.interleave import from_texts
from serve.errors import BadInput

TEXTS = ["book a table", "play jazz", "", "for two in Oslo tomorrow"]


def test_every_row_is_full_of_real_tokens_between_its_special_ones(tokenizer: Tokenizer) -> None:
    workload = from_texts(TEXTS, tokenizer, batch=3, tokens=6)
    assert workload.input_ids.dtype == np.int64
    assert workload.input_ids.tolist() == [
        [2, 4, 5, 6, 12, 3],  # book a table play
        [2, 7, 8, 9, 10, 3],  # for two in Oslo
        [2, 4, 5, 6, 12, 3],  # the texts ran out
    ]
    assert (workload.batch, workload.tokens, workload.name) == (3, 6, "batch 3 x 6 tokens")


def test_a_tokenizer_that_pads_or_truncates_adds_no_padding_and_is_left_as_it_was(tokenizer: Tokenizer) -> None:
    expected = from_texts(TEXTS, tokenizer, batch=2, tokens=9).input_ids
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(max_length=10)
    np.testing.assert_array_equal(from_texts(TEXTS, tokenizer, batch=2, tokens=9).input_ids, expected)
    assert (tokenizer.padding or {})["length"] == 12
    assert (tokenizer.truncation or {})["max_length"] == 10


def test_a_tokenizer_without_special_tokens_fills_the_whole_row(tokenizer: Tokenizer) -> None:
    bare = Tokenizer(tokenizer.model)
    bare.pre_tokenizer = tokenizer.pre_tokenizer
    assert from_texts(TEXTS, bare, batch=1, tokens=4).input_ids.tolist() == [[4, 5, 6, 12]]


def test_no_text_no_room_and_no_rows_are_refused(tokenizer: Tokenizer) -> None:
    for texts, batch, tokens, named in (
        (["", "  "], 1, 8, "without any token"),
        (TEXTS, 1, 2, "3 or more"),
        (TEXTS, 0, 8, "batch 0"),
    ):
        with pytest.raises(BadInput, match=named):
            from_texts(texts, tokenizer, batch, tokens)
