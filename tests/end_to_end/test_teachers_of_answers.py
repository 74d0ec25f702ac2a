"""`run` with a teacher that gives answers alone: a file of them, or a model of another family or with other tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import interrupted_at
from small_task import CITIES, ITEMS, examples, make_teacher, make_tokenizer, write_rows, write_splits

import stillroom as face
from compress.evaluation import predictions
from compress.labelling import label as labelling
from serve.errors import BadInput
from serve.tasks import open_bundle
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import resolve
from stillroom.verbs.run.pipeline import plan_of
from stillroom.verbs.run.stages import Run
from stillroom.verbs.run.teacher_stages import ANSWERS

STUDENT: dict[str, Any] = {
    "student": "layers=1,hidden=32,heads=4,ffn=64", "student_epochs": 8, "student_learning_rate": 5e-3, "batch": 8,
    "latency_seconds": 0.5, "threads": 1, "soft_weight": 0.9,
}  # fmt: skip


SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0,
    "max_position_embeddings": 64, "type_vocab_size": 0,
}  # fmt: skip


def on(data: Path, folder: Path) -> dict[str, str]:
    """Settings of a run on the task's texts, for `folder`/out."""
    return {"task": "text-classification", "data": str(data), "out": str(folder / "out")}


@pytest.fixture(scope="module")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeBERTa-v2 that knows the classes of the task, and one more."""
    import transformers

    folder = tmp_path_factory.mktemp("deberta") / "my-deberta"
    make_tokenizer(folder)
    names = ("praise", "refund", "spam", "status")
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        **SMALL, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    model = transformers.DebertaV2ForSequenceClassification(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = examples(160, seed=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for start in [*range(0, 160, 16)] * 6:
        batch = rows[start : start + 16]
        inputs = tokenizer([row["text"] for row in batch], padding=True, return_tensors="pt")
        targets = torch.tensor([names.index(str(row["label"])) for row in batch])
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def body(tmp_path: Path) -> Path:
    """An encoder that splits the names of cities and items into characters, and has other ids."""
    folder = make_teacher(tmp_path / "body", num_hidden_layers=2)
    known = {name.lower() for name in CITIES + ITEMS}
    vocabulary = [word for word in (folder / "vocab.txt").read_text(encoding="utf-8").split("\n") if word not in known]
    (folder / "vocab.txt").write_text("\n".join([*vocabulary[:5], *vocabulary[5:][::-1]]), encoding="utf-8")
    from transformers import BertTokenizerFast

    for file in folder.glob("tokenizer*"):
        file.unlink()
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_teacher_of_another_family_is_asked_about_all_texts_and_goes_on_after_a_kill(
    deberta: Path, body: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = write_rows(tmp_path / "more.jsonl", examples(30, seed=9))
    settings = STUDENT | {
        "teacher": str(deberta), "start": str(body), "task": "text-classification", "data": str(task_data),
        "unlabelled": [str(more)], "augment": 1, "out": str(tmp_path / "intents"), "keep_words_of": [str(more)], "undistilled": False,
    }  # fmt: skip
    asked: list[int] = []
    dying = interrupted_at(2, predictions.shared_row_logits, asked)
    monkeypatch.setattr(labelling, "SHARD_TEXTS", 200)
    monkeypatch.setattr(predictions, "shared_row_logits", dying)
    with pytest.raises(KeyboardInterrupt):
        face.run(**settings)
    document = face.run(**settings)
    work, bundle = tmp_path / "intents.work", tmp_path / "intents"
    answers = [json.loads(line) for line in (work / "teacher-answers" / "answers.jsonl").read_text().splitlines()]
    # Train, validation, test and the unlabelled texts, each once, and what was generated from train.
    texts = [row["text"] for row in answers]
    assert len(set(texts)) == len(texts) > 370
    assert {row["text"] for row in examples(30, seed=9)} < set(texts)
    assert all(not set(row) - {"text", "labels"} for row in answers)
    assert sum(asked) == len(texts) + asked[1]
    assert document["teacher"] > 0.95
    assert document["int8"] > 0.9
    assert not (work / "teacher").exists()
    manifest, report = open_bundle(bundle).manifest, json.loads((bundle / "report.json").read_text())
    assert set(manifest.labels) == {"praise", "refund", "spam", "status"}
    assert (manifest.lineage["teacher"], manifest.lineage["start"]) == ("my-deberta", "body")
    assert report["names"]["teacher"] == "the answers of my-deberta that the student learns from"
    assert "was distilled by soft-labels from the answers of my-deberta on" in report["made"]
    # Its recipe is the command that made it.
    recipe = (bundle / "recipe.toml").read_text()
    assert f'teacher = "{deberta}"' in recipe
    assert f'start = "{body}"' in recipe
    assert face.run(**settings) == document
    assert face.Pipeline(bundle)("please refund the lamp")["labels"][0]["label"] == "refund"


@pytest.mark.slow
def test_a_teacher_with_other_tokens_gives_entities_and_the_checkpoint_is_the_student(
    tiny_teacher: Path, body: Path, task_data: Path, tmp_path: Path
) -> None:
    task = "token-classification"
    quick: dict[str, Any] = {"epochs": 6, "batch": 8, "learning_rate": 3e-3, "patience": 0, "threads": 1}
    teacher = face.finetune(tiny_teacher, task, task_data, tmp_path / "teacher", **quick)
    settings = {key: value for key, value in STUDENT.items() if key != "student"} | {
        "teacher": str(teacher), "start": str(body), "task": task, "data": str(task_data), "out": str(tmp_path / "ner"), "gate": 0,
    }  # fmt: skip
    plan = plan_of(resolve({}, settings))
    assert (plan.teacher_steps, plan.seconds["teacher"]) == (0, 0)
    assert plan.understood["student"] == "layers=2,hidden=32,heads=4,ffn=64"
    assert not (tmp_path / "ner.work").exists()
    document = face.run(**settings)
    assert document["teacher"] > 0.9
    assert document["int8"] > 0.8


def test_with_the_same_tokens_the_teacher_is_opened(
    classifier: Path, shallow_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    given = {"teacher": str(classifier), "start": str(shallow_teacher)} | on(task_data, tmp_path)
    inputs = prepare(resolve({}, given))
    assert inputs.answering is None
    assert inputs.opened.folder == classifier


def test_settings_that_a_teacher_of_answers_alone_cannot_follow_are_refused_at_once(
    deberta: Path, body: Path, task_data: Path, tmp_path: Path
) -> None:
    def fault_of(**settings: Any) -> str:
        with pytest.raises(BadInput) as refused:
            prepare(resolve({}, {"teacher": str(deberta)} | on(task_data, tmp_path) | settings))
        return str(refused.value)

    others = write_splits(
        tmp_path / "others",
        lambda *given: [row | {"label": f"a {row['label']}"} for row in examples(*given)],
        (30, 30, 30),
    )
    beside = write_splits(
        tmp_path / "beside",
        lambda *given: [row | {"label": "spam"} if i % 5 == 0 else row for i, row in enumerate(examples(*given))],
        (60, 60, 60),
    )
    start = {"start": str(body)}
    faults: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({}, (f"stillroom run --teacher {deberta} --start ENCODER",)),
        (
            start | {"method": "minilmv2", "folds": 2, "unlabelled": ["nowhere.txt"]},
            ("my-deberta gives answers alone", "--method minilmv2 asks", "--folds needs", "nowhere.txt"),
        ),
        (start | {"task": "token-classification"}, ("has a head for text-classification",)),
        (start | {"data": str(others)}, ("a praise, a refund, a status",)),
        ({"start": "nobody/nothing"}, ("--start nobody/nothing",)),
        (start | {"new_head": True}, ("--new-head needs",)),
        (start | {"revision": "main"}, ("only models of the Hub",)),
        (start | {"data": str(beside), "out_of_scope": "spam"}, ("my-deberta was trained with that label",)),
        (start | {"teacher": str(headless(tmp_path / "bare"))}, ("has no head for a task", "Fine-tune it first")),
    )
    for settings, told in faults:
        said = fault_of(**settings)
        assert [part for part in told if part not in said] == [], said


def headless(folder: Path) -> Path:
    """A small DeBERTa-v2 without a head."""
    import transformers

    make_tokenizer(folder)
    transformers.DebertaV2Model(transformers.DebertaV2Config(**SMALL)).save_pretrained(folder)
    return folder


def test_earlier_answers_are_taken_unless_other_texts_are_generated(
    deberta: Path, body: Path, shallow_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    def of(start: Path, augment: int) -> str:
        settings = {"teacher": str(deberta), "start": str(start), "augment": augment} | on(task_data, tmp_path)
        return Run(prepare(resolve({}, settings))).fingerprints[ANSWERS]

    # Without generated texts the answers are the same for every start.
    assert of(body, 0) == of(shallow_teacher, 0)
    assert of(body, 1) != of(body, 0)
    assert of(body, 2) != of(body, 1)


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
    same = {"task": "text-classification", "data": str(task_data), "method": "soft-labels", "out": str(tmp_path / "o")}
    by_model = Run(prepare(resolve({}, same | {"teacher": str(body)}))).fingerprints
    by_answers = Run(prepare(resolve({}, same | {"teacher_labels": [str(answers)], "start": str(body)}))).fingerprints
    both = by_model.keys() & by_answers.keys() - {"plan"}
    assert not {name for name in both if by_model[name] == by_answers[name]}


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
