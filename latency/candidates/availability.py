"""Whether a runtime can run a model on a device of this machine, and what to install if it cannot."""

import ctypes
import sys
from importlib.util import find_spec

from latency.candidates.candidate import Device, Runtime
from serve.bundle.runtimes import INSTALL_OPENVINO, has_openvino

# Versions are those of constraints.txt. onnxruntime and onnxruntime-gpu hold the same module, so only one may be installed.
INSTALL_ONNXRUNTIME_GPU = "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'"
INSTALL_TORCH_CUDA = "pip install --force-reinstall --index-url https://pypi.org/simple torch==2.13.0"
INSTALL_TORCH = "in a clone of stillroom, pip install '.[build]'"


def missing(runtime: Runtime, device: Device) -> str:
    """What `runtime` lacks to run on `device` here, with the command that installs it; empty if it can run.

    For torch on a GPU this imports torch.
    """
    if runtime.startswith("torch"):
        return _torch_lacks(device)
    if runtime == "openvino" and not has_openvino():
        return f"OpenVINO is not installed: {INSTALL_OPENVINO}"
    if device == "cpu":
        return ""
    import onnxruntime

    provider = provider_of(runtime)
    if provider not in onnxruntime.get_available_providers():
        return f"onnxruntime's {provider} is not installed: {INSTALL_ONNXRUNTIME_GPU}"
    return "" if _gpus() else f"onnxruntime's {provider} finds no GPU: nvidia-smi must list one"


def provider_of(runtime: Runtime) -> str:
    """The name of onnxruntime's execution provider for `runtime` on a GPU."""
    return "TensorrtExecutionProvider" if runtime == "onnxruntime-tensorrt" else "CUDAExecutionProvider"


def _torch_lacks(device: Device) -> str:
    if find_spec("torch") is None:
        return f"torch is not installed: {INSTALL_TORCH}"
    if device == "cpu":
        return ""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: {INSTALL_TORCH_CUDA}"
    return "torch finds no GPU with CUDA: nvidia-smi must list one"


def _gpus() -> int:
    """The number of GPUs of NVIDIA's driver; 0 without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
