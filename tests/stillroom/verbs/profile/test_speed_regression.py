"""Is it slower than before? What is compared with what, what is called slower, and the exit code that says so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_profiles import QUICK, Models

from latency.candidates.candidate import Candidate
from serve.errors import BadInput
from stillroom.verbs.profile.speed_regression import (
    BEFORE,
    given_models,
    models_of,
    named_before,
    refuse_strangers,
    regression_lines,
    regressions,
)

Refused = Callable[..., str]


def document(*models: tuple[str, str, float], stream: bool = True) -> dict[str, Any]:
    """A profile of models (name, runtime, p50_ms), all fp32 on a CPU: eight turns of three calls each."""
    rows, grid = [], []
    for name, runtime, p50_ms in models:
        calls_ms = [
            round(p50_ms * (1 + wave + noise), 6) for wave in np.sin(range(8)) / 20 for noise in (-0.01, 0, 0.3)
        ]
        kind = {"name": name, "runtime": runtime, "precision": "fp32", "device": "cpu"}
        row: dict[str, Any] = dict(kind)
        if stream:
            samples = [[9, 0.25 * ms, 0.5 * ms, 0.25 * ms] for ms in calls_ms]
            row["single_stream"] = {"samples": samples, "turn_sizes": [3] * 8}
        rows.append(row)
        grid.append({**kind, "batch": 1, "tokens": 8, "samples_ms": calls_ms, "turn_sizes": [3] * 8})
    made: Any = {"models": rows, "candidates": grid}
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("p50_ms", "ratio", "slower"), [(2.0, 1, False), (4.0, 2, True), (1.0, 0.5, False), (2.02, 1.01, False), (2.06, 1.03, True)]
)  # fmt: skip
def test_a_model_is_slower_from_a_fiftieth_more_than_before(p50_ms: float, ratio: float, slower: bool) -> None:
    found = regressions(document(("new", "torch", p50_ms), ("old" + BEFORE, "torch", 2.0)))
    assert [(row["name"], row["before"], row["where"], row["slower"]) for row in found] == [
        ("new", "old" + BEFORE, "batch 1 x 8 tokens", slower),
        ("new", "old" + BEFORE, "single stream", slower),
    ]
    assert all(row["ratio"] == pytest.approx(ratio) and row["low"] < ratio < row["high"] for row in found)
    line, _ = regression_lines(found)
    assert line.startswith(f"new, batch 1 x 8 tokens: {ratio:.3f} times as long as before [")
    assert line.endswith(", slower") is slower


def test_a_model_is_compared_with_the_one_of_its_name_else_of_its_kind() -> None:
    def pairs(*models: str) -> set[tuple[str, str]]:
        before = [("teacher" + BEFORE, "onnxruntime", 9.0), ("ner" + BEFORE, "onnxruntime", 1.0)]
        now = [(name, "openvino" if name == "alone" else "onnxruntime", 1.0) for name in models]
        return {(row["name"], row["before"].removesuffix(BEFORE)) for row in regressions(document(*now, *before))}

    assert pairs("new", "ner", "alone") == {("ner", "ner"), ("new", "teacher")}
    assert pairs("ner") == {("ner", "ner")}


def test_models_that_read_no_text_are_compared_on_the_grid_alone() -> None:
    found = regressions(document(("a", "torch", 1.0), ("a" + BEFORE, "torch", 1.0), stream=False))
    assert [row["where"] for row in found] == ["batch 1 x 8 tokens"]


def test_candidates_of_other_kinds_are_refused_before_anything_is_timed() -> None:
    now = [Candidate("a", "onnxruntime", "int8", Path("a.onnx"), 1), Candidate("b", "torch", "fp32", Path("b"), 1)]
    refuse_strangers(now, named_before(now[1:]))
    with pytest.raises(BadInput, match="No model runs in the same runtime and precision"):
        refuse_strangers(now[:1], named_before(now[1:]))


def test_a_model_is_known_again_by_what_it_holds_wherever_it_lies(models: Models) -> None:
    one, same = given_models([models.fast, models.copied])
    assert (one["mark"], one["model"]) == (same["mark"], str(models.fast))
    assert len({each["mark"] for each in given_models([models.fast, models.slow, models.checkpoint, models.file])}) == 4


@pytest.fixture
def kept(models: Models, tmp_path: Path) -> Path:
    """A report on a bundle, a checkpoint and a file that lie beside it."""
    bundle, checkpoint = (
        Path(shutil.copytree(each, tmp_path / name))
        for each, name in ((models.fast, "bundle"), (models.checkpoint, "checkpoint"))
    )
    file = Path(shutil.copy(models.file, tmp_path / "model.onnx"))
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"given": given_models([bundle, checkpoint, file])}), encoding="utf-8")
    return report


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"given": [{"model": "x"}]}', '{"given": 3}', None])
def test_a_file_that_is_no_report_is_bad_input(
    refused: Refused, models: Models, tmp_path: Path, content: str | None
) -> None:
    report = tmp_path / "report.json"
    if content is not None:
        report.write_text(content, encoding="utf-8")
    said = refused(models.fast, "--against", report, *QUICK)
    assert f"--against {report} is not a report.json of `stillroom profile`" in said


@pytest.mark.parametrize("name", ["bundle", "checkpoint", "model.onnx"])
def test_a_model_of_before_that_has_gone_or_changed_is_bad_input(
    refused: Refused, models: Models, kept: Path, name: str
) -> None:
    assert [path.name for path in models_of(kept)] == ["bundle", "checkpoint", "model.onnx"]
    model = kept.with_name(name)
    other = {"bundle": models.slow, "checkpoint": models.checkpoint, "model.onnx": models.slow / "onnx" / "model.onnx"}
    model.rename(kept.with_name("gone"))
    said = refused(models.fast, "--against", kept, *QUICK)
    assert f"--against {kept}: its model {model} does not exist any more" in said
    if model.suffix:
        shutil.copy(other[name], model)
    else:
        shutil.copytree(other[name], model)
    if name == "checkpoint":
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}), encoding="utf-8")
    said = refused(models.fast, "--against", kept, *QUICK)
    assert f"--against {kept}: its model {model} has changed since" in said


def test_models_of_other_kinds_than_before_are_bad_input(refused: Refused, models: Models, kept: Path) -> None:
    before = kept.with_name("before.json")
    before.write_text(json.dumps({"given": given_models([models.file])}), encoding="utf-8")
    renamed = Path(shutil.copy(models.file, kept.with_name("model_int8.onnx")))
    assert "there is nothing to compare" in refused(renamed, "--against", before, *QUICK)
