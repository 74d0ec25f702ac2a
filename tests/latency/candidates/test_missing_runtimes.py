"""What a runtime is said to lack, on a machine that lacks it."""

import sys

import onnxruntime
import pytest
import torch

from latency.candidates.candidate import missing

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("runtime", "package", "named"), [("openvino", "openvino", "OpenVINO"), ("torch-compile", "torch", "torch")]
)
def test_a_runtime_that_is_not_installed_is_named_with_how_to_install_it(
    runtime: str, package: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    said = missing(runtime, "cpu")  # type: ignore[arg-type]
    assert named in said
    assert "pip install" in said


@NO_GPU
@pytest.mark.parametrize(
    ("runtime", "named"),
    [
        ("onnxruntime", "CUDAExecutionProvider"),
        ("onnxruntime-tensorrt", "TensorrtExecutionProvider"),
        ("torch", "torch"),
        ("torch-cuda-graphs", "torch"),
    ],
)
def test_a_runtime_for_gpus_on_a_machine_without_one_points_to_the_driver(
    runtime: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = missing(runtime, "cuda")  # type: ignore[arg-type]
    assert named in said
    assert "nvidia-smi" in said
    assert "pip install" not in said
