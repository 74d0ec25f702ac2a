"""Questions about contexts from data to answers: fine-tuned, exported, scored, served alike, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import here
from small_task import questions, write_splits

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
    return write_splits(tmp_path_factory.mktemp("questions"), questions, (320, 80, 120))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, asked: Path) -> Path:
    """The tiny teacher fine-tuned to find items and cities, and to say where there is no city."""
    out = tmp_path_factory.mktemp("tuned") / "finder"
    return compress.finetune(
        str(shallow_teacher), TASK, str(asked), out, epochs=10, learning_rate=5e-3, batch=16, threads=1, patience=0
    )


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, asked: Path) -> Path:
    return Path(face.export(checkpoint, checkpoint.with_name("finder.bundle"), asked, latency_seconds=0)["bundle"])


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


def test_the_server_gives_the_answers_that_were_scored(bundle: Path, checkpoint: Path, asked: Path) -> None:
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
    texts, contexts = ([getattr(example, name) for example in examples] for name in ("text", "text_pair"))
    served = pipeline(texts, text_pair=contexts)
    assert [answer["answer"]["text"] if answer["answer"] else "" for answer in served] == of_torch
    alone = [pipeline(example.text, text_pair=example.text_pair) for example in examples]
    assert alone == served
    card = (bundle / "README.md").read_text(encoding="utf-8")
    assert "answers a question from a context" in card
    assert "localhost:8000/v1/answer" in card
    assert "Labels" not in card


def test_questions_are_told_and_settings_without_a_meaning_for_them_are_refused(
    shallow_teacher: Path, asked: Path, tmp_path: Path
) -> None:
    settings = TaskSettings(teacher=str(shallow_teacher), task=TASK, data=str(asked), student=SHAPE)
    inputs = open_task(settings, asked / "out")
    found = input_summary(inputs)
    assert (found["kind"], found["metric"]) == ("answers in a context", "answer_f1")
    assert set(found["labels"]) == {"an answer", "no answer"}
    assert "answers in a context" in "\n".join(summary_lines(found))
    for changes, named in (
        ({"folds": 2}, "--folds"),
        ({"unlabelled": (str(asked / "train.jsonl"),)}, "--unlabelled"),
        ({"teacher_labels": (str(asked / "no.jsonl"),)}, "--teacher-labels"),
        ({"method": "xtremedistil"}, "places of answers"),
    ):
        with pytest.raises(BadInput, match=f"{named}.*question-answering|question-answering.*{named}"):
            open_task(replace(settings, **changes), asked / "out")  # type: ignore[arg-type]
    # Where no question has an answer nothing is trained.
    none = write_splits(
        tmp_path / "none", lambda *given: [row | {"answers": []} for row in questions(*given)], (20, 5, 5)
    )
    with pytest.raises(BadInput, match="No question of train"):
        open_task(replace(settings, data=str(none)), tmp_path / "out")


def test_a_checkpoint_of_questions_is_explained_profiled_and_exported_with_data_alone(
    bundle: Path, checkpoint: Path, asked: Path, tmp_path: Path
) -> None:
    test = asked / "test.jsonl"
    explained = here(
        "explain", checkpoint, checkpoint, "--data", test, "--text-column", "context", "--out", tmp_path / "shown"
    )
    assert explained.returncode == 0, explained.stderr
    brief = {"runtimes": "torch", "seconds": 0.1, "batches": (1,), "lengths": (16,)}
    timed = face.profile([checkpoint], data=str(test), out=tmp_path / "timed", **brief)
    assert [candidate["runtime"] for candidate in timed["candidates"]] == ["torch"]
    out = ("--out", tmp_path / "refused")
    for command, named in (
        (("export", checkpoint, "--texts", test, *out), "--data is needed"),
        (("export", checkpoint, "--data", asked, "--promise", "precision=0.9", *out), "--promise"),
        (("select", "--like", asked, "--bank", test, "--task", TASK, "--encoder", checkpoint, *out), "needs a context"),
    ):
        done = here(*command)
        assert done.returncode == 2, done.stderr
        assert named in done.stderr
    assert "It answers a question from a context" in here("inspect", bundle).stdout


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
    done = here(*command)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["metric"] == "answer_f1"
    assert document["int8"] >= 0.9 * document["teacher"] > 0.8
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {row["name"] for row in report["questions"]} >= {"teacher", "student", "int8"}
    assert all("exact_match" in row and "f1_without_answer" in row for row in report["questions"])
    assert "exact match" in (out / "report.html").read_text(encoding="utf-8")
    assert here(*command).returncode == 0  # the same command finds what it made
    assert face.evaluate(out, asked)["value"] == pytest.approx(document["int8"], abs=1e-6)
