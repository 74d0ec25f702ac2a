"""What can be timed: a model on disk, the runtime and device that run it, and how many threads it gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput, BundleError

Runtime = Literal["torch", "torch-compile", "torch-cuda-graphs", "onnxruntime", "onnxruntime-tensorrt", "openvino"]
Device = Literal["cpu", "cuda"]
Int64s = npt.NDArray[np.int64]
Call = Callable[[Mapping[str, Int64s]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Reads:
    """How a model reads text and how its logits are answered, so that it can be timed from text to answer."""

    folder: Path  # holds tokenizer.json
    task: Literal["token-classification", "text-classification"]
    labels: tuple[str, ...]
    multi_label: bool = False


@dataclass(frozen=True)
class Candidate:
    """One model as one runtime runs it."""

    name: str  # how tables and ratios call it; unique in a comparison
    runtime: Runtime
    precision: str  # fp32, fp16, bf16 or int8; of ONNX files it only describes the file
    path: Path  # a transformers folder for torch, a .onnx file for the others
    threads: int  # of one call
    device: Device = "cpu"
    max_length: int | None = None  # tokens that the model has positions for, where known: padding stops there
    reads: Reads | None = None  # None: only rows of token ids can be timed

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back."""
        reads = self.reads and {**vars(self.reads), "folder": str(self.reads.folder.absolute())}
        return {**vars(self), "path": str(self.path.absolute()), "reads": reads}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Candidate":
        """The candidate that `as_dict` described."""
        told = document["reads"]
        reads = told and Reads(**{**told, "folder": Path(told["folder"]), "labels": tuple(told["labels"])})
        return cls(**{**document, "path": Path(document["path"]), "reads": reads})


def load(candidate: Candidate) -> Call:
    """A function from inputs `{name: (batch, tokens) int64}` to the model's first output, float32, on the host.

    Inputs that the model does not take are left out; an answer on the host means that the device has finished. Raises
    BadInput for a path that its runtime cannot open, and for a runtime or device that is not here.
    """
    if candidate.threads < 1:
        raise BadInput(f"candidate {candidate.name!r} was given {candidate.threads} threads; give it 1 or more")
    if candidate.runtime not in get_args(Runtime):
        raise BadInput(
            f"runtime {candidate.runtime!r} of candidate {candidate.name!r} is unknown; use {', '.join(get_args(Runtime))}"
        )
    if candidate.runtime.startswith("torch"):
        from latency.in_torch import load_torch

        return load_torch(candidate)
    return _load_onnx(candidate)


def size_bytes(candidate: Candidate) -> int:
    """Bytes of the weights on disk: the .onnx file with its external data, or a checkpoint's weight files."""
    path = candidate.path
    if not candidate.runtime.startswith("torch"):
        # Exporters name external data after the graph: model.onnx.data, model.onnx_data.
        return sum(file.stat().st_size for file in path.parent.iterdir() if file.name.startswith(path.name))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _load_onnx(candidate: Candidate) -> Call:
    """On a CPU the graph as it is served: with the same options, and the same padding."""
    from serve.session import open_graph, padded_length

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
    import onnxruntime

    wanted = "TensorrtExecutionProvider" if candidate.runtime == "onnxruntime-tensorrt" else "CUDAExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise BadInput(
            f"candidate {candidate.name!r} needs onnxruntime's {wanted}, which is not here; "
            "install onnxruntime-gpu on a machine with CUDA"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = candidate.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(candidate.path), options, providers=[wanted, "CPUExecutionProvider"])
    if wanted not in session.get_providers():  # it falls back to the CPU without an error
        raise BadInput(f"candidate {candidate.name!r}: onnxruntime's {wanted} did not start; see its message above")
    names, first = [node.name for node in session.get_inputs()], session.get_outputs()[0].name

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = session.run([first], {name: inputs[name] for name in names})[0]
        return found

    return call
