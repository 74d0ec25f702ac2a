"""Scores by the manifest's temperature, and no class where the model is not sure enough."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_bundles import INTENTS, city_table, intent_table, write_bundle

from serve.errors import BadInput
from serve.model.pipeline import Pipeline

CLASSES: dict[str, Any] = {"task": "text-classification", "labels": INTENTS}


def variants(**calibrated: object) -> dict[str, object]:
    described = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "onnxruntime", **calibrated}
    return {"variants": {"fp32": described}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrated")


def test_logits_are_divided_by_the_temperature_before_they_become_scores(folder: Path) -> None:
    classes = Pipeline(
        write_bundle(folder / "classes", intent_table(), **CLASSES, **variants(temperature=2.0)), threads=1
    )
    (score,) = (each["score"] for each in classes("refund")["labels"] if each["label"] == "refund")
    assert score == round(float(np.exp(1.5) / (np.exp(1.5) + 2)), 6)  # [CLS] refund [SEP]: 9 / 3 / 2
    cities = Pipeline(write_bundle(folder / "cities", city_table(), **variants(temperature=2.0)), threads=1)
    (entity,) = cities("rome")["entities"]
    assert entity["score"] == round(float(np.exp(2) / (np.exp(2) + np.exp(0.5) + 1)), 6)


def test_a_temperature_changes_no_decision_on_labels_that_apply_each_on_its_own(folder: Path) -> None:
    several = {**CLASSES, "multi_label": True}
    plain = Pipeline(write_bundle(folder / "plain", intent_table() - 2, **several), threads=1)
    warm = Pipeline(
        write_bundle(folder / "warm", intent_table() - 2, **several, **variants(temperature=3.0)), threads=1
    )
    for text in ("love refund refund", "love love refund refund fly", "a b", "refund"):
        ours, theirs = plain(text)["labels"], warm(text)["labels"]
        assert [each["label"] for each in ours] == [each["label"] for each in theirs]
        logits = [np.log(each["score"] / (1 - each["score"])) for each in ours]
        expected = [1 / (1 + np.exp(-logit / 3)) for logit in logits]
        assert [each["score"] for each in theirs] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("multi_label", [False, True])
def test_who_asks_the_model_to_abstain_gets_no_class_it_is_not_sure_of(folder: Path, multi_label: bool) -> None:
    given = {**CLASSES, "multi_label": multi_label, **variants(abstain_below=0.7, temperature=1.5)}
    pipeline = Pipeline(write_bundle(folder / f"abstaining-{multi_label}", intent_table() - 1, **given), threads=1)
    sure, unsure = "refund refund refund", "refund a a a a a a"
    assert pipeline(sure, top_k=1)["labels"][0]["score"] > 0.7 > pipeline(unsure, top_k=1)["labels"][0]["score"]
    assert pipeline(sure, abstain=True) == {**pipeline(sure), "abstained": False}
    assert pipeline(unsure, abstain=True) == {"labels": [], "truncated": False, "abstained": True}
    assert pipeline(unsure, abstain=True, top_k=2)["labels"] == []
    assert "abstained" not in pipeline(unsure)
    assert len(pipeline(unsure, top_k=3)["labels"]) == 3


def test_a_bundle_without_a_threshold_says_what_to_do(intents_bundle: Path) -> None:
    with pytest.raises(BadInput, match=r"no `abstain_below` in its manifest; export the bundle again") as caught:
        Pipeline(intents_bundle, threads=1)("refund", abstain=True)
    assert caught.value.field == "abstain"
