"""What this machine trains on, and how torch gives the same bits on it each time."""

import os
from dataclasses import replace
from typing import TypeVar

import torch

from compress import distributed
from compress.settings import Distillation, TaskSettings, TrainingDevice
from serve.bundle.cpu import cpu_features
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput

AnyTraining = TypeVar("AnyTraining", bound=TaskSettings | Distillation)


def has_bf16(device: torch.device) -> bool:
    """Whether `device` runs matrix products in bfloat16 natively; otherwise they are emulated, and slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool({"amx_bf16", "avx512_bf16"} & cpu_features())


def device_here(asked: str = "auto") -> torch.device:
    """Where models are trained and label texts: as `asked`, or with `auto` on a GPU where torch sees one.

    Raises:
        BadInput: it is `cuda`, and torch sees none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        built = "was built for CPUs alone" if torch.version.cuda is None else f"was built for CUDA {torch.version.cuda}"
        raise BadInput(
            f"--device is cuda, and torch sees no GPU here: torch {torch.__version__} {built}, and there are {os.cpu_count()} cores. "
            "Give --device cpu, or a torch and a driver for the GPU."
        )
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def on_this_machine(settings: AnyTraining) -> AnyTraining:
    """`settings` with what they leave to the machine spelled out: the device, the cores to train on, and the precision.

    Raises:
        BadInput: the device is not here.
    """
    device = device_here(settings.device)
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if has_bf16(device) else "fp32"
    threads = settings.threads or available_cores()
    named: TrainingDevice = "cuda" if device.type == "cuda" else "cpu"
    return replace(settings, device=named, threads=threads, precision=precision)


def same_bits(threads: int) -> None:
    """Torch on so many cores, shared with the other processes here, by ways that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products on CUDA ask for
    torch.set_num_threads(max(1, threads // distributed.count_here()))
    torch.use_deterministic_algorithms(True)
