"""Learning from a file of answers: which texts get which soft labels, and what is told of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_task import examples, write_rows

import stillroom as face
from compress.evaluation.metrics import ACCURACY
from compress.runs.open_task import open_task
from compress.runs.soft_labels import make_soft_labels, read_soft_labels
from compress.runs.task_inputs import TaskInputs
from compress.runs.task_stages import load_stage, make_start
from compress.settings import TaskSettings
from serve.errors import BadInput
from serve.text.answers import softmax

Opener = Callable[..., TaskInputs]


@pytest.fixture
def opened(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> Opener:
    """Opens the inputs of fine-tuning, with a file of answers if one is given."""

    def open_it(
        file: Path | None = None, data: Path = task_data, model: Path = tiny_teacher, **more: Any
    ) -> TaskInputs:
        given = {"task": "text-classification", "student": "layers=2,hidden=32,heads=4,ffn=32"} | more
        answers = (str(file),) if file else ()
        settings = TaskSettings(teacher=str(model), data=str(data), teacher_labels=answers, threads=1, **given)
        return open_task(settings, tmp_path, role="--model")

    return open_it


@pytest.fixture(scope="module", params=["text-classification", "token-classification"])
def tuned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, task_data: Path
) -> tuple[str, Path]:
    """A task, and a folder with a teacher of it, texts beside its own, and its answers to those of train and to these."""
    folder = tmp_path_factory.mktemp("tuned")
    made = face.finetune(tiny_teacher, request.param, task_data, folder / "tuned", epochs=1, patience=0, threads=1)
    more = write_rows(folder / "more.jsonl", examples(40, seed=9))
    face.label([task_data / "train.jsonl", more], folder / "answers.jsonl", checkpoint=str(made), threads=1)
    return request.param, folder


def test_answers_from_a_file_equal_the_models_soft_labels(
    tuned: tuple[str, Path], tmp_path: Path, opened: Opener
) -> None:
    task, folder = tuned
    teacher = folder / "tuned"
    inputs = opened(task=task, model=teacher, unlabelled=(str(folder / "more.jsonl"),))
    make_soft_labels(tmp_path, inputs, teacher)
    expected = read_soft_labels(tmp_path, inputs)
    inputs = opened(folder / "answers.jsonl", task=task, model=teacher)
    found = inputs.answered
    assert found
    assert len(inputs.soft_labelled) == len(found.soft) == 280
    for theirs, ours in zip(expected, found.soft, strict=True):
        np.testing.assert_allclose(softmax(ours), softmax(np.asarray(theirs)), atol=2e-5)


def test_a_student_keeps_the_head_of_a_start_with_the_same_labels(
    tuned: tuple[str, Path], task_data: Path, tmp_path: Path
) -> None:
    task, folder = tuned
    other = shutil.copytree(folder / "tuned", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["id2label"] |= {"0": "another"}
    (other / "config.json").write_text(json.dumps(config))
    heads = {}
    for start in (folder / "tuned", other):
        settings = TaskSettings(
            start=str(start), task=task, data=str(task_data), teacher_labels=(str(folder / "answers.jsonl"),),
            student="layers=2,hidden=32,heads=4,ffn=64", threads=1,
        )  # fmt: skip
        inputs = open_task(settings, tmp_path)
        place = tmp_path / f"start-{start.name}"
        place.mkdir()
        make_start(place, inputs, None)
        heads[start.name] = load_stage(place, inputs).classifier.weight
        origin = json.loads((place / "lineage.json").read_text())["origin"]["head"]
        assert origin == ("tuned's" if start.name == "tuned" else "new")
    given = load_stage(folder / "tuned", inputs).classifier.weight
    narrow = replace(settings, start=str(folder / "tuned"), student="layers=2,hidden=16,heads=4,ffn=64")
    assert not open_task(narrow, tmp_path).teacher_has_head
    assert torch.equal(heads["tuned"], given)
    assert not torch.equal(heads["other"], given)


def test_the_interval_of_the_answers_score_takes_pairs_of_a_premise_together(opened: Opener, tmp_path: Path) -> None:
    rows = [
        {"text": f"parcel {i % 12}", "text_pair": f"refund {i}", "label": "ab"[i % 2]} for i in range(60)
    ]  # fmt: skip
    data = tmp_path / "pairs"
    data.mkdir()
    for name, some in (
        ("train", [row | {"text_pair": "lamp"} for row in rows[:12]]),
        ("validation", rows),
        ("test", rows[:12]),
    ):
        write_rows(data / f"{name}.jsonl", some)
    # Of a sixth of the premises every answer is wrong.
    said = [row | {"label": "b" if row["text"] in ("parcel 0", "parcel 2") else row["label"]} for row in rows]
    file = write_rows(tmp_path / "answers.jsonl", [*said, {"text": "lamp", "text_pair": "kettle", "label": "a"}])
    found = opened(file, data=data).answered
    assert found
    gold, answers = ([str(row["label"]) for row in each] for each in (rows, said))
    clusters = np.arange(60) % 12
    assert found.on_validation == ACCURACY.score(gold, answers, clusters=clusters) != ACCURACY.score(gold, answers)


def rows_of(data: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def some_splits(folder: Path, data: Path, *splits: str) -> Path:
    """A folder with these splits of `data`."""
    folder.mkdir()
    for name in splits:
        shutil.copyfile(data / f"{name}.jsonl", folder / f"{name}.jsonl")
    return folder


def test_a_text_without_an_answer_keeps_its_label_and_no_text_of_validation_or_test_is_learned(
    task_data: Path, tmp_path: Path, opened: Opener
) -> None:
    rows = {name: rows_of(task_data, name) for name in ("train", "validation", "test")}
    labels = {"praise": 0.5, "refund": 0.3, "status": 0.2}
    soft = [{"text": row["text"], "labels": labels} for row in rows["train"][:10]]
    right = [{"text": row["text"], "label": row["label"]} for row in rows["validation"][:30] + rows["test"]]
    right[0]["label"] = next(name for name in ("praise", "refund") if name != right[0]["label"])
    new = [{"text": "an odd lamp", "label": "praise"}]
    inputs = opened(write_rows(tmp_path / "answers.jsonl", soft + right + new))
    found = inputs.answered
    assert found
    assert not found.whole_validation
    assert [example.text for example in inputs.further] == ["an odd lamp"]
    assert len(found.soft) == len(inputs.soft_labelled) == 241
    for logits in found.soft[:10]:
        np.testing.assert_allclose(softmax(logits), [[0.5, 0.3, 0.2]], atol=1e-6)
    for row, logits in zip(rows["train"][10:], found.soft[10:240], strict=True):
        assert inputs.labels[int(logits.argmax())] == row["label"]
        assert softmax(logits).max() == pytest.approx(1, abs=1e-6)
    assert found.on_validation is not None
    assert found.on_validation.value == pytest.approx(29 / 30)
    for told, line in zip(
        ("10 of 240 texts of train", "230 texts of train", "30 texts of validation", "as 30 texts with labels agree"),
        found.lines,
        strict=True,
    ):
        assert told in line


@pytest.mark.parametrize("validation", [True, False])
def test_answers_are_labels_without_a_train_file(
    task_data: Path, tmp_path: Path, opened: Opener, validation: bool
) -> None:
    data = some_splits(tmp_path / "data", task_data, "test", *["validation"] * validation)
    rows = [*rows_of(task_data, "train"), *rows_of(task_data, "test")]
    answers = [{"text": row["text"], "labels": {row["label"]: 0.9}} for row in rows]
    file = write_rows(tmp_path / "answers.jsonl", answers)
    inputs = opened(file, data)
    assert (len(inputs.splits.train), len(inputs.splits.test)) == (240 if validation else 216, 60)
    texts = {example.text for example in inputs.splits.train}
    assert not texts & {example.text for example in (*inputs.splits.test, *inputs.splits.validation)}
    told = " ".join(inputs.warnings)
    assert "There is no train file:" in told
    assert ("not how often it is right" in told) is not validation
    found = inputs.answered
    assert found
    assert found.on_validation is None
    assert all(softmax(logits).max() == pytest.approx(0.9, abs=1e-6) for logits in found.soft)
    with pytest.raises(BadInput, match="has no train split"):
        opened(None, data)


def test_further_texts_have_no_labels_and_exclude_test(task_data: Path, tmp_path: Path, opened: Opener) -> None:
    of_test = {"text": f"{rows_of(task_data, 'test')[0]['text']} ", "label": "praise"}
    further = {"text": "an odd lamp", "labels": {"praise": 0.5, "refund": 0.5}}
    inputs = opened(write_rows(tmp_path / "answers.jsonl", [further, of_test]))
    assert [example.text for example in inputs.further] == ["an odd lamp"]
    assert inputs.in_domain is not None
    assert [targets.tolist() for targets in inputs.in_domain.targets] == [[-100]]


def test_few_answers_to_validation_stop_nothing(task_data: Path, tmp_path: Path, opened: Opener) -> None:
    rows = [rows_of(task_data, name)[0] for name in ("train", "validation")]
    answers = [{"text": row["text"], "label": row["label"]} for row in rows]
    inputs = opened(write_rows(tmp_path / "answers.jsonl", answers))
    assert inputs.answered
    assert inputs.answered.on_validation
    assert inputs.answered.on_validation.value == 1.0


def test_where_answers_are_labels_a_cut_one_is_left_out(task_data: Path, tmp_path: Path, opened: Opener) -> None:
    data = some_splits(tmp_path / "data", task_data, "validation", "test")
    rows = [{"text": row["text"], "entities": row["entities"]} for row in examples(20, seed=5)]
    cut = {"text": "please refund the lamp to Oslo", "words": [{"start": 0, "end": 6, "tags": {"O": 1.0}}]}
    inputs = opened(write_rows(tmp_path / "answers.jsonl", [*rows, cut]), data, task="token-classification")
    assert len(inputs.splits.train) == 20
    assert inputs.in_domain is None
    assert inputs.answered
    assert len(inputs.answered.soft) == 20


def test_texts_out_of_scope_are_not_learned(task_data: Path, tmp_path: Path, opened: Opener) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "validation", "test"):
        strange = {"text": f"how tall is a tower {name}", "label": "strange"}
        write_rows(data / f"{name}.jsonl", [*rows_of(task_data, name), strange])
    answers = [{"text": "how tall is a tower train", "label": "strange"}, {"text": "an odd lamp", "label": "praise"}]
    inputs = opened(write_rows(tmp_path / "answers.jsonl", answers), data, out_of_scope="strange")
    assert [example.text for example in inputs.further] == ["an odd lamp"]


def test_useless_answers_are_refused_before_training(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, opened: Opener
) -> None:
    of_test = [{"text": row["text"], "label": "praise"} for row in rows_of(task_data, "test")]
    file = write_rows(tmp_path / "test-only.jsonl", of_test)
    with pytest.raises(BadInput, match="answers none of the 240 texts of train"):
        opened(file)
    odd = write_rows(tmp_path / "odd.jsonl", [{"text": "a", "label": "odd"}])
    out = tmp_path / "student"
    with pytest.raises(BadInput, match="has labels that the task lacks: odd"):
        face.finetune(tiny_teacher, "text-classification", task_data, out, teacher_labels=[str(odd)], threads=1)
    with pytest.raises(BadInput, match=r"--teacher-labels and --teacher are both given"):
        face.finetune(tiny_teacher, "text-classification", task_data, out, teacher="t", teacher_labels=["f"], threads=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("student")]


def test_a_student_learns_from_a_file_and_names_it(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    rows = [*rows_of(task_data, "train"), *examples(60, seed=5)]
    # Answers that contradict the labels of train: what is learned is what they say.
    turned = {"praise": "refund", "refund": "status", "status": "praise"}
    answers = [{"text": row["text"], "label": turned[row["label"]]} for row in rows]
    file = write_rows(tmp_path / "answers.jsonl", answers)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("validation", "test"):
        right = [{**row, "label": turned[row["label"]]} for row in rows_of(task_data, "validation")]
        write_rows(data / f"{name}.jsonl", right)
    write_rows(data / "train.jsonl", rows[:240])
    student = face.finetune(
        tiny_teacher, "text-classification", data, tmp_path / "student", teacher_labels=[str(file)], soft_weight=1.0,
        epochs=4, learning_rate=5e-3, batch=8, threads=1,
    )  # fmt: skip
    lineage = json.loads((student / "lineage.json").read_text())
    assert max(value for _, value in lineage["validation"]) > 0.9
    assert (lineage["method"], lineage["teacher"]) == ("soft labels", "answers.jsonl")
    assert lineage["teacher_answers"]["texts"] == 300
    assert str(tmp_path) not in json.dumps(lineage)
