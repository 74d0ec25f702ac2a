"""Checkpoints in torch: eager, compiled, or as CUDA graphs."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from compress.models.configurations import loading_config
from compress.models.heads import stated_head
from compress.models.sentence_pooling import pooling_in
from latency.candidates.candidate import Call, Candidate, Int64s, missing
from serve.errors import BadInput

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from compress.models.sentence_encoder import SentenceModel

WARM_UPS = 3  # runs on a side stream before a CUDA graph is captured, as torch's documentation requires

Forward = Callable[[dict[str, "torch.Tensor"]], "torch.Tensor"]


def load_torch(candidate: Candidate) -> Call:
    """See `latency.candidates.candidate.load`."""
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if candidate.precision not in dtypes:
        raise BadInput(
            f"candidate {candidate.name!r}: torch runs only fp32, fp16 or bf16 here, not {candidate.precision!r}; "
            "time that precision in onnxruntime"
        )
    on_gpu = candidate.device == "cuda" or candidate.runtime == "torch-cuda-graphs"
    if lacks := missing(candidate.runtime, "cuda" if on_gpu else "cpu"):
        raise BadInput(f"candidate {candidate.name!r} cannot run: {lacks}")
    opener = _opener(candidate)
    torch.set_num_threads(candidate.threads)
    with suppress(RuntimeError):  # a process that has run something in parallel keeps its threads
        torch.set_num_interop_threads(1)
    # dtype is given because transformers 5 otherwise uses the precision of the saved checkpoint.
    try:
        model = opener(candidate.path, dtype=dtypes[candidate.precision])
    except Exception as error:
        # Everything that transformers raises here (damaged weights, unusable values) is about the given folder.
        said = " ".join(str(error).split())
        raise BadInput(
            f"candidate {candidate.name!r}: {candidate.path} cannot be opened ({type(error).__name__}: {said}); "
            "copy the folder again, or save the model again with save_pretrained"
        ) from None
    model.eval().to(candidate.device)
    parameters = inspect.signature(model.forward).parameters
    # dynamic: lengths differ between texts, and a graph for one shape would be compiled again for the next.
    module: Any = torch.compile(model, dynamic=True) if candidate.runtime == "torch-compile" else model

    def forward(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        first: torch.Tensor = module(**inputs)[0]
        return first

    run = _replayed(forward) if candidate.runtime == "torch-cuda-graphs" else forward

    def call(inputs: Mapping[str, Int64s]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            taken = {
                name: torch.from_numpy(array).to(candidate.device)
                for name, array in inputs.items()
                if name in parameters
            }
            # The copy to the host waits for the device, so the clock is read after the work, not after its launch.
            first: npt.NDArray[np.float32] = run(taken).float().cpu().numpy()
            return first

    return call


def _replayed(forward: Forward) -> Forward:
    """`forward`, captured as a CUDA graph at the first call of each input shape, and replayed."""
    import torch

    graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor], torch.Tensor]] = {}

    def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = tuple(inputs["input_ids"].shape)
        if shape not in graphs:
            held = {name: tensor.clone() for name, tensor in inputs.items()}
            aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    forward(held)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = forward(held)
            graphs[shape] = graph, held, output
        graph, held, output = graphs[shape]
        for name, tensor in inputs.items():
            held[name].copy_(tensor)
        graph.replay()
        return output

    return run


def _opener(candidate: Candidate) -> "Callable[..., PreTrainedModel | SentenceModel]":
    """What opens the local checkpoint, of safetensors alone, with the head in its config.json or the pooling in its modules.json."""
    import transformers

    from compress.models.pretrained import config_in

    config_file = candidate.path / "config.json"
    if not config_file.is_file():
        raise BadInput(
            f"candidate {candidate.name!r}: no config.json in {candidate.path}; "
            "give a local folder that transformers saved (a Hub model must be downloaded first)"
        )
    # It may name code that is not to be loaded.
    config = config_in(candidate.path, f"candidate {candidate.name!r} in {candidate.path}", any_family=True)
    head = stated_head(config)
    if head is None and (how := pooling_in(candidate.path)):
        from compress.models.sentence_encoder import load_sentence_model

        return partial(load_sentence_model, how)
    opener = (head.model_class if head else transformers.AutoModel).from_pretrained
    opened = partial(opener, config=loading_config(candidate.path), local_files_only=True, use_safetensors=True)
    return (lambda path, **options: head.ready(opened(path, **options))) if head else opened
