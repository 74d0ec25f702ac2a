"""Devices and runtimes that this machine has, and those that it lacks."""

from pathlib import Path

import pytest
from small_profiles import Models, Profiled

from latency.candidates.candidate import INSTALL_TORCH_CUDA, missing
from serve.bundle.runtimes import INSTALL_ONNXRUNTIME_GPU
from serve.errors import BadInput
from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.models import Ways, candidates_of
from stillroom.verbs.profile.run import profile_models
from stillroom.verbs.profile.texts import TIMED_TEXTS

NO_ONNX_CUDA = pytest.mark.skipif(not missing("onnxruntime", "cuda"), reason="onnxruntime has CUDA here")
NO_TORCH_CUDA = pytest.mark.skipif(not missing("torch", "cuda"), reason="torch has CUDA here")
QUICK = {"seconds": 0.1, "batches": (1,), "lengths": (8,), "threads": 1}


@pytest.mark.slow
def test_the_texts_that_are_timed_are_drawn_and_not_the_first_of_the_file(on_both: Profiled) -> None:
    work = on_both.document["work"]
    assert work["texts"] == TIMED_TEXTS
    assert 5 < work["tokens_mean"] < 10  # the first thousand have 3, the others 12


@pytest.mark.slow
@NO_ONNX_CUDA
@NO_TORCH_CUDA
def test_runtimes_that_lack_a_gpu_are_named_once_and_the_rest_is_measured(on_both: Profiled) -> None:
    rows = on_both.document["models"]
    assert [(row["name"], row["device"]) for row in rows] == [("whole torch fp32", "cpu"), ("whole ORT fp32", "cpu")]
    of_torch, of_onnxruntime = on_both.document["left_out"]
    assert "CUDA" in of_torch
    assert of_onnxruntime.endswith(INSTALL_ONNXRUNTIME_GPU)
    for line in (of_torch, of_onnxruntime):
        assert on_both.said.count(line) == 1
        assert line in (on_both.out / "table.md").read_text(encoding="utf-8")
    assert "CUDAExecutionProvider" in (on_both.out / "report.html").read_text(encoding="utf-8")


@NO_ONNX_CUDA
def test_a_gpu_alone_that_is_not_here_is_bad_input(models: Models, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No model can be run here with --device cuda") as refused:
        profile_models([models.fast], Profiling(device=("cuda",), out=str(tmp_path / "timings"), **QUICK))
    assert INSTALL_ONNXRUNTIME_GPU in refused.value.message
    assert list(tmp_path.iterdir()) == []


@NO_TORCH_CUDA
def test_cuda_graphs_of_a_bundle_that_are_not_here_are_bad_input_and_say_what_is_missing(whole: Path) -> None:
    import torch

    with pytest.raises(BadInput, match="torch") as refused:
        profile_models([whole], Profiling(runtimes=("torch-cuda-graphs",), **QUICK))
    assert "CUDA" in refused.value.message
    assert (INSTALL_TORCH_CUDA in refused.value.message) is (torch.version.cuda is None)


@NO_TORCH_CUDA
def test_torch_on_a_gpu_that_is_not_here_leaves_torch_on_the_cpu(whole: Path) -> None:
    lacks: list[str] = []
    ways = Ways(("cpu", "cuda"), ("torch", "torch-cuda-graphs"))
    found = candidates_of(whole, ways, whole, [], left_out=lacks.append)
    assert [(candidate.runtime, candidate.device) for candidate in found] == [("torch", "cpu")]
    assert len(set(lacks)) == 1


@pytest.fixture
def as_if_it_had_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are made, not run."""
    monkeypatch.setattr("stillroom.verbs.profile.models.missing", lambda *_asked: "")


@pytest.mark.slow
@pytest.mark.usefixtures("as_if_it_had_a_gpu")
def test_onnxruntime_on_a_gpu_gets_no_int8_graph_and_none_is_exported_for_it(models: Models, tmp_path: Path) -> None:
    lacks: list[str] = []
    cuda, both = (Ways(devices, ("onnxruntime",)) for devices in (("cuda",), ("cpu", "cuda")))

    def made(ways: Ways) -> list[tuple[str, str]]:
        found = candidates_of(models.checkpoint, ways, tmp_path, ["where is my parcel"] * 8, left_out=lacks.append)
        return [(candidate.device, candidate.precision) for candidate in found]

    assert made(cuda) == [("cuda", "fp32")]
    assert not [*tmp_path.rglob("*quantized*")]
    assert not lacks
    graph = next(tmp_path.rglob("model.onnx"))
    written = graph.stat().st_mtime_ns
    assert made(both) == [("cpu", "fp32"), ("cuda", "fp32"), ("cpu", "int8")]
    assert graph.stat().st_mtime_ns == written  # the int8 graph was added
    assert lacks == [
        "int8 in onnxruntime on cuda: it has no fast kernels for it there; time fp16, or int8 with --device cpu"
    ]


@pytest.mark.gpu
def test_cuda_graphs_alone_run_a_bundles_checkpoint(whole: Path) -> None:
    if lacks := missing("torch-cuda-graphs", "cuda"):
        pytest.skip(lacks)
    document = profile_models([whole], Profiling(runtimes=("torch-cuda-graphs",), **QUICK))
    assert [(row["runtime"], row["device"]) for row in document["models"]] == [("torch-cuda-graphs", "cuda")]


@pytest.mark.gpu
def test_onnxruntime_on_a_gpu_runs_a_bundle_beside_the_cpu(models: Models) -> None:
    if lacks := missing("onnxruntime", "cuda"):
        pytest.skip(lacks)
    document = profile_models([models.fast], Profiling(device=("cpu", "cuda"), **QUICK))
    assert [row["device"] for row in document["models"]] == ["cpu", "cuda"]
    assert "left_out" not in document
