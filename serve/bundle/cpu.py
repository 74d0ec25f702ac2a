"""What this processor can do, as far as the answers of 8-bit files and the precision of training depend on it."""

import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

from serve.errors import BadInput

# What decides anything here: 8-bit products that do not saturate, and training in bfloat16.
FEATURES = ("amx_bf16", "amx_int8", "arm64", "avx512_bf16", "avx512_vnni", "avx_vnni")
# Instruction sets that are treated as absent, set apart by commas: `avx512_vnni,amx_int8`.
HIDDEN_VARIABLE = "STILLROOM_HIDE_CPU_FEATURES"


def cpu_features(
    cpuinfo: Path = Path("/proc/cpuinfo"),
    machine: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """The processor's instruction sets as Linux names them (`avx512_vnni`, ...), and `arm64` on any 64-bit Arm.

    Where there is no `/proc/cpuinfo` nothing is known of an x86 processor, and the set is empty. What
    STILLROOM_HIDE_CPU_FEATURES names is left out; that of `environment`, or of this process now. It takes away alone: no
    file is ever believed to run on a processor that lacks what it needs. BadInput when it names something else than `FEATURES`.
    """
    hidden = hidden_features(os.environ if environment is None else environment)
    return _reported_features(cpuinfo, machine or platform.machine()) - hidden


def hidden_features(environment: Mapping[str, str]) -> frozenset[str]:
    """What STILLROOM_HIDE_CPU_FEATURES names. BadInput for a name that nothing here depends on, or a misspelt one."""
    hidden = {name.strip() for name in environment.get(HIDDEN_VARIABLE, "").split(",")} - {""}
    if unknown := sorted(hidden - set(FEATURES)):
        raise BadInput(
            f"{HIDDEN_VARIABLE} names {', '.join(unknown)}, which is unknown; give some of {', '.join(FEATURES)}, set apart by commas"
        )
    return frozenset(hidden)


def _reported_features(cpuinfo: Path, machine: str) -> frozenset[str]:
    found = {"arm64"} if machine.lower() in ("arm64", "aarch64") else set()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(found | set(value.split()))
    return frozenset(found)


def suits(needed: Collection[str], features: Collection[str]) -> bool:
    """Whether a file that needs one of `needed`, or nothing, gives its measured answers on a processor with `features`."""
    return not needed or bool(set(needed) & set(features))
