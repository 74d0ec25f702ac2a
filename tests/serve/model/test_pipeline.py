import itertools
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_bundles import INTENTS, city_table, intent_table, number_table, write_bundle, write_graph, write_manifest

from serve.bundle.manifest import TaskName
from serve.client import Client
from serve.errors import BadInput
from serve.model.pipeline import Pipeline, length_batches
from serve.tasks import SERVED_TASKS, TASKS, open_bundle, task_named, task_of
from serve.tasks.relations import RELATIONS
from serve.text.entity_markers import marked

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
def test_bad_questions_are_refused_by_field(cities: Pipeline, call: Callable[[Pipeline], object], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        call(cities)
    assert caught.value.field == field


def test_the_package_offers_its_three_names_and_no_others() -> None:
    import serve

    assert (serve.Client, serve.Pipeline, serve.open_bundle) == (Client, Pipeline, open_bundle)
    with pytest.raises(AttributeError, match="no attribute 'Teacher'"):
        _ = serve.Teacher


@given(
    lengths=st.lists(st.integers(1, 100), max_size=50),
    batch_tokens=st.integers(1, 500),
    padding_tokens=st.none() | st.integers(0, 50),
)
def test_batches_hold_each_text_in_the_budget(
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


CLASSES: dict[str, Any] = {"task": "text-classification", "labels": INTENTS}


def variants(**calibrated: object) -> dict[str, object]:
    described = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", **calibrated}
    return {"variants": {"fp32": described}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrated")


def test_logits_are_divided_by_the_temperature_before_they_become_scores(folder: Path) -> None:
    classes = Pipeline(
        write_bundle(folder / "classes", intent_table(), **CLASSES, **variants(temperature=2.0)), threads=1
    )
    (score,) = (each["score"] for each in classes("refund")["labels"] if each["label"] == "refund")
    assert score == round(float(np.exp(1.5) / (np.exp(1.5) + 2)), 6)  # [CLS] refund [SEP]: 9 / 3 / 2
    cities = Pipeline(write_bundle(folder / "cities", city_table(), **variants(temperature=2.0)), threads=1)
    (entity,) = cities("rome")["entities"]
    assert entity["score"] == round(float(np.exp(2) / (np.exp(2) + np.exp(0.5) + 1)), 6)


def test_a_temperature_changes_no_decision_on_labels_that_apply_each_on_its_own(folder: Path) -> None:
    several = {**CLASSES, "multi_label": True}
    plain = Pipeline(write_bundle(folder / "plain", intent_table() - 2, **several), threads=1)
    warm = Pipeline(
        write_bundle(folder / "warm", intent_table() - 2, **several, **variants(temperature=3.0)), threads=1
    )
    for text in ("love refund refund", "love love refund refund fly", "a b", "refund"):
        ours, theirs = plain(text)["labels"], warm(text)["labels"]
        assert [each["label"] for each in ours] == [each["label"] for each in theirs]
        logits = [np.log(each["score"] / (1 - each["score"])) for each in ours]
        expected = [1 / (1 + np.exp(-logit / 3)) for logit in logits]
        assert [each["score"] for each in theirs] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("multi_label", [False, True])
def test_an_abstaining_model_gives_no_class_below_its_threshold(folder: Path, multi_label: bool) -> None:
    given = {**CLASSES, "multi_label": multi_label, **variants(abstain_below=0.7, temperature=1.5)}
    pipeline = Pipeline(write_bundle(folder / f"abstaining-{multi_label}", intent_table() - 1, **given), threads=1)
    sure, unsure = "refund refund refund", "refund a a a a a a"
    assert pipeline(sure, top_k=1)["labels"][0]["score"] > 0.7 > pipeline(unsure, top_k=1)["labels"][0]["score"]
    assert pipeline(sure, abstain=True) == {**pipeline(sure), "abstained": False}
    assert pipeline(unsure, abstain=True) == {"labels": [], "truncated": False, "abstained": True}
    assert pipeline(unsure, abstain=True, top_k=2)["labels"] == []
    assert "abstained" not in pipeline(unsure)
    assert len(pipeline(unsure, top_k=3)["labels"]) == 3


def test_a_bundle_without_a_threshold_says_what_to_do(intents_bundle: Path) -> None:
    with pytest.raises(BadInput, match=r"no `abstain_below` in its manifest; export the bundle again") as caught:
        Pipeline(intents_bundle, threads=1)("refund", abstain=True)
    assert caught.value.field == "abstain"


MARKED = "😀 fly to rome"


def item(head: tuple[int, int], tail: tuple[int, int], text: str = MARKED) -> dict[str, object]:
    parts = {"head": head, "tail": tail}
    return {"text": text} | {name: {"start": start, "end": end} for name, (start, end) in parts.items()}


@pytest.fixture(scope="module")
def relations(relations_bundle: Path) -> Pipeline:
    return Pipeline(relations_bundle, threads=1)


def test_an_item_is_answered_as_its_marked_text_and_a_list_as_a_list(relations: Pipeline) -> None:
    expected = relations(marked(MARKED, (2, 5), (9, 13)))
    assert expected["labels"][0]["label"] == "to"
    assert relations(item((2, 5), (9, 13))) == expected
    assert relations(item((3, 6), (10, 14)), offsets="utf16") == expected
    swapped = relations(marked(MARKED, (9, 13), (2, 5)))
    assert relations([item((2, 5), (9, 13)), item((9, 13), (2, 5))]) == [expected, swapped]
    assert relations([item((2, 5), (9, 13))], top_k=1)[0]["labels"] == expected["labels"][:1]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        pytest.param("fly to rome", "text", id="a-text"),
        pytest.param(["fly to rome"], "text", id="a-list-of-texts"),
        pytest.param([item((2, 5), (9, 13)), {"text": "a b"}], "text[1]", id="one-without-parts"),
        pytest.param([item((5, 2), (9, 13))], "text[0].head.end", id="reversed"),
        pytest.param(item((2, 5), (9, 99)), "tail.end", id="outside"),
        pytest.param({**item((2, 5), (9, 13)), "head": 2}, "text", id="a-number"),
        pytest.param(item((0, 1), (2, 3), "\ud83d b"), "text", id="half-a-pair"),
    ],
)
def test_what_is_no_question_about_two_parts_is_refused(relations: Pipeline, given: object, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        relations(given)  # type: ignore[call-overload]
    assert refused.value.field == field


def test_relations_are_not_read_of_pairs_and_classes_not_of_items(relations: Pipeline, intents_bundle: Path) -> None:
    with pytest.raises(BadInput, match="'relations' is for relations in one text"):
        relations(marked(MARKED, (2, 5), (9, 13)), text_pair="it")
    with pytest.raises(BadInput, match="text is a dict; give a string"):
        Pipeline(intents_bundle, threads=1)(item((2, 5), (9, 13)))


def test_every_name_has_one_task() -> None:
    assert set(TASKS) == set(get_args(TaskName))
    assert all(task_named(name).name == name for name in TASKS)


def test_every_task_has_an_endpoint_with_an_example_that_its_requests_take() -> None:
    assert len({task.endpoint.path for task in SERVED_TASKS}) == len(SERVED_TASKS)
    for task in SERVED_TASKS:
        request = task.endpoint.requests[0](**task.endpoint.example)
        assert "model" in request.__struct_fields__


@pytest.mark.parametrize("task", SERVED_TASKS, ids=lambda task: task.kind)
def test_a_task_that_reads_one_text_says_so(task) -> None:
    assert bool(task.one_text) is not task.reads_pairs


def test_a_bundle_has_the_task_of_its_manifest(bundle_of_each_kind: list[Path]) -> None:
    found = [task_of(open_bundle(bundle).manifest) for bundle in bundle_of_each_kind]
    assert sorted(task.kind for task in found) == sorted(task.kind for task in SERVED_TASKS)
    assert RELATIONS in found


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
    assert of_pairs(["fly", "refund"], text_pair=["love", "fly"])
    assert of_texts(["fly", "refund"], text_pair=["", ""]) == of_texts(["fly", "refund"])
    with pytest.raises(BadInput, match="text_pair is missing"):
        of_pairs(["fly", "refund"], text_pair=["love", ""])
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
