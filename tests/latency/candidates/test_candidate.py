import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import torch

from latency.candidates import candidate as candidates
from latency.candidates.candidate import Candidate, Runtime, load, missing, size_bytes
from latency.measure.interleave import Workload, start_workers
from latency.measure.operators import operators
from latency.measure.worker import inputs_of
from serve.errors import BadInput

INPUT_IDS = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])
INPUTS = {"input_ids": INPUT_IDS, "attention_mask": np.ones_like(INPUT_IDS), "token_type_ids": np.zeros_like(INPUT_IDS)}


def test_onnxruntime_answers_with_the_inputs_that_the_graph_takes(onnx_candidate: Candidate) -> None:
    expected = np.log(INPUT_IDS.mean(axis=1, keepdims=True))
    np.testing.assert_allclose(load(onnx_candidate)(INPUTS), expected, rtol=1e-6)


def test_the_logits_are_read_where_a_graph_has_another_output_before_them(
    onnx_candidate: Candidate, tmp_path: Path
) -> None:
    model = onnx.load(onnx_candidate.path)
    logits = onnx.ValueInfoProto.FromString(model.graph.output[0].SerializeToString())
    del model.graph.output[:]
    model.graph.output.extend([onnx.helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, None), logits])
    onnx.save(model, tmp_path / "model.onnx")
    expected = np.log(INPUT_IDS.mean(axis=1, keepdims=True))
    np.testing.assert_allclose(load(replace(onnx_candidate, path=tmp_path / "model.onnx"))(INPUTS), expected, rtol=1e-6)


def test_onnxruntime_gets_the_threads_that_the_candidate_has(onnx_candidate: Candidate) -> None:
    load(onnx_candidate)  # whatever the runtime starts once per process
    before = psutil.Process().num_threads()
    call = load(replace(onnx_candidate, threads=4))
    assert psutil.Process().num_threads() - before == 3  # the caller is the fourth
    del call


def test_a_path_without_a_model_is_refused_by_either_runtime(tmp_path: Path, onnx_candidate: Candidate) -> None:
    with pytest.raises(BadInput, match=r"no file at .*model\.onnx; give the path of a \.onnx file"):
        load(replace(onnx_candidate, path=tmp_path / "model.onnx"))
    with pytest.raises(BadInput, match=r"no config\.json"):
        load(Candidate("t", "torch", "fp32", tmp_path, 1))


def test_torch_int8_unknown_runtimes_and_no_threads_are_refused(
    torch_candidate: Candidate, onnx_candidate: Candidate
) -> None:
    wrong: tuple[tuple[Candidate, dict[str, Any], str], ...] = (
        (torch_candidate, {"precision": "int8"}, "not 'int8'.*onnxruntime"),
        (onnx_candidate, {"runtime": "tvm"}, "runtime 'tvm' of candidate 'student'"),
        (onnx_candidate, {"threads": 0}, "0 threads"),
    )
    for candidate, changes, named in wrong:
        with pytest.raises(BadInput, match=named):
            load(replace(candidate, **changes))


CUDA_IS_HERE = not missing("onnxruntime", "cuda") or not missing("torch", "cuda")
NO_CUDA = pytest.mark.skipif(CUDA_IS_HERE, reason="CUDA is here")


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime-tensorrt", "torch", "torch-cuda-graphs"])
def test_a_gpu_that_is_not_here_is_refused(
    runtime: Runtime, onnx_candidate: Candidate, torch_candidate: Candidate
) -> None:
    if not missing(runtime, "cuda"):
        pytest.skip("it is here")
    candidate = torch_candidate if runtime.startswith("torch") else onnx_candidate
    with pytest.raises(BadInput, match=f"'{candidate.name}' cannot run"):
        load(replace(candidate, runtime=runtime, device="cuda"))


