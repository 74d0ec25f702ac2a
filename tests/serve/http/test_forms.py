"""The forms of OpenAI, Hugging Face and TEI, as their clients send them, beside the answers of `/v1` to the same texts."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from serve.http.app import create_app

TEXTS = ["i love it", "please refund", "fly to oslo"]
WIDTH = 4


def post(client: httpx.Client, path: str, **body: object) -> Any:
    answered = client.post(path, json=body)
    assert answered.status_code == 200, answered.text
    return answered.json()


def results(client: httpx.Client, path: str, **body: object) -> list[Any]:
    return list(post(client, path, **body)["results"])


def vectors_of(client: httpx.Client, texts: list[str], **more: object) -> list[list[float]]:
    return [each["embedding"] for each in post(client, "/v1/embeddings", input=texts, **more)["data"]]


def refused(client: httpx.Client, path: str, **body: object) -> str:
    answered = client.post(path, json=body)
    assert answered.status_code == 422, answered.text
    (message,) = answered.json().values()
    return message if isinstance(message, str) else message["message"]


def test_entities_in_hugging_faces_form(client: httpx.Client) -> None:
    own = results(client, "/v1/entities", text=TEXTS)
    told = [
        [{**{name: each[name] for name in ("score", "start", "end")}, "entity_group": each["label"], "word": each["text"]}
         for each in answer["entities"]]
        for answer in own
    ]  # fmt: skip
    assert any(told)
    assert post(client, "/models/cities", inputs=TEXTS) == told
    assert post(client, "/", inputs=TEXTS[2]) == told[2]  # of the first model
    as_average = post(client, "/models/cities", inputs="oslos", parameters={"aggregation_strategy": "average"})
    (expected,) = results(client, "/v1/entities", text=["oslos"], aggregation="average")
    assert [each["score"] for each in as_average] == [each["score"] for each in expected["entities"]]


def test_classes_and_numbers_in_hugging_faces_form(client: httpx.Client) -> None:
    own = [each["labels"] for each in results(client, "/v1/classify", text=TEXTS, model="intents")]
    assert post(client, "/models/intents", inputs=TEXTS) == own
    assert post(client, "/models/intents", inputs=TEXTS[0]) == own[:1]
    assert post(client, "/models/intents", inputs=TEXTS[0], parameters={"top_k": 1}) == [own[0][:1]]
    scores = results(client, "/v1/score", text=TEXTS, text_pair=["it", "love", "fly"])
    pairs = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, ["it", "love", "fly"], strict=True)]
    assert post(client, "/models/stars", inputs=pairs) == [
        [{"label": "score", "score": each["score"]}] for each in scores
    ]


def test_answers_in_hugging_faces_form(client: httpx.Client) -> None:
    asked = [
        {"question": "to", "context": "fly to new york please"},
        {"question": "from", "context": "please love it"},
    ]
    own = results(client, "/v1/answer", question=["to", "from"], context=["fly to new york please", "please love it"])
    assert own[1]["answer"] is None
    found = own[0]["answer"]
    told = [
        {"answer": found["text"], "start": found["start"], "end": found["end"], "score": own[0]["score"]},
        {"answer": "", "start": 0, "end": 0, "score": own[1]["score"]},
    ]
    assert post(client, "/models/places", inputs=asked) == told
    assert post(client, "/models/places", inputs=asked[0]) == told[0]


def test_vectors_and_similarities_in_hugging_faces_form(client: httpx.Client) -> None:
    assert post(client, "/models/vectors", inputs=TEXTS) == vectors_of(client, TEXTS)
    assert post(client, "/models/vectors", inputs=TEXTS[0]) == vectors_of(client, TEXTS)[0]
    of_length_1 = np.asarray(vectors_of(client, TEXTS, dimensions=WIDTH))
    assert post(client, "/models/vectors", inputs=TEXTS, normalize=True) == of_length_1.tolist()
    alike = post(client, "/models/vectors", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})
    np.testing.assert_allclose(alike, of_length_1[1:] @ of_length_1[0], atol=1e-5)


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [
        ("relations", {"inputs": "a"}, "post to /v1/relations instead"),
        ("cities", {"inputs": {"question": "a", "context": "b"}}, "or post to /v1/entities"),
        ("places", {"inputs": "to"}, "answers questions about a context"),
        ("cities", {"inputs": "a", "parameters": {"top_k": 2}}, "parameters.top_k: 'cities' is for token-classification"),
        ("cities", {"inputs": "a", "normalize": True}, "see /v1/entities"),
        ("intents", {"inputs": "a", "parameters": {"top_p": 2}}, "parameters.top_p"),
        ("intents", {"inputs": "a", "prompt": "b"}, "there is no field 'prompt'; the fields are inputs"),
        ("intents", {"inputs": []}, "inputs is an empty list"),
        ("vectors", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs is an empty list"),
        ("vectors", {"inputs": {"source_sentence": ["a", "b"], "sentences": ["c"]}}, "source_sentence is a list"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_answer_in_hugging_faces_form_is_refused(
    client: httpx.Client, model: str, body: dict[str, object], said: str
) -> None:
    assert said in refused(client, f"/models/{model}", **body)


def test_an_unknown_model_is_not_found_in_the_forms_way(client: httpx.Client) -> None:
    answered = client.post("/models/nothing", json={"inputs": "a"})
    assert answered.status_code == 404
    assert "the models are 'cities'" in answered.json()["error"]


def test_vectors_in_teis_form(client: httpx.Client) -> None:
    assert post(client, "/embed", inputs=TEXTS, normalize=False) == vectors_of(client, TEXTS)
    assert post(client, "/embed", inputs=TEXTS[0], truncate=True) == vectors_of(client, TEXTS[:1], dimensions=WIDTH)
    assert post(client, "/embed", inputs=TEXTS, dimensions=2) == vectors_of(client, TEXTS, dimensions=2)


def test_classes_in_teis_form(client: httpx.Client) -> None:
    own = [each["labels"] for each in results(client, "/v1/classify", text=TEXTS, model="intents")]
    assert post(client, "/predict", inputs=TEXTS[0]) == own[0]
    assert post(client, "/predict", inputs=[[text] for text in TEXTS]) == own
    (pair,) = results(client, "/v1/classify", text=TEXTS[:1], text_pair=TEXTS[1:2], model="intents")
    assert pair["labels"] != own[0]
    assert post(client, "/predict", inputs=TEXTS[:2]) == pair["labels"]
    assert post(client, "/predict", inputs=[TEXTS[:2], [TEXTS[0]]]) == [pair["labels"], own[0]]
    assert "a list of 3 strings" in refused(client, "/predict", inputs=TEXTS)
    assert "an empty list" in refused(client, "/predict", inputs=[["a"], []])
    assert "/v2 gives logits" in refused(client, "/predict", inputs="a", raw_scores=True)


def test_texts_are_ordered_by_their_numbers_in_teis_form(client: httpx.Client) -> None:
    own = [each["score"] for each in results(client, "/v1/score", text=["fly"] * 3, text_pair=TEXTS)]
    order = sorted(range(3), key=lambda index: -own[index])
    assert order != [0, 1, 2]
    raw = post(client, "/rerank", query="fly", texts=TEXTS, raw_scores=True, return_text=True)
    assert raw == [{"index": index, "score": own[index], "text": TEXTS[index]} for index in order]
    ranked = post(client, "/rerank", query="fly", texts=TEXTS, truncate=True, top_n=2)
    assert [each["index"] for each in ranked] == order[:2]
    np.testing.assert_allclose([each["score"] for each in ranked], [1 / (1 + np.exp(-own[i])) for i in order[:2]])
    assert "texts is an empty list" in refused(client, "/rerank", query="fly", texts=[])
    too_much = client.post("/rerank", json={"query": "fly " * 20_000, "texts": ["a"] * 20})
    assert (too_much.status_code, "send fewer texts at once" in too_much.json()["error"]) == (413, True)


def test_a_form_without_a_model_of_its_task_names_the_path_to_use(entities_bundle: Path) -> None:
    entities_app = TestClient(create_app([entities_bundle]))
    for path, body in (
        ("/embed", {"inputs": "a"}),
        ("/predict", {"inputs": "a"}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
    ):
        assert "post to /v1/entities instead" in refused(entities_app, path, **body)
    assert entities_app.get("/info").status_code == 422


def test_info_describes_the_first_model_that_has_a_form_of_tei(client: httpx.Client) -> None:
    told = client.get("/info").json()
    assert told["model_id"] == "intents"
    assert told["model_type"]["classifier"]["id2label"] == {"0": "book", "1": "praise", "2": "refund"}
    assert told["max_client_batch_size"] == 2048


def test_models_in_openais_form(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    for each in listed["data"]:
        assert client.get(f"/v1/models/{each['id']}").json() == each
    unknown = client.get("/v1/models/nothing")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


def test_token_ids_are_refused_with_what_langchain_needs(client: httpx.Client) -> None:
    for ids in ([1, 2], [[1, 2], [3]]):
        assert "check_embedding_ctx_length=False" in refused(client, "/v1/embeddings", input=ids)


def test_2048_inputs_are_one_request(client: httpx.Client) -> None:
    assert len(vectors_of(client, ["fly"] * 2048)) == 2048
    assert client.post("/v1/embeddings", json={"input": ["fly"] * 2049}).status_code == 413


def test_errors_have_openais_type_and_param(client: httpx.Client) -> None:
    for path, body, kind, param in (
        ("/v1/embeddings", {"input": []}, "invalid_request_error", "input"),
        ("/v1/nothing", {}, "invalid_request_error", None),
        ("/v1/entities", {"text": "refund", "model": "broken"}, "server_error", None),
    ):
        error = client.post(path, json=body).json()["error"]
        assert (error["type"], error["param"]) == (kind, param)
