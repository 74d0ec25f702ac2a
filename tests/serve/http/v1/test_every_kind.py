"""Models of numbers, vectors and answers, and promises, asked by every way there is: Python, `/v1`, `/v2`, the client and `annotate`."""

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from lookup_bundles import answer_table, write_bundle

from serve.client import Client
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.run import annotate

LONG = "please fly " * 60


class Kind(NamedTuple):
    """What is asked of one model, each a text or two, and how."""

    model: str
    path: str
    names: tuple[str, ...]  # of the texts in a request, and in a row of a file
    asked: list[tuple[str, ...]]
    by_client: Callable[[Client, list[list[str]]], list[Any]]
    of_answer: Callable[[Any], Any]  # what the client and the second output of /v2 give of an answer
    outputs: list[str]

    def __str__(self) -> str:
        return self.model


TEXTS = [(text,) for text in ("i love it", "please refund", "fly", "", "love " * 90)]
QUESTIONS = [
    ("to", "fly from rome to it"),
    ("from", "please love it"),
    ("to", "fly to new york please"),
    ("to", f"{LONG}to oslo {LONG}"),
    ("to", ""),
]
KINDS = [
    Kind("stars", "/v1/score", ("text",), TEXTS,
         lambda client, texts: client.score(*texts), lambda answer: answer["score"], ["answer", "score", "logits"]),
    Kind("vectors", "/v1/embeddings", ("input",), TEXTS,
         lambda client, texts: client.embed(*texts), lambda answer: answer["embedding"], ["answer", "embedding", "logits"]),
    Kind("places", "/v1/answer", ("question", "context"), QUESTIONS,
         lambda client, texts: client.answer(*texts), lambda answer: answer["score"], ["answer", "score", "logits"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def bundles(numbers_bundle: Path, vectors_bundle: Path, answers_bundle: Path) -> dict[str, Path]:
    return {"stars": numbers_bundle, "vectors": vectors_bundle, "places": answers_bundle}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_way_to_ask_gives_the_same_answers_in_any_company(
    kind: Kind, bundles: dict[str, Path], client: httpx.Client, url: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(bundles[kind.model])
    pairs = [{"text_pair": texts[1]} if len(texts) == 2 else {} for texts in kind.asked]
    alone = [pipeline(texts[0], **pair) for texts, pair in zip(kind.asked, pairs, strict=True)]
    columns = [list(column) for column in zip(*kind.asked, strict=True)]
    assert pipeline(columns[0], **({"text_pair": columns[1]} if len(columns) == 2 else {})) == alone

    answered = client.post(kind.path, json=dict(zip(kind.names, columns, strict=True))).json()
    if kind.model == "vectors":
        assert [each["embedding"] for each in answered["data"]] == [each["embedding"] for each in alone]
    else:
        assert answered == {"model": kind.model, "variant": "fp32", "results": alone}

    with Client(url, request_texts=2) as asking:
        expected = [kind.of_answer(each) for each in alone] if kind.model == "vectors" else alone
        assert kind.by_client(asking, columns) == expected
        assert kind.by_client(asking, [list(column) for column in zip(kind.asked[0], strict=True)]) == expected[:1]

    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [2], "data": column[:2]}
        for name, column in zip(("text", "text_pair"), columns, strict=False)
    ]
    said = client.post(f"/v2/models/{kind.model}/infer", json={"inputs": tensors}).json()["outputs"]
    assert [each["name"] for each in said] == kind.outputs[:2]
    assert said[0]["data"] == [json.dumps(each, separators=(",", ":")) for each in alone[:2]]
    assert said[1]["data"] == pytest.approx(np.ravel([kind.of_answer(each) for each in alone[:2]]).tolist())

    names = ("text",) if len(columns) == 1 else kind.names
    rows = [dict(zip(names, texts, strict=True)) for texts in kind.asked[:3]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    annotate(Annotation(bundles[kind.model], tmp_path / "in.jsonl", tmp_path / "out.jsonl", processes=1))
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in found] == alone[:3]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_model_is_described_with_its_endpoint_and_its_tensors(kind: Kind, client: httpx.Client) -> None:
    described = client.get(f"/v2/models/{kind.model}").json()
    assert [each["name"] for each in described["outputs"]] == kind.outputs
    assert [each["name"] for each in described["inputs"]][:2][: len(kind.names)] == ["text", "text_pair"][
        : len(kind.names)
    ]
    document = client.get("/openapi.json").json()
    reference = document["paths"][kind.path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert schema["properties"]["model"]["examples"] == [kind.model]


def test_a_text_gets_the_number_of_its_model_to_seven_digits(numbers_bundle: Path) -> None:
    pipeline = Pipeline(numbers_bundle)
    # The mean over the tokens, of which two are special: 12 / 5, -6.5 / 4 and 1 / 3.
    assert pipeline("i love it") == {"score": 2.4, "truncated": False}
    assert [answer["score"] for answer in pipeline(["please refund", "fly", ""])] == [-1.625, 0.3333333, 0]
    # 90 times 12 in windows, each with two special tokens, and at once in the 32 tokens that the model reads.
    whole, cut = pipeline("love " * 90), pipeline("love " * 90, truncate=True)
    assert (whole["score"], whole["truncated"], cut["score"], cut["truncated"]) == (11.25, False, 11.25, True)


def test_pairs_get_a_number_together(numbers_bundle: Path, client: httpx.Client, url: str) -> None:
    expected = Pipeline(numbers_bundle)("i love it", text_pair="fly")
    (answer,) = client.post("/v1/score", json={"text": "i love it", "text_pair": "fly"}).json()["results"]
    assert answer == expected
    assert answer != Pipeline(numbers_bundle)("i love it")
    with Client(url) as asking:
        assert asking.score(["i love it"], ["fly"]) == [expected]
        assert asking.score("i love it", model="stars", truncate=True) == Pipeline(numbers_bundle)("i love it")


def test_a_text_gets_the_vector_of_its_model_and_its_tokens_are_counted(vectors_bundle: Path) -> None:
    pipeline = Pipeline(vectors_bundle)
    # The mean over the tokens, at length 1.
    assert pipeline("i love it") == {"embedding": [0.6, 0.8, 0, 0], "tokens": 5, "truncated": False}
    vectors = [answer["embedding"] for answer in pipeline(["please refund", "fly", ""])]
    assert vectors == [[-0.6, 0, 0.8, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    # A long text is read in windows, whose mean has length 1 again.
    whole, cut = pipeline("love " * 90), pipeline("love " * 90, truncate=True)
    assert whole == {"embedding": [0.6, 0.8, 0, 0], "tokens": 92, "truncated": False}
    assert (cut["tokens"], cut["truncated"]) == (32, True)


def test_the_first_numbers_of_a_vector_alone_have_length_1_again(vectors_bundle: Path) -> None:
    pipeline = Pipeline(vectors_bundle)
    assert pipeline("rome", dimensions=2)["embedding"] == [0, 1]
    assert pipeline("please refund", dimensions=3)["embedding"] == [-0.6, 0, 0.8]
    assert pipeline("fly", dimensions=3)["embedding"] == [0, 0, 0]  # nothing of it is left
    for dimensions in (5, 0):
        with pytest.raises(BadInput, match=f"dimensions is {dimensions}"):
            pipeline("fly", dimensions=dimensions)


def test_vectors_have_the_form_of_openais_endpoint(vectors_bundle: Path, client: httpx.Client, url: str) -> None:
    texts = [text for (text,) in TEXTS]
    alone = Pipeline(vectors_bundle)(texts)
    tokens = sum(answer["tokens"] for answer in alone)
    assert client.post("/v1/embeddings", json={"input": texts, "user": "someone"}).json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": each["embedding"]} for i, each in enumerate(alone)],
        "model": "vectors",
        "variant": "fp32",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    as_bytes = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in as_bytes]
    np.testing.assert_allclose(decoded, [each["embedding"] for each in alone], atol=1e-7)
    one = client.post("/v1/embeddings", json={"input": "fly"}).json()["data"]
    assert [(each["index"], len(each["embedding"])) for each in one] == [(0, 4)]
    with Client(url) as asking:
        assert asking.embed(texts[0], model="vectors", dimensions=2) == [0.6, 0.8]


def score(margin: float) -> float:
    return round(1 / (1 + math.exp(-margin)), 6)


def test_an_answer_is_the_likeliest_stretch_or_none_where_that_is_likelier(answers_bundle: Path) -> None:
    # Tokens of a context have 0.25 more than those of the question, in both logits; none has 2 and 1. The fourth context has many windows:
    # where its middle is found, every window says that there is something.
    places = [("rome", 9), None, ("new york", 7), ("oslo", len(LONG) + 3), None]
    found = [Pipeline(answers_bundle)(question, text_pair=context) for question, context in QUESTIONS]
    assert [each["answer"] for each in found] == [
        place and {"text": place[0], "start": place[1], "end": place[1] + len(place[0])} for place in places
    ]
    assert [each["score"] for each in found][:2] == [score(4 + 2 + 0.5 - 3), score(0.5 - 3)]
    assert found[3]["score"] == score(4 + 2 + 0.5 - 3)
    assert not any(each["truncated"] for each in found)


def test_scores_below_the_bundles_threshold_or_the_callers_are_no_answer(answers_bundle: Path, tmp_path: Path) -> None:
    assert Pipeline(answers_bundle)("to", text_pair="rome", min_score=0.98)["answer"] is None
    assert Pipeline(answers_bundle)("to", text_pair="rome", min_score=0.97)["answer"] is not None
    table = answer_table()
    table[2] = [4.0, 2.2]  # [CLS]: a city has 0.3 more, a score of 0.574
    known = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", "cpu": []}
    for threshold, found in ((None, True), (0.57, True), (0.58, False)):
        folder = tmp_path / f"places-{threshold}"
        variant = known if threshold is None else {**known, "abstain_below": threshold}
        write_bundle(folder, table, task="question-answering", labels=["start", "end"], variants={"fp32": variant})
        assert (Pipeline(folder)("to", text_pair="rome")["answer"] is not None) is found


def test_questions_may_share_a_context_of_some_length(answers_bundle: Path, client: httpx.Client, url: str) -> None:
    context = QUESTIONS[0][1]
    expected = [Pipeline(answers_bundle)(question, text_pair=context) for question in ("to", "from")]
    asked = {"question": ["to", "from"], "context": context}
    assert client.post("/v1/answer", json=asked).json()["results"] == expected
    with Client(url) as asking:
        assert asking.answer(["to", "from"], context) == expected
        assert asking.answer("to", context, model="places", min_score=0.5) == expected[0]
        for questions, contexts in (("to", ["rome"]), (["to"], ["rome", "oslo"])):
            with pytest.raises(BadInput, match="context"):
                asking.answer(questions, contexts)  # type: ignore[call-overload]
    # The context counts once for each question, in the limit and in the tokens that wait.
    many = client.post("/v1/answer", json={"question": ["where"] * 200, "context": "please fly to rome " * 3000})
    assert (many.status_code, many.json()["error"]["field"]) == (413, "context")


def test_offsets_of_an_answer_are_in_the_unit_that_was_asked_for(client: httpx.Client) -> None:
    asked = {"question": "to", "context": "😀 to rome"}
    for unit, start in (("codepoints", 5), ("utf16", 6), ("utf8", 8)):
        (said,) = client.post("/v1/answer", json={**asked, "offsets": unit}).json()["results"]
        assert said["answer"] == {"text": "rome", "start": start, "end": start + 4}


def test_token_ids_get_the_logits_of_both_ends_of_an_answer(client: httpx.Client) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [2, 4, 3]}
    (said,) = client.post("/v2/models/places/infer", json={"inputs": [ids]}).json()["outputs"]
    assert (said["name"], said["shape"]) == ("logits", [1, 3, 2])
    np.testing.assert_allclose(said["data"], answer_table()[[2, 4, 3]].ravel())
    alone = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["where"]}
    refused = client.post("/v2/models/places/infer", json={"inputs": [alone]})
    assert (refused.status_code, "text_pair" in refused.json()["error"]) == (422, True)


@pytest.mark.parametrize(
    ("model", "options", "field"),
    [
        ("stars", {"abstain": True}, "abstain"),
        ("vectors", {"text_pair": "b"}, "text_pair"),
        ("vectors", {"abstain": True}, "abstain"),
        ("places", {}, "text_pair"),
        ("places", {"text_pair": "rome", "abstain": True}, "abstain"),
    ],
)
def test_an_option_of_another_kind_is_refused(
    bundles: dict[str, Path], model: str, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=f"'{model}'|{field}") as refused:
        Pipeline(bundles[model])("a", **options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {"text": "a", "top_k": 2}, "top_k"),
        ("/v1/score", {"text": "a", "model": "intents"}, "model"),
        ("/v1/score", {}, "text"),
        ("/v1/score", {"text": ["a", "b"], "text_pair": ["a"]}, "text_pair"),
        ("/v1/classify", {"text": "a", "model": "stars"}, "model"),
        ("/v1/classify", {"text": "a", "model": "vectors"}, "model"),
        ("/v1/classify", {"text": "a", "model": "places"}, "model"),
        ("/v1/embeddings", {"text": "a"}, "text"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, 2]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "model": "intents"}, "model"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/answer", {"question": "a"}, "context"),
        ("/v1/answer", {"context": "a"}, "question"),
        ("/v1/answer", {"question": ["a", "b"], "context": ["a"]}, "context"),
        ("/v1/answer", {"question": "a", "context": ["a"]}, "context"),
        ("/v1/answer", {"question": [], "context": "a"}, "question"),
        ("/v1/answer", {"question": "a", "context": "b", "top_k": 2}, "top_k"),
        ("/v1/answer", {"question": "a", "context": "b", "min_score": 2}, "min_score"),
        ("/v1/answer", {"question": "a", "context": "b", "model": "intents"}, "model"),
    ],
)
def test_bad_questions_to_a_kind_are_refused_by_field(
    client: httpx.Client, path: str, body: dict[str, object], field: str
) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["field"]) == (422, field), response.text


