"""Text to rows and back, on a real tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import TEXT, TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.batches import TaskText, collate, part_of, rows_of
from compress.data.encoded import IGNORED, Encoded
from compress.data.examples import Entity, Example
from compress.distributed import ProcessShare
from compress.evaluation.metrics import ENTITY_F1, MICRO_F1, Prediction
from compress.evaluation.predictions import row_logits
from serve.text.labels import bio_tags
from serve.text.tokenizer import load_tokenizer

TAGS = bio_tags(["city", "item"])
MULTI_LABEL = TEXT.with_multi_label(True)
TEXTS = [
    Example("send the kettle to São Paulo 🚚 now", entities=(Entity(9, 15, "item"), Entity(19, 28, "city"))),
    Example("Ghent\tTurin\r\nBasel", entities=(Entity(0, 5, "city"), Entity(6, 11, "city"), Entity(13, 18, "city"))),
    Example("１２ lamps!", entities=(Entity(3, 8, "item"),)),
    Example("nothing here", entities=()),
]


def one_hot(targets: np.ndarray) -> np.ndarray:
    return np.eye(len(TAGS))[targets] * 10


def said(encoded: Encoded, logits: list[np.ndarray]) -> list[Prediction]:
    return list(encoded.task.predictions(encoded, logits))


@pytest.fixture(scope="module")
def encode(tokenizer_folder: Path) -> Callable[..., Encoded]:
    """Encodes examples of a task, of entities by default."""

    def made(
        examples: Sequence[Example], task: Any = TOKENS, names: Sequence[str] = TAGS, longest: int = 64
    ) -> Encoded:
        return task.encode(examples, load_tokenizer(tokenizer_folder, longest), names)  # type: ignore[no-any-return]

    return made


Encode = Callable[..., Encoded]


def test_the_targets_say_the_entities_that_they_came_from(encode: Encode) -> None:
    encoded = encode(TEXTS)
    found = said(encoded, [one_hot(targets) for targets in encoded.targets])
    assert found == [TOKENS.gold_of(example) for example in TEXTS]


words = st.lists(
    st.sampled_from(["kettle", "São", "日本", "naïve", "x9", "🚚", "l'eau", "１２", "A-B", "e\u0301te"]),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(words, st.data())
def test_entities_on_word_borders_survive_the_round_trip(encode: Encode, parts: list[str], data: st.DataObject) -> None:
    text = " ".join(parts)
    ends = np.cumsum([len(part) + 1 for part in parts]) - 1
    starts = [0, *(ends[:-1] + 1)]
    labels = data.draw(st.lists(st.sampled_from(["", "city", "item"]), min_size=len(parts), max_size=len(parts)))
    entities = tuple(Entity(int(s), int(e), label) for s, e, label in zip(starts, ends, labels, strict=True) if label)
    example = Example(text, entities=entities)
    encoded = encode([example])
    assert said(encoded, [one_hot(encoded.targets[0])]) == [TOKENS.gold_of(example)]


def test_labels_that_train_lacks_and_unlabelled_text_carry_no_target(encode: Encode) -> None:
    unknown = encode([Example("to Oslo", entities=(Entity(3, 7, "planet"),)), Example("to Oslo")])
    assert unknown.targets[0].tolist() == [0, IGNORED]
    assert set(unknown.targets[1].tolist()) == {IGNORED}
    assert encode([Example("x", label="new")], TEXT, ["old"]).targets[0].tolist() == [IGNORED]


def test_texts_past_the_limit_are_cut_and_counted(encode: Encode) -> None:
    encoded = encode([Example("kettle " * 80, entities=()), TEXTS[3]], longest=16)
    assert (encoded.truncated, len(encoded.ids[0])) == (1, 16)


def test_logits_are_those_of_each_text_alone_whatever_its_batch(encode: Encode, tiny_teacher: Path) -> None:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(tiny_teacher, num_labels=len(TAGS)).eval()
    encoded = encode(TEXTS * 3)
    together = row_logits(model, encoded)
    with torch.no_grad():
        for i, rows in enumerate(together):
            alone = rows_of(model, collate(encoded, [i])).numpy()
            np.testing.assert_allclose(rows, alone, atol=1e-5)


def test_a_word_counts_alike_whatever_the_length_of_its_text_and_the_size_of_its_batch(encode: Encode) -> None:
    examples = [Example("lamp " * (1 + i % 11), entities=None if i % 5 == 0 else ()) for i in range(33)]
    text = TaskText(encode(examples), 8, seed=0)
    steps = text.sampler.steps_per_epoch
    counted, known, alike = (np.zeros(33) for _ in range(3))
    for step in range(steps):
        batch, chosen = text.at(step), text.sampler.at(step)
        parts = [part_of(batch, ProcessShare(i, 3)).weights for i in range(3)]
        assert np.sum(parts, axis=0) == pytest.approx(batch.weights)
        # Of each row a mean takes its share, and the weight of the batch that of the mean.
        counted[chosen] += batch.weights.rows / len(batch.targets)
        known[chosen] += batch.weights.labelled / int((batch.targets != IGNORED).sum())
        alike[chosen] += batch.weights.texts / len(chosen)
    words, labelled = (
        np.array([sum(kept(rows)) for rows in text.texts.targets])
        for kept in (np.ones_like, lambda rows: rows != IGNORED)
    )
    assert counted == pytest.approx(steps / words.sum())
    assert known == pytest.approx(steps / labelled.sum())
    assert alike == pytest.approx(steps / 33)


def test_weights_are_1_on_average_with_a_number_of_labelled_texts_in_each_step(encode: Encode) -> None:
    examples = [Example("lamp " * (1 + i % 11), entities=None if i >= 9 else ()) for i in range(33)]
    text = TaskText(encode(examples), 8, seed=0, labelled=9)
    weights = np.array([text.at(step).weights for step in range(300)])
    assert weights.mean(axis=0) == pytest.approx([1, 1, 1, 1], rel=0.02)
    assert np.ptp(weights[:, 0]) == 0


def test_chance_is_compared_with_constant_answers(encode: Encode) -> None:
    encoded = encode(TEXTS[1:2])
    gold = [TOKENS.gold_of(example) for example in TEXTS[1:2]]
    constant = list(encoded.task.constant_predictions(encoded))
    assert constant[0] == gold  # every word a city happens to be right here
    assert ENTITY_F1.chance(gold, [frozenset()], constant) == 1.0


def test_lists_of_labels_survive_the_round_trip_and_are_matched_by_constant_answers(encode: Encode) -> None:
    names = ["city", "item", "price"]
    labels = {"to Oslo": ("city",), "no": (), "a lamp to Oslo": ("city", "item")}
    examples = [Example(text, label=label) for text, label in labels.items()]
    encoded = encode(examples, MULTI_LABEL, names)
    gold = [TEXT.gold_of(example) for example in examples]
    assert said(encoded, [targets * 10 - 5 for targets in encoded.targets]) == gold
    unknown = encode([Example("to Oslo", label=("city", "planet")), Example("to Oslo")], MULTI_LABEL, names)
    assert [targets.tolist() for targets in unknown.targets] == [[[1, 0, 0]], [[IGNORED] * 3]]
    both = collate(encoded + unknown, [3, 4, 0])
    assert both.targets.tolist() == [[1, 0, 0], [IGNORED] * 3, [1, 0, 0]]
    constant = [answers[0] for answers in encoded.task.constant_predictions(encoded)]
    assert constant == [{"city"}, {"city", "item"}, {"city", "item", "price"}]
    # Of the three labels that there are, {city} for all finds two and says one that is not there.
    level = MICRO_F1.chance(gold, [frozenset()] * 3, encoded.task.constant_predictions(encoded))
    assert level == pytest.approx(2 * 2 / (3 + 3))


def test_a_logit_of_0_is_no_label(encode: Encode) -> None:
    encoded = encode([Example("x")], MULTI_LABEL, ["a", "b", "c"])
    assert said(encoded, [np.array([[0.0, 1e-6, -1e-6]], dtype=np.float32)]) == [{"b"}]
