"""The device, cores and precision to train with on this machine, the settings of each training there, and reproducible bits."""

import os
from dataclasses import replace
from typing import Any, TypeVar

import torch

from compress import distributed
from compress.models.precision import check_precision
from compress.settings import Distillation, FineTuning, TaskSettings, TrainingDevice
from compress.training.loop import StageSettings
from serve.bundle.cpu import available_cores, cpu_features, hidden_features
from serve.errors import BadInput

# Set to `amx_bf16`, `auto` chooses the precision as on a processor with AMX, so that a test can see both choices on any machine. Nothing
# else reads it: a processor computes bfloat16 without AMX, only slowly, but cannot run every file.
ADDED_VARIABLE = "STILLROOM_ADD_CPU_FEATURES"

AnyTraining = TypeVar("AnyTraining", bound=TaskSettings | Distillation | FineTuning)


def is_faster_in_bf16(device: torch.device) -> bool:
    """Whether `device` trains faster in bfloat16 than in float32.

    Of CPUs that is so with AMX. Products of AVX-512 alone are hardly faster, and the conversions cost more than they gain: a
    training step took 1.5 to 2.0 times as long (`benchmarks/distill/precision.py`). STILLROOM_HIDE_CPU_FEATURES and
    STILLROOM_ADD_CPU_FEATURES may say `amx_bf16`; a set that is hidden is not added. Raises BadInput: STILLROOM_ADD_CPU_FEATURES
    names something else.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    added = os.environ.get(ADDED_VARIABLE, "")
    if added not in ("", "amx_bf16"):
        raise BadInput(f"{ADDED_VARIABLE} is {added!r}; only amx_bf16 can be added")
    return "amx_bf16" in (cpu_features() | {added}) - hidden_features(os.environ)


def device_here(asked: str = "auto") -> torch.device:
    """The device to train and predict on: `asked`; for `auto` a GPU if torch finds one, otherwise the CPU.

    Raises BadInput: `asked` is `cuda` and torch finds no GPU.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        built = "for CPUs only" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise BadInput(
            f"--device is cuda, but torch finds no GPU: torch {torch.__version__} was built {built}. Give --device cpu "
            f"(this machine has {os.cpu_count()} cores), or install a torch and a driver for the GPU."
        )
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def on_this_machine(settings: AnyTraining) -> AnyTraining:
    """`settings` with device, threads and precision resolved for this machine.

    Raises BadInput: the machine has no such device, or that device cannot train in this precision.
    """
    device = device_here(settings.device)
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if is_faster_in_bf16(device) else "fp32"
    check_precision(precision, device)
    threads = settings.threads or available_cores()
    named: TrainingDevice = "cuda" if device.type == "cuda" else "cpu"
    return replace(settings, device=named, threads=threads, precision=precision)


def stage_settings(settings: AnyTraining, steps: int = 0, **others: Any) -> StageSettings:
    """The settings of one training of `steps`, as the user gave them for all; `others` are those of this one."""
    same = {name: getattr(settings, name) for name in ("seed", "precision", "device", "accumulate")}
    if isinstance(settings, TaskSettings):
        same["checkpoint_every_s"] = settings.checkpoint_seconds
    return StageSettings(steps, trackers=tuple(settings.trackers), **same | others)


def same_bits(threads: int) -> None:
    """Let torch use `threads` cores, shared by the processes on this machine, and only deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA need it
    torch.set_num_threads(max(1, threads // distributed.count_here()))
    torch.use_deterministic_algorithms(True)
    # Filling new memory helps to find operations that read it uninitialised; it cost 2.5 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
