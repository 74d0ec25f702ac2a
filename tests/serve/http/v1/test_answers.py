"""Models that answer questions, asked by every way there is: Python, `/v1/answer`, `/v2`, the client and `annotate`."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from lookup_bundles import answer_table, write_bundle, write_manifest

from benchmarks.serve.small_server import serving
from serve.client import Client
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.run import annotate

LONG = "please fly " * 60
ASKED = [
    ("to", "fly from rome to it"),
    ("from", "please love it"),
    ("to", "fly to new york please"),
    ("to", f"{LONG}to oslo {LONG}"),
    ("to", ""),
]


@pytest.fixture
def bundle(answers_bundle: Path) -> Path:
    return answers_bundle


@pytest.fixture(scope="module")
def url(answers_bundle: Path, intents_bundle: Path) -> Iterator[str]:
    with serving([answers_bundle, intents_bundle]) as url:
        yield url


def score(margin: float) -> float:
    return round(1 / (1 + math.exp(-margin)), 6)


def test_an_answer_is_the_likeliest_stretch_or_none_where_that_is_likelier(bundle: Path) -> None:
    pipeline = Pipeline(bundle)
    # Tokens of a context have 0.25 more than those of the question, in both logits; none has 2 and 1.
    assert pipeline("to", text_pair="fly from rome to it") == {
        "answer": {"text": "rome", "start": 9, "end": 13}, "score": score(4 + 2 + 0.5 - 3), "truncated": False,
    }  # fmt: skip
    york = pipeline("to", text_pair="fly to new york please")
    assert york["answer"] == {"text": "new york", "start": 7, "end": 15}
    none = pipeline("from", text_pair="please love it")
    assert none == {"answer": None, "score": score(0.5 - 3), "truncated": False}
    assert pipeline("to", text_pair="")["answer"] is None
    # The middle of a context of many windows; where it is found, every window says that there is something.
    far = pipeline("to", text_pair=ASKED[3][1])
    assert far["answer"] == {"text": "oslo", "start": len(LONG) + 3, "end": len(LONG) + 7}
    assert far["score"] == score(4 + 2 + 0.5 - 3)


def test_scores_below_the_bundles_threshold_or_the_callers_are_no_answer(bundle: Path, tmp_path: Path) -> None:
    assert Pipeline(bundle)("to", text_pair="rome", min_score=0.98)["answer"] is None
    assert Pipeline(bundle)("to", text_pair="rome", min_score=0.97)["answer"] is not None
    table = answer_table()
    table[2] = [4.0, 2.2]  # [CLS]: a city has 0.3 more, a score of 0.574
    known = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", "cpu": []}
    for threshold, found in ((None, True), (0.57, True), (0.58, False)):
        folder = tmp_path / f"places-{threshold}"
        variant = known if threshold is None else {**known, "abstain_below": threshold}
        write_bundle(folder, table, task="question-answering", labels=["start", "end"], variants={"fp32": variant})
        assert (Pipeline(folder)("to", text_pair="rome")["answer"] is not None) is found


def test_every_way_to_ask_gives_the_same_answers_in_any_company(
    bundle: Path, client: httpx.Client, url: str, tmp_path: Path
) -> None:
    questions, contexts = [list(each) for each in zip(*ASKED, strict=True)]
    alone = [Pipeline(bundle)(question, text_pair=context) for question, context in ASKED]
    assert Pipeline(bundle)(questions, text_pair=contexts) == alone
    asked = {"question": questions, "context": contexts}
    assert client.post("/v1/answer", json=asked).json() == {"model": "places", "variant": "fp32", "results": alone}
    one_context = client.post("/v1/answer", json={"question": ["to", "from"], "context": contexts[0]}).json()["results"]
    assert one_context == [alone[0], Pipeline(bundle)("from", text_pair=contexts[0])]
    with Client(url) as asking:
        assert asking.answer(questions, contexts) == alone
        assert asking.answer(*ASKED[0], model="places", min_score=0.5) == alone[0]
        assert asking.answer(["to", "from"], contexts[0]) == one_context
        with pytest.raises(BadInput, match="context: give a string, or for a list of questions a list as long"):
            asking.answer("to", ["rome"])  # type: ignore[call-overload]
        with pytest.raises(BadInput, match="or for a list of questions a list as long"):
            asking.answer(["to"], ["rome", "oslo"])
    said = client.post(
        "/v2/models/places/infer",
        json={
            "inputs": [
                {"name": "text", "datatype": "BYTES", "shape": [2], "data": questions[:2]},
                {"name": "text_pair", "datatype": "BYTES", "shape": [2], "data": contexts[:2]},
            ]
        },
    ).json()["outputs"]
    assert [each["name"] for each in said] == ["answer", "score"]
    assert said[0]["data"] == [json.dumps(each, separators=(",", ":")) for each in alone[:2]]
    assert said[1]["data"] == pytest.approx([answer["score"] for answer in alone[:2]])
    rows = [{"question": question, "context": context} for question, context in ASKED[:4]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    annotate(Annotation(bundle, tmp_path / "in.jsonl", tmp_path / "out.jsonl", processes=1))
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in found] == alone[:4]


def test_offsets_are_in_the_unit_that_was_asked_for(client: httpx.Client) -> None:
    asked = {"question": "to", "context": "😀 to rome"}
    for unit, start in (("codepoints", 5), ("utf16", 6), ("utf8", 8)):
        (said,) = client.post("/v1/answer", json={**asked, "offsets": unit}).json()["results"]
        assert said["answer"] == {"text": "rome", "start": start, "end": start + 4}


def test_token_ids_get_the_logits_of_both_ends(client: httpx.Client) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [2, 4, 3]}
    (said,) = client.post("/v2/models/places/infer", json={"inputs": [ids]}).json()["outputs"]
    assert (said["name"], said["shape"]) == ("logits", [1, 3, 2])
    np.testing.assert_allclose(said["data"], answer_table()[[2, 4, 3]].ravel())


def test_the_model_is_described_with_its_endpoint(client: httpx.Client) -> None:
    model = client.get("/v2/models/places").json()
    assert [each["name"] for each in model["outputs"]] == ["answer", "score", "logits"]
    assert [each["name"] for each in model["inputs"]][:2] == ["text", "text_pair"]
    assert model["outputs"][-1]["shape"] == [-1, -1, 2]


def test_one_context_for_many_questions_costs_no_more_than_a_body_could_hold(client: httpx.Client) -> None:
    # The context counts once for each question, in the limit and in the tokens that wait.
    questions, context = ["where"] * 200, "please fly to rome " * 3000
    response = client.post("/v1/answer", json={"question": questions, "context": context})
    assert response.status_code == 413
    assert "context has 57,000 characters for each of 200 questions" in response.json()["error"]["message"]
    assert response.json()["error"]["field"] == "context"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/answer", {"question": "a"}, "context: missing; give the text that may hold the answer"),
        ("/v1/answer", {"context": "a"}, "question: missing; give a question, or a list of questions"),
        ("/v1/answer", {"question": ["a", "b"], "context": ["a"]}, "context has 1 texts for 2 questions"),
        ("/v1/answer", {"question": "a", "context": ["a"]}, "context has 1 texts for 1 questions"),
        ("/v1/answer", {"question": [], "context": "a"}, "question is an empty list"),
        ("/v1/answer", {"question": "a", "context": "b", "top_k": 2}, "there is no field 'top_k'"),
        (
            "/v1/answer",
            {"question": "a", "context": "b", "min_score": 2},
            "min_score is 2; give a number from 0 to 1",
        ),
        (
            "/v1/answer",
            {"question": "a", "context": "b", "model": "intents"},
            "'intents' is for text-classification; post to /v1/classify",
        ),
        ("/v1/classify", {"text": "a", "model": "places"}, "'places' is for question-answering; post to /v1/answer"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    client: httpx.Client, path: str, body: dict[str, object], message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]


def test_a_question_needs_its_context_and_has_no_other_options(bundle: Path, client: httpx.Client) -> None:
    with pytest.raises(BadInput, match="give the question as text and the context as text_pair"):
        Pipeline(bundle)("where")
    with pytest.raises(BadInput, match="abstain: 'places' gives no answer where it finds none"):
        Pipeline(bundle)("where", text_pair="rome", abstain=True)
    alone = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["where"]}]}
    response = client.post("/v2/models/places/infer", json=alone)
    assert response.status_code == 422
    assert "the context as text_pair" in response.json()["error"]


def test_a_manifest_of_answers_has_two_ends(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "places", answer_table(), task="question-answering", labels=["start", "end"])
    assert open_bundle(folder).manifest.outputs == 2
    write_manifest(folder, task="question-answering", labels=["start"])
    with pytest.raises(BundleError, match="question-answering gives a token two numbers, and there are 1 labels"):
        open_bundle(folder)
