"""A candidate: a model on disk, with its runtime, device and number of threads; whether this machine can run it; and its opening."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from serve.bundle.manifest import TaskName
from serve.bundle.runtimes import CUDA, INSTALL_OPENVINO, Device, gpu_lacks, has_openvino
from serve.errors import BadInput, BundleError
from serve.wording import all_of

Runtime = Literal["torch", "torch-compile", "torch-cuda-graphs", "onnxruntime", "onnxruntime-tensorrt", "openvino"]
Int64s = npt.NDArray[np.int64]
Call = Callable[[Mapping[str, Int64s]], npt.NDArray[np.float32]]

# The version is that of constraints.txt.
INSTALL_TORCH_CUDA = "pip install --force-reinstall --index-url https://pypi.org/simple torch==2.13.0"
INSTALL_TORCH = "in a clone of stillroom, pip install '.[build]'"


@dataclass(frozen=True)
class Reads:
    """A model's tokenizer, task and labels, with which it can be timed from text to answer."""

    folder: Path  # holds tokenizer.json
    task: TaskName
    labels: tuple[str, ...]
    multi_label: bool = False


@dataclass(frozen=True)
class Candidate:
    """One model in one runtime."""

    name: str  # in tables and ratios; unique in a comparison
    runtime: Runtime
    precision: str  # fp32, fp16, bf16 or int8; for an ONNX file only a description
    path: Path  # a transformers folder for torch, a .onnx file for the others
    threads: int  # per call
    device: Device = "cpu"
    max_length: int | None = None  # in tokens, where known: padding does not exceed it
    reads: Reads | None = None  # None: only token ids can be timed, not text

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `from_dict`."""
        reads = self.reads and {**vars(self.reads), "folder": str(self.reads.folder.absolute())}
        return {**vars(self), "path": str(self.path.absolute()), "reads": reads}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Candidate":
        """The candidate from the result of `as_dict`."""
        given = document["reads"]
        reads = given and Reads(**{**given, "folder": Path(given["folder"]), "labels": tuple(given["labels"])})
        return cls(**{**document, "path": Path(document["path"]), "reads": reads})


def size_bytes(candidate: Candidate) -> int:
    """Bytes of the weights on disk: the .onnx file with its external data, or a checkpoint's weight files."""
    path = candidate.path
    if not candidate.runtime.startswith("torch"):
        # Exporters name external data after the graph: model.onnx.data, model.onnx_data.
        return sum(file.stat().st_size for file in path.parent.iterdir() if file.name.startswith(path.name))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def missing(runtime: Runtime, device: Device) -> str:
    """What `runtime` lacks to run on `device` here, with the command that installs it; empty if it can run.

    For torch on a GPU this imports torch.
    """
    if not runtime.startswith("torch"):
        if runtime == "openvino" and not has_openvino():
            return f"OpenVINO is not installed: {INSTALL_OPENVINO}"
        return "" if device == "cpu" else gpu_lacks(provider_of(runtime))
    if find_spec("torch") is None:
        return f"torch is not installed: {INSTALL_TORCH}"
    if device == "cpu":
        return ""
    import torch

    if torch.cuda.is_available():
        return ""
    without_cuda = f"torch {torch.__version__} was built without CUDA: {INSTALL_TORCH_CUDA}"
    return without_cuda if torch.version.cuda is None else "torch finds no GPU with CUDA: nvidia-smi must list one"


def provider_of(runtime: Runtime) -> str:
    """The name of onnxruntime's execution provider for `runtime` on a GPU."""
    return "TensorrtExecutionProvider" if runtime == "onnxruntime-tensorrt" else CUDA


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
