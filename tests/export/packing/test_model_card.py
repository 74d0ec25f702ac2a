import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import yaml

from export.packing.model_card import CardFacts, Figure, model_card
from serve.settings import Limits
from serve.tasks import SERVED_TASKS
from serve.tasks.served_task import ServedTask

FACTS = CardFacts(
    name="places: a | student",
    task="token-classification",
    labels=("O", "B-city", "I-city", "B-date", "I-date"),
    max_length=128,
    figures=(
        Figure("teacher", "f1", 0.93),
        Figure("student, int8", "f1", 0.9251, 0.9100, 0.9380, size_bytes=17_600_000),
    ),
    shipped="student, int8",
    license="apache-2.0",
    base_model="someone/teacher",
    dataset="trips",
    language="en",
    lineage={"method": "minilmv2", "seed": 0},
    limits=("It was trained on English alone.",),
)


def front_matter(card: str) -> dict[str, object]:
    opening, block, _ = card.split("---\n", 2)
    assert opening == ""
    parsed = yaml.safe_load(block)
    assert isinstance(parsed, dict)
    return parsed


def test_the_hub_reads_the_front_matter() -> None:
    metadata = front_matter(model_card(FACTS))
    results = {
        "task": {"type": "token-classification"},
        "dataset": {"name": "trips", "type": "trips", "split": "test"},
        "metrics": [{"type": "f1", "value": 0.9251}],
    }
    expected = {
        "license": "apache-2.0", "base_model": "someone/teacher", "pipeline_tag": "token-classification", "metrics": ["f1"],
        "model-index": [{"name": "places: a | student", "results": [results]}],
    }  # fmt: skip
    assert {name: metadata[name] for name in expected} == expected


def test_a_person_reads_scores_labels_lineage_and_limits() -> None:
    card = model_card(replace(FACTS, confidence=["int8: temperature 1.5.", "fp32: temperature 1.4."]))
    for told in (
        "| **student, int8** | f1 | 0.9251 | 0.9100 to 0.9380 | 17.6 MB |", "| teacher | f1 | 0.9300 |  |  |",
        "Labels (2): `city`, `date`.", "/v1/entities", '"method": "minilmv2"', "- It was trained on English alone.",
        "of the data: not stated", "## Confidence\n\n- int8: temperature 1.5.\n- fp32: temperature 1.4.\n\n## Use",
    ):  # fmt: skip
        assert told in card
    assert "Confidence" not in model_card(FACTS)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "reads 128 tokens at once. A longer text is read whole, in overlapping windows"),
        ({"task": "text-classification"}, "A longer pair of texts is cut."),
        ({"task": "text-classification", "relations": True}, "reads the window around the two parts"),
    ],
)
def test_the_card_says_what_becomes_of_a_long_text(known: dict[str, Any], said: str) -> None:
    assert said in model_card(replace(FACTS, **known))


@pytest.mark.parametrize("task", [*SERVED_TASKS], ids=lambda task: task.kind)
def test_the_card_sends_a_request_that_the_task_accepts(task: ServedTask) -> None:
    facts = replace(FACTS, task=task.name, labels=("a", "b"), relations=task.reads_markers)
    sent = re.search(r"localhost:8000(\S+) .* -d '(.*)'", model_card(facts))
    assert sent is not None
    assert sent[1] == task.endpoint.path
    body = sent[2].encode()
    request = msgspec.json.decode(body, type=task.request_type(body))
    assert len(task.works_of(request, Limits())) == 1


@pytest.mark.parametrize("license_name", [None, "mit"])
def test_unknown_facts_are_left_out(license_name: str | None) -> None:
    card = model_card(CardFacts("intents", "text-classification", ("yes", "no"), 64, license=license_name))
    metadata = front_matter(card)
    assert metadata.get("license") == license_name
    assert not {"base_model", "language", "datasets", "model-index", "metrics"} & set(metadata)
    assert "Scores" not in card
    assert "Labels (2): `yes`, `no`." in card
    assert "/v1/classify" in card


@pytest.mark.parametrize(
    ("known", "distilled"),
    [
        ({"base_model": "someone/teacher"}, True),
        ({"lineage": {"teacher": "large", "method": "minilmv2 + soft labels"}}, True),
        ({"lineage": {"teacher": "large", "stage": "soft labels", "role": "student"}}, True),
        ({"lineage": {"checkpoint": "found-somewhere"}}, False),
        ({"base_model": "someone/model", "lineage": {"checkpoint": "someone/model"}}, False),
        ({"base_model": "someone/large", "lineage": {"teacher": "someone/large", "method": "labels"}}, False),
        ({"lineage": {"teacher": "itself", "method": "labels"}}, False),
        ({"lineage": {"teacher": "large", "method": "none"}}, False),
        ({}, False),
    ],
)
def test_a_teacher_is_spoken_of_where_one_is_known(known: dict[str, Any], distilled: bool) -> None:
    card = model_card(CardFacts("intents", "text-classification", ("yes", "no"), 64, **known))
    told = card.split("## Lineage")[0] + card.split("## Limits")[1]
    assert ("distil" in told, "teacher" in told) == (distilled, distilled)
    assert "Licence of the model: not stated" in told
    assert front_matter(card)["tags"] == ["stillroom", "onnx", *(["distillation"] if distilled else [])]


def test_a_name_cannot_break_the_front_matter() -> None:
    card = model_card(CardFacts("x", "text-classification", ("a", "b"), 64, license="x\nevil: true\n---\n"))
    assert "evil" not in front_matter(card)
