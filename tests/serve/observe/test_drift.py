"""The drift alarm: what starts and ends it, what a server tells of it, and that it is about the same number as in the export."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from lookup_bundles import INTENTS, TAGS, VOCABULARY, intent_table, write_bundle
from starlette.testclient import TestClient

from compress.data.examples import Entity, Example
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from export.validation.temperature import validation_scores
from serve.http.app import create_app
from serve.model.pipeline import Pipeline
from serve.observe import metrics as server_metrics
from serve.observe.metrics import WINDOW_TEXTS, Drift, Expected, Metrics, deviations
from serve.settings import ServeSettings
from serve.tasks.served_task import ReadText
from serve.text.answers import confidence
from serve.text.inputs import TextWork
from serve.text.windows import Row

EXPECTED = Expected(texts=1000, mean=0.9, deviation=0.1)


def test_deviations_are_those_of_two_means() -> None:
    assert deviations(0.9, 250, EXPECTED) == 0
    # The standard error of a difference: 0.1 sqrt(1/250 + 1/1000).
    assert deviations(0.9 - 0.1 * np.sqrt(0.005), 250, EXPECTED) == pytest.approx(-1)
    # A model that was as sure of every text of validation.
    assert deviations(0.5, 250, Expected(10**9, 1.0, 0.0)) < -100
    assert abs(deviations(0.998, 250, Expected(10**9, 1.0, 0.0))) < 5


def test_texts_of_another_kind_start_one_alarm_and_texts_as_before_end_it(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    watched = Drift("intents", "confidence", EXPECTED, metrics)
    rng = np.random.default_rng(0)

    def give(mean: float, texts: int) -> None:
        for score in rng.normal(mean, 0.1, texts):
            watched.add(1, float(score))

    with caplog.at_level(logging.WARNING, "serve"):
        give(0.9, 20 * WINDOW_TEXTS)
        assert (watched.alarmed, caplog.records) == (False, [])
        give(0.8, 3 * WINDOW_TEXTS)
        assert watched.alarmed
        give(0.9, 2 * WINDOW_TEXTS)
        assert watched.alarmed  # two windows of the others are among the last four
        give(0.9, 2 * WINDOW_TEXTS)
    assert not watched.alarmed
    started, ended = [record.message for record in caplog.records]
    assert started.startswith("texts are unlike those of validation: -")
    assert ended == "texts are like those of validation again"
    assert metrics.drift_alarms.labels("intents", "confidence").value == 1


def test_a_change_too_small_for_one_window_is_seen_in_four() -> None:
    watched = Drift("intents", "confidence", EXPECTED, Metrics())
    less = 0.1 * np.sqrt(1 / WINDOW_TEXTS + 1 / EXPECTED.texts) * 4.5  # 4.5 deviations of a window, 7.1 of four
    seen = []
    for _ in range(4):
        watched.add(WINDOW_TEXTS, (EXPECTED.mean - less) * WINDOW_TEXTS)
        seen.append(watched.alarmed)
    assert seen == [False, True, True, True]


def test_fewer_texts_than_a_window_say_nothing() -> None:
    metrics = Metrics()
    watched = Drift("intents", "confidence", EXPECTED, metrics)
    watched.add(WINDOW_TEXTS - 1, 0.1 * (WINDOW_TEXTS - 1))
    text = metrics.text().decode()
    assert 'stillroom_drift_expected{model="intents",of="confidence"} 0.9' in text
    assert "stillroom_drift_deviations{" not in text
    watched.add(1, 0.1)
    assert 'stillroom_drift_mean{model="intents",of="confidence"} 0.1' in metrics.text().decode()


def test_confidence_is_the_probability_of_the_likeliest_label_and_of_each_ones_likelier_outcome() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]])) + 3
    assert confidence(logits) == pytest.approx(0.6)
    assert confidence(np.log(np.array([[0.2 / 0.8, 0.9 / 0.1]])), multi_label=True) == pytest.approx(0.85)
    assert confidence(np.array([[1e5, -1e5]])) == 1


def test_what_is_served_is_as_sure_as_what_was_exported(entities_bundle: Path, intents_bundle: Path) -> None:
    texts = ["fly to rome", "new york please", "i love it", "münchen"]
    for bundle, task, labels in (
        (entities_bundle, TOKEN_CLASSIFICATION, TAGS),
        (intents_bundle, TEXT_CLASSIFICATION, INTENTS),
    ):
        pipeline = Pipeline(bundle)
        encoded = task.encode(
            [Example(text, entities=(Entity(0, 1, "city"),)) for text in texts], pipeline.tokenizer, labels
        )  # type: ignore[arg-type]
        rows = pipeline.encode(texts)
        logits = pipeline.session.run(rows)
        of_rows = [each[encoded.rows[i]] if each.ndim == 2 else each[None] for i, each in enumerate(logits)]
        expected = validation_scores(encoded, of_rows, 1.0)
        assert expected is not None
        served = [confidence_of(pipeline, text, row, of) for text, row, of in zip(texts, rows, logits, strict=True)]
        assert (len(texts), np.mean(served), np.std(served)) == (
            expected.texts, pytest.approx(expected.mean, abs=1e-6), pytest.approx(expected.deviation, abs=1e-6),
        )  # fmt: skip
        assert np.mean([len(row.ids) for row in rows]) == pytest.approx(expected.tokens_mean, abs=1e-6)


def confidence_of(pipeline: Pipeline, text: str, row: Row, logits: np.ndarray) -> float | None:
    read = ReadText(TextWork(text), row, pipeline.task.words(text, row))
    return pipeline.task.confidence(read, logits, pipeline.facts)


def test_a_text_without_a_word_has_no_entities_to_be_sure_of(entities_bundle: Path) -> None:
    pipeline = Pipeline(entities_bundle)
    (row,) = pipeline.encode([""])
    (logits,) = pipeline.session.run([row])
    assert confidence_of(pipeline, "", row, logits) is None


def test_a_server_tells_of_less_sure_and_of_longer_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "WINDOW_TEXTS", 20)
    table = intent_table()
    table[VOCABULARY.index("b")] = [0.1, 0, 0]
    scores = {"texts": 500, "mean": 0.95, "deviation": 0.05, "tokens_mean": 3.1, "tokens_deviation": 0.4}
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", "validation_scores": scores}
    classes = {"task": "text-classification", "labels": INTENTS}
    bundle = write_bundle(tmp_path / "intents", table, **classes, variants={"fp32": variant})
    with TestClient(create_app([bundle], ServeSettings(processes=1))) as client:

        def alarms_after(text: str) -> set[str]:
            assert client.post("/v1/classify", json={"text": [text] * 20}).status_code == 200
            told = client.get("/metrics").text
            assert 'stillroom_drift_mean{model="intents",of="confidence"}' in told
            return set(re.findall(r'drift_alarms_total{model="intents",of="(\w+)"} 1.0', told))

        assert alarms_after("fly") == set()
        assert alarms_after("b") == {"confidence"}
        deviations = re.findall(r"(?m)^stillroom_drift_deviations{.*confidence.*} (\S+)$", client.get("/metrics").text)
        assert float(deviations[0]) < -5
        assert alarms_after("fly fly fly fly fly") == {"confidence", "tokens"}  # seven tokens, where three were usual
