"""A candidate: a model on disk, with its runtime, device and number of threads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from serve.bundle.manifest import TaskName
from serve.bundle.runtimes import Device

Runtime = Literal["torch", "torch-compile", "torch-cuda-graphs", "onnxruntime", "onnxruntime-tensorrt", "openvino"]
Int64s = npt.NDArray[np.int64]
Call = Callable[[Mapping[str, Int64s]], npt.NDArray[np.float32]]


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
