"""Numbers of texts from data to answers: fine-tuned, exported, scored, labelled by a teacher, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from command_line import here
from small_task import ratings, write_rows, write_splits

import compress
import stillroom as face
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.evaluation.numbers import check_unit
from compress.evaluation.predictions import row_logits
from compress.models import task_heads
from compress.models.pretrained import load, open_model
from compress.runs.input_summary import input_summary, summary_lines
from compress.runs.open_task import open_task
from compress.runs.soft_labels import fold_of
from compress.settings import TaskSettings
from compress.tasks import TEXT_CLASSIFICATION, TEXT_REGRESSION
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from serve.text.tokenizer import load_tokenizer

TASK = "text-regression"
SHAPE = "layers=1,hidden=32,heads=4,ffn=64"


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("ratings"), ratings, (320, 60, 100))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, rated: Path) -> Path:
    """The tiny teacher fine-tuned on numbers from -600 to 600."""
    out = tmp_path_factory.mktemp("tuned") / "rater"
    return compress.finetune(
        str(shallow_teacher), TASK, str(rated), out, epochs=8, learning_rate=2e-3, batch=8, threads=1, patience=0
    )


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, rated: Path) -> Path:
    return Path(face.export(checkpoint, checkpoint.with_name("rater.bundle"), rated, latency_seconds=0)["bundle"])


def test_a_head_learns_numbers_of_any_size_and_transformers_gives_them(checkpoint: Path, rated: Path) -> None:
    from transformers import pipeline

    document = face.evaluate(checkpoint, rated)
    assert (document["task"], document["metric"]) == (TASK, "pearson")
    assert document["value"] > 0.9
    assert document["scores"]["spearman"]["value"] > 0.85
    numbers = [row["label"] for row in ratings(100, 2)]
    assert document["scores"]["mean_squared_error"]["value"] < 0.25 * np.var(numbers)
    assert document["labels"] == document["unknown_labels"] == []
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "score"})
    asked = "the lamp is superb and the radio is very nice"
    (theirs,) = pipeline("text-classification", model=str(checkpoint), function_to_apply="none")(asked)
    assert theirs["score"] > 200


@pytest.mark.slow
def test_the_bundle_keeps_the_numbers_in_int8_and_its_card_says_what_it_gives(
    bundle: Path, checkpoint: Path, rated: Path
) -> None:
    manifest = open_bundle(bundle).manifest
    assert (manifest.task, manifest.labels, manifest.metrics["metric"]) == (TASK, ["score"], "pearson")
    int8 = manifest.variants["int8"]
    assert (int8.temperature, int8.abstain_below) == (1, None)
    scores = {name: face.evaluate(bundle, rated, variant=name)["value"] for name in ("fp32", "int8")}
    assert scores["fp32"] == pytest.approx(face.evaluate(checkpoint, rated)["value"], abs=1e-4)
    assert scores["int8"] >= 0.99 * scores["fp32"]
    tokenizer = load_tokenizer(checkpoint, 64)
    encoded = TEXT_REGRESSION.encode(read_examples(rated / "test.jsonl", TEXT_REGRESSION), tokenizer, ("score",))
    logits = row_logits(load(open_model(str(checkpoint)), TEXT_REGRESSION), encoded)
    served = [answer["score"] for answer in Pipeline(bundle, "fp32")(encoded.texts, truncate=True)]
    expected = encoded.task.predictions(encoded, logits)
    np.testing.assert_allclose(served, expected, rtol=1e-4, atol=0.05)  # of numbers from -600 to 600
    card = (bundle / "README.md").read_text(encoding="utf-8")
    assert all(part in card for part in ("gives a text a number", "localhost:8000/v1/score", "pearsonr"))
    assert "Labels" not in card


def test_a_student_learns_the_numbers_of_a_file(checkpoint: Path, rated: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    face.label([rated / "train.jsonl"], answers, checkpoint=str(checkpoint), threads=1)
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert all(isinstance(row["label"], float) for row in rows)
    settings = TaskSettings(
        teacher_labels=(str(answers),), start=str(checkpoint), task=TASK, data=str(rated), student=SHAPE
    )
    inputs = open_task(settings, tmp_path / "out")
    assert inputs.answered
    np.testing.assert_allclose(np.concatenate(inputs.answered.soft)[:, 0], [row["label"] for row in rows], rtol=1e-6)


def test_numbers_are_told_and_spread_over_the_folds(shallow_teacher: Path, rated: Path) -> None:
    settings = TaskSettings(teacher=str(shallow_teacher), task=TASK, data=str(rated), student=SHAPE)
    inputs = open_task(settings, rated / "out")
    found = input_summary(inputs)
    assert (found["kind"], found["labels"]) == ("a number", {})
    numbers = np.concatenate(inputs.train.targets)
    assert f"numbers: {numbers.min():g} to {numbers.max():g} in train" in "\n".join(summary_lines(found))
    folds = fold_of(inputs.splits.train, 4, 0)
    assert np.bincount(folds).tolist() == [80] * 4
    assert np.ptp([numbers[folds == fold].mean() for fold in range(4)]) < 0.1 * numbers.std()


def test_a_head_of_one_output_is_for_numbers_and_no_other_is(checkpoint: Path) -> None:
    opened = open_model(str(checkpoint))
    assert (opened.head_for(TEXT_REGRESSION), opened.head_for(TEXT_CLASSIFICATION)) == (("score",), None)
    # A new head for classes of a model of numbers is one of classes.
    model = load(opened, TEXT_CLASSIFICATION, ("no", "yes"))
    assert model.config.problem_type is None
    # Nor are two outputs of numbers a head for either.
    config = open_model(str(checkpoint)).config
    config.id2label = {0: "a", 1: "b"}
    assert (config.problem_type, config.num_labels) == ("regression", 2)
    assert [task.head.labels_in(config) for task in (TEXT_REGRESSION, TEXT_CLASSIFICATION)] == [None, None]


@pytest.mark.parametrize("unit", [task_heads.Unit(2000.0, 5.0), task_heads.Unit(3e-7, 1e-6)])
def test_a_head_gives_standard_numbers_in_training_and_the_datas_before_and_after(
    checkpoint: Path, unit: task_heads.Unit
) -> None:
    model = load(open_model(str(checkpoint)), TEXT_REGRESSION, ("score",)).eval()
    ids = torch.tensor([[2, 9, 11, 3]])
    new = model(ids).logits.detach()
    numbers = np.array([unit.mean - unit.deviation, unit.mean + unit.deviation])
    task_heads.start_head(model, cast(Any, SimpleNamespace(task=TEXT_REGRESSION, targets=[numbers])))
    torch.testing.assert_close(
        model(ids).logits, unit.mean + unit.deviation * new, rtol=1e-6, atol=1e-6 * unit.deviation
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with task_heads.standardised(unit, model):
        torch.testing.assert_close(model(ids).logits, new, rtol=1e-4, atol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-6, atol=1e-7 * unit.deviation)


def test_a_teacher_of_another_unit_is_refused() -> None:
    gold = [1.0, 2.0, 3.0]
    check_unit("M", gold, [1.5, 2.5, 3.5])
    with pytest.raises(BadInput, match="M gives numbers in another unit"):
        check_unit("M", gold, [100.0, 200.0, 300.0])


def test_numbers_are_read_as_numbers_or_as_text_and_anything_else_is_named_with_its_line(tmp_path: Path) -> None:
    given = {"3": 3.0, "-1.5": -1.5, '"2.25"': 2.25, '"1e3"': 1000.0, str(10**20): 1e20, '"-100"': -100.0}
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"text": "a", "label": {number}}}\n' for number in given))
    assert [example.label for example in read_examples(file, TEXT_REGRESSION)] == list(given.values())
    for wrong in ("good", None, True, "", "nan", "inf", 1e31, [1], {"a": 1}, "9" * 5000):
        write_rows(file, [{"text": "a", "label": 1}, {"text": "b", "label": wrong}])
        with pytest.raises(BadRows, match=r"line 2: `label` is .*a number is needed") as told:
            read_examples(file, TEXT_REGRESSION)
        assert len(str(told.value)) < 400


def test_verbs_and_methods_for_labels_are_refused_for_numbers_before_any_training(
    shallow_teacher: Path, checkpoint: Path, rated: Path, tmp_path: Path
) -> None:
    same = write_splits(
        tmp_path / "same", lambda count, _: [{"text": str(i), "label": 2.5} for i in range(count)], (3, 3, 3)
    )
    train, out = [rated / "train.jsonl"], tmp_path / "out"
    settings = TaskSettings(teacher=str(shallow_teacher), task=TASK, data=str(rated), student=SHAPE)
    uncertain = {"encoder": str(shallow_teacher), "checkpoint": str(checkpoint), "uncertain": 3}
    for use, named in (
        (lambda: open_task(replace(settings, method="tinybert"), out), "--method tinybert .*soft-labels, labels"),
        (lambda: open_task(replace(settings, data=str(same)), out), "the number 2.5"),
        (lambda: face.export(checkpoint, out, rated, promises=("recall=0.9",), latency_seconds=0), "no single class"),
        (lambda: face.label(train, out, url="http://127.0.0.1:9", task=TASK, model="m"), "--with-url asks for labels"),
        (lambda: face.select(train, rated, out, task=TASK, **uncertain), "how sure it is of them is not known"),
    ):
        with pytest.raises(BadInput, match=named):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["same"]


@pytest.mark.slow
def test_a_run_on_pairs_ends_with_a_bundle_that_keeps_its_teachers_numbers(
    shallow_teacher: Path, tmp_path: Path
) -> None:
    def pairs(count: int, seed: int) -> list[dict[str, object]]:
        halves = [(str(row["text"]).split(" and ", 1), row["label"]) for row in ratings(count, seed)]
        return [{"text": first, "text_pair": second, "label": label} for (first, second), label in halves]

    data = write_splits(tmp_path / "pairs", pairs, (320, 60, 100))
    done = here(
        "run", "--teacher", shallow_teacher, "--task", TASK, "--data", data, "--student", SHAPE, "--out", tmp_path / "out",
        "--teacher-epochs", "8", "--student-epochs", "8", "--teacher-learning-rate", "2e-3", "--student-learning-rate", "2e-3",
        "--batch", "8", "--threads", "1", "--latency-seconds", "0.2", "--teacher-gate", "0.9", "--folds", "2", "--augment", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["metric"] == "pearson"
    assert document["int8"] > 0.9
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.pairs
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in report["numbers"]] == ["teacher", "undistilled", "student", "fp32", "int8"]
    assert report["understood"]["numbers"]["highest"] > 300
    page = (tmp_path / "out.work" / "report.html").read_text(encoding="utf-8")
    assert "Spearman" in page
