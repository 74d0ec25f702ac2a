"""What runs a graph, by name, and whether it is installed: asked without loading any."""

from importlib.util import find_spec
from typing import Literal

Runtime = Literal["onnxruntime", "openvino"]

# What to do where OpenVINO is wanted and missing.
INSTALL_OPENVINO = "in a clone of stillroom, pip install '.[openvino]'"


def has_openvino() -> bool:
    """Whether OpenVINO is installed."""
    return find_spec("openvino") is not None