@pytest.fixture
def intents(promising_bundles: list[Path]) -> Path:
    """Scores of 0.75 for `i love it` and 0.33 for a text that says nothing."""
    return promising_bundles[0]


@pytest.fixture
def cities(promising_bundles: list[Path]) -> Path:
    """A score of 0.936 for `rome`."""
    return promising_bundles[1]


def test_a_class_is_given_from_its_score_on_and_the_answer_says_where_it_is_not(intents: Path) -> None:
    pipeline = Pipeline(intents)
    sure, unsure = pipeline(["i love it", "to"], promise="precision=0.9", top_k=1)
    assert (sure["labels"][0]["label"], sure["abstained"]) == ("praise", False)
    assert (unsure["labels"], unsure["abstained"]) == ([], True)
    assert pipeline("to", promise="recall=0.5")["labels"]
    assert "abstained" not in pipeline("to")


def test_entities_below_the_score_are_left_out(cities: Path) -> None:
    pipeline = Pipeline(cities)
    assert pipeline("fly to rome", promise="precision=0.99")["entities"] == []
    assert len(pipeline("fly to rome", promise="recall=0.9")["entities"]) == 1
    assert len(pipeline("fly to rome", promise="recall=0.9", truncate=True)["entities"]) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("min_score", 0.1), ("aggregation", "max"), ("constrained", True), ("abstain", True)]
)
def test_an_option_that_breaks_the_promise_is_refused(cities: Path, intents: Path, option: str, value: object) -> None:
    bundle = intents if option == "abstain" else cities
    with pytest.raises(BadInput, match=f"recall=.*without {option}") as told:
        Pipeline(bundle)("fly to rome", promise="recall=0.5" if bundle == intents else "recall=0.9", **{option: value})
    assert told.value.field == option


