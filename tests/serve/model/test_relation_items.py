"""`Pipeline` of a model of relations: items with their two parts, as `/v1/relations` takes them."""

from pathlib import Path

import pytest

from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.entity_markers import marked

TEXT = "😀 fly to rome"


def item(head: tuple[int, int], tail: tuple[int, int], text: str = TEXT) -> dict[str, object]:
    parts = {"head": head, "tail": tail}
    return {"text": text} | {name: {"start": start, "end": end} for name, (start, end) in parts.items()}


@pytest.fixture(scope="module")
def relations(relations_bundle: Path) -> Pipeline:
    return Pipeline(relations_bundle, threads=1)


def test_an_item_is_answered_as_its_marked_text_and_a_list_as_a_list(relations: Pipeline) -> None:
    expected = relations(marked(TEXT, (2, 5), (9, 13)))
    assert expected["labels"][0]["label"] == "to"
    assert relations(item((2, 5), (9, 13))) == expected
    assert relations(item((3, 6), (10, 14)), offsets="utf16") == expected
    swapped = relations(marked(TEXT, (9, 13), (2, 5)))
    assert relations([item((2, 5), (9, 13)), item((9, 13), (2, 5))]) == [expected, swapped]
    assert relations([item((2, 5), (9, 13))], top_k=1)[0]["labels"] == expected["labels"][:1]


@pytest.mark.parametrize(
    ("given", "message", "field"),
    [
        pytest.param("fly to rome", 'give "head" and "tail" beside "text"', "text", id="a-text"),
        pytest.param(["fly to rome"], 'give "head" and "tail" beside "text"', "text", id="a-list-of-texts"),
        pytest.param({"text": TEXT}, 'give "head" and "tail" beside "text"', "text", id="no-parts"),
        pytest.param([item((2, 5), (9, 13)), {"text": "a b"}], 'give "head" and "tail"', "text[1]", id="one-without"),
        pytest.param(item((2, 5), (9, 99)), "tail.end 99 is outside the text", "tail.end", id="outside"),
        pytest.param([item((5, 2), (9, 13))], "end is exclusive and must be greater than start", "text[0].head.end", id="reversed"),
        pytest.param(item((2, 5), (4, 9)), "overlaps head", "tail", id="overlapping"),
        pytest.param({**item((2, 5), (9, 13)), "head": 2}, "Expected `object`, got `int`", "text", id="a-number"),
        pytest.param(item((2, 5), (9, 13), "[E1] fly to rome"), "already has the marker [E1]", "text", id="marked"),
        pytest.param(item((0, 1), (2, 3), "\ud83d b"), "text has half a surrogate pair", "text", id="half-a-pair"),
        pytest.param(7, "text is an int", "text", id="no-text"),
    ],
)  # fmt: skip
def test_what_is_no_question_about_two_parts_is_refused(
    relations: Pipeline, given: object, message: str, field: str
) -> None:
    with pytest.raises(BadInput) as refused:
        relations(given)  # type: ignore[call-overload]
    assert message in refused.value.message
    assert refused.value.field == field


def test_a_model_of_relations_reads_no_pairs_and_one_of_classes_no_items(
    relations: Pipeline, intents_bundle: Path
) -> None:
    with pytest.raises(BadInput, match="'relations' is for relations in one text"):
        relations(marked(TEXT, (2, 5), (9, 13)), text_pair="it")
    with pytest.raises(BadInput, match="text is a dict; give a string"):
        Pipeline(intents_bundle, threads=1)(item((2, 5), (9, 13)))
