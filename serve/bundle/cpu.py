"""The processor's instruction sets on which answers of 8-bit files and the precision of training depend."""

import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

from serve.errors import BadInput

# The instruction sets that matter here: those with 8-bit products that do not saturate, and those for training in bfloat16.
FEATURES = ("amx_bf16", "amx_int8", "arm64", "avx512_bf16", "avx512_vnni", "avx_vnni")
# Instruction sets to treat as absent, separated by commas: `avx512_vnni,amx_int8`.
HIDDEN_VARIABLE = "STILLROOM_HIDE_CPU_FEATURES"


def cpu_features(
    cpuinfo: Path = Path("/proc/cpuinfo"),
    machine: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """The processor's instruction sets as Linux names them (`avx512_vnni`, ...), and `arm64` on any 64-bit Arm.

    Without `/proc/cpuinfo` nothing is known of an x86 processor, and the set is empty. The sets that
    STILLROOM_HIDE_CPU_FEATURES names in `environment` (None: this process's) are left out. The variable can only remove sets, so
    no file runs on a processor that lacks what it needs. BadInput when it names a set that is not in `FEATURES`.
    """
    hidden = hidden_features(os.environ if environment is None else environment)
    return _reported_features(cpuinfo, machine or platform.machine()) - hidden


def hidden_features(environment: Mapping[str, str]) -> frozenset[str]:
    """The instruction sets that STILLROOM_HIDE_CPU_FEATURES names. BadInput for one that is not in `FEATURES`."""
    hidden = {name.strip() for name in environment.get(HIDDEN_VARIABLE, "").split(",")} - {""}
    if unknown := sorted(hidden - set(FEATURES)):
        raise BadInput(
            f"{HIDDEN_VARIABLE} names {', '.join(unknown)}, which is unknown; give some of {', '.join(FEATURES)}, separated by commas"
        )
    return frozenset(hidden)


def _reported_features(cpuinfo: Path, machine: str) -> frozenset[str]:
    features = {"arm64"} if machine.lower() in ("arm64", "aarch64") else set()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(features | set(value.split()))
    return frozenset(features)


def suits(needed: Collection[str], features: Collection[str]) -> bool:
    """Whether a processor with `features` has one of `needed`, or `needed` is empty: then a file gives its measured answers."""
    return not needed or bool(set(needed) & set(features))
