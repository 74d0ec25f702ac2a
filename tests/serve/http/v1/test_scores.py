"""Models that give a text a number, asked by every way there is: Python, `/v1/score`, `/v2`, the client and `annotate`."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lookup_bundles import number_table, write_bundle, write_manifest

from benchmarks.serve.small_server import serving
from serve.client import Client
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.run import annotate

TEXTS = ["i love it", "please refund", "fly", "", "love " * 90]


@pytest.fixture
def bundle(numbers_bundle: Path) -> Path:
    return numbers_bundle


@pytest.fixture(scope="module")
def url(numbers_bundle: Path, intents_bundle: Path) -> Iterator[str]:
    with serving([numbers_bundle, intents_bundle]) as url:
        yield url


def test_a_text_gets_the_number_of_its_model_to_seven_digits(bundle: Path) -> None:
    pipeline = Pipeline(bundle)
    # The mean over the tokens, of which two are special: 12 / 5, -6.5 / 4 and 1 / 3.
    assert pipeline("i love it") == {"score": 2.4, "truncated": False}
    assert [answer["score"] for answer in pipeline(["please refund", "fly", ""])] == [-1.625, 0.3333333, 0]
    # 90 times 12 in windows, each with two special tokens, and at once in the 32 tokens that the model reads.
    whole, cut = pipeline(TEXTS[-1]), pipeline(TEXTS[-1], truncate=True)
    assert (whole["score"], whole["truncated"], cut["score"], cut["truncated"]) == (11.25, False, 11.25, True)


def test_every_way_to_ask_gives_the_same_numbers_in_any_company(
    bundle: Path, client: httpx.Client, url: str, tmp_path: Path
) -> None:
    alone = [Pipeline(bundle)(text) for text in TEXTS]
    assert Pipeline(bundle)(TEXTS) == alone
    assert client.post("/v1/score", json={"text": TEXTS}).json() == {
        "model": "stars", "variant": "fp32", "results": alone,
    }  # fmt: skip
    with Client(url) as asking:
        assert asking.score(TEXTS) == alone
        assert asking.score(TEXTS[0], model="stars", truncate=True) == alone[0]
    said = client.post(
        "/v2/models/stars/infer",
        json={"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS[:2]}]},
    ).json()["outputs"]
    assert [each["name"] for each in said] == ["answer", "score"]
    assert said[0]["data"] == [json.dumps(each, separators=(",", ":")) for each in alone[:2]]
    assert said[1]["data"] == pytest.approx([answer["score"] for answer in alone[:2]])
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    annotate(Annotation(bundle, tmp_path / "in.jsonl", tmp_path / "out.jsonl", processes=1))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == alone[:3]


def test_pairs_get_a_number_together(bundle: Path, client: httpx.Client, url: str) -> None:
    expected = Pipeline(bundle)("i love it", text_pair="fly")
    (answer,) = client.post("/v1/score", json={"text": "i love it", "text_pair": "fly"}).json()["results"]
    assert answer == expected
    assert answer != Pipeline(bundle)("i love it")
    with Client(url) as asking:
        assert asking.score(["i love it"], ["fly"]) == [expected]


def test_the_models_are_described_with_their_endpoint(client: httpx.Client) -> None:
    model = client.get("/v2/models/stars").json()
    assert [each["name"] for each in model["outputs"]] == ["answer", "score", "logits"]
    paths = client.get("/openapi.json").json()
    assert paths["components"]["schemas"]["ScoreRequest"]["properties"]["model"]["enum"] == ["stars", None]
    assert "/v1/score" in paths["paths"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/score", {"text": "a", "top_k": 2}, "there is no field 'top_k'"),
        ("/v1/score", {"text": "a", "model": "intents"}, "'intents' is for text-classification; post to /v1/classify"),
        ("/v1/classify", {"text": "a", "model": "stars"}, "'stars' is for text-regression; post to /v1/score"),
        ("/v1/score", {}, "text: missing; give a string, or a list of strings"),
        ("/v1/score", {"text": ["a", "b"], "text_pair": ["a"]}, "text_pair"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_field(
    client: httpx.Client, path: str, body: dict[str, object], message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]


def test_a_number_has_no_threshold_to_abstain_below(bundle: Path) -> None:
    with pytest.raises(BadInput, match="abstain: 'stars' gives a number"):
        Pipeline(bundle)("a", abstain=True)


def test_a_manifest_of_numbers_has_one_label_and_no_kind_of_classes(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "stars", number_table(), task="text-regression", labels=["score"], pairs=True)
    assert open_bundle(folder).manifest.pairs
    for changes, message in (
        ({"labels": ["a", "b"]}, "text-regression gives a text one number, and there are 2 labels"),
        ({"labels": ["score"], "multi_label": True}, "multi_label is for text-classification, not for text-regression"),
    ):
        write_manifest(folder, task="text-regression", **changes)
        with pytest.raises(BundleError, match=message):
            open_bundle(folder)
