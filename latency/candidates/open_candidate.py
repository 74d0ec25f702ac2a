"""Opens a candidate in its runtime: ONNX files in onnxruntime and OpenVINO, on a CPU or with CUDA and TensorRT; torch elsewhere."""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from latency.candidates.candidate import Call, Candidate, Int64s, Runtime, missing, provider_of
from serve.errors import BadInput, BundleError


def load(candidate: Candidate) -> Call:
    """A function from inputs `{name: (batch, tokens) int64}` to the model's first output, float32, on the host.

    Inputs that the model does not take are ignored. The output is on the host, so the device has finished. Raises BadInput
    for a path that its runtime cannot open, and for an unavailable runtime or device.
    """
    if candidate.threads < 1:
        raise BadInput(f"candidate {candidate.name!r} was given {candidate.threads} threads; give it 1 or more")
    if candidate.runtime not in get_args(Runtime):
        raise BadInput(
            f"runtime {candidate.runtime!r} of candidate {candidate.name!r} is unknown; use one of {', '.join(get_args(Runtime))}"
        )
    if candidate.runtime.startswith("torch"):
        from latency.candidates.torch_candidate import load_torch

        return load_torch(candidate)
    if not candidate.path.is_file():
        raise BadInput(f"candidate {candidate.name!r}: no file at {candidate.path}; give the path of a .onnx file")
    on_gpu = candidate.device == "cuda" or candidate.runtime == "onnxruntime-tensorrt"
    if on_gpu and (lacks := missing(candidate.runtime, "cuda")):
        raise BadInput(f"candidate {candidate.name!r} cannot run: {lacks}")
    try:
        return _on_gpu(candidate) if on_gpu else _on_cpu(candidate)
    except BundleError as error:
        raise BadInput(f"candidate {candidate.name!r}: {error.message}") from error


def _on_cpu(candidate: Candidate) -> Call:
    """With the server's options and padding."""
    from serve.model.session import open_graph, padded_length

    runtime: Literal["onnxruntime", "openvino"] = "openvino" if candidate.runtime == "openvino" else "onnxruntime"
    graph = open_graph(candidate.path, candidate.threads, runtime)

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        tokens = inputs["input_ids"].shape[1]
        added = padded_length(tokens, runtime, candidate.max_length) - tokens
        feeds = {name: np.pad(inputs[name], ((0, 0), (0, added))) if added else inputs[name] for name in graph.inputs}
        first: npt.NDArray[np.float32] = graph.run(feeds, graph.outputs[0])
        return first

    return call


def _on_gpu(candidate: Candidate) -> Call:
    """With the server's options."""
    from serve.model.session import onnxruntime_options, onnxruntime_session

    options = onnxruntime_options(candidate.threads)
    session = onnxruntime_session(candidate.path, options, provider_of(candidate.runtime))
    names, first = [node.name for node in session.get_inputs()], session.get_outputs()[0].name

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = session.run([first], {name: inputs[name] for name in names})[0]
        return found

    return call
