"""What a bundle's tokenizer gives the model, and where it fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lookup_bundles import VOCABULARY, city_table, write_bundle, write_manifest, write_tokenizer
from starlette.testclient import TestClient

from serve.errors import BundleError
from serve.http.app import create_app
from serve.model.pipeline import Pipeline
from serve.settings import ServeSettings

# At the word that is left out of this pattern's matches, the search for one takes too many steps, and the tokenizer's library panics.
SLOW = {"type": "Split", "pattern": {"Regex": "(a*)*$"}, "behavior": "Isolated", "invert": False}
PANICS = "a" * 40 + "b"


@pytest.fixture
def with_tokenizer(bundle_copy: Path) -> Callable[..., Path]:
    """Makes a bundle whose tokenizer has these parts."""

    def make(**parts: object) -> Path:
        file = bundle_copy / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
        write_manifest(bundle_copy)
        return bundle_copy

    return make


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"model": {"type": "BPE", "vocab": {"h": 0, "e": 1, "he": 2}, "merges": ["h e"], "continuing_subword_prefix": "####"}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_panics_at_once_is_refused(
    with_tokenizer: Callable[..., Path], parts: dict[str, object]
) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        Pipeline(with_tokenizer(**parts))


def test_a_tokenizer_that_panics_at_every_text_is_the_bundles_fault(with_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match="the tokenizer of 'cities' failed at this text"):
        Pipeline(with_tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}))


def test_a_text_at_which_the_tokenizer_panics_fails_alone(with_tokenizer: Callable[..., Path]) -> None:
    blanks = {"type": "WhitespaceSplit"}
    bundle = with_tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [blanks, SLOW]})
    assert answers(bundle, ["rome", PANICS]) == [200, 500, 200]


def test_a_word_that_a_vocabulary_without_unknown_words_lacks_fails_alone(with_tokenizer: Callable[..., Path]) -> None:
    model = {
        "type": "WordLevel",
        "vocab": {"[CLS]": 2, "[SEP]": 3, "rome": 4, "shape": 5, "warm": 6},
        "unk_token": "[UNK]",
    }
    added = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for number, text in ((2, "[CLS]"), (3, "[SEP]"))]  # fmt: skip
    assert answers(with_tokenizer(model=model, added_tokens=added), ["rome", "oslo"]) == [200, 500, 200]


def test_a_tokenizer_with_dropout_gives_equal_texts_the_same_tokens(with_tokenizer: Callable[..., Path]) -> None:
    vocabulary = {"r": 4, "o": 5, "m": 6, "e": 7, "ro": 8, "me": 9, "rome": 10, "[UNK]": 1}
    merges = [["r", "o"], ["m", "e"], ["ro", "me"]]
    model = {"type": "BPE", "dropout": 0.5, "unk_token": "[UNK]", "vocab": vocabulary, "merges": merges}
    tokenizer = Pipeline(with_tokenizer(model=model, post_processor=None, added_tokens=[])).tokenizer
    assert {tuple(tokenizer.encode("rome").ids) for _ in range(50)} == {(10,)}


def answers(bundle: Path, texts: list[str]) -> list[int]:
    """The status for each text, then for the first one again, from one worker process."""
    app = create_app([bundle], ServeSettings(processes=1))
    with TestClient(app, raise_server_exceptions=False) as client:
        asked = [client.post("/v1/entities", json={"text": text}) for text in [*texts, texts[0]]]
    return [answer.status_code for answer in asked]


def test_a_special_token_without_a_row_in_the_embedding_is_read_as_characters(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "cities", city_table())
    write_tokenizer(bundle, special=["[USER]"])
    (bundle / "config.json").write_text(json.dumps({"vocab_size": len(VOCABULARY)}))
    write_manifest(bundle)
    pipeline = Pipeline(bundle)
    for texts in (["[USER] to rome", "oslo"], ["[USER] [USER]"]):
        pipeline(texts)
    (found,) = pipeline("[USER] to rome")["entities"]
    assert (found["start"], found["end"], found["label"]) == (10, 14, "city")
