"""What a body may hold besides what the examples show: null, 5.0, a byte order mark; and bodies that are made to cost much."""

import asyncio
import json
import sys
from types import FrameType
from typing import Any

import httpx
import pytest
from loopback import Asked, answer
from loopback import serving as pretending
from server_process import HTTP

from benchmarks.serve.malformations import RIGHT
from benchmarks.serve.malformed import attack
from serve.client import Client
from serve.errors import BadInput
from serve.http.request_bodies import decode
from serve.tasks.token_classification import EntitiesRequest

JSON = {"Content-Type": "application/json"}
HEAD, TAIL = {"start": 0, "end": 4}, {"start": 5, "end": 7}
ITEM = {"text": "rome to oslo", "head": HEAD, "tail": TAIL}
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/entities": {"text": "fly to rome"},
    "/v1/classify": {"text": "i love it"},
    "/v1/score": {"text": "i love it"},
    "/v1/answer": {"question": "from", "context": "fly from rome"},
    "/v1/embeddings": {"input": ["fly to rome"]},
    "/v1/relations": ITEM,
    "/v2/models/intents/infer": {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["i love it"]}]
    },
}


def answered(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, (body, response.text)
    return dict(response.json())


@pytest.mark.parametrize("path", [path for path in REQUIRED if path.startswith("/v1")])
def test_null_in_a_field_that_may_be_left_out_is_its_default(client: httpx.Client, path: str) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    bodies = [REQUIRED[path], {"items": [ITEM]}] if "oneOf" in schema else [REQUIRED[path]]
    for body, described in zip(bodies, schema.get("oneOf", [schema]), strict=True):
        fields = document["components"]["schemas"][described["$ref"].rpartition("/")[2]]
        optional = fields["properties"].keys() - fields["required"]
        assert "model" in optional
        assert answered(client, path, {**body, **dict.fromkeys(optional)}) == answered(client, path, body)
        for name in optional:  # the document says so, too
            field = fields["properties"][name]
            assert None in field.get("enum", []) or {"type": "null"} in field.get("anyOf", []), name
        for name in fields["required"]:
            refused = client.post(path, json={**body, name: None})
            assert (refused.status_code, refused.json()["error"]["field"]) == (422, name)


def test_null_is_the_default_in_the_other_protocol_and_its_clients_parameters_are_ignored(client: httpx.Client) -> None:
    path = "/v2/models/intents/infer"
    plain = answered(client, path, REQUIRED[path])
    tensor = REQUIRED[path]["inputs"][0]
    ignored = {"content_type": "str", "headers": None}
    nulls = {"id": None, "parameters": None, "outputs": None, "inputs": [{**tensor, "parameters": None}]}
    options = {"binary_data_output": None, "top_k": None, "truncate": None, "promise": None, "abstain": None}
    output = {"name": "answer", "parameters": {"binary_data": None, **ignored}}
    assert answered(client, path, nulls) == plain
    assert answered(client, path, {**REQUIRED[path], "parameters": {**options, **ignored}}) == plain
    asked = {"inputs": [{**tensor, "parameters": {"binary_data_size": None, **ignored}}], "outputs": [output]}
    assert answered(client, path, asked)["outputs"] == plain["outputs"][:1]


def test_a_whole_number_may_be_written_with_a_point(client: httpx.Client) -> None:
    def same(path: str, body: dict[str, Any], other: dict[str, Any]) -> None:
        assert answered(client, path, {**REQUIRED[path], **body}) == answered(client, path, {**REQUIRED[path], **other})

    quoted = 'i said \\" "top_k": 5.0'
    same("/v1/classify", {"text": quoted, "top_k": 2.0}, {"text": quoted, "top_k": 2})
    same("/v1/embeddings", {"dimensions": 3.0}, {"dimensions": 3})
    same("/v1/relations", {"head": {"start": 0.0, "end": 4.0}, "top_k": 1.0}, {"top_k": 1})
    path = "/v2/models/intents/infer"
    tensor = REQUIRED[path]["inputs"][0]
    same(path, {"parameters": {"top_k": 2.0}}, {"parameters": {"top_k": 2}})
    same(path, {"inputs": [{**tensor, "shape": [1.0]}]}, {})
    ids = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [2, 5, 3]}
    same(path, {"inputs": [{**ids, "data": [2.0, 5, 3.0]}]}, {"inputs": [ids]})
    for written in (b"2e0", b"2.00", b"2.0E+00"):
        sent = client.post("/v1/classify", content=b'{"text": "a", "top_k": %s}' % written, headers=JSON)
        assert (sent.status_code, len(sent.json().get("results", [{}])[0].get("labels", []))) == (200, 2), written
    for written in (b"2.0.0", b"2e1.0", b"02.0", b"2.", b"2.0e", b"--2.0"):
        sent = client.post("/v1/classify", content=b'{"text": "a", "top_k": %s}' % written, headers=JSON)
        assert sent.status_code in (400, 422), written
    for top_k in (2.5, "2", True):
        assert client.post("/v1/classify", json={"text": "a", "top_k": top_k}).json()["error"]["field"] == "top_k"