@NO_CUDA
@pytest.mark.parametrize(
    ("runtime", "named"),
    [
        ("onnxruntime", "CUDAExecutionProvider"),
        ("onnxruntime-tensorrt", "TensorrtExecutionProvider"),
        ("torch", "torch"),
        ("torch-cuda-graphs", "torch"),
    ],
)
def test_packages_for_gpus_on_a_machine_without_one_point_to_the_driver(
    runtime: Runtime, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = missing(runtime, "cuda")
    assert named in said
    assert "nvidia-smi" in said
    assert "pip install" not in said


@pytest.mark.parametrize(("runtime", "package"), [("openvino", "openvino"), ("torch-compile", "torch")])
def test_a_runtime_that_is_not_installed_is_named_with_how_to_install_it(
    runtime: Runtime, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    said = missing(runtime, "cpu")
    assert package in said.lower()
    assert "pip install" in said


@NO_CUDA
def test_a_graph_that_would_run_on_the_cpu_for_want_of_the_gpus_libraries_is_refused(
    onnx_candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "missing", lambda runtime, device: "")  # a package and a driver, but no cuDNN
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(BadInput, match=r"'student': .*CUDAExecutionProvider"),
    ):
        load(replace(onnx_candidate, device="cuda"))


@pytest.mark.parametrize("config", ["{", "[1]", '{"architectures": [7]}'])
def test_a_config_that_is_none_is_refused_with_its_folder(
    config: str, tmp_path: Path, torch_candidate: Candidate
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadInput, match=re.escape(str(tmp_path))):
        load(replace(torch_candidate, path=tmp_path))


def test_size_counts_the_weights_and_an_onnx_files_external_data(
    tmp_path: Path, onnx_candidate: Candidate, torch_candidate: Candidate
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x" * 10)
    (tmp_path / "model.onnx.data").write_bytes(b"x" * 500)
    (tmp_path / "model_quantized.onnx").write_bytes(b"x" * 3)
    assert size_bytes(replace(onnx_candidate, path=tmp_path / "model.onnx")) == 510
    assert size_bytes(torch_candidate) == (torch_candidate.path / "model.safetensors").stat().st_size


# In an interpreter of its own: thread counts are set once per process, and what is imported is part of the behaviour.
TORCH_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from latency.candidates.candidate import Candidate, load
from latency.measure.machine import machine_facts
assert not {"torch", "transformers", "onnxruntime"} & sys.modules.keys()
machine_facts()
assert "torch" not in sys.modules
call = load(Candidate("t", "torch", "fp32", Path(sys.argv[1]), 3))
import torch
assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (3, 1)
ids = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])
logits = call({"input_ids": ids, "attention_mask": np.ones_like(ids), "unknown_input": ids})
from transformers import AutoModelForTokenClassification
model = AutoModelForTokenClassification.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    expected = model(input_ids=torch.from_numpy(ids)).logits
assert logits.shape == (2, 4, 5)
torch.testing.assert_close(torch.from_numpy(logits), expected)
"""


def test_torch_answers_like_the_checkpoint_in_the_precision_asked_for(tiny_bert: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TORCH_PROGRAM, tiny_bert], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA, and torch sees none")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # of the compiler; float32 stays as it is
@pytest.mark.parametrize("runtime", ["torch", "torch-compile", "torch-cuda-graphs"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_every_way_that_torch_runs_on_a_gpu_answers_as_the_cpu_does(
    torch_candidate: Candidate, runtime: Runtime, precision: str, tolerance: float
) -> None:
    expected = load(torch_candidate)
    call = load(replace(torch_candidate, runtime=runtime, precision=precision, device="cuda"))
    for shape in ((1, 5), (2, 9), (1, 5)):  # a shape that comes again is replayed
        inputs = inputs_of(np.random.default_rng(sum(shape)).integers(4, 14, size=shape))
        np.testing.assert_allclose(call(inputs), expected(inputs), atol=tolerance)


def changed(file: Path, out: Path, **changes: object) -> Path:
    """The graph in `file` with an input of another `name`, `type` or `shape`."""
    import onnx

    model = onnx.load(file)
    given = model.graph.input[0]
    kind = changes.get("kind", onnx.TensorProto.INT64)
    new = onnx.helper.make_tensor_value_info(
        str(changes.get("name", given.name)), kind, changes.get("shape", ["b", "s"])
    )
    for node in model.graph.node:
        node.input[:] = [new.name if name == given.name else name for name in node.input]
    del model.graph.input[:]
    model.graph.input.append(new)
    onnx.save(model, out)
    return out


def test_a_graph_from_elsewhere_is_fed_in_its_types_or_refused_with_the_cause(
    tmp_path: Path, onnx_candidate: Candidate
) -> None:
    from onnx import TensorProto

    expected = load(onnx_candidate)(INPUTS)
    narrow = changed(onnx_candidate.path, tmp_path / "int32.onnx", kind=TensorProto.INT32)
    np.testing.assert_array_equal(load(replace(onnx_candidate, path=narrow))(INPUTS), expected)
    assert operators(narrow, INPUTS, threads=1)["tokens"] == 4
    other = changed(onnx_candidate.path, tmp_path / "names.onnx", name="ids")
    with pytest.raises(BadInput, match=r"has the inputs ids, and ids cannot be filled\. Export it with inputs called"):
        load(replace(onnx_candidate, path=other))


def test_a_graph_of_a_fixed_shape_is_refused_by_its_own_process_without_a_traceback(
    tmp_path: Path, onnx_candidate: Candidate, workload: Workload
) -> None:
    fixed = changed(onnx_candidate.path, tmp_path / "fixed.onnx", shape=[1, 16])
    with (
        pytest.raises(BadInput, match="does not run 2 x 6 tokens") as refused,
        start_workers([replace(onnx_candidate, path=fixed)], [workload]),
    ):
        pass
    assert "\n" not in refused.value.message