def test_every_way_to_ask_takes_a_promise(client: httpx.Client, url: str, cities: Path, tmp_path: Path) -> None:
    asked = {"text": ["i love it", "to"], "promise": "precision=0.9", "model": "sure"}
    answers = client.post("/v1/classify", json=asked).json()["results"]
    assert [answer["abstained"] for answer in answers] == [False, True]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["to"]}
    of_v2 = {"inputs": [tensor], "parameters": {"promise": "precision=0.9"}}
    said = client.post("/v2/models/sure/infer", json=of_v2).json()["outputs"]
    assert {each["name"]: each["data"] for each in said}["label"] == [""]
    with Client(url) as asking:
        assert asking.entities("rome", promise="precision=0.99", model="strangers")["entities"] == []
        promises = {model["name"]: model["promises"] for model in asking.models()}
        assert promises["sure"] == ["precision=0.9", "recall=0.5"]
        assert promises["strangers"] == ["precision=0.99", "recall=0.9"]
        assert promises["cities"] == []
    (tmp_path / "in.txt").write_text("rome\n", encoding="utf-8")
    options = AnswerOptions(promise="precision=0.99")
    annotate(Annotation(cities, tmp_path / "in.txt", tmp_path / "out", options, processes=1))
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8"))["answer"]["entities"] == []


def test_a_promise_not_made_is_refused(
    client: httpx.Client, cities: Path, intents_bundle: Path, tmp_path: Path
) -> None:
    refused = client.post("/v1/classify", json={"text": "to", "promise": "precision=0.95", "model": "sure"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "promise")
    assert "precision=0.9, recall=0.5" in refused.json()["error"]["message"]
    with pytest.raises(BadInput, match="none"):
        Pipeline(intents_bundle)("to", promise="recall=0.9")
    (tmp_path / "in.txt").write_text("rome\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"--promise recall=0\.8"):
        annotate(Annotation(cities, tmp_path / "in.txt", tmp_path / "out", AnswerOptions(promise="recall=0.8")))
    assert not (tmp_path / "out").exists()
