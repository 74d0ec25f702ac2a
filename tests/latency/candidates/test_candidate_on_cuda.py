"""On a GPU: every way that torch runs a model gives what the CPU gives."""

from dataclasses import replace

import numpy as np
import pytest

from latency.candidates.candidate import Candidate, Runtime
from latency.candidates.open_candidate import load
from latency.measure.worker import inputs_of
from serve.errors import BadInput

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA, and torch sees none"),
]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # of the compiler; float32 stays as it is
@pytest.mark.parametrize("runtime", ["torch", "torch-compile", "torch-cuda-graphs"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_it_answers_as_the_cpu_does(
    torch_candidate: Candidate, runtime: Runtime, precision: str, tolerance: float
) -> None:
    expected = load(torch_candidate)
    call = load(replace(torch_candidate, runtime=runtime, precision=precision, device="cuda"))
    for shape in ((1, 5), (2, 9), (1, 5)):  # a shape that comes again is replayed
        inputs = inputs_of(np.random.default_rng(sum(shape)).integers(4, 14, size=shape))
        np.testing.assert_allclose(call(inputs), expected(inputs), atol=tolerance)


def test_onnxruntime_without_cuda_is_refused_and_not_run_on_the_cpu(onnx_candidate: Candidate) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(BadInput, match="CUDAExecutionProvider is not installed"):
        load(replace(onnx_candidate, device="cuda"))
