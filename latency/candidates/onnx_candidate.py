"""ONNX files in onnxruntime and OpenVINO, on a CPU or with CUDA and TensorRT."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from latency.candidates.availability import missing, provider_of
from latency.candidates.candidate import Call, Candidate, Int64s
from serve.errors import BadInput, BundleError


def load_onnx(candidate: Candidate) -> Call:
    """See `latency.candidates.open_candidate.load`. With the options of the server, and on a CPU with its padding."""
    from serve.model.session import open_graph, padded_length

    if not candidate.path.is_file():
        raise BadInput(f"candidate {candidate.name!r}: no file at {candidate.path}; give the path of a .onnx file")
    runtime: Literal["onnxruntime", "openvino"] = "openvino" if candidate.runtime == "openvino" else "onnxruntime"
    if candidate.device == "cuda" or candidate.runtime == "onnxruntime-tensorrt":
        return _load_onnx_cuda(candidate)
    try:
        graph = open_graph(candidate.path, candidate.threads, runtime)
    except BundleError as error:
        raise BadInput(f"candidate {candidate.name!r}: {error.message}") from error

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        tokens = inputs["input_ids"].shape[1]
        added = padded_length(tokens, runtime, candidate.max_length) - tokens
        feeds = {name: np.pad(inputs[name], ((0, 0), (0, added))) if added else inputs[name] for name in graph.inputs}
        first: npt.NDArray[np.float32] = graph.run(feeds, graph.outputs[0])
        return first

    return call


def _load_onnx_cuda(candidate: Candidate) -> Call:
    from serve.model.session import onnxruntime_options, onnxruntime_session

    if lacks := missing(candidate.runtime, "cuda"):
        raise BadInput(f"candidate {candidate.name!r} cannot run: {lacks}")
    options = onnxruntime_options(candidate.threads)
    try:
        session = onnxruntime_session(candidate.path, options, provider_of(candidate.runtime))
    except BundleError as error:
        raise BadInput(f"candidate {candidate.name!r}: {error.message}") from error
    names, first = [node.name for node in session.get_inputs()], session.get_outputs()[0].name

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = session.run([first], {name: inputs[name] for name in names})[0]
        return found

    return call
