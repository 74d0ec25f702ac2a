"""Ways from tokens' tags to entities: beside transformers' own pipeline and seqeval's strict reading, which are told apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.scheme import IOB2, IOBES, Entities
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from serve.text.answers import softmax
from serve.text.labels import bio_tags, entity_labels, schemes, split_tag
from serve.text.spans import Aggregation, decode_spans, strict_runs, tag_runs, words

TAGS = bio_tags(["city", "name"])
SEQUENCES = {
    "IOB2": (IOB2, [f"{prefix}-{label}" for prefix in "BI" for label in "ab"]),
    "IOBES": (IOBES, [f"{prefix}-{label}" for prefix in "BIES" for label in "ab"]),
}


def pieces() -> Tokenizer:
    """Every letter a piece."""
    letters = "abcdefgh"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


@pytest.mark.parametrize("aggregation", ["first", "average", "max"])
def test_the_aggregations_are_those_of_transformers(aggregation: Aggregation) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        id2label=dict(enumerate(TAGS)),
        label2id={tag: index for index, tag in enumerate(TAGS)},
    )
    model = transformers.BertForTokenClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=2.0)  # tags that differ from piece to piece
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces(), unk_token="[UNK]")  # noqa: S106
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")
    random = np.random.default_rng(0)
    found: list[list[tuple[int, int, str]]] = []
    for _ in range(12):
        text = " ".join("".join(random.choice([*"abcdefgh"], random.integers(1, 5))) for _ in range(12))
        encoding = pieces().encode(text)
        with torch.no_grad():
            logits = model(torch.tensor([encoding.ids])).logits[0].numpy()
        spans = decode_spans(
            words(text, encoding.offsets, encoding.word_ids), softmax(logits), TAGS, aggregation=aggregation
        )
        expected = theirs(text, aggregation_strategy=aggregation)
        assert [span[:3] for span in spans] == [(e["start"], e["end"], e["entity_group"]) for e in expected]
        np.testing.assert_allclose([span.score for span in spans], [e["score"] for e in expected], rtol=1e-4)
        found.append([span[:3] for span in spans])
    assert sum(map(len, found)) > 20


def test_the_tokens_of_a_word_are_distinguishable_by_the_three() -> None:
    text, encoding, tags = "ab c", pieces().encode("ab c"), ["O", "B-city", "I-city"]  # [CLS] a ##b c [SEP]
    probabilities = np.array([[1, 0, 0], [0.6, 0.4, 0], [0.1, 0.85, 0.05], [0.05, 0.0, 0.95], [1, 0, 0]])

    def spans(aggregation: Aggregation) -> list[tuple[int, int, float]]:
        found = decode_spans(
            words(text, encoding.offsets, encoding.word_ids), probabilities, tags, aggregation=aggregation
        )
        return [(span.start, span.end, round(span.score, 6)) for span in found]

    assert spans("first") == [(3, 4, 0.95)]
    assert spans("strict") == []
    assert spans("average") == [(0, 4, round((0.625 + 0.95) / 2, 6))]
    assert spans("max") == [(0, 4, 0.9)]


def test_with_constraints_the_words_tags_are_chosen_together() -> None:
    text, encoding, tags = "ab c", pieces().encode("ab c"), ["O", "B-city", "I-city"]
    probabilities = np.array([[1, 0, 0], [0.6, 0.4, 0], [0, 1, 0], [0.05, 0.0, 0.95], [1, 0, 0]])
    (span,) = decode_spans(words(text, encoding.offsets, encoding.word_ids), probabilities, tags, constrained=True)
    assert span[:3] == (0, 4, "city")
    assert span.score == pytest.approx((0.4 + 0.95) / 2)


def test_with_constraints_a_word_keeps_to_the_token_that_is_surest() -> None:
    text, encoding, tags = "ab", pieces().encode("ab"), ["O", "B-city", "I-city"]
    probabilities = np.array([[1, 0, 0], [0.6, 0.4, 0], [0.01, 0.04, 0.95], [1, 0, 0]])
    (span,) = decode_spans(
        words(text, encoding.offsets, encoding.word_ids), probabilities, tags, aggregation="max", constrained=True
    )
    assert span == (0, 2, "city", pytest.approx(0.04))


@pytest.mark.parametrize("scheme", SEQUENCES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_strict_runs_agree_with_seqevals_strict_reading(scheme: str, data: st.DataObject) -> None:
    reading, names = SEQUENCES[scheme]
    tags = data.draw(st.lists(st.sampled_from(["O", *names]), max_size=12))
    theirs = [(each.start, each.end - 1, each.tag) for each in Entities([tags], reading).entities[0]]
    assert strict_runs(tags, schemes(("O", *names))) == theirs


@settings(max_examples=100, deadline=None)
@given(tags=st.lists(st.sampled_from(["O", "a", "b"]), max_size=12))
def test_in_tags_without_prefixes_nothing_is_broken(tags: list[str]) -> None:
    assert strict_runs(tags, schemes(("O", "a", "b"))) == tag_runs(tags)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (("O", "B-a", "I-a"), {"a": "BIO"}),
        (("O", "B-a"), {"a": "BIO"}),
        (("O", "B-a", "I-a", "L-a", "U-a", "U-b"), {"a": "BIOES", "b": "BIOES"}),
        (("O", "I-a", "b"), {"a": "IO", "b": "IO"}),
        (("O", "B-a", "I-a", "I-b"), {"a": "BIO", "b": "IO"}),
    ],
)
def test_the_scheme_is_found_from_the_tags(tags: tuple[str, ...], found: dict[str, str]) -> None:
    assert schemes(tags) == found


def test_tags_come_in_one_order_whatever_the_labels_order() -> None:
    assert bio_tags(["city", "airline", "city"]) == ("O", "B-airline", "I-airline", "B-city", "I-city")
    assert bio_tags([]) == ("O",)


@pytest.mark.parametrize(
    ("tag", "parts"),
    [
        ("O", ("O", "")),
        ("B-city", ("B", "city")),
        ("B-order-date", ("B", "order-date")),
        ("L-city", ("E", "city")),
        ("U-city", ("S", "city")),
        ("city", ("I", "city")),
        ("first-name", ("I", "first-name")),
    ],
)
def test_a_tag_is_a_prefix_and_a_label(tag: str, parts: tuple[str, str]) -> None:
    assert split_tag(tag) == parts


def test_the_labels_of_tags_are_sorted_and_each_once() -> None:
    assert entity_labels(["O", "I-city", "B-city", "name"]) == ("city", "name")
