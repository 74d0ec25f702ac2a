"""Where data came as words, a span that a model finds counts as the words that it touches: scores are conlleval's."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lookup_bundles import city_table, write_bundle

import stillroom
from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.labelled_files import read_examples
from compress.data.tags import from_tags
from compress.evaluation.metrics import ENTITY_F1, scored_spans, widened
from compress.tasks import TOKEN_CLASSIFICATION
from serve.text.labels import bio_tags
from serve.text.spans import Span
from serve.text.tokenizer import load_tokenizer

LABELS = bio_tags(["city", "item"])
WORDS = st.sampled_from(
    ["lamp", "U.S.", "(Oslo)", "new york", "10\u00a0000", "x-ray", "'s", "o'er", "a  b", " lamp", ",", "東京"]
)


def tag_of_each_word(words: list[str], spans: list[Span]) -> list[str]:
    """A tag for each word, as a file for conlleval has it: that of the first span that touches the word."""
    tags, at = [], 0
    last: Span | None = None
    for word in words:
        span = next((span for span in spans if span.start < at + len(word) and span.end > at), None)
        tags.append("O" if span is None else f"{'I' if span is last else 'B'}-{span.label}")
        last, at = span, at + len(word) + 1
    return tags


def conlleval(tags: list[str]) -> set[tuple[int, int, str]]:
    """(first, last, label) of the chunks of `tags`, all of which begin with `B`."""
    found: list[tuple[int, int, str]] = []
    for at, tag in enumerate(tags):
        if tag[0] == "B":
            found.append((at, at, tag[2:]))
        elif tag[0] == "I":
            found[-1] = (found[-1][0], at, tag[2:])
    return {*found}


@given(words=st.lists(WORDS, min_size=1, max_size=8), seed=st.integers(0, 2**31))
def test_spans_count_as_conlleval_counts_the_tags_of_words(tokenizer_folder: Path, words: list[str], seed: int) -> None:
    chance = np.random.default_rng(seed)
    gold_tags = tag_of_each_word(words, [])  # all outside, then entities of one word
    gold_tags = [f"B-{chance.choice(['city', 'item'])}" if chance.random() < 0.3 else tag for tag in gold_tags]
    example = from_tags(words, gold_tags)
    encoded = TOKEN_CLASSIFICATION.encode([example], load_tokenizer(tokenizer_folder, 64), LABELS)
    logits = [chance.normal(size=(len(encoded.rows[0]), len(LABELS))).astype(np.float32)]
    spans = next(scored_spans(encoded, logits))
    right, said, there = ENTITY_F1.counts(
        [TOKEN_CLASSIFICATION.gold_of(example)], encoded.task.predictions(encoded, logits)
    )[0]
    ours, theirs = conlleval(tag_of_each_word(words, spans)), conlleval(gold_tags)
    assert (right, said, there) == (len(ours & theirs), len(ours), len(theirs))


def test_texts_that_were_given_whole_keep_the_spans_of_the_model(tokenizer_folder: Path) -> None:
    whole, words = Example("x-ray", entities=()), from_tags(["x-ray"], ["O"])
    tokenizer = load_tokenizer(tokenizer_folder, 64)

    def said(encoded: Encoded) -> list[object]:
        logits = [np.eye(len(LABELS), dtype=np.float32)[[1, *[0] * (len(rows) - 1)]] for rows in encoded.rows]
        return list(encoded.task.predictions(encoded, logits))

    of_whole, of_words = {(0, 1, "city")}, {(0, 5, "city")}
    both = TOKEN_CLASSIFICATION.encode([whole, words], tokenizer, LABELS)
    assert said(both) == [of_whole, of_words]
    assert said(both.take([1, 0])) == [of_words, of_whole]
    assert said(both[:1] + both[1:]) == [of_whole, of_words]
    assert widened([(2, 3, "x")], "a b c", (1, 3)) == {(0, 5, "x")}


def test_a_bundle_is_scored_on_published_words_and_answers_as_before(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "cities", city_table())
    row = {"tokens": ["to", "rome-based"], "tags": ["O", "B-city"]}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert stillroom.evaluate(str(bundle), tmp_path / "test.jsonl")["value"] == 1.0
    (example,) = read_examples(tmp_path / "test.jsonl", TOKEN_CLASSIFICATION)
    whole = {"text": example.text, "entities": [{"start": 3, "end": 13, "label": "city"}]}
    (tmp_path / "test.jsonl").write_text(json.dumps(whole) + "\n", encoding="utf-8")
    assert stillroom.evaluate(str(bundle), tmp_path / "test.jsonl")["value"] == 0.0
    ((found,),) = [answer["entities"] for answer in stillroom.Pipeline(bundle)([example.text])]
    assert (found["start"], found["end"]) == (3, 7)
