"""Opens a candidate in its runtime: ONNX files in onnxruntime and OpenVINO, on a CPU or with CUDA and TensorRT; torch elsewhere."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from latency.candidates.candidate import Call, Candidate, Int64s, Runtime, missing, provider_of
from serve.errors import BadInput, BundleError
from serve.wording import all_of


def load(candidate: Candidate) -> Call:
    """A function from inputs `{name: (batch, tokens) int64}` to the model's `logits`, or else its first output, float32, on the host.

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


def check_inputs(candidate: Candidate, names: Sequence[str]) -> None:
    """BadInput if a graph has inputs of other `names` than those of a text's tokens."""
    from serve.model.session import KNOWN_INPUTS

    if strange := [name for name in names if name not in KNOWN_INPUTS]:
        raise BadInput(
            f"candidate {candidate.name!r}: {candidate.path} has the inputs {', '.join(names)}, and {', '.join(strange)} cannot be filled. "
            f"Export it with inputs called {all_of(sorted(KNOWN_INPUTS))}."
        )


def feeds_of(inputs: Mapping[str, Int64s], names: Sequence[str], int32: Collection[str]) -> dict[str, Any]:
    """Those of `inputs` that a graph takes by its `names`, with 32 bits where it takes `int32`."""
    return {name: inputs[name].astype(np.int32) if name in int32 else inputs[name] for name in names}


def _on_cpu(candidate: Candidate) -> Call:
    """With the server's options and padding."""
    from serve.model.session import OUTPUT, open_graph, padded_length

    runtime: Literal["onnxruntime", "openvino"] = "openvino" if candidate.runtime == "openvino" else "onnxruntime"
    graph = open_graph(candidate.path, candidate.threads, runtime)
    check_inputs(candidate, graph.inputs)

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        tokens = inputs["input_ids"].shape[1]
        added = padded_length(tokens, runtime, candidate.max_length) - tokens
        inputs = {name: np.pad(inputs[name], ((0, 0), (0, added))) if added else inputs[name] for name in graph.inputs}
        feeds = feeds_of(inputs, graph.inputs, graph.int32)
        found: npt.NDArray[np.float32] = graph.run(feeds, OUTPUT if OUTPUT in graph.outputs else graph.outputs[0])
        return found

    return call


def _on_gpu(candidate: Candidate) -> Call:
    """With the server's options."""
    from serve.model.session import OUTPUT, int32_of, onnxruntime_options, onnxruntime_session

    options = onnxruntime_options(candidate.threads)
    session = onnxruntime_session(candidate.path, options, provider_of(candidate.runtime))
    names, outputs = ([node.name for node in nodes] for nodes in (session.get_inputs(), session.get_outputs()))
    wanted = OUTPUT if OUTPUT in outputs else outputs[0]
    int32 = int32_of(session)
    check_inputs(candidate, names)

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = session.run([wanted], feeds_of(inputs, names, int32))[0]
        return found

    return call
