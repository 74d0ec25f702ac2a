"""`/v1/relations`: a text and two parts of it, in the caller's unit of offsets."""

import json
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from serve.http.app import create_app
from serve.http.request_bodies import decode
from serve.model.pipeline import Pipeline
from serve.settings import Limits
from serve.tasks.relations import RELATIONS
from serve.text.entity_markers import marked

TEXT = "😀 fly from münchen to rome"
# The same two words in each unit.
PLACES = {
    "codepoints": ((11, 18), (22, 26)),
    "utf16": ((12, 19), (23, 27)),
    "utf8": ((14, 22), (26, 30)),
}


def part(start: int, end: int) -> dict[str, int]:
    return {"start": start, "end": end}


def read(asked: dict[str, object]) -> list[str]:
    body = json.dumps(asked).encode()
    return [work.text for work in RELATIONS.works_of(decode(body, RELATIONS.request_type(body)), Limits())]


def test_a_relation_is_answered_as_the_marked_text(client: httpx.Client, relations_bundle: Path) -> None:
    answer = client.post("/v1/relations", json={"text": "fly to rome", "head": part(0, 3), "tail": part(7, 11)}).json()
    assert (answer["model"], answer["variant"]) == ("relations", "fp32")
    assert answer["results"] == [Pipeline(relations_bundle)(marked("fly to rome", (0, 3), (7, 11)))]
    assert answer["results"][0]["labels"][0]["label"] == "to"


@pytest.mark.parametrize("unit", PLACES)
def test_offsets_are_read_in_the_unit_that_is_asked_for(unit: str) -> None:
    head, tail = PLACES[unit]
    asked = {"text": TEXT, "head": part(*head), "tail": part(*tail), "offsets": unit}
    assert read(asked) == ["😀 fly from [E1] münchen [/E1] to [E2] rome [/E2]"]
    swapped = {**asked, "head": part(*tail), "tail": part(*head)}
    assert read(swapped) == ["😀 fly from [E2] münchen [/E2] to [E1] rome [/E1]"]


def test_several_items_are_answered_in_their_order(client: httpx.Client) -> None:
    items = [
        {"text": f"{'please ' * (index % 5)}fly {word} rome", "head": part(0, 2), "tail": part(3, 4)}
        for index, word in enumerate(["to", "from", "to", "to", "from"])
    ]
    answer = client.post("/v1/relations", json={"items": items, "top_k": 1}).json()
    labels = [[each["label"] for each in result["labels"]] for result in answer["results"]]
    assert labels == [["to"], ["from"], ["to"], ["to"], ["from"]]


def test_a_text_called_items_is_a_text() -> None:
    assert read({"text": "items", "head": part(0, 1), "tail": part(1, 2)}) == ["[E1] i [/E1][E2] t [/E2]ems"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"head": part(0, 27)}, "head.end", id="end-outside"),
        pytest.param({"tail": part(26, 28)}, "tail.end", id="wholly-outside"),
        pytest.param({"head": part(3, 2)}, "head.end", id="reversed"),
        pytest.param({"head": part(3, 3)}, "head.end", id="empty"),
        pytest.param({"head": part(11, 23)}, "tail", id="overlapping"),
        pytest.param({"head": part(22, 26)}, "tail", id="the-same"),
        pytest.param({"head": part(1, 12), "offsets": "utf16"}, "head.start", id="between-surrogates"),
        pytest.param({"head": part(0, 16), "offsets": "utf8"}, "head.end", id="inside-an-umlaut"),
        pytest.param({"head": {"start": 1}}, "head.end", id="no-end"),
        pytest.param({"head": {"start": 1, "end": 2, "x": 3}}, "head.x", id="a-field-too-many"),
        pytest.param({"head": part(-1, 2)}, "head.start", id="negative"),
        pytest.param({"head": {"start": True, "end": 2}}, "head.start", id="a-truth-for-a-number"),
        pytest.param({"head": part(0, 10**30)}, "head.end", id="a-huge-number"),
        pytest.param({"text": "a [E1] b c d e f g h i j k l m"}, "text", id="a-marker-in-the-text"),
        pytest.param({"text": "a [/E2] b c d e f g h i j k l m"}, "text", id="another-marker"),
        pytest.param({"tail": None}, "tail", id="null"),
        pytest.param({"offsets": "bytes"}, "offsets", id="no-such-unit"),
        pytest.param({"top_k": 0}, "top_k", id="no-labels"),
        pytest.param({"model": "cities"}, "model", id="a-model-of-entities"),
        pytest.param({"model": "intents"}, "model", id="a-model-of-classes"),
    ],
)
def test_what_cannot_be_marked_is_refused_by_field(client: httpx.Client, change: dict[str, object], field: str) -> None:
    head, tail = PLACES["codepoints"]
    asked = {"text": TEXT, "head": part(*head), "tail": part(*tail), **change}
    response = client.post("/v1/relations", json=asked)
    assert response.status_code == 422, response.text
    assert response.json()["error"]["field"] == field
    if asked.keys() == {"text", "head", "tail"}:
        both = {"items": [{"text": "a b", "head": part(0, 1), "tail": part(2, 3)}, asked]}
        response = client.post("/v1/relations", json=both)
        assert (response.status_code, response.json()["error"]["field"]) == (422, f"items[1].{field}")


def test_no_items_and_too_many_are_refused(client: httpx.Client) -> None:
    item = {"text": "a b", "head": part(0, 1), "tail": part(2, 3)}
    assert client.post("/v1/relations", json={"items": []}).json()["error"]["field"] == "items"
    assert client.post("/v1/relations", json={"items": [item] * 2049}).status_code == 413
    long = client.post("/v1/relations", json={"items": [item, {**item, "text": "a" * 100_001}]})
    assert (long.status_code, long.json()["error"]["field"]) == (413, "items[1]")
    lone = client.post(
        "/v1/relations",
        content=b'{"items": [{"text": "\\ud83d", "head": {"start": 0, "end": 1}, "tail": {"start": 1, "end": 2}}]}',
        headers={"Content-Type": "application/json"},
    )
    assert (lone.status_code, lone.json()["error"]["field"]) == (422, "items[0].text")


def test_classes_are_never_asked_of_a_model_of_relations(client: httpx.Client, relations_bundle: Path) -> None:
    assert client.post("/v1/classify", json={"text": "refund"}).json()["model"] == "intents"
    named = client.post("/v1/classify", json={"text": "fly to rome", "model": "relations"})
    assert (named.status_code, named.json()["error"]["field"]) == (422, "model")
    assert "/v1/relations" in named.json()["error"]["message"]
    alone = TestClient(create_app([relations_bundle]))
    assert alone.post("/v1/classify", json={"text": "fly to rome"}).json() == named.json()
