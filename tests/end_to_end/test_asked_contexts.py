"""Questions about contexts from data to answers: fine-tuned, exported, scored, served alike, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_task import questions, write_splits
from test_run import stillroom

import compress
import stillroom as face
from compress.data.labelled_files import read_examples
from compress.evaluation.predictions import row_logits
from compress.models.pretrained import load, open_model, open_tokenizer
from compress.runs.input_summary import input_summary, summary_lines
from compress.runs.open_task import open_task
from compress.settings import TaskSettings
from compress.tasks import QUESTION_ANSWERING
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from serve.text.labels import SPAN_ENDS

TASK = "question-answering"
SHAPE = "layers=1,hidden=32,heads=4,ffn=64"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("questions"), questions, (480, 80, 120))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, asked: Path) -> Path:
    """The tiny teacher fine-tuned to find items and cities, and to say where there is no city."""
    out = tmp_path_factory.mktemp("tuned") / "finder"
    return compress.finetune(
        str(shallow_teacher), TASK, str(asked), out, epochs=12, learning_rate=3e-3, batch=8, threads=1, patience=0
    )


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, asked: Path) -> Path:
    return Path(face.export(checkpoint, checkpoint.with_name("finder.bundle"), asked, latency_seconds=0.2)["bundle"])


def test_a_head_learns_where_answers_are_and_transformers_opens_it(checkpoint: Path, asked: Path) -> None:
    from transformers import AutoModelForQuestionAnswering

    document = face.evaluate(checkpoint, asked)
    assert (document["task"], document["metric"]) == (TASK, "answer_f1")
    assert document["value"] > 0.9
    assert document["scores"]["exact_match"]["value"] > 0.9
    assert document["scores"]["f1_without_answer"]["value"] > 0.8
    assert document["labels"] == document["unknown_labels"] == []
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["BertForQuestionAnswering"]
    theirs, found = AutoModelForQuestionAnswering.from_pretrained(checkpoint, output_loading_info=True)
    assert not found["missing_keys"]
    assert theirs.qa_outputs.out_features == 2


def test_what_is_scored_is_what_is_served(bundle: Path, checkpoint: Path, asked: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert (manifest.task, manifest.labels, manifest.metrics["metric"]) == (TASK, ["start", "end"], "answer_f1")
    threshold = manifest.variants["fp32"].abstain_below
    assert threshold is not None
    assert manifest.variants["int8"].abstain_below == threshold
    fp32, int8 = (face.evaluate(bundle, asked, variant=name) for name in ("fp32", "int8"))
    assert int8["value"] >= 0.99 * fp32["value"] > 0.9
    # Long contexts too, of which each window is read.
    examples = [
        replace(example, text_pair=f"{'the lamp is lovely ' * 60}{example.text_pair}", answers=())
        for example in read_examples(asked / "test.jsonl", QUESTION_ANSWERING)[:10]
    ] + read_examples(asked / "test.jsonl", QUESTION_ANSWERING)
    opened = open_model(str(checkpoint))
    encoded = QUESTION_ANSWERING.encode(examples, open_tokenizer(opened), SPAN_ENDS)
    assert encoded.owners is not None
    assert len(encoded) > len(examples)
    of_torch = encoded.task.predictions(
        replace(encoded, answer_from=threshold), row_logits(load(opened, QUESTION_ANSWERING), encoded)
    )
    pipeline = Pipeline(bundle, "fp32")
    served = pipeline(
        [example.text for example in examples], text_pair=[example.text_pair or "" for example in examples]
    )
    assert [answer["answer"]["text"] if answer["answer"] else "" for answer in served] == of_torch
    alone = [pipeline(example.text, text_pair=example.text_pair) for example in examples]
    assert alone == served
    card = (bundle / "README.md").read_text(encoding="utf-8")
    assert "answers a question from a context" in card
    assert (
        'localhost:8000/v1/answer -H \'content-type: application/json\' -d \'{"question": "...", "context": "..."}\''
        in card
    )
    assert "question-answering" in card
    assert "Labels" not in card


def test_questions_are_told_and_what_has_no_meaning_for_them_is_refused(shallow_teacher: Path, asked: Path) -> None:
    settings = TaskSettings(teacher=str(shallow_teacher), task=TASK, data=str(asked), student=SHAPE)
    inputs = open_task(settings, asked / "out")
    found = input_summary(inputs)
    assert (found["kind"], found["metric"]) == ("answers in a context", "answer_f1")
    assert set(found["labels"]) == {"an answer", "no answer"}
    assert "answers in a context" in "\n".join(summary_lines(found))
    for changes, message in (
        ({"folds": 2}, "--folds cannot be given with --task question-answering"),
        ({"unlabelled": (str(asked / "train.jsonl"),)}, "--unlabelled cannot be given with --task question-answering"),
        ({"teacher_labels": (str(asked / "no.jsonl"),)}, "--teacher-labels cannot be given with --task question-answ"),
        ({"method": "xtremedistil"}, "question-answering has places of answers"),
    ):
        with pytest.raises(BadInput, match=message):
            open_task(replace(settings, **changes), asked / "out")  # type: ignore[arg-type]


def test_where_no_question_has_an_answer_nothing_is_trained(shallow_teacher: Path, tmp_path: Path) -> None:
    def none(count: int, seed: int) -> list[dict[str, Any]]:
        return [{**row, "answers": []} for row in questions(count, seed)]

    folder = write_splits(tmp_path / "none", none, (20, 5, 5))
    settings = TaskSettings(teacher=str(shallow_teacher), task=TASK, data=str(folder), student=SHAPE)
    with pytest.raises(BadInput, match="No question of train has an answer"):
        open_task(settings, tmp_path / "out")


def test_a_checkpoint_of_questions_is_explained_profiled_and_exported_with_data_alone(
    bundle: Path, checkpoint: Path, asked: Path, tmp_path: Path
) -> None:
    test = str(asked / "test.jsonl")
    shown = stillroom(
        "explain", str(checkpoint), str(checkpoint), "--data", test, "--text-column", "context", "--out", str(tmp_path / "shown")
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    document = face.profile(
        [checkpoint, bundle], data=test, out=tmp_path / "timed", seconds=0.2, batches=(1,), lengths=(16,)
    )  # fmt: skip
    assert {candidate["runtime"] for candidate in document["candidates"]} >= {"torch", "onnxruntime"}
    refused = (
        (["export", str(checkpoint), "--texts", test, "--out", str(tmp_path / "bundle")], "--data is needed"),
        (
            ["export", str(checkpoint), "--data", str(asked), "--promise", "precision=0.9", "--out", str(tmp_path / "b")],
            "--promise",
        ),
        (
            ["select", "--like", str(asked), "--bank", test, "--task", TASK, "--encoder", str(checkpoint), "--out", str(tmp_path / "s")],
            "--task question-answering needs a context for each question",
        ),
    )  # fmt: skip
    for command, said in refused:
        done = stillroom(*command)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
    line = stillroom("inspect", str(bundle))
    assert "It answers a question from a context" in line.stdout


@pytest.mark.slow
def test_a_run_ends_in_a_bundle_that_answers_as_well_as_its_teacher(
    shallow_teacher: Path, asked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [
        "run", "--teacher", str(shallow_teacher), "--task", TASK, "--data", str(asked), "--student", SHAPE, "--out", str(out),
        "--teacher-epochs", "12", "--teacher-learning-rate", "3e-3", "--student-epochs", "12", "--student-learning-rate", "3e-3",
        "--batch", "8", "--threads", "1", "--latency-seconds", "0.2", "--teacher-gate", "0.9", "--json",
    ]  # fmt: skip
    done = stillroom(*command)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["metric"] == "answer_f1"
    assert document["int8"] >= 0.9 * document["teacher"] > 0.8
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {row["name"] for row in report["questions"]} >= {"teacher", "student", "int8"}
    assert all("exact_match" in row and "f1_without_answer" in row for row in report["questions"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "exact match" in page
    again = stillroom(*command)  # the same command finds what it made
    assert again.returncode == 0
    assert face.evaluate(out, asked)["value"] == pytest.approx(document["int8"], abs=1e-6)
