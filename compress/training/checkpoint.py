"""The state of a training in one safetensors file: weights, optimiser moments and progress. It is replaced atomically."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress import distributed
from serve.files import disk_errors_reported, replacing


@dataclass
class Progress:
    """The progress of a training after `step` steps. Curves are (step, value) pairs."""

    step: int = 0
    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_value: float = float("-inf")
    best_step: int = 0
    stopped: bool = False
    planned: int = 0  # steps that it takes unless validation ends it; 0 in checkpoints of earlier versions

    @property
    def ended(self) -> str:
        """How many steps it took and why no more, as part of a sentence."""
        if not self.stopped or self.step == self.planned:
            return f"after all {self.step:,} steps"
        return f"after {self.step:,} of {self.planned:,} steps, as validation had no new best"


def save_checkpoint(
    path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Write the state beside `path` and rename it into place: after a kill or on a full disk the previous file is whole.

    Raises:
        BadInput: the disk is full.
    """
    tensors = {f"model.{name}": value for name, value in own_tensors(model).items()}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    metadata = {"progress": json.dumps(asdict(progress))}
    if scaler is not None and scaler.is_enabled():
        metadata["scaler"] = json.dumps(scaler.state_dict())
    write_safetensors(path, tensors, metadata)


def load_checkpoint(
    path: Path, model: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> Progress:
    """Load the state in `path` into `model`, `optimizer` and `scaler`, and return its progress."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        stored = json.loads(metadata["progress"])
        tensors = _named_as_in(model, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
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
    if scaler is not None and "scaler" in metadata:
        scaler.load_state_dict(json.loads(metadata["scaler"]))
    return _progress(stored)


def progress_in(path: Path) -> Progress:
    """The progress of the checkpoint in `path`."""
    with safe_open(path, framework="pt") as file:
        return _progress(json.loads(file.metadata()["progress"]))


def _progress(stored: dict[str, Any]) -> Progress:
    stored["loss"] = [tuple(pair) for pair in stored["loss"]]
    stored["validation"] = [tuple(pair) for pair in stored["validation"]]
    return Progress(**stored)


def share_checkpoint(
    progress: Progress, model: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> Progress:
    """Give every process the main one's weights, moments and scale, in place; its progress is returned."""
    distributed.broadcast_tensors(list(own_tensors(model).values()))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [
        (number, key, tuple(value.shape), value.dtype)
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
    ]
    progress, state, scale = distributed.broadcast((progress, state, scaler.state_dict()))
    if not distributed.main():
        scaler.load_state_dict(scale)
        for number, key, shape, dtype in state:
            parameter = parameters[number]
            optimizer.state[parameter][key] = torch.empty(shape, dtype=dtype, device=parameter.device)
    distributed.broadcast_tensors([optimizer.state[parameters[number]][key] for number, key, _, _ in state])
    return progress


def own_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict of `model` with shared tensors once, under their first name: a head may share the embeddings."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        first = seen.setdefault((value.data_ptr(), tuple(value.shape)), name) if value.numel() else name
        if first == name:
            found[name] = value
    return found


def _named_as_in(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of a checkpoint without the `student.` that earlier versions put before the names of every student's weights."""
    if any(name.startswith("student.") for name, _ in model.named_parameters()):
        return tensors
    return {re.sub(r"^(model\.|optimizer\.\w+\.|)student\.", r"\1", name): value for name, value in tensors.items()}


def put_tensors(model: Any, tensors: dict[str, Tensor]) -> None:
    """Load the result of `own_tensors` into `model`, or into one of the same structure.

    Raises:
        ValueError: the names differ from those of this model.
    """
    tensors = _named_as_in(model, tensors)
    if set(tensors) != set(own_tensors(model)):
        raise ValueError(
            f"the checkpoint is of another model: {sorted(set(tensors) ^ set(own_tensors(model)))[:3]} differ"
        )
    model.load_state_dict(tensors, strict=False)


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to a file beside `path` and rename it; the temporary file is removed if writing fails.

    Raises:
        BadInput: the disk is full.
    """
    with disk_errors_reported(path), replacing(path, alone=True, synced=True) as beside:
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, beside, metadata)
