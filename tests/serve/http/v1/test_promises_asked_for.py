"""Answers below the score for which a bundle promises something are not given, by every way to ask."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lookup_bundles import INTENTS, TAGS, city_table, intent_table, write_bundle, write_manifest

from benchmarks.serve.small_server import serving
from serve.client import Client
from serve.errors import BadInput, BundleError
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.run import annotate

VARIANT = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime"}


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of 0.75 for `i love it` and 0.33 for a text that says nothing."""
    given = {"task": "text-classification", "labels": INTENTS}
    promises = {"precision=0.9": 0.6, "recall=0.5": 0.0}
    folder = tmp_path_factory.mktemp("bundles") / "intents"
    return write_bundle(folder, intent_table(), variants={"fp32": VARIANT | {"promises": promises}}, **given)


@pytest.fixture(scope="module")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A score of 0.936 for `rome`."""
    folder = tmp_path_factory.mktemp("bundles") / "cities"
    promises = {"precision=0.99": 0.95, "recall=0.9": 0.5}
    return write_bundle(folder, city_table(), variants={"fp32": VARIANT | {"promises": promises}}, labels=TAGS)


@pytest.fixture(scope="module")
def url(intents: Path, cities: Path) -> Iterator[str]:
    with serving([intents, cities]) as url:
        yield url


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
def test_an_option_that_gives_other_answers_than_the_promise_was_made_for_is_refused(
    cities: Path, intents: Path, option: str, value: object
) -> None:
    bundle = intents if option == "abstain" else cities
    with pytest.raises(BadInput, match=f"{option}: promise 'recall=.*' was made for answers without {option}") as told:
        Pipeline(bundle)("fly to rome", promise="recall=0.5" if bundle == intents else "recall=0.9", **{option: value})
    assert told.value.field == option


def test_every_way_to_ask_takes_a_promise(client: httpx.Client, url: str, cities: Path, tmp_path: Path) -> None:
    asked = {"text": ["i love it", "to"], "promise": "precision=0.9"}
    answers = client.post("/v1/classify", json=asked).json()["results"]
    assert [answer["abstained"] for answer in answers] == [False, True]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["to"]}
    said = client.post(
        "/v2/models/intents/infer", json={"inputs": [tensor], "parameters": {"promise": "precision=0.9"}}
    ).json()["outputs"]
    assert {each["name"]: each["data"] for each in said}["label"] == [""]
    with Client(url) as asking:
        assert asking.entities("rome", promise="precision=0.99")["entities"] == []
        assert {model["name"]: model["promises"] for model in asking.models()} == {
            "intents": ["precision=0.9", "recall=0.5"],
            "cities": ["precision=0.99", "recall=0.9"],
        }
    (tmp_path / "in.txt").write_text("rome\n", encoding="utf-8")
    job = Annotation(
        cities, tmp_path / "in.txt", tmp_path / "out", AnswerOptions(promise="precision=0.99"), processes=1
    )
    annotate(job)
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8"))["answer"]["entities"] == []


def test_a_promise_that_is_not_made_is_refused_with_those_that_are(
    client: httpx.Client, intents: Path, cities: Path, intents_bundle: Path, tmp_path: Path
) -> None:
    response = client.post("/v1/classify", json={"text": "to", "promise": "precision=0.95"})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["field"] == "promise"
    assert "its promises are precision=0.9, recall=0.5" in error["message"]
    with pytest.raises(BadInput, match="it makes none"):
        Pipeline(intents_bundle)("to", promise="recall=0.9")
    (tmp_path / "in.txt").write_text("rome\n", encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"--promise recall=0.8: 'cities' does not make it; its promises are precision=0.99"
    ):
        annotate(Annotation(cities, tmp_path / "in.txt", tmp_path / "out", AnswerOptions(promise="recall=0.8")))
    assert not (tmp_path / "out").exists()


def test_a_least_score_that_is_no_probability_is_a_fault_of_the_bundle(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "cities", city_table(), labels=TAGS)
    write_manifest(folder, variants={"fp32": VARIANT | {"promises": {"recall=0.9": 1.5}}})
    with pytest.raises(BundleError, match=r"variant 'fp32' keeps 'recall=0.9' from a score of 1.5, not a probability"):
        open_bundle(folder)
