"""The papers' table beside ours: what is compared with what, and how it reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import command

from compress.models.shapes import STUDENTS
from serve.bundle.runtimes import has_openvino
from stillroom.verbs.profile.papers_table import (
    PUBLISHED,
    SHAPES,
    TEACHER,
    make_models,
    paper_markdown,
    paper_rows,
    random_texts,
    runtimes,
)


def about(ratio: float) -> object:
    """That ratio with an interval of hardly any width: that of two processes whose every turn agrees."""
    return pytest.approx([ratio] * 3, rel=0.01)


def document(*timed: tuple[str, str, str, str, float], tokens: int = 128) -> dict[str, Any]:
    """A grid of (model, runtime, precision, device, p50_ms): eight turns of one call each, all turns alike for all."""
    rows = [
        {
            "name": f"{model} {runtime} {precision}" + (" cuda" if device == "cuda" else ""),
            "runtime": runtime, "precision": precision, "device": device, "batch": 1, "tokens": tokens, "p50_ms": p50_ms,
            "samples_ms": [p50_ms * (1 + turn / 100) for turn in range(8)], "turn_sizes": [1] * 8,
        }
        for model, runtime, precision, device, p50_ms in timed
    ]  # fmt: skip
    made: Any = {"candidates": rows, "ratios": []}
    return made  # type: ignore[no-any-return]


ON_CPU = (
    (TEACHER, "torch", "fp32", "cpu", 60.0),
    (TEACHER, "onnxruntime", "int8", "cpu", 15.0),
    ("3x384", "torch", "fp32", "cpu", 6.0),
    ("3x384", "onnxruntime", "int8", "cpu", 2.0),
    ("3x384", "openvino", "int8", "cpu", 1.0),
)
ON_GPU = ((TEACHER, "torch", "fp32", "cuda", 8.0), ("3x384", "torch", "fp32", "cuda", 2.0))


def test_each_model_stands_beside_its_published_figures_with_speed_ups_over_the_teacher_on_its_device() -> None:
    rows = paper_rows(document(*ON_CPU))
    assert [row["model"] for row in rows] == list(SHAPES) == list(PUBLISHED)
    assert [row["theirs_speedup"] for row in rows] == [1.0, 2.0, 5.4, 6.8, 12.0]  # of their own times
    teacher, untimed, *_, student = rows
    assert (student["device"], student["tokens"], student["theirs_ms"]) == ("cpu", 128, 5.41)
    assert student["ours"]["torch fp32"] == {"name": "3x384 torch fp32", "p50_ms": 6.0, "speedup": about(10.0)}
    assert student["ours"]["int8"]["name"] == "3x384 openvino int8", "the faster of two runtimes"
    assert student["ours"]["int8"]["speedup"] == about(60.0)
    assert teacher["ours"]["int8"]["speedup"] == about(4.0)
    assert teacher["ours"]["torch fp32"]["speedup"] == about(1.0)
    assert untimed["ours"] == {}
    on_both = {(row["model"], row["device"]): row for row in paper_rows(document(*ON_CPU, *ON_GPU))}
    student = on_both["3x384", "cuda"]
    assert (student["theirs_ms"], student["theirs_speedup"]) == (3.02, 2.9)
    assert student["ours"]["torch fp32"]["speedup"] == about(4.0)
    assert on_both["3x384", "cpu"]["ours"]["torch fp32"]["speedup"] == about(10.0)


def test_without_the_teacher_in_torch_there_is_no_speed_up() -> None:
    rows = paper_rows(document(*ON_CPU[1:]))
    assert rows[-1]["ours"]["torch fp32"] == {"name": "3x384 torch fp32", "p50_ms": 6.0, "speedup": []}
    assert "| 3x384 | 5.41 | 12.0 | 1.00 |  | 6.00 |  |" in paper_markdown(rows)


def test_the_table_has_a_part_for_each_device_and_length() -> None:
    given = document(*ON_CPU, *ON_GPU)
    given["candidates"] += document(*ON_GPU, tokens=16)["candidates"]
    text = paper_markdown(paper_rows(given))
    assert text.count("Batch 1, 128 tokens, cpu; speed-ups over 12x768 in torch fp32\n\n| ") == 1
    assert text.count("Batch 1, 128 tokens, cuda;") == text.count("Batch 1, 16 tokens, cuda;") == 1
    assert "|  | paper, ms | speed-up | torch fp32, ms | speed-up | int8, ms | speed-up |" in text
    assert "| 3x384 | 5.41 | 12.0 | 6.00 | 10.0 [9.9, 10.1] | 1.00 | 60.0 [59.6, 60.4] |" in text
    assert "| 6x768 | 33.28 | 2.0 |  |  |  |  |" in text
    assert len({line.count("|") for line in text.split("\n\n")[1].strip().splitlines()}) == 1


def test_the_students_are_the_shapes_that_distil_takes() -> None:
    assert all(SHAPES[name] == STUDENTS[name] for name in SHAPES if name != TEACHER)
    assert (SHAPES[TEACHER].layers, SHAPES[TEACHER].hidden, SHAPES[TEACHER].ffn) == (12, 768, 3072)


def test_texts_are_drawn_from_the_seed() -> None:
    assert random_texts(0) == random_texts(0) != random_texts(1)
    assert all(word[:1] == "w" and word[1:].isdigit() for text in random_texts(0) for word in text.split())


def test_each_device_has_its_runtimes() -> None:
    on_cpu = ["torch", "onnxruntime", *(["openvino"] if has_openvino() else [])]
    assert list(runtimes(["cpu"])) == on_cpu
    assert list(runtimes(["cuda"])) == ["torch", "torch-compile", "torch-cuda-graphs"]
    assert list(runtimes(["cpu", "cuda"])) == [*on_cpu, "torch-compile", "torch-cuda-graphs"]


@pytest.mark.slow
def test_models_are_made_by_the_names_of_their_shapes(tmp_path: Path) -> None:
    from safetensors import safe_open

    made = make_models(tmp_path)
    assert [path.name for path in made] == list(SHAPES)
    for path, shape in zip(made, SHAPES.values(), strict=True):
        with safe_open(path / "model.safetensors", "np") as weights:
            names = list(weights.keys())
            feed_forward = weights.get_slice("bert.encoder.layer.0.intermediate.dense.weight").get_shape()
        layers = {name.split(".")[3] for name in names if name.startswith("bert.encoder.layer.")}
        assert (len(layers), feed_forward) == (shape.layers, [shape.ffn, shape.hidden])
        assert json.loads((path / "config.json").read_text(encoding="utf-8"))["num_attention_heads"] == shape.heads
    assert (made[0] / "tokenizer.json").is_file()


@pytest.mark.slow
def test_paper_times_the_teacher_and_every_student(tmp_path: Path) -> None:
    out = tmp_path / "paper"
    done = command("profile", "--paper", "--seconds", "5", "--lengths", "16", "--out", out)
    assert done.code == 0, done.said
    rows = json.loads((out / "report.json").read_text(encoding="utf-8"))["paper"]
    assert [(row["model"], row["tokens"]) for row in rows] == [(name, 16) for name in SHAPES]
    assert all({"torch fp32", "onnxruntime fp32", "int8"} <= set(row["ours"]) for row in rows)
    assert rows[0]["ours"]["torch fp32"]["speedup"] == about(1.0)
    fastest = np.array([row["ours"]["int8"]["p50_ms"] for row in rows])
    assert fastest[-1] < fastest[0]
    assert "| 3x384 | 5.41 | 12.0 |" in done.out
