"""A candidate: a model on disk, with its runtime, device and number of threads; and whether this machine can run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from serve.bundle.manifest import TaskName
from serve.bundle.runtimes import CUDA, INSTALL_OPENVINO, Device, gpu_lacks, has_openvino

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
