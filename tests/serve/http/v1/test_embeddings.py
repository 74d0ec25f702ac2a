"""Models that give a text a vector, asked by every way there is: Python, `/v1/embeddings`, `/v2`, the client and `annotate`."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from lookup_bundles import write_manifest, write_vectors_bundle

from benchmarks.serve.small_server import serving
from serve.client import Client
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.run import annotate

TEXTS = ["i love it", "please refund", "fly", "", "love " * 90]


@pytest.fixture(scope="module")
def url(vectors_bundle: Path, intents_bundle: Path) -> Iterator[str]:
    with serving([vectors_bundle, intents_bundle]) as url:
        yield url


def test_a_text_gets_the_vector_of_its_model_and_its_tokens_are_counted(vectors_bundle: Path) -> None:
    pipeline = Pipeline(vectors_bundle)
    # The mean over the tokens, at length 1.
    assert pipeline("i love it") == {"embedding": [0.6, 0.8, 0, 0], "tokens": 5, "truncated": False}
    vectors = [answer["embedding"] for answer in pipeline(["please refund", "fly", ""])]
    assert vectors == [[-0.6, 0, 0.8, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_a_long_text_is_read_in_windows_whose_mean_has_length_1_and_a_cut_one_says_so(vectors_bundle: Path) -> None:
    pipeline = Pipeline(vectors_bundle)
    whole, cut = pipeline(TEXTS[-1]), pipeline(TEXTS[-1], truncate=True)
    assert whole == {"embedding": [0.6, 0.8, 0, 0], "tokens": 92, "truncated": False}
    assert (cut["tokens"], cut["truncated"]) == (32, True)


def test_the_first_numbers_alone_have_length_1_again(vectors_bundle: Path) -> None:
    pipeline = Pipeline(vectors_bundle)
    assert pipeline("rome", dimensions=2)["embedding"] == [0, 1]
    assert pipeline("please refund", dimensions=3)["embedding"] == [-0.6, 0, 0.8]
    assert pipeline("fly", dimensions=3)["embedding"] == [0, 0, 0]  # nothing of it is left
    with pytest.raises(BadInput, match="dimensions is 5; the vectors of 'vectors' have 4 numbers"):
        pipeline("fly", dimensions=5)
    with pytest.raises(BadInput, match="dimensions is 0; give a whole number from 1"):
        pipeline("fly", dimensions=0)


def test_every_way_to_ask_gives_the_same_vectors_in_any_company(
    vectors_bundle: Path, client: httpx.Client, url: str, tmp_path: Path
) -> None:
    alone = [Pipeline(vectors_bundle)(text) for text in TEXTS]
    assert Pipeline(vectors_bundle)(TEXTS) == alone
    vectors = [answer["embedding"] for answer in alone]
    tokens = sum(answer["tokens"] for answer in alone)
    assert client.post("/v1/embeddings", json={"input": TEXTS, "user": "someone"}).json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
        "model": "vectors",
        "variant": "fp32",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    as_bytes = client.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in as_bytes]
    np.testing.assert_allclose(decoded, vectors, atol=1e-7)
    with Client(url, request_texts=2) as asking:
        assert asking.embed(TEXTS) == vectors
        assert asking.embed(TEXTS[0], model="vectors", dimensions=2) == [0.6, 0.8]
    said = client.post(
        "/v2/models/vectors/infer",
        json={"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS[:2]}]},
    ).json()["outputs"]
    assert [(each["name"], each["shape"]) for each in said] == [("answer", [2]), ("embedding", [2, 4])]
    assert said[1]["data"] == pytest.approx([number for vector in vectors[:2] for number in vector])
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    annotate(Annotation(vectors_bundle, tmp_path / "in.jsonl", tmp_path / "out.jsonl", processes=1))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == alone[:3]


def test_one_text_gets_a_list_of_one_as_the_openai_client_expects(client: httpx.Client) -> None:
    body = client.post("/v1/embeddings", json={"input": "fly"}).json()
    assert [(each["index"], len(each["embedding"])) for each in body["data"]] == [(0, 4)]
    assert body["usage"]["total_tokens"] == 3


def test_the_models_are_described_with_their_endpoint(client: httpx.Client) -> None:
    (model,) = [each for each in client.get("/v1/models").json()["models"] if each["name"] == "vectors"]
    assert (model["task"], model["labels"], model["vector_width"]) == ("feature-extraction", [], 4)
    outputs = client.get("/v2/models/vectors").json()["outputs"]
    assert [(each["name"], each["shape"]) for each in outputs] == [
        ("answer", [-1]), ("embedding", [-1, 4]), ("logits", [-1, 4]),
    ]  # fmt: skip
    paths = client.get("/openapi.json").json()
    assert paths["components"]["schemas"]["EmbeddingsRequest"]["properties"]["model"]["enum"] == ["vectors", None]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"text": "a"}, "there is no field 'text'; the fields are input, model"),
        ("/v1/embeddings", {"input": []}, "input is an empty list"),
        ("/v1/embeddings", {"input": [1, 2]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "model": "intents"}, "'intents' is for text-classification; post to /v1/classify"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions is 9; the vectors of 'vectors' have 4 numbers"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 'encoding_format: '),
        ("/v1/classify", {"text": "a", "model": "vectors"}, "'vectors' is for feature-extraction; post to /v1/embeddings"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_with_its_field(
    client: httpx.Client, path: str, body: dict[str, object], message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]


def test_a_vector_has_no_second_text_and_nothing_to_abstain_from(vectors_bundle: Path) -> None:
    with pytest.raises(BadInput, match="text_pair: 'vectors' gives a vector to one text"):
        Pipeline(vectors_bundle)("a", text_pair="b")
    with pytest.raises(BadInput, match="abstain: 'vectors' gives a vector"):
        Pipeline(vectors_bundle)("a", abstain=True)


def test_a_manifest_of_vectors_has_a_width_and_no_labels(tmp_path: Path) -> None:
    folder = write_vectors_bundle(tmp_path / "vectors")
    right = {"task": "feature-extraction", "labels": [], "vector_width": 4}
    for changes, message in (
        ({"vector_width": 0}, "vector_width is 0, and feature-extraction needs one above 0"),
        ({"labels": ["a"]}, "feature-extraction has no labels"),
        ({"task": "text-classification", "labels": ["a"]}, "vector_width is 4, and text-classification has no vectors"),
    ):
        write_manifest(folder, **(right | changes))
        with pytest.raises(BundleError, match=message):
            open_bundle(folder)
    write_manifest(folder, **(right | {"vector_width": 3}))
    with pytest.raises(BundleError, match=r"gives logits of shape \[4\] for one text"):
        Pipeline(folder)
