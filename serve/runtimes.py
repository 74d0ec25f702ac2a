"""What runs a graph, by name, and whether it is installed: asked without loading any."""

from importlib.util import find_spec
from typing import Literal

Runtime = Literal["onnxruntime", "openvino"]


def has_openvino() -> bool:
    """Whether OpenVINO is installed."""
    return find_spec("openvino") is not None
