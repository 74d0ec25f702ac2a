"""What to make of a checkpoint, and what it must keep. Imports nothing heavy: `stillroom export --help` reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from serve.bundle.runtimes import INSTALL_OPENVINO, Runtime, has_openvino
from serve.errors import BadInput
from serve.options import check, setting

Precision = Literal["fp32", "fp16", "int8"]
Scheme = Literal["static", "weight-only", "dynamic"]
VARIANTS: tuple[Precision, ...] = get_args(Precision)

GATE = 0.99
KEPT_RIGHT = 0.95
ATOL = 1e-4  # float32 summed in two orders differs by 1e-6 to 1e-5 at 6x384

# Headings of help.
CHECKS, GRAPHS = "Checks", "Graphs"


@dataclass(frozen=True)
class VariantSettings:
    """What to make of a checkpoint, and what it must keep.

    Raises:
        BadInput: a setting cannot be, or OpenVINO is asked for where it is not installed or cannot read the file.
    """

    variants: tuple[Precision, ...] = ("fp32", "int8")
    gate: float = setting(
        GATE, help="Least share of the fp32 metric that int8 and fp16 keep; without data, of fp32's labels.", at_least=0,
        at_most=1, panel=CHECKS,
    )  # fmt: skip
    keep_right: float = setting(
        KEPT_RIGHT, help="Share of right answers to keep when it abstains; 0 is never to abstain.", at_least=0, at_most=1,
        panel=CHECKS,
    )  # fmt: skip
    atol: float = setting(
        ATOL, help="What a logit of fp32 may differ by from torch's, beside a share of it.", at_least=0, panel=CHECKS
    )
    int8: Scheme = setting(
        "static",
        help="How int8 is made. weight-only is near fp32 and no faster; the answers of dynamic depend on the batch.",
        panel=GRAPHS,
    )
    runtime: Runtime = setting("onnxruntime", help="What serves int8.", panel=GRAPHS)
    fuse: bool = setting(False, help="Join kernels in fp32 and fp16, for GPUs.", panel=GRAPHS)

    def __post_init__(self) -> None:
        check(self)
        if self.runtime == "openvino" and not has_openvino():
            raise BadInput(f"--runtime openvino: OpenVINO is not installed; {INSTALL_OPENVINO}.")
        if self.runtime == "openvino" and self.int8 == "weight-only":
            raise BadInput("--int8 weight-only is read by onnxruntime alone; leave --runtime openvino out.")

    def runs_in(self, variant: Precision) -> Runtime:
        """What the manifest pins for `variant`."""
        return self.runtime if variant == "int8" else "onnxruntime"
