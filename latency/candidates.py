"""What can be timed: a model on disk, the runtime that runs it, and how many threads it gets."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from serve.errors import BadInput, BundleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Runtime = Literal["torch", "onnxruntime", "openvino"]
Int64s = npt.NDArray[np.int64]
Call = Callable[[Mapping[str, Int64s]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Candidate:
    """One model as one runtime runs it."""

    name: str  # how tables and ratios call it; unique in a comparison
    runtime: Runtime
    precision: str  # fp32, fp16, bf16 or int8; for onnxruntime it only describes the file
    path: Path  # a transformers folder for torch, a .onnx file for onnxruntime
    threads: int  # of one call


def load(candidate: Candidate) -> Call:
    """A function from inputs `{name: (batch, tokens) int64}` to the model's first output, float32.

    Inputs that the model does not take are left out. Raises BadInput for a path that its runtime cannot open.
    """
    if candidate.threads < 1:
        raise BadInput(f"candidate {candidate.name!r} was given {candidate.threads} threads; give it 1 or more")
    if candidate.runtime == "torch":
        return _load_torch(candidate)
    if candidate.runtime == "onnxruntime":
        return _load_onnx(candidate, "onnxruntime")
    if candidate.runtime == "openvino":
        return _load_onnx(candidate, "openvino")
    raise BadInput(
        f"runtime {candidate.runtime!r} of candidate {candidate.name!r} is unknown; use torch, onnxruntime or openvino"
    )


def size_bytes(candidate: Candidate) -> int:
    """Bytes of the weights on disk: the .onnx file with its external data, or a checkpoint's weight files."""
    path = candidate.path
    if candidate.runtime != "torch":
        # Exporters name external data after the graph: model.onnx.data, model.onnx_data.
        return sum(file.stat().st_size for file in path.parent.iterdir() if file.name.startswith(path.name))
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    return sum(file.stat().st_size for file in weights)


def _load_onnx(candidate: Candidate, runtime: Literal["onnxruntime", "openvino"]) -> Call:
    """The graph as it is served: with the same options, and the same padding."""
    from serve.session import open_graph, padded_length

    if not candidate.path.is_file():
        raise BadInput(f"candidate {candidate.name!r}: no file at {candidate.path}; give the path of a .onnx file")
    try:
        graph = open_graph(candidate.path, candidate.threads, runtime)
    except BundleError as error:
        raise BadInput(f"candidate {candidate.name!r}: {error.message}") from error

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        tokens = inputs["input_ids"].shape[1]
        added = padded_length(tokens, runtime, None) - tokens
        feeds = {name: np.pad(inputs[name], ((0, 0), (0, added))) if added else inputs[name] for name in graph.inputs}
        first: npt.NDArray[np.float32] = graph.run(feeds, graph.outputs[0])
        return first

    return call


def _load_torch(candidate: Candidate) -> Call:
    import inspect

    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if candidate.precision not in dtypes:
        raise BadInput(
            f"candidate {candidate.name!r}: torch runs {', '.join(dtypes)} here, not {candidate.precision!r}; "
            "time that precision in onnxruntime"
        )
    torch.set_num_threads(candidate.threads)
    torch.set_num_interop_threads(1)
    # Said outright, since transformers 5 otherwise takes the precision that the checkpoint was saved in.
    model = _opener(candidate)(
        candidate.path, dtype=dtypes[candidate.precision], local_files_only=True, use_safetensors=True
    )
    model.eval()
    parameters = inspect.signature(model.forward).parameters

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            taken = {name: torch.from_numpy(array) for name, array in inputs.items() if name in parameters}
            first: npt.NDArray[np.float32] = model(**taken)[0].float().numpy()
            return first

    return call


def _opener(candidate: Candidate) -> "Callable[..., PreTrainedModel]":
    """The `from_pretrained` that opens the checkpoint with the head that its config names."""
    import transformers

    config_file = candidate.path / "config.json"
    if not config_file.is_file():
        raise BadInput(
            f"candidate {candidate.name!r}: no config.json in {candidate.path}; "
            "give a local folder that transformers saved (a Hub model must be downloaded first)"
        )
    architectures = " ".join(json.loads(config_file.read_text(encoding="utf-8")).get("architectures") or [])
    opener: Callable[..., PreTrainedModel] = transformers.AutoModel.from_pretrained
    if "ForTokenClassification" in architectures:
        opener = transformers.AutoModelForTokenClassification.from_pretrained
    elif "ForSequenceClassification" in architectures:
        opener = transformers.AutoModelForSequenceClassification.from_pretrained
    return opener
