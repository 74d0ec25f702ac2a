"""Which graph of a bundle runs here, and in what: as its manifest says, unless this machine cannot."""

from collections.abc import Collection
from typing import NamedTuple, cast, get_args

from serve.bundle.cpu import cpu_features, suits
from serve.bundle.manifest import CARD, Bundle
from serve.bundle.runtimes import INSTALL_OPENVINO, Runtime, has_openvino
from serve.errors import BundleError


class Choice(NamedTuple):
    """A variant, what runs it, and what its user should know of it and its bundle."""

    variant: str
    runtime: Runtime
    notes: tuple[str, ...]


def choose(
    bundle: Bundle,
    asked: str | None = None,
    *,
    features: Collection[str] | None = None,
    openvino: bool | None = None,
) -> Choice:
    """The variant `asked`, or the bundle's default one, and its runtime; `features` and `openvino` are those of this machine.

    The default variant gives way to fp32 on a processor that would compute it otherwise; a variant that was asked for is
    refused there (BundleError). Without OpenVINO onnxruntime reads the same file. A note says each such thing.
    """
    name, variant = bundle.variant(asked)
    notes: list[str] = []
    if bundle.card_edited:
        notes.append(
            f"{CARD} of {bundle.manifest.name!r} was edited since the bundle was made; every other file is as its manifest says"
        )
    if not suits(variant.cpu, cpu_features() if features is None else features):
        lacking = (
            f"variant {name!r} of {bundle.manifest.name!r} needs a processor with one of {', '.join(variant.cpu)}; on this one "
            "its sums would saturate, and its answers would not be those that were measured"
        )
        if asked or "fp32" not in bundle.manifest.variants:
            raise BundleError(f"{lacking}: name another variant, or export with 7-bit weights")
        notes.append(f"{lacking}: fp32 answers instead, slower")
        name, variant = bundle.variant("fp32")
    if variant.runtime not in get_args(Runtime):
        raise BundleError(
            f"variant {name!r} of {bundle.manifest.name!r} runs on {variant.runtime!r}; this program runs "
            f"{' and '.join(get_args(Runtime))}: name another variant"
        )
    runtime = cast(Runtime, variant.runtime)
    if runtime == "openvino" and not (has_openvino() if openvino is None else openvino):
        runtime = "onnxruntime"
        notes.append(
            f"variant {name!r} of {bundle.manifest.name!r} was measured for OpenVINO, which is not installed: onnxruntime answers "
            f"instead; {INSTALL_OPENVINO}"
        )
    if variant.scheme == "dynamic":
        notes.append(
            f"variant {name!r} of {bundle.manifest.name!r} is dynamic int8: its answers depend on the texts that share a batch"
        )
    return Choice(name, runtime, tuple(notes))
