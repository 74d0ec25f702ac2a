"""The device that a training is told to run on: honoured, or refused where it is not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress.distributed import count
from compress.progress import Event
from compress.runs.hardware import ADDED_VARIABLE, device_here, on_this_machine
from compress.settings import Distillation, TaskSettings
from compress.training.loop import device_of_process
from serve.bundle.cpu import HIDDEN_VARIABLE
from serve.errors import BadInput
from stillroom.inputs.preflight import prepare
from stillroom.inputs.recipe import Recipe
from stillroom.verbs.compare import compare
from stillroom.verbs.run.pipeline import run
from stillroom.verbs.run.stages import Run

NEEDED: dict[Any, dict[str, Any]] = {
    TaskSettings: {"teacher": "t", "task": "text-classification", "data": "d"},
    Distillation: {"teacher": "t", "corpus": ("c",), "out": "o"},
}
SHAPE = "layers=2,hidden=32,heads=4,ffn=32"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("please refund the lamp\nthank you team\n" * 20, encoding="utf-8")
    return path


def test_auto_is_a_gpu_where_torch_sees_one_and_cpu_is_the_cpu_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [device_here(name).type for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert device_of_process("cpu") == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [device_here(name).type for name in ("auto", "cpu")] == ["cpu", "cpu"]


@pytest.mark.parametrize("kind", [TaskSettings, Distillation])
def test_the_precision_is_chosen_for_the_device_that_is_trained_on(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    monkeypatch.setenv(HIDDEN_VARIABLE, "amx_bf16")
    chosen = [on_this_machine(kind(**NEEDED[kind], device=device)) for device in ("cuda", "cpu")]
    assert [(settings.device, settings.precision) for settings in chosen] == [("cuda", "bf16"), ("cpu", "fp32")]
    assert all(settings.threads > 0 for settings in chosen)
    assert on_this_machine(kind(**NEEDED[kind], threads=3)).threads == 3


def test_a_missing_gpu_is_refused_among_other_faults(
    tiny_teacher: Path, task_data: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    teacher, data, out, task = str(tiny_teacher), str(task_data), tmp_path / "out", "text-classification"
    both = r"2 faults were found(?s:.)*--device is cuda, but torch finds no GPU"
    given: dict[str, Any] = {"teacher": teacher, "task": task, "out": str(out), "data": "./none", "device": "cuda"}
    with pytest.raises(BadInput, match=both):
        run(Recipe(**given))
    with pytest.raises(BadInput, match=both):
        compress.finetune(teacher, task, "./none", out, device="cuda")
    with pytest.raises(BadInput, match=both):
        compress.distill("./none", [corpus], out, device="cuda", precision="fp16")
    with pytest.raises(BadInput, match=both):
        compare(**given, methods=("minilm",), corpus=(str(corpus),))
    with pytest.raises(BadInput, match=r"--device is 'tpu'"):
        compress.finetune(teacher, task, data, out, device="tpu")
    with pytest.raises(BadInput, match=r"--device is 'tpu'"):
        compress.distill(teacher, [corpus], out, device="tpu")
    assert list(tmp_path.iterdir()) == [corpus]


def test_naming_the_default_device_changes_no_fingerprint(
    tiny_teacher: Path, task_data: Path, corpus: Path, tmp_path: Path
) -> None:
    def stop(event: Event) -> None:
        if event.kind == "advanced":
            raise KeyboardInterrupt

    def stages(folder: Path) -> set[str]:
        return {json.loads(file.read_text(encoding="utf-8"))["fingerprint"] for file in folder.rglob("stage.json")}

    named = device_here().type
    recipe: dict[str, Any] = {
        "teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "out": str(tmp_path / "bundle"),
        "student": SHAPE,
    }  # fmt: skip
    auto, same = (Run(prepare(Recipe(**recipe, device=device))).fingerprints for device in ("auto", named))
    assert auto == same
    begun: dict[str, list[set[str]]] = {"distill": [], "finetune": []}
    for device in ("auto", named):
        more: dict[str, Any] = {"student": SHAPE, "batch": 1, "device": device}
        given = (str(tiny_teacher), "text-classification", str(task_data), tmp_path / "tuned")
        with pytest.raises(KeyboardInterrupt):
            compress.distill(str(tiny_teacher), [corpus], tmp_path / "small", progress=stop, **more)
        begun["distill"].append(stages(tmp_path / "small.distill-work"))
        with pytest.raises(KeyboardInterrupt):
            compress.finetune(*given, device=device, progress=stop)
        begun["finetune"].append(stages(tmp_path / "tuned.finetune-work"))
    for first, second in begun.values():
        assert first
        assert first == second
    assert count() == 1


def test_a_seed_below_zero_is_refused(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--seed is -1; give a whole number from 0"):
        compress.distill(str(tiny_teacher), [corpus], tmp_path / "out", student=SHAPE, seed=-1)


@pytest.mark.parametrize(("hidden", "precision"), [("", "bf16"), ("amx_bf16", "fp32")])
def test_distill_honours_threads_and_the_processors_precision(
    tiny_teacher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, precision: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(HIDDEN_VARIABLE, hidden)
    monkeypatch.setenv(ADDED_VARIABLE, "amx_bf16")
    before = torch.get_num_threads()
    made = compress.distill(str(tiny_teacher), [corpus], tmp_path / "small", student=SHAPE, threads=1, epochs=0.1)
    lineage = json.loads((made / "lineage.json").read_text(encoding="utf-8"))
    assert (torch.get_num_threads(), lineage["threads"]) == (1, 1)
    assert lineage["precision"] == precision
    torch.set_num_threads(before)
    with pytest.raises(BadInput, match="--threads is -1; give a whole number from 0"):
        compress.distill(str(tiny_teacher), [corpus], tmp_path / "other", student=SHAPE, threads=-1)
