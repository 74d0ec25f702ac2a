"""From a file of answers to a bundle, without a teacher to open and without labels in training."""

import json
from pathlib import Path

import pytest
from small_task import examples, make_teacher, write_rows

import stillroom as face
from serve.errors import BadInput
from serve.tasks import open_bundle
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import resolve
from stillroom.verbs.run.stages import Run


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, task_data: Path) -> tuple[Path, Path, Path]:
    """An encoder, a folder of validation and test alone, and a file of answers to these and to other texts."""
    root = tmp_path_factory.mktemp("answered")
    data = root / "data"
    data.mkdir()
    rows = examples(240, seed=8)
    for name in ("validation", "test"):
        text = (task_data / f"{name}.jsonl").read_text()
        (data / f"{name}.jsonl").write_text(text)
        rows += [json.loads(line) for line in text.splitlines()]
    others = {"praise": "refund", "refund": "status", "status": "praise"}
    answers = [{"text": row["text"], "labels": {row["label"]: 0.9, others[str(row["label"])]: 0.1}} for row in rows]
    body = make_teacher(root / "body", num_hidden_layers=2)
    return body, data, write_rows(root / "answers.jsonl", answers)


@pytest.mark.slow
def test_a_bundle_is_made_of_answers_alone(answered: tuple[Path, Path, Path], tmp_path: Path) -> None:
    body, data, answers = answered
    settings = {
        "teacher_labels": [str(answers)], "start": str(body), "task": "text-classification", "data": str(data),
        "out": str(tmp_path / "intents"), "student": "layers=1,hidden=32,heads=4,ffn=64", "student_epochs": 12,
        "student_learning_rate": 5e-3, "batch": 8, "latency_seconds": 0.5, "threads": 1,
    }  # fmt: skip
    document = face.run(**settings)
    bundle = tmp_path / "intents"
    report = json.loads((bundle / "report.json").read_text())
    # The answers are right, and they are the teacher of gates and tables.
    assert document["teacher"] == 1.0
    assert document["int8"] > 0.95
    gates = [gate["name"] for gate in document["gates"]]
    assert gates == ["int8 over fp32, validation", "int8 over teacher, validation"]
    assert document["speedup_over"] == "student"
    timed = {row["name"] for row in report["latency"]["candidates"]}
    assert timed == {"student torch fp32", "student ORT fp32", "student ORT int8"}
    teacher = {"metric": 1.0, "low": 1.0, "high": 1.0, "size_bytes": None, "latency_ms": None}
    assert report["summary"][0] == teacher | {"name": "teacher"}
    assert "the answers in answers.jsonl that the student learns from" in report["names"]["teacher"]
    assert "which starts from layers of body (2x32)" in report["made"]
    manifest = open_bundle(bundle).manifest
    assert (manifest.lineage["teacher"], manifest.lineage["start"]) == ("answers.jsonl", "body")
    assert manifest.lineage["origin"] == {"embeddings": "body's", "head": "new", "layers": "layers of body: 2"}
    assert "distilled from answers to texts with stillroom" in (bundle / "README.md").read_text()
    assert str(tmp_path.parent) not in (bundle / "README.md").read_text()
    assert face.Pipeline(bundle)("please refund the lamp")["labels"][0]["label"] == "refund"
    # Its recipe is the command that made it.
    recipe = (bundle / "recipe.toml").read_text()
    assert 'teacher = ""\n' in recipe
    assert f'start = "{body}"' in recipe
    assert face.run(**settings)["method"] == document["method"]
    assert not (tmp_path / "intents.work" / "teacher").exists()


def test_a_run_by_answers_takes_up_no_stage_of_a_run_by_a_model(
    answered: tuple[Path, Path, Path], task_data: Path, tmp_path: Path
) -> None:
    body, _, answers = answered
    same = {
        "task": "text-classification",
        "data": str(task_data),
        "out": str(tmp_path / "out"),
        "method": "soft-labels",
    }
    by_model = Run(prepare(resolve({}, same | {"teacher": str(body)}))).fingerprints
    by_answers = Run(prepare(resolve({}, same | {"teacher_labels": [str(answers)], "start": str(body)}))).fingerprints
    assert not {name for name in by_model if name != "plan" and by_model[name] == by_answers[name]}


def test_settings_that_need_a_model_as_teacher_are_refused_at_once(
    answered: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    body, data, answers = answered
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    turned = [{"text": text, "label": ("praise", "refund", "status")[i % 3]} for i, text in enumerate(texts)]
    wrong = str(write_rows(tmp_path / "wrong.jsonl", turned))
    given: tuple[tuple[dict[str, object], tuple[str, ...]], ...] = (
        (
            {"teacher_labels": [str(answers)], "method": "minilmv2", "augment": 2, "folds": 2},
            ("--start is needed", "--method minilmv2 asks", "--augment needs a teacher", "--folds needs a teacher"),
        ),
        ({"teacher_labels": [str(answers)], "teacher": str(body)}, ("a student has one teacher",)),
        ({}, ("--teacher is needed",)),
        ({"teacher": str(body)}, ("has no train split",)),
        ({"start": str(body), "teacher_labels": [wrong]}, ("better than chance",)),
    )
    for settings, faults in given:
        with pytest.raises(BadInput) as refused:
            face.run(task="text-classification", data=str(data), out=str(tmp_path / "out"), **settings)
        assert [fault for fault in faults if fault not in str(refused.value)] == []
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.jsonl"]
