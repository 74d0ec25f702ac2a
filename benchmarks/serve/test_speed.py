"""Time the steps of an answer: tokenising, padding, a call of the model with 1 and 32 texts, and decoding.

    pytest benchmarks/serve --benchmark-only -o addopts=

The model is a 3x384 tagger with random weights, on one thread. Each benchmark checks its result. `benchmarks/against_ref.py`
compares them with those of another commit.
"""

from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Encoding, Tokenizer

from serve.model.session import Session, padded
from serve.text.labels import bio_tags
from serve.text.spans import decode_spans, words
from serve.text.tokenizer import load_tokenizer

TEXTS = [
    "please book a table for two in the old town tomorrow evening at eight",
    "the kettle from order 4471-220 is broken, call me at +48 601 555 010",
    "will it rain in Trondheim on Friday?",
    "play something by that quartet from the second half of the nineties",
] * 8
TAGS = list(bio_tags(["city", "date", "order", "person", "phone"]))
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.onnx and tokenizer.json."""
    torch = pytest.importorskip("torch")
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, BertForTokenClassification

    from export.graph.exporter import export_graph

    folder = tmp_path_factory.mktemp("model")
    pieces = sorted({part for text in TEXTS for character in text.lower() for part in (character, f"##{character}")})
    words = sorted({word for text in TEXTS for word in text.lower().split()})
    vocabulary = {
        piece: i for i, piece in enumerate(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, *pieces]))
    }
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1024,
        num_labels=len(TAGS),
    )
    BertForTokenClassification(config).save_pretrained(folder)
    export_graph(folder, folder / "model.onnx", 128)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model, 128)


@pytest.fixture(scope="session")
def session(model: Path) -> Session:
    return Session(model / "model.onnx", 1)


@pytest.fixture(scope="session")
def encodings(tokenizer: Tokenizer) -> list[Encoding]:
    return list(tokenizer.encode_batch(TEXTS))


def test_tokenise_one_text(benchmark: BenchmarkFixture, tokenizer: Tokenizer) -> None:
    encoding = benchmark(tokenizer.encode, TEXTS[0])
    assert encoding.tokens[0] == "[CLS]"


def test_pad_32_texts(benchmark: BenchmarkFixture, encodings: list[Encoding]) -> None:
    feeds = benchmark(padded, encodings, INPUTS, max(map(len, encodings)))
    assert feeds["attention_mask"].sum() == sum(map(len, encodings))


@pytest.mark.parametrize("texts", [1, 32])
def test_call_the_model(benchmark: BenchmarkFixture, session: Session, encodings: list[Encoding], texts: int) -> None:
    rows = benchmark(session.run, encodings[:texts])
    np.testing.assert_array_equal(rows[0], session.run(encodings[:1])[0])


def test_decode_the_spans_of_one_text(benchmark: BenchmarkFixture, session: Session, encodings: list[Encoding]) -> None:
    encoding = encodings[1]
    logits = session.run([encoding])[0]
    spans = benchmark(lambda: decode_spans(words(TEXTS[1], encoding.offsets, encoding.word_ids), logits, TAGS))
    assert all(0 <= span.start < span.end <= len(TEXTS[1]) for span in spans)
