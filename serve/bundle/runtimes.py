"""The runtimes and devices by name, and what they lack on this machine, with what to install."""

import ctypes
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import Literal, NamedTuple, cast, get_args

from serve.bundle.cpu import cpu_features, suits
from serve.bundle.manifest import CARD, Bundle
from serve.errors import BadInput, BundleError

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


class Choice(NamedTuple):
    """A variant, its runtime, and what the user should know of both."""

    variant: str
    runtime: Runtime
    notes: tuple[str, ...]


def choose(
    bundle: Bundle,
    asked: str | None = None,
    *,
    features: Collection[str] | None = None,
    openvino: bool | None = None,
    device: Device = "cpu",
) -> Choice:
    """The variant `asked`, or the bundle's default one, and its runtime. `features` and `openvino` are by default this machine's.

    On a processor that would compute the default variant differently, fp32 takes its place; a variant that was asked for is
    refused (BundleError). Without OpenVINO, onnxruntime runs the same file. Each of these is noted in `notes`. For `device` "cuda"
    see `choose_for_gpu`; BadInput where there is no GPU, or onnxruntime cannot use it.
    """
    if device not in get_args(Device):
        raise BadInput(f"device is {device!r}; give {' or '.join(map(repr, get_args(Device)))}")
    if device == "cuda":
        if lacks := gpu_lacks():
            raise BadInput(f"--device is cuda, but {lacks}")
        return choose_for_gpu(bundle, asked)
    name, variant = bundle.variant(asked)
    notes = _notes_on_card(bundle)
    if not suits(variant.cpu, cpu_features() if features is None else features):
        lacking = (
            f"variant {name!r} of {bundle.manifest.name!r} needs a processor with one of {', '.join(variant.cpu)}; on this one "
            "its 8-bit sums would saturate, and its answers would differ from the measured ones"
        )
        if asked or "fp32" not in bundle.manifest.variants:
            raise BundleError(f"{lacking}: name another variant, or export fp32 too (--variants fp32,int8)")
        notes.append(f"{lacking}: fp32 answers instead, and is slower")
        name, variant = bundle.variant("fp32")
    if variant.runtime not in get_args(Runtime):
        raise BundleError(
            f"variant {name!r} of {bundle.manifest.name!r} is for the runtime {variant.runtime!r}; this program has "
            f"{' and '.join(get_args(Runtime))}: name another variant"
        )
    runtime = cast(Runtime, variant.runtime)
    if runtime == "openvino" and not (has_openvino() if openvino is None else openvino):
        runtime = "onnxruntime"
        notes.append(
            f"variant {name!r} of {bundle.manifest.name!r} was measured in OpenVINO, which is not installed or "
            f"crashed here: onnxruntime runs it instead; {INSTALL_OPENVINO}"
        )
    if variant.scheme == "dynamic":
        notes.append(
            f"variant {name!r} of {bundle.manifest.name!r} is dynamic int8: an answer depends on the other texts in its batch"
        )
    return Choice(name, runtime, tuple(notes))


def choose_for_gpu(bundle: Bundle, asked: str | None = None) -> Choice:
    """As `choose`, for onnxruntime on a GPU.

    fp16, or else fp32, takes the place of a default variant that is int8 or for another runtime; one that was asked for is refused.
    """
    name, variant = bundle.variant(asked)
    notes, variants = _notes_on_card(bundle), bundle.manifest.variants
    fit = [each for each in ("fp16", "fp32") if each in variants and variants[each].runtime == "onnxruntime"]
    lacking = "is int8, for which onnxruntime has no fast kernels on a GPU" if name == "int8" else ""
    if variant.runtime != "onnxruntime":
        lacking = f"is for the runtime {variant.runtime!r}, and --device cuda runs onnxruntime"
    if lacking:
        lacking = f"variant {name!r} of {bundle.manifest.name!r} {lacking}"
        if asked or not fit:
            others = " or ".join(fit)
            raise BundleError(f"{lacking}: give {f'--variant {others}, or ' if fit else ''}--device cpu")
        notes.append(f"{lacking}: {fit[0]} answers instead")
        name = fit[0]
    return Choice(name, "onnxruntime", tuple(notes))


def _notes_on_card(bundle: Bundle) -> list[str]:
    if not bundle.card_edited:
        return []
    return [
        f"{CARD} of {bundle.manifest.name!r} was edited after the bundle was made; all other files match the manifest"
    ]
