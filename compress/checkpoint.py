"""A training state in one safetensors file: weights, optimiser moments and where it stands; written in one step."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class Progress:
    """Where training stands after `step` steps. Curves are (step, value) pairs."""

    step: int = 0
    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_value: float = float("-inf")
    best_step: int = 0
    stopped: bool = False


def save_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the state beside `path` and rename it into place: a kill leaves the file before it whole."""
    tensors = {f"model.{name}": value for name, value in own_tensors(model).items()}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    write_safetensors(path, tensors, {"progress": json.dumps(asdict(progress))})


def load_checkpoint(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> Progress:
    """Put the state of `path` into `model` and `optimizer`, and say where it stood."""
    with safe_open(path, framework="pt") as file:
        stored = json.loads(file.metadata()["progress"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    put_tensors(
        model, {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    )
    for name, parameter in model.named_parameters():
        state = {
            key: tensors[f"optimizer.{key}.{name}"]
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"optimizer.{key}.{name}" in tensors
        }
        if state:
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    stored["loss"] = [tuple(pair) for pair in stored["loss"]]
    stored["validation"] = [tuple(pair) for pair in stored["validation"]]
    return Progress(**stored)


def own_tensors(model: Any) -> dict[str, Tensor]:
    """The state of `model` with each tensor once, under the first of its names: a head may share the embeddings."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        first = seen.setdefault((value.data_ptr(), tuple(value.shape)), name) if value.numel() else name
        if first == name:
            found[name] = value
    return found


def put_tensors(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put what `own_tensors` gave back into `model`, or one like it.

    Raises:
        ValueError: the names are not those of this model.
    """
    if set(tensors) != set(own_tensors(model)):
        raise ValueError(
            f"the checkpoint is of another model: {sorted(set(tensors) ^ set(own_tensors(model)))[:3]} differ"
        )
    model.load_state_dict(tensors, strict=False)


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `path` in one step, through a file beside it."""
    beside = path.with_name(path.name + ".partial")
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, beside, metadata)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)
