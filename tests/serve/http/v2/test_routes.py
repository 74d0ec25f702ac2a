"""The Open Inference Protocol as its own clients speak it: tritonclient, and JSON by hand."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from lookup_bundles import INTENTS, VOCABULARY
from tritonclient.utils import InferenceServerException

from serve.model.pipeline import Pipeline
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer

OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def theirs(url: str) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    yield client
    client.close()


def text_tensor(name: str, texts: list[str], *, binary: bool = True, column: bool = False) -> triton.InferInput:
    array = np.array([text.encode() for text in texts], dtype=np.object_)
    array = array.reshape(-1, 1) if column else array
    tensor = triton.InferInput(name, list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def id_tensor(name: str, rows: list[list[int]], *, binary: bool = True) -> triton.InferInput:
    array = np.array(rows, dtype=np.int64)
    tensor = triton.InferInput(name, list(array.shape), "INT64")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def infer(client: httpx.Client, model: str, *inputs: dict[str, object], **more: object) -> httpx.Response:
    return client.post(f"/v2/models/{model}/infer", json={"inputs": inputs, **more})


def texts(*data: str, **changes: object) -> dict[str, object]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(data)], "data": data, **changes}


def ids(rows: list[list[int]], name: str = "input_ids", **changes: object) -> dict[str, object]:
    return {"name": name, "datatype": "INT64", "shape": [len(rows), len(rows[0])], "data": rows, **changes}


def test_tritonclient_finds_the_server_and_its_models(theirs: triton.InferenceServerClient) -> None:
    assert theirs.is_server_live()
    assert theirs.is_server_ready()
    assert theirs.is_model_ready("intents")
    assert not theirs.is_model_ready("nobody")
    assert "binary_tensor_data" in theirs.get_server_metadata()["extensions"]
    found = theirs.get_model_metadata("intents")
    version = found["versions"][0]
    assert theirs.is_model_ready("intents", version)
    assert not theirs.is_model_ready("intents", version[::-1])
    inputs = ["text", "text_pair", "input_ids", "attention_mask", "token_type_ids"]
    assert [each["name"] for each in found["inputs"]] == inputs
    assert [(each["name"], each["datatype"], each["shape"]) for each in found["outputs"]] == [
        ("answer", "BYTES", [-1]),
        ("label", "BYTES", [-1]),
        ("score", "FP32", [-1]),
        ("logits", "FP32", [-1, len(INTENTS)]),
    ]


@pytest.mark.parametrize("binary", [True, False], ids=["as-bytes", "in-json"])
@pytest.mark.parametrize("column", [True, False], ids=["one-column", "flat"])
def test_tritonclient_gets_v1s_answers(
    theirs: triton.InferenceServerClient, client: httpx.Client, binary: bool, column: bool
) -> None:
    asked = ["i love it", "refund 😀 please", "", "münchen"]
    answered = theirs.infer("intents", [text_tensor("text", asked, binary=binary, column=column)], request_id="7")
    expected = client.post("/v1/classify", json={"text": asked}).json()["results"]
    assert [json.loads(each) for each in answered.as_numpy("answer")] == expected
    assert [each.decode() for each in answered.as_numpy("label")] == [each["labels"][0]["label"] for each in expected]
    scores = np.array([each["labels"][0]["score"] for each in expected], dtype=np.float32)
    assert answered.as_numpy("score").dtype == np.float32
    np.testing.assert_array_equal(answered.as_numpy("score"), scores)
    assert answered.get_response()["id"] == "7"
    assert answered.get_response()["model_name"] == "intents"


def test_pairs_and_parameters_reach_the_model(theirs: triton.InferenceServerClient, intents_bundle: Path) -> None:
    inputs = [text_tensor("text_pair", ["love", "a"]), text_tensor("text", ["fly", "refund"], binary=False)]
    answered = theirs.infer("intents", inputs, parameters={"top_k": 2})
    expected = Pipeline(intents_bundle)(["fly", "refund"], text_pair=["love", "a"], top_k=2)
    assert [json.loads(each) for each in answered.as_numpy("answer")] == expected

    entities = theirs.infer("cities", [text_tensor("text", ["😀 rome"])], parameters={"offsets": "utf16"})
    (found,) = json.loads(entities.as_numpy("answer")[0])["entities"]
    assert (found["start"], found["end"]) == (3, 7)
    none = theirs.infer("cities", [text_tensor("text", ["😀 rome"])], parameters={"min_score": 0.999})
    assert json.loads(none.as_numpy("answer")[0])["entities"] == []


@pytest.mark.parametrize("binary", [True, False], ids=["as-bytes", "in-json"])
def test_token_ids_give_the_logits_of_the_graph(
    theirs: triton.InferenceServerClient, entities_bundle: Path, intents_bundle: Path, binary: bool
) -> None:
    asked = ["fly to rome", "refund a paris"]
    wanted = [triton.InferRequestedOutput("logits", binary_data=binary)]
    for bundle, model in ((entities_bundle, "cities"), (intents_bundle, "intents")):
        encodings = load_tokenizer(bundle, 32).encode_batch(asked)
        inputs = [
            id_tensor("input_ids", [each.ids for each in encodings], binary=binary),
            id_tensor("token_type_ids", [each.type_ids for each in encodings], binary=binary),
        ]
        logits = theirs.infer(model, inputs, outputs=wanted).as_numpy("logits")
        expected = np.stack(Session(bundle / "onnx" / "model.onnx", 1).run(encodings))
        assert logits.dtype == np.float32
        np.testing.assert_array_equal(logits, expected)


def test_masks_and_types_of_tokens_are_heeded(theirs: triton.InferenceServerClient) -> None:
    row = [VOCABULARY.index(word) for word in ("fly", "love", "refund")]

    def logits(**more: list[list[int]]) -> list[float]:
        inputs = [id_tensor("input_ids", [row]), *(id_tensor(name, rows) for name, rows in more.items())]
        return list(theirs.infer("intents", inputs).as_numpy("logits")[0])

    assert logits() == [3.0, 3.0, 3.0]
    assert logits(attention_mask=[[1, 0, 0]]) == [9.0, 0.0, 0.0]
    assert logits(token_type_ids=[[1, 1, 1]]) == [3.25, 3.25, 3.25]  # the lookup graph adds a quarter


def test_each_output_comes_as_it_was_asked_for(client: httpx.Client) -> None:
    asked = {
        "inputs": [texts("refund", "love")],
        "outputs": [{"name": "score", "parameters": {"binary_data": True}}, {"name": "label"}],
    }
    response = client.post("/v2/models/intents/infer", json=asked)
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers["inference-header-content-length"])
    score, label = json.loads(response.content[:length])["outputs"]
    assert (score["name"], score["parameters"]) == ("score", {"binary_data_size": 8})
    assert label["data"] == ["refund", "praise"]
    assert len(response.content) == length + 8
    assert 0 < struct.unpack("<2f", response.content[length:])[0] < 1

    asked["parameters"] = {"binary_data_output": True}
    asked["outputs"] = [{"name": "answer", "parameters": {"binary_data": False}}]
    response = client.post("/v2/models/intents/infer", json=asked)
    assert response.headers["content-type"] == "application/json"
    assert len(response.json()["outputs"][0]["data"]) == 2


def test_a_version_is_the_digest_and_another_is_not_found(client: httpx.Client, entities_bundle: Path) -> None:
    digest = json.loads((entities_bundle / "manifest.json").read_text())["digest"]
    asked = {"inputs": [texts("rome")]}
    answered = client.post(f"/v2/models/cities/versions/{digest}/infer", json=asked)
    assert answered.json()["model_version"] == digest
    other = client.post("/v2/models/cities/versions/1/infer", json=asked)
    assert other.status_code == 404
    assert digest in other.json()["error"]


OF_CITIES: dict[str, tuple[list[dict[str, object]], str]] = {
    "nothing": ([], "either text or input_ids"),
    "both": ([texts("a"), ids([[1]])], "either text or input_ids"),
    "unknown-input": ([texts("a", name="txt")], "'text'"),
    "twice": ([texts("a"), texts("b")], "a second 'text'"),
    "wrong-datatype": ([texts("a", datatype="INT64")], "must be BYTES"),
    "fewer-than-the-shape": ([texts("a", shape=[2])], "make them equal"),
    "a-row-of-texts": ([texts("a", "b", shape=[1, 2])], "[n] or [n, 1]"),
    "no-shape": ([texts("a", shape=[])], "1 to 8 sizes"),
    "negative-shape": ([texts("a", shape=[-1])], "1 or more"),
    "no-texts": ([texts(shape=[0])], "1 or more"),
    "a-huge-shape": ([texts("a", shape=[2**62, 2**62])], "make them equal"),
    "a-number-in-texts": ([texts("a", data=["a", 1])], "list of strings"),
    "an-object-for-data": ([texts("a", data={"a": 1})], "list of strings"),
    "no-data": ([{"name": "text", "datatype": "BYTES", "shape": [1]}], "its values"),
    "pair-of-entities": ([texts("a"), texts("b", name="text_pair")], "one text"),
    "text-and-mask": ([texts("a"), ids([[1]], "attention_mask")], "together with"),
    "id-beyond-the-vocabulary": ([ids([[23]])], "0 to 22"),
    "negative-id": ([ids([[1], [-1]])], "-1"),
    "beyond-int64": ([ids([[2**63]])], "list of INT64"),
    "a-huge-id": ([ids([[2**62]])], "the ids of"),
    "ragged": ([ids([[1, 2], [3]])], "one length"),
    "half-nested": ([ids([[1, 2]], data=[1, [2]])], "one length"),
    "a-fraction": ([ids([[1, 2]], data=[1, 2.5])], "list of INT64"),
    "no-rows": ([ids([[1, 2]], shape=[2], data=[1, 2])], "[rows, tokens]"),
    "short-mask": ([ids([[1, 2]]), ids([[1]], "attention_mask")], "shape of input_ids"),
    "a-mask-of-2": ([ids([[1]]), ids([[2]], "attention_mask")], "0 and 1"),
    "memory": ([texts("a", parameters={"shared_memory_region": "x"})], "not a field"),
    "two-datas": ([texts("a", parameters={"binary_data_size": 4}, data=["a"])], "either"),
}
OF_INTENTS = {
    "fewer-pairs": ([texts("a", "b"), texts("b", name="text_pair")], "as many"),
    "only-a-pair": ([texts("b", name="text_pair")], "either text or input_ids"),
    "all-masked": ([ids([[1]]), ids([[0]], "attention_mask")], "only 0 in row 0"),
}
OPTIONS = {
    "not-its-option": ({"parameters": {"top_k": 1}}, "'top_k'"),
    "option-out-of-range": ({"parameters": {"min_score": 2}}, "from 0 to 1"),
    "option-of-wrong-type": ({"parameters": {"min_score": "x"}}, "parameters"),
    "a-number-for-a-truth": ({"parameters": {"binary_data_output": 1}}, "true or false"),
    "no-such-output": ({"outputs": [{"name": "label"}]}, "outputs"),
    "an-output-twice": ({"outputs": [{"name": "answer"}] * 2}, "a second 'answer'"),
}


@pytest.mark.parametrize(
    ("model", "inputs", "more", "said"),
    [
        *(pytest.param("cities", inputs, {}, said, id=name) for name, (inputs, said) in OF_CITIES.items()),
        *(pytest.param("intents", inputs, {}, said, id=name) for name, (inputs, said) in OF_INTENTS.items()),
        *(pytest.param("cities", [texts("a")], more, said, id=name) for name, (more, said) in OPTIONS.items()),
    ],
)
def test_what_is_wrong_with_tensors_is_told_in_the_protocols_form(
    client: httpx.Client, model: str, inputs: list[dict[str, object]], more: dict[str, object], said: str
) -> None:
    response = infer(client, model, *inputs, **more)
    assert response.status_code == 422, response.text
    assert list(response.json()) == ["error"]
    assert said in response.json()["error"]
    assert infer(client, "cities", texts("rome")).status_code == 200


@pytest.mark.parametrize(
    ("header", "body"),
    [(None, b"not json"), ("x", b"{}"), ("-1", b"{}"), ("99", b"{}"), ("9" * 400, b"{}"), ("1", b"{}")],
    ids=["not-json", "no-number", "negative", "beyond-the-body", "a-huge-number", "into-the-json"],
)
def test_a_wrong_length_of_the_json_is_a_bad_request(client: httpx.Client, header: str | None, body: bytes) -> None:
    headers = OCTETS if header is None else {**OCTETS, "Inference-Header-Content-Length": header}
    response = client.post("/v2/models/cities/infer", content=body, headers=headers)
    assert (response.status_code, type(response.json()["error"])) == (400, str)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 200, id="a-program-that-says-nothing"),
        pytest.param({"Content-Type": "application/json", "Origin": "https://evil.example"}, 200, id="asked-for-first"),
        pytest.param({"Origin": "https://evil.example"}, 415, id="a-page-that-says-nothing"),
        pytest.param({"Origin": "null"}, 415, id="a-page-without-an-origin"),
        pytest.param({"Sec-Fetch-Site": "same-site"}, 415, id="a-browser"),
        pytest.param({"Content-Type": "text/plain"}, 415, id="a-form"),
    ],
)
def test_a_web_page_cannot_ask_without_a_preflight(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"inputs": [texts("rome")]}).encode()
    assert client.post("/v2/models/cities/infer", content=body, headers=headers).status_code == status


def as_bytes(
    size: int, behind: bytes, shape: list[int] | None = None, kind: str = "text"
) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": kind,
        "datatype": "BYTES" if kind == "text" else "INT64",
        "shape": shape or [1],
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + behind, {**OCTETS, "Inference-Header-Content-Length": str(len(head))}


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        pytest.param(as_bytes(8, b"\4\0\0\0rome"), 200, "Rome", id="right"),
        pytest.param(as_bytes(8, b"\4\0\0\0rom"), 422, "binary_data_size 8", id="fewer-bytes-than-given"),
        pytest.param(as_bytes(8, b"\4\0\0\0romer"), 400, "belong to no input", id="more-bytes-than-given"),
        pytest.param(as_bytes(8, b"\5\0\0\0rome"), 422, "is cut short", id="a-string-beyond-the-end"),
        pytest.param(as_bytes(8, b"\xff\xff\xff\xffrome"), 422, "is cut short", id="a-string-of-4-gb"),
        pytest.param(as_bytes(3, b"\4\0\0"), 422, "is cut short", id="half-a-length"),
        pytest.param(as_bytes(8, b"\4\0\0\0ro\xff\xfe"), 422, "is not UTF-8", id="not-utf-8"),
        pytest.param(as_bytes(8, b"\4\0\0\0rome", [2]), 422, "make them equal", id="another-shape"),
        pytest.param(as_bytes(-8, b"\4\0\0\0rome"), 422, "binary_data_size -8", id="negative-size"),
        pytest.param(as_bytes(9, b"\1" * 9, [1, 1], "input_ids"), 422, "8 for each INT64", id="ids-of-9-bytes"),
    ],
)
def test_tensors_as_bytes_are_checked_against_what_is_said_of_them(
    client: httpx.Client, asked: tuple[bytes, dict[str, str]], status: int, said: str
) -> None:
    response = client.post("/v2/models/cities/infer", content=asked[0], headers=asked[1])
    assert response.status_code == status, response.text
    assert said.lower() in response.text.lower()


def test_limits_hold_for_tensors_too(client: httpx.Client) -> None:
    assert infer(client, "cities", texts(*["a"] * 2049)).status_code == 413
    assert infer(client, "cities", ids([[1]] * 2049)).status_code == 413
    too_long = infer(client, "cities", ids([[1] * 33]))
    assert (too_long.status_code, "reads at most 32" in too_long.json()["error"]) == (413, True)
    assert infer(client, "cities", ids([[1] * 32])).status_code == 200
    assert infer(client, "cities", texts("a" * 100_001)).status_code == 413
    assert infer(client, "cities", texts("a" * 1_000_001)).status_code == 413


def test_errors_of_the_server_have_the_form_too(client: httpx.Client, theirs: triton.InferenceServerClient) -> None:
    for method, path, status in (
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nobody", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2/models/cities/infer", 405),
        ("GET", "/v2/models/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/v2", 405),
    ):
        response = client.request(method, path)
        assert (response.status_code, type(response.json()["error"])) == (status, str), path
    with pytest.raises(InferenceServerException, match="there is no model 'nobody'; the models are 'cities'"):
        theirs.infer("nobody", [text_tensor("text", ["a"])])
    for wrong in ({"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}):
        response = client.post("/v2/models/cities/infer", json={}, headers=wrong)
        assert (response.status_code, type(response.json()["error"])) == (415, str)


def test_requests_are_counted_by_their_pattern_and_not_by_each_name(client: httpx.Client) -> None:
    infer(client, "cities", texts("rome"))
    counted = client.get("/metrics").text
    assert 'stillroom_requests_total{process="0",endpoint="/v2/models/{name}/infer",status="200"}' in counted
    assert "/v2/models/cities" not in counted


def test_an_id_that_a_graph_could_not_look_up_costs_no_process(client: httpx.Client) -> None:
    good, bad = [VOCABULARY.index("rome")], [len(VOCABULARY) + 5]
    assert infer(client, "cities", ids([good, bad])).status_code == 422
    assert infer(client, "cities", ids([good])).status_code == 200
    assert 'stillroom_process_restarts_total{process="0"} 0.0' in client.get("/metrics").text


def test_kserves_client_may_name_the_model_in_the_body_too(client: httpx.Client) -> None:
    parameters = {"content_type": "str", "headers": {"a": "b"}}
    asked = texts("rome")
    alone = infer(client, "cities", asked).json()
    assert infer(client, "cities", asked, model_name="cities", parameters=parameters, id="1").json() == {
        **alone,
        "id": "1",
    }
    other = infer(client, "cities", asked, model_name="intents")
    assert (other.status_code, "name one model" in other.json()["error"]) == (422, True)
