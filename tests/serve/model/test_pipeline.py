import itertools
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_bundles import INTENTS, intent_table, number_table, write_bundle, write_graph, write_manifest

from serve import Pipeline, open_bundle
from serve.errors import BadInput, BundleError
from serve.model.pipeline import length_batches

Copy = Callable[[Path], Path]
Writer = Callable[..., None]

TEXT = "😀 Fly to Rome,\r\n\tfrom new york or Mu\u0308nchen: München!"


@pytest.fixture(scope="module")
def cities(entities_bundle: Path) -> Pipeline:
    return Pipeline(entities_bundle, threads=1)


@pytest.fixture(scope="module")
def intents(intents_bundle: Path) -> Pipeline:
    return Pipeline(intents_bundle, threads=1)


def found(answer: object) -> list[tuple[str, int, int]]:
    assert isinstance(answer, dict)
    return [(entity["text"], entity["start"], entity["end"]) for entity in answer["entities"]]


def test_entities_are_cut_exactly_from_the_text_as_sent(cities: Pipeline) -> None:
    answer = cities(TEXT)

    assert found(answer) == [("Rome", 9, 13), ("new york", 22, 30), ("München", 44, 51)]
    assert all(TEXT[start:end] == text for text, start, end in found(answer))
    assert answer["truncated"] is False


@pytest.mark.parametrize(
    ("unit", "encoding", "unit_bytes"),
    [("codepoints", "utf-32-le", 4), ("utf16", "utf-16-le", 2), ("utf8", "utf-8", 1)],
)
def test_offsets_cut_the_text_in_the_unit_asked_for(
    cities: Pipeline, unit: str, encoding: str, unit_bytes: int
) -> None:
    encoded = TEXT.encode(encoding)
    entities = found(cities(TEXT, offsets=unit))
    assert len(entities) == 3
    for text, start, end in entities:
        assert encoded[start * unit_bytes : end * unit_bytes].decode(encoding) == text


def test_a_list_gives_a_list_in_its_own_order(cities: Pipeline) -> None:
    texts = ["from oslo please " * 3, "rome", "", "a b", "fly to paris", "rome"]
    assert cities(texts) == [cities(text) for text in texts]
    assert [len(answer["entities"]) for answer in cities(texts)] == [3, 1, 0, 0, 1, 1]


def test_low_scores_are_left_out_when_asked(cities: Pipeline) -> None:
    (entity,) = cities("rome")["entities"]
    assert 0.9 < entity["score"] < 0.95
    assert entity["score"] == round(entity["score"], 6)
    assert cities("rome", min_score=0.95)["entities"] == []


def test_classes_come_likeliest_first_and_sum_to_one(intents: Pipeline) -> None:
    answer = intents("please refund it")
    assert [each["label"] for each in answer["labels"]] == ["refund", "book", "praise"]
    assert sum(each["score"] for each in answer["labels"]) == pytest.approx(1, abs=3e-6)
    assert intents("please refund it", top_k=1) == {"labels": answer["labels"][:1], "truncated": False}


