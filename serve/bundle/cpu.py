"""What this processor can do, as far as the answers of 8-bit files depend on it."""

import platform
from collections.abc import Collection
from pathlib import Path


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> frozenset[str]:
    """The processor's instruction sets as Linux names them (`avx512_vnni`, ...), and `arm64` on any 64-bit Arm.

    Where there is no `/proc/cpuinfo` nothing is known of an x86 processor, and the set is empty.
    """
    found: set[str] = set()
    if (machine or platform.machine()).lower() in ("arm64", "aarch64"):
        found.add("arm64")
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
