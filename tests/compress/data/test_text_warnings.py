"""What is said of texts that a model does not read as they are: cut ones, and words that its vocabulary lacks."""

from pathlib import Path

import pytest
from small_task import make_tokenizer
from tokenizers import Tokenizer

from compress.data.corpus import tokenised
from compress.data.encoded import text_warnings
from compress.data.examples import Entity, Example
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from serve.text.tokenizer import load_tokenizer

RUSSIAN = ["привет мир", "лампа и чайник"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words") / "model"
    make_tokenizer(folder)
    return load_tokenizer(folder, 12)


def test_words_that_the_vocabulary_lacks_are_told_as_a_share_of_the_tokens(tokenizer: Tokenizer) -> None:
    examples = [Example(text, label="a") for text in RUSSIAN]
    encoded = TEXT_CLASSIFICATION.encode(examples, tokenizer, ("a",))
    (said,) = text_warnings(encoded, examples, 12, "train")
    assert said.startswith("56% of the tokens in train are unknown")  # 5 of 9
    known = [Example("where is the lamp", label="a")] * 9
    assert text_warnings(TEXT_CLASSIFICATION.encode(known, tokenizer, ("a",)), known, 12, "train") == []


def test_a_corpus_keeps_its_share_of_unknown_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for _ in range(2):  # written, and read again
        made = tokenised(RUSSIAN, tokenizer, 12, tmp_path / "russian", fingerprint="russian")
        assert made.unknown_share == pytest.approx(5 / 9)
    assert tokenised(["the lamp"], tokenizer, 12, tmp_path / "english", fingerprint="english").unknown_share == 0


def test_entities_behind_the_cut_are_told(tokenizer: Tokenizer) -> None:
    long = Example("the lamp " * 8 + "oslo", entities=(Entity(4, 8, "item"), Entity(72, 76, "city")))
    encoded = TOKEN_CLASSIFICATION.encode([long], tokenizer, ("O", "B-city", "I-city", "B-item", "I-item"))
    cut, unread = text_warnings(encoded, [long], 12, "long.jsonl")
    assert "longer than 12 tokens" in cut
    assert unread.startswith("1 of 2 entities in long.jsonl are behind the cut, and count as missed.")
