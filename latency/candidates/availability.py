"""Whether a runtime can run a model on a device of this machine, and what to install if it cannot."""

from importlib.util import find_spec

from latency.candidates.candidate import Runtime
from serve.bundle.runtimes import CUDA, INSTALL_OPENVINO, Device, gpu_lacks, has_openvino

# The version is that of constraints.txt.
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
    return "" if device == "cpu" else gpu_lacks(provider_of(runtime))


def provider_of(runtime: Runtime) -> str:
    """The name of onnxruntime's execution provider for `runtime` on a GPU."""
    return "TensorrtExecutionProvider" if runtime == "onnxruntime-tensorrt" else CUDA


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
