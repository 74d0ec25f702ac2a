"""What this machine trains on, and how torch gives the same bits on it each time."""

import os

import torch

from compress import distributed
from serve.bundle.cpu import cpu_features


def has_bf16() -> bool:
    """Whether matrix products in bfloat16 run natively here; elsewhere they are emulated, and slower than float32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return bool({"amx_bf16", "avx512_bf16"} & cpu_features())


def device_here() -> torch.device:
    """Where models are trained and label texts."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def same_bits(threads: int) -> None:
    """Torch on so many cores, shared with the other processes here, by ways that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products on CUDA ask for
    torch.set_num_threads(max(1, threads // distributed.count_here()))
    torch.use_deterministic_algorithms(True)
