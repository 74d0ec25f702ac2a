"""`stillroom profile` as its user types it: what it writes, what it says of the models, and what it refuses."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from in_process import command
from processes import started
from safetensors.torch import load_file, save_file
from small_profiles import QUICK, TASK, Models, Profiled, profiled

import stillroom as face
from serve.model.pipeline import Pipeline
from stillroom.verbs.profile.models import Ways, candidates_of, task_of
from stillroom.verbs.profile.run import UNENDED
from stillroom.verbs.profile.speed_regression import models_of, regression_lines
from stillroom.verbs.profile.texts import given_texts

Refused = Callable[..., str]
TOGETHER = [
    "fast ORT fp32",
    "checkpoint torch fp32",
    "checkpoint ORT fp32",
    "checkpoint ORT int8",
    "model.onnx ORT fp32",
    "fast ORT fp32 (before)",
]


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["models"]}


def test_a_page_a_report_and_a_table_are_written_and_graphs_are_kept_beside(together: Profiled) -> None:
    assert {path.name for path in together.out.iterdir()} == {"report.html", "report.json", "table.md"}
    page = (together.out / "report.html").read_text(encoding="utf-8")
    table = (together.out / "table.md").read_text(encoding="utf-8")
    for name in TOGETHER:
        assert name in page
        assert name in table
    assert together.document["report"] == str(together.out / "report.html")
    assert together.out.with_name("timings.work").is_dir()


def test_the_report_holds_what_it_promises(together: Profiled, models: Models) -> None:
    document = together.document
    assert json.loads(together.printed) == document
    assert UNENDED not in document["warnings"]
    assert document["machine"]["cores"] >= 1
    # The machine was looked at before graphs were exported: their folder changes when the first export begins.
    looked_s = datetime.fromisoformat(document["machine"]["measured_at"]).timestamp()
    assert looked_s <= together.out.with_name("timings.work").joinpath("graphs").stat().st_mtime
    promised = {
        "name",
        "runtime",
        "precision",
        "batch",
        "tokens",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "texts_per_s",
        "metric",
    }
    assert [row["name"] for row in document["candidates"]] == TOGETHER
    for row in document["candidates"]:
        assert promised <= set(row)
        assert (row["batch"], row["tokens"]) == (1, 8)
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert len(row["samples_ms"]) == sum(row["turn_sizes"])
    assert [(row["a"], row["b"]) for row in document["ratios"]] == [(TOGETHER[0], name) for name in TOGETHER[1:]]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in document["ratios"])
    models_of_it = by_name(document)
    assert list(models_of_it) == TOGETHER
    for row in models_of_it.values():
        assert len(row["single_stream"]["samples"]) == sum(row["single_stream"]["turn_sizes"])
    assert {name: (row["runtime"], row["precision"]) for name, row in models_of_it.items()} == {
        "fast ORT fp32": ("onnxruntime", "fp32"),
        "checkpoint torch fp32": ("torch", "fp32"),
        "checkpoint ORT fp32": ("onnxruntime", "fp32"),
        "checkpoint ORT int8": ("onnxruntime", "int8"),
        "model.onnx ORT fp32": ("onnxruntime", "fp32"),
        "fast ORT fp32 (before)": ("onnxruntime", "fp32"),
    }
    assert {"operators" in row for row in models_of_it.values() if row["runtime"] == "onnxruntime"} == {True}
    given = [models.copied, *[models.checkpoint] * 3, models.file, models.fast]
    assert [row["model"] for row in document["models"]] == list(map(str, given))
    assert models_of(together.out / "report.json") == [models.copied, models.checkpoint, models.file]


def test_the_metric_is_what_evaluate_says_of_the_same_model(together: Profiled, models: Models, splits: Path) -> None:
    rows = by_name(together.document)
    for name, model in (("fast ORT fp32", models.copied), ("checkpoint torch fp32", models.checkpoint)):
        told = face.evaluate(str(model), splits / "test.jsonl")
        metric = {key: told[key] for key in ("value", "low", "high", "examples")} | {"name": told["metric"]}
        assert rows[name]["metric"] == metric
    assert rows["fast ORT fp32"]["metric"]["value"] == 0.9  # one label in ten is wrong
    assert rows["checkpoint torch fp32"]["metric"] == rows["checkpoint ORT fp32"]["metric"]
    assert all(row["metric"] == rows[row["name"]]["metric"]["value"] for row in together.document["candidates"])


@pytest.mark.slow
def test_a_model_of_few_tokens_is_timed_without_being_told_lengths(models: Models, tmp_path: Path) -> None:
    quick = ("--seconds", "1", "--batches", "1", "--threads", "1")
    done = command("profile", models.fast, "--out", tmp_path / "out", *quick)
    assert done.code == 0, done.said
    document = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row["tokens"] for row in document["candidates"]] == [16, 32]


@pytest.mark.slow
def test_pairs_of_texts_are_scored_as_pairs(slower: Profiled, models: Models, pairs: Path) -> None:
    told = face.evaluate(str(models.slow), pairs)
    metric = by_name(slower.document)["slow ORT fp32"]["metric"]
    assert (metric["value"], metric["examples"]) == (told["value"], 40) == (0.9, 40)
    pipeline = Pipeline(models.slow)
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    encodings = pipeline.encode([row["text"] for row in rows], [row["text_pair"] for row in rows])
    assert slower.document["work"]["tokens_mean"] == round(sum(map(len, encodings)) / 40, 2)


def test_the_budget_names_a_candidate_of_the_best_metric(together: Profiled) -> None:
    budget, rows = together.document["budget"], by_name(together.document)
    assert (budget["budget_ms"], budget["percentile"]) == (60_000, 90)
    assert rows[budget["best"]]["metric"]["value"] == 0.9
    assert budget["sentence"].startswith(f"{budget['best']} meets the budget, p90 of 60000 ms")
    assert set(together.document["front"]) <= set(TOGETHER)


def test_the_same_bundle_in_another_place_runs_beside_the_one_of_before(together: Profiled) -> None:
    found = together.document["regression"]
    assert [(row["name"], row["before"], row["where"]) for row in found] == [
        ("fast ORT fp32", "fast ORT fp32 (before)", "batch 1 x 8 tokens"),
        ("fast ORT fp32", "fast ORT fp32 (before)", "single stream"),
    ]
    for row, line in zip(found, regression_lines(found), strict=True):
        assert row["low"] <= row["ratio"] <= row["high"]
        assert line.startswith(f"{row['name']}, {row['where']}: {row['ratio']:.3f} times as long as before")
    # Equal models come out equal but for what a busy machine does to one of them.
    assert together.code == (3 if any(row["slower"] for row in found) else 0)


@pytest.mark.slow
def test_a_slower_model_ends_with_3_when_its_report_is_written(slower: Profiled) -> None:
    assert slower.code == 3
    found = slower.document["regression"]
    assert [(row["name"], row["before"]) for row in found] == [("slow ORT fp32", "fast ORT fp32 (before)")] * 2
    assert all(row["slower"] and row["low"] > 1.02 for row in found)
    assert "2 of 2 comparisons: slower than before" in slower.said
    gates = slower.document["gates"]
    assert [(gate["passed"], gate["needed"], gate["value"] < gate["needed"]) for gate in gates] == [
        (False, 0.9804, True)
    ] * 2
    assert all(line in " ".join(slower.printed.split()) for line in regression_lines(found))
    assert slower.printed.endswith(f"Report  {slower.out / 'report.html'}\n")
    assert {path.name for path in slower.out.iterdir()} == {"report.html", "report.json", "table.md"}


def test_without_data_the_texts_are_generated_and_there_is_no_metric(earlier: Profiled) -> None:
    (row,) = earlier.document["models"]
    assert "metric" not in row
    assert "metric" not in earlier.document["candidates"][0]
    assert row["single_stream"]["p50_ms"] > 0
    note = "No --data was given: the texts are generated messages to a shop's support, so there is no metric."
    assert earlier.document["warnings"] == [note]
    assert f"Warning: {note}" in earlier.printed
    assert earlier.document["work"]["texts"] > 100
    assert earlier.document["front"] == []
    assert "| fast ORT fp32 |" in earlier.printed  # the table


def test_graphs_that_were_exported_for_the_same_texts_are_found_again(
    together: Profiled, models: Models, splits: Path
) -> None:
    class Exporting(Exception):
        pass

    def say(line: str) -> None:
        raise Exporting(line)

    work, calibration = together.out.with_name("timings.work"), given_texts(str(splits), TASK).calibration
    found = candidates_of(models.checkpoint, Ways(), work, calibration, say)
    assert [candidate.name for candidate in found] == TOGETHER[1:4]
    assert all(candidate.path.exists() for candidate in found)
    with pytest.raises(Exporting, match="exporting checkpoint"):
        candidates_of(models.checkpoint, Ways(), work, [*calibration[:10], "another text"], say)


@pytest.mark.slow
def test_a_model_of_another_kind_of_labels_gets_no_metric_and_says_why(slower: Profiled) -> None:
    row = by_name(slower.document)["several ORT fp32"]
    assert "metric" not in row
    assert row["single_stream"]["p50_ms"] > 0
    (note,) = row["notes"]
    assert note.startswith("No metric: several ORT fp32 gives a text any number of labels")
    assert [each.get("metric") for each in slower.document["candidates"]] == [0.9, None, 0.9]
    assert slower.document["warnings"] == []


def test_two_classes_that_nobody_named_are_read_as_transformers_calls_them(models: Models, tmp_path: Path) -> None:
    config = json.loads((models.checkpoint / "config.json").read_text(encoding="utf-8"))
    del config["id2label"], config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(models.checkpoint / "tokenizer.json", tmp_path)
    weights = load_file(models.checkpoint / "model.safetensors")
    two = {name: tensor[:2].clone() if name.startswith("classifier.") else tensor for name, tensor in weights.items()}
    save_file(two, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (found,) = candidates_of(tmp_path, Ways(runtimes=("torch",)), tmp_path, [])
    assert found.reads is not None
    assert found.reads.labels == ("LABEL_0", "LABEL_1")
    assert task_of(tmp_path) == TASK


def test_a_profile_of_bundles_needs_no_torch(models: Models) -> None:
    code = (
        "import sys; from pathlib import Path; import stillroom.verbs.profile.run as profiling\n"
        f"bundle = Path({str(models.fast)!r})\n"
        "found = profiling.candidates_of(bundle, profiling.Ways(), Path('.'), [])\n"
        "profiling.given_models([bundle]), profiling.given_texts('', 'text-classification').drawn(0)\n"
        "sys.exit(len(found) != 1 or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param("", "No model was given", id="no model"),
        pytest.param("nowhere gone.onnx --data gone.jsonl",
                     "3 faults were found.* 1. nowhere does not exist.* 2. gone.onnx does not exist.* 3. --data gone.jsonl",
                     id="nothing is there"),
        pytest.param("THIS", "is neither a bundle, nor a checkpoint's folder, nor an .onnx file", id="no model's file"),
        pytest.param("BARE", "No model has a tokenizer.json", id="no model that reads text"),
        pytest.param("FAST --lengths 8,33", "--lengths has 33 tokens, and fast ORT fp32 takes at most 32", id="too long"),
        pytest.param("FAST --lengths 2", "2 tokens were asked for, but special tokens", id="too short"),
        pytest.param("FAST --data TEXTS", r"has no file test\.", id="splits without test"),
        pytest.param("FAST FAST", "two candidates are named fast ORT fp32", id="the same model twice"),
        pytest.param("FILE --runtimes torch", "--device cpu, --runtimes torch", id="no way to run it"),
        pytest.param("FAST --runtimes torch", r"fast has no model\.safetensors for torch", id="torch without a checkpoint"),
        pytest.param("FAST --paper", "--paper makes its own models", id="a model beside the paper's"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(refused: Refused, models: Models, tmp_path: Path, arguments: str, words: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("fly\n", encoding="utf-8")
    bare = shutil.copy(models.file, tmp_path / "model.onnx")
    paths = {"FAST": models.fast, "FILE": models.file, "THIS": __file__, "BARE": bare, "TEXTS": tmp_path / "texts"}
    lengths = [] if "--lengths" in arguments else ["--lengths", "8"]
    given = [*(paths.get(part, part) for part in arguments.split()), *lengths, "--batches", "1", "--threads", "1"]
    assert re.search(words, refused(*given))


def test_a_folder_that_cannot_be_used_is_told_before_any_timing(
    refused: Refused, models: Models, tmp_path: Path
) -> None:
    letter = tmp_path / "mine" / "letter.txt"
    letter.parent.mkdir()
    letter.write_text("dear", encoding="utf-8")
    assert "already exists and holds other files" in refused(models.fast, "--out", letter.parent, *QUICK)
    assert "already exists and is not a folder" in refused(models.fast, "--out", letter)
    said = refused(models.fast, "gone.bundle", "--out", letter / "out", *QUICK)
    assert "letter.txt is not a folder" in said
    assert "gone.bundle" in said
    assert "letter.txt is not a folder" in refused("--paper", "--out", letter / "out")
    # What a kill left of a page under way is no other thing.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".report.json.4711.partial").write_text("{", encoding="utf-8")
    assert "already exists" not in refused(models.fast, "gone.bundle", "--out", tmp_path / "out", *QUICK)


def test_a_damaged_bundle_and_a_damaged_configuration_are_bad_input(
    refused: Refused, models: Models, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(models.fast, tmp_path / "damaged"))
    (bundle / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "differs from its manifest" in refused(bundle, *QUICK)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": "be', encoding="utf-8")
    assert "torn: its config.json cannot be read" in refused(tmp_path / "torn", *QUICK)


@pytest.mark.slow
def test_calibration_on_the_scored_texts_is_warned_of(models: Models, splits: Path, tmp_path: Path) -> None:
    given = (models.checkpoint, "--runtimes", "onnxruntime", "--data", splits / "test.jsonl")
    found = profiled(tmp_path / "timings", *given)
    (warning,) = [each for each in found.document["warnings"] if "calibrated" in each]
    assert warning.endswith("Give --data a folder of splits to calibrate on train.")
    assert "timing takes about 1 s, or longer until each of 2 candidates has run 6 turns" in found.said


PROFILE = """
import sys
from pathlib import Path
from stillroom.verbs.profile.run import profile_models
from stillroom.verbs.profile import Profiling

settings = Profiling(seconds=6.0, tight=1e-9, batches=(1,), lengths=(8, 16), threads=1, bound_ms=50.0, sweep=True, out=sys.argv[2])
profile_models([Path(sys.argv[1])], settings, "profile it")
"""


def test_an_interrupted_profile_has_a_report_of_what_was_measured(models: Models, tmp_path: Path) -> None:
    out = tmp_path / "timings"
    command = [sys.executable, "-c", PROFILE, str(models.fast), str(out)]
    with started(command, stderr=subprocess.PIPE) as profiling:
        while not (out / "table.md").is_file():  # the last of the three
            assert profiling.poll() is None, profiling.communicate()
            time.sleep(0.01)
        profiling.send_signal(signal.SIGINT)
        _, said = profiling.communicate()
    assert b"KeyboardInterrupt" in said
    assert sorted(file.name for file in out.iterdir()) == ["report.html", "report.json", "table.md"]
    document = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {row["tokens"] for row in document["candidates"]} >= {8}
    assert document["given"][0]["model"] == str(models.fast)
    assert document["command"] == "profile it"
    assert UNENDED in document["warnings"]
    assert "peaks" not in document
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>")
    assert UNENDED in page
