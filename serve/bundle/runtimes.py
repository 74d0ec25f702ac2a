"""The runtimes and devices by name, and what they lack on this machine, with what to install."""

import ctypes
import sys
from importlib.util import find_spec
from typing import Literal

Runtime = Literal["onnxruntime", "openvino"]
Device = Literal["cpu", "cuda"]

CUDA = "CUDAExecutionProvider"

# The end of messages that say OpenVINO is missing.
INSTALL_OPENVINO = "in a clone of stillroom, pip install '.[openvino]'"
# The version is that of constraints.txt. onnxruntime and onnxruntime-gpu hold the same module, so only one may be installed.
INSTALL_ONNXRUNTIME_GPU = "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'"


def has_openvino() -> bool:
    """Whether OpenVINO is installed."""
    return find_spec("openvino") is not None


def gpu_lacks(provider: str = CUDA) -> str:
    """What the execution provider `provider` of onnxruntime lacks here, with what to do; empty if it can run.

    A process that forks afterwards must not call it: NVIDIA's driver does not work in the child.
    """
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        return f"onnxruntime's {provider} is not installed: {INSTALL_ONNXRUNTIME_GPU}"
    return "" if gpus() else f"onnxruntime's {provider} finds no GPU: nvidia-smi must list one"


def gpus() -> int:
    """The number of GPUs of NVIDIA's driver; 0 without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