@pytest.mark.parametrize("path", REQUIRED)
def test_a_byte_order_mark_before_the_body_is_passed_over(client: httpx.Client, path: str) -> None:
    body = json.dumps({"items": [ITEM]} if path == "/v1/relations" else REQUIRED[path])
    answers = [client.post(path, content=mark + body.encode(), headers=JSON) for mark in (b"", b"\xef\xbb\xbf")]
    assert [each.status_code for each in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


def test_the_client_takes_none_for_the_default(client: httpx.Client) -> None:
    with Client(str(client.base_url)) as ours:
        assert ours.entities("rome", model=None, min_score=None, offsets=None) == ours.entities("rome")
        assert ours.classify("a", None, top_k=None, abstain=None) == ours.classify("a")
        assert ours.classify("a", top_k=2.0) == ours.classify("a", top_k=2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        pytest.param(b'{"text": "a", "model": "\\udc00"}', 422, "model", id="a-value"),
        pytest.param(b'{"text": "a", "\\ud800": "\\ud800"}', 422, None, id="a-name"),
        pytest.param(b'{"\\ud800": 0, "text": [' + b"[0," * 700 + b"0" + b"]" * 700 + b"]}", 422, None, id="deep"),
    ],
)
def test_half_a_surrogate_pair_anywhere_is_refused(
    client: httpx.Client, body: bytes, status: int, field: str | None
) -> None:
    refused = client.post("/v1/entities", content=body, headers=JSON)
    assert refused.status_code == status
    assert refused.json()["error"].get("field") == field


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(b'"%s": [%s0]' % (b"k" * 20_000, b"0," * 5_000), id="a-long-name-around-many-values"),
        pytest.param(b'"k": %s0%s' % (b"[0," * 700, b"]" * 700), id="many-lists-in-each-other"),
        pytest.param(b'"k": %s0%s' % (b'{"a":' * 700, b"}" * 700), id="many-objects-in-each-other"),
    ],
)
def test_what_a_refused_body_costs_grows_with_its_length_alone(inside: bytes) -> None:
    body = b'{"text": NaN, %s}' % inside  # valid but for that, so that all of it is looked through for half a pair
    depth = deepest = characters = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest, characters
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            characters += sum(len(each) for each in frame.f_locals.values() if isinstance(each, str))
        elif event == "return":
            depth -= 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(BadInput):
            decode(body, EntitiesRequest)
    finally:
        sys.setprofile(before)
    assert deepest < 20  # in a deep stack CPython takes memory for a call and gives it back
    assert characters < 10 * len(body)


def test_a_long_option_is_refused_before_it_is_copied_for_every_text(client: httpx.Client) -> None:
    refused = client.post("/v1/entities", json={"text": ["a"] * 1024, "promise": "x" * 900_000})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "promise")
    assert len(refused.content) < 1000  # the model's process, which would repeat it, never had it


def test_300_malformed_requests_are_refused_and_right_ones_answered_as_before(url: str) -> None:
    tally = asyncio.run(attack(url, requests=300, seed=4))
    assert tally.faults == []
    assert tally.requests == 300
    assert max(tally.by_status) < 500
    assert tally.by_status[422] > 50
    assert tally.by_status[400] > 50
    assert tally.right_before.keys() == RIGHT.keys()
    assert all(body.startswith(b"200 ") for body in tally.right_before.values())
    assert tally.right_after == tally.right_before
    # Nothing died of it and was replaced in silence.
    assert 'stillroom_process_restarts_total{process="0"} 0.0' in HTTP.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(answer(500), "500", id="a-fault-of-the-server"),
        pytest.param(
            answer(422, b'{"detail": "no"}', "Content-Type: application/json"), "another form", id="a-form-not-ours"
        ),
        pytest.param(None, "no answer", id="a-connection-broken-off"),
    ],
)
def test_a_server_that_fails_is_told_of(said: bytes | None, told: str) -> None:
    right: set[str] = set()

    async def handler(asked: Asked) -> bytes | None:
        path = asked.head.split()[1]
        if path in RIGHT and path not in right:  # the first requests are the right ones
            right.add(path)
            return answer()
        return said

    with pretending(handler) as server:
        tally = asyncio.run(attack(f"http://127.0.0.1:{server.port}", requests=40, seed=0, owed_s=1))
    assert any(told in fault for fault in tally.faults)
    assert tally.right_after != tally.right_before
