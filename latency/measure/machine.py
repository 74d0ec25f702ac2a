"""Facts about the machine of a timing; none identifies a person or a host."""

import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from serve.bundle.cpu import available_cores, cpu_features

# Instruction sets that decide which int8, bf16 and fp32 kernels run.
FLAGS_OF_INTEREST = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
LIBRARIES = ("torch", "transformers", "onnxruntime", "openvino", "tokenizers", "numpy")


class MachineFacts(TypedDict):
    """The result of `machine_facts`."""

    cpu: str
    cores: int  # that this process may use
    flags: list[str]  # those of `FLAGS_OF_INTEREST` that the CPU has
    memory_gib: float
    os: str
    python: str
    versions: dict[str, str]  # installed libraries only
    load_average: float  # of the last minute, before measuring
    measured_at: str  # UTC


def machine_facts() -> MachineFacts:
    """The facts to record with every timing: no host name, no user name, no path."""
    flags = cpu_features(environment={})  # empty: libraries use even the features that a setting hides from stillroom
    return MachineFacts(
        cpu=_cpu_model(),
        cores=available_cores(),
        flags=[flag for flag in FLAGS_OF_INTEREST if flag in flags],
        memory_gib=round(_memory_bytes() / 2**30, 1),
        os=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        python=platform.python_version(),
        versions=_installed(LIBRARIES),
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def machine_line(machine: Mapping[str, Any], runtimes: Iterable[str] | None = None) -> str:
    """A line such as `2026-11-24 · AMD EPYC, 2 cores · torch 2.13.0, onnxruntime 1.31.1`; unknown parts are left out.

    Only libraries of the used `runtimes` are named (`torch-compile` is of torch); None names all.
    """
    versions = {
        name: version
        for name, version in machine.get("versions", {}).items()
        if runtimes is None or any(runtime.startswith(name) for runtime in runtimes)
    }
    cpu = [str(machine["cpu"])] if machine.get("cpu") else []
    cores = [f"{machine['cores']} cores" if machine["cores"] != 1 else "1 core"] if machine.get("cores") else []
    parts = [
        str(machine.get("measured_at", ""))[:10],
        ", ".join(cpu + cores),
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return " · ".join(filter(None, parts))


def busy_core_seconds() -> float | None:
    """Busy seconds of this process's cores since boot, for all processes; None without /proc/stat.

    Includes time stolen by the hypervisor. Fields user, nice, system, irq, softirq and steal of proc_stat(5); the
    resolution is one clock tick (10 ms) per core.
    """
    stat = _read("/proc/stat")
    if not stat:
        return None
    cores = os.sched_getaffinity(0)
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_guests = map(int, fields)
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _cpuinfo(*keys: str) -> str:
    """The first value in /proc/cpuinfo for any of `keys`, or an empty string."""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _cpu_model() -> str:
    return _cpuinfo("model name", "Hardware", "Processor") or platform.processor() or platform.machine()


def _memory_bytes() -> int:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