def test_a_pair_is_read_as_one_text_of_two(intents: Pipeline) -> None:
    assert intents("it", text_pair="refund")["labels"][0]["label"] == "refund"
    assert intents(["it", "a"], text_pair=["refund", "love"]) == [
        intents("it", text_pair="refund"),
        intents("a", text_pair="love"),
    ]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda cities: cities(7), "text"),
        (lambda cities: cities([]), "text"),
        (lambda cities: cities(["a", None]), "text[1]"),
        (lambda cities: cities("a\ud800"), "text"),
        (lambda cities: cities(["a", "b\udfff"]), "text[1]"),
        (lambda cities: cities("a", text_pair="b"), "text_pair"),
        (lambda cities: cities("a", text_pair=["b"]), "text_pair"),
        (lambda cities: cities(["a"], text_pair=["b", "c"]), "text_pair"),
        (lambda cities: cities("a", min_score=1.5), "min_score"),
        (lambda cities: cities("a", min_score=float("nan")), "min_score"),
        (lambda cities: cities("a", offsets="bytes"), "offsets"),
        (lambda cities: cities("a", top_k=0), "top_k"),
        (lambda cities: cities("a", aggregation="last"), "aggregation"),
        (lambda cities: cities("a", abstain=True), "abstain"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_its_field(
    cities: Pipeline, call: Callable[[Pipeline], object], field: str
) -> None:
    with pytest.raises(BadInput) as caught:
        call(cities)
    assert caught.value.field == field


def test_what_is_no_text_is_named_with_its_article(cities: Pipeline) -> None:
    for wrong, told in ((7, "text is an int;"), ({}, "text is a dict;"), (["a", 7], "text[1] is an int;")):
        with pytest.raises(BadInput) as caught:
            cities(wrong)  # type: ignore[call-overload]
        assert caught.value.message.startswith(told)


@pytest.mark.parametrize(
    "changes", [{"labels": ["O", "B-city"]}, {"task": "text-classification"}], ids=["other-labels", "other-task"]
)
def test_a_graph_that_does_not_fit_its_manifest_is_refused(
    entities_bundle: Path, copied: Copy, manifest_writer: Writer, changes: dict[str, object]
) -> None:
    folder = copied(entities_bundle)
    manifest_writer(folder, **changes)
    with pytest.raises(BundleError, match=r"gives logits of shape \[3, 3\]"):
        Pipeline(folder)


def test_the_package_offers_its_two_names_and_no_others() -> None:
    import serve

    assert serve.open_bundle is open_bundle
    with pytest.raises(AttributeError, match="no attribute 'Teacher'"):
        _ = serve.Teacher


@given(
    lengths=st.lists(st.integers(1, 100), max_size=50),
    batch_tokens=st.integers(1, 500),
    padding_tokens=st.none() | st.integers(0, 50),
)
def test_batches_hold_every_text_once_within_the_budget(
    lengths: list[int], batch_tokens: int, padding_tokens: int | None
) -> None:
    batches = length_batches(lengths, batch_tokens, padding_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert len(batch) == 1 or padded <= batch_tokens
        assert padding_tokens is None or padded - sum(lengths[index] for index in batch) <= padding_tokens
    # None was begun without need.
    for before, after in itertools.pairwise(batches):
        padded = (len(before) + 1) * lengths[after[0]]
        padding = padded - sum(lengths[index] for index in [*before, after[0]])
        assert padded > batch_tokens or (padding_tokens is not None and padding > padding_tokens)


@pytest.fixture(scope="module")
def moods(intents_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Like `intents`, but each label applies or not on its own: where its word makes up more than half of a text's tokens."""
    folder = tmp_path_factory.mktemp("bundles") / "moods"
    shutil.copytree(intents_bundle, folder)
    table = intent_table() - 2.0
    write_graph(folder / "onnx" / "model.onnx", table, per_text=True)
    write_manifest(folder, task="text-classification", labels=INTENTS, multi_label=True)
    return Pipeline(folder, threads=1)


def test_labels_that_apply_are_answered_each_with_its_own_probability(moods: Pipeline) -> None:
    # [CLS] love refund refund [SEP]: 9 / 5 - 2, 18 / 5 - 2 and -2 are the logits.
    answer = moods("love refund refund")
    assert answer == {"labels": [{"label": "refund", "score": round(1 / (1 + math.exp(-1.6)), 6)}], "truncated": False}
    both = moods("love love refund refund fly")
    assert [each["label"] for each in both["labels"]] == ["praise", "refund"]
    assert sum(each["score"] for each in both["labels"]) > 1
    assert moods("a b") == {"labels": [], "truncated": False}


def test_as_many_labels_are_answered_as_asked_for_whether_they_apply_or_not(moods: Pipeline) -> None:
    answer = moods("love refund refund", top_k=2)
    assert [each["label"] for each in answer["labels"]] == ["refund", "praise"]
    assert answer["labels"][1]["score"] == round(1 / (1 + math.exp(0.2)), 6)
    assert len(moods("a b", top_k=9)["labels"]) == len(INTENTS)


@pytest.mark.parametrize(
    ("task", "table", "labels"),
    [("text-classification", intent_table, INTENTS), ("text-regression", number_table, ["score"])],
)
def test_a_model_refuses_texts_of_a_kind_that_it_was_not_trained_on(
    tmp_path: Path, task: str, table: Callable[[], np.ndarray], labels: list[str]
) -> None:
    """Of pairs or of single texts; a model of both, or of which this is not known, reads both."""
    made = partial(write_bundle, table=table(), task=task, labels=labels)
    of_pairs = Pipeline(made(tmp_path / "pairs", pairs=True, single_texts=False), threads=1)
    of_texts = Pipeline(made(tmp_path / "texts", pairs=False, single_texts=True), threads=1)
    assert of_pairs(["fly", "refund"], text_pair=["love", ""])
    assert of_texts(["fly", "refund"])
    for asked in ("fly", ["fly", "refund"]):
        with pytest.raises(BadInput, match="text_pair is missing: 'pairs' was trained on pairs") as refused:
            of_pairs(asked)
        assert refused.value.field == "text_pair"
    with pytest.raises(BadInput, match="text_pair was given: 'texts' was trained on texts without a second one"):
        of_texts("fly", text_pair="love")
    for name, kinds in (("both", {"pairs": True, "single_texts": True}), ("old", {"pairs": True})):
        either = Pipeline(made(tmp_path / name, **kinds), threads=1)
        assert either("fly")
        assert either("fly", text_pair="love")
