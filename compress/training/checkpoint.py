"""A training state in one safetensors file: weights, optimiser moments and where it stands; written in one step."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from serve.errors import BadInput

# A full disk, a quota used up, a limit on the size of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Progress:
    """Where training stands after `step` steps. Curves are (step, value) pairs."""

    step: int = 0
    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_value: float = float("-inf")
    best_step: int = 0
    stopped: bool = False


def save_checkpoint(
    path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Write the state beside `path` and rename it into place: a kill, or a disk that fills, leaves the file before it whole.

    Raises:
        BadInput: there is no room for it.
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
    """Put the state of `path` into `model`, `optimizer` and `scaler`, and say where it stood."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        stored = json.loads(metadata["progress"])
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
    if scaler is not None and "scaler" in metadata:
        scaler.load_state_dict(json.loads(metadata["scaler"]))
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
    """Write `tensors` to `path` in one step, through a file beside it that does not stay when writing fails.

    Raises:
        BadInput: there is no room for it.
    """
    beside = path.with_name(path.name + ".partial")
    try:
        with full_disk_reported(path):
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, beside, metadata)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def full_disk_reported(path: Path) -> Iterator[None]:
    """Within it `path` is written; that there is no room for it becomes one message.

    Raises:
        BadInput: there is none.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _no_room(error):
            raise
        # What it says of the cause is the system's own: a full disk, a quota, a limit.
        raise BadInput(
            f"{path} could not be written: {error}. What stood there before is whole. Make room and give the same command again: "
            "it goes on from the last checkpoint."
        ) from error


def _no_room(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    return any(f"(os error {number})" in str(error) for number in NO_ROOM)  # safetensors says it in words alone
