"""The runtimes and devices by name, and whether OpenVINO is installed. Nothing here loads one."""

from importlib.util import find_spec
from typing import Literal

Runtime = Literal["onnxruntime", "openvino"]
Device = Literal["cpu", "cuda"]

# The end of messages that say OpenVINO is missing.
INSTALL_OPENVINO = "in a clone of stillroom, pip install '.[openvino]'"


def has_openvino() -> bool:
    """Whether OpenVINO is installed."""
    return find_spec("openvino") is not None
