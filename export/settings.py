"""Settings of the export. Imports nothing heavy, since `stillroom export --help` reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from serve.bundle.runtimes import INSTALL_OPENVINO, Runtime, has_openvino
from serve.errors import BadInput
from serve.options import Settings, setting

Precision = Literal["fp32", "fp16", "int8"]
Scheme = Literal["static", "weight-only", "dynamic"]
VARIANTS: tuple[Precision, ...] = get_args(Precision)

# What a promise may be of; see `export.validation.promises`.
PromiseKind = Literal["precision", "recall"]
PROMISE_KINDS: tuple[PromiseKind, ...] = get_args(PromiseKind)
PROMISES = "A share of right answers, or of right ones found, that holds for the answers above a score, such as precision=0.95."
PROMISE_DATA = (
    "File of labelled texts, other than the data's, to make promises on. Without it `run` sets a quarter of validation apart, if that "
    "leaves 300 texts; else promises have no confidence."
)
PROMISE_CONFIDENCE = "Least chance that each promise holds on texts like those that it was made on."

GATE = 0.99
KEPT_RIGHT = 0.95
ATOL = 1e-4  # float32 logits summed in two orders differ by 1e-6 to 1e-5 at 6x384


def read_promise(text: str) -> tuple[PromiseKind, float]:
    """The kind and the share in `text`, such as `precision=0.95`.

    Raises BadInput: it is of another form, or the share is not between 0 and 1.
    """
    kind, _, share = text.partition("=")
    try:
        asked = float(share)
    except ValueError:
        asked = 0.0
    if kind not in PROMISE_KINDS or not 0 < asked < 1:
        raise BadInput(
            f"--promise {text} is not a promise. Give precision or recall, =, and a share between 0 and 1, such as precision=0.95."
        )
    return kind, asked


@dataclass(frozen=True)
class VariantSettings(Settings):
    """Which variants to make of a checkpoint, and their gates.

    Raises BadInput: a setting is out of range, or OpenVINO is asked for but not installed or unable to read the file.
    """

    variants: tuple[Precision, ...] = ("fp32", "int8")
    gate: float = setting(
        GATE, help="Least share of the fp32 metric that int8 and fp16 keep; without data, of fp32's labels.", at_least=0,
        at_most=1,
    )  # fmt: skip
    keep_right: float = setting(
        KEPT_RIGHT, help="Share of right answers to keep when the model may abstain; 0 means it never abstains.", at_least=0, at_most=1,
    )  # fmt: skip
    promises: tuple[str, ...] = setting((), help=PROMISES, metavar="PROMISE", flag="--promise")
    promise_confidence: float = setting(0.95, help=PROMISE_CONFIDENCE, at_least=0.5, at_most=0.9999)
    atol: float = setting(
        ATOL,
        help="Largest allowed difference of a logit of fp32 from torch's, beside 1e-5 of the logit; of numbers, as a share of their "
        "standard deviation.",
        at_least=0,
    )
    int8: Scheme = setting(
        "static",
        help="How int8 is made. weight-only is near fp32 but no faster; answers of dynamic depend on the batch.",
    )
    runtime: Runtime = setting("onnxruntime", help="Runtime that serves int8.")
    fuse: bool = setting(False, help="Join kernels in fp32 and fp16, for GPUs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for promise in self.promises:
            read_promise(promise)
        if self.runtime == "openvino" and not has_openvino():
            raise BadInput(f"--runtime openvino: OpenVINO is not installed; {INSTALL_OPENVINO}.")
        if self.runtime == "openvino" and self.int8 == "weight-only":
            raise BadInput("only onnxruntime reads --int8 weight-only; leave --runtime openvino out.")

    def runs_in(self, variant: Precision) -> Runtime:
        """What the manifest pins for `variant`."""
        return self.runtime if variant == "int8" else "onnxruntime"
