"""Facts about the machine of a timing, none of which identifies a person or a host; memory and energy in use. An unknown figure is None."""

import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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
POWERCAP = Path("/sys/class/powercap")
CPUS = Path("/sys/devices/system/cpu")
LIBRARIES = ("torch", "transformers", "onnxruntime", "openvino", "tokenizers", "numpy")


def machine_facts() -> dict[str, Any]:
    """The facts to record with every timing: no host name, no user name, no path."""
    said = [(key.strip(), value.strip()) for key, _, value in _lines(Path("/proc/cpuinfo"))]
    model = next((value for key, value in said if key in ("model name", "Hardware", "Processor")), "")
    memory_bytes = 0
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    flags = cpu_features(environment={})  # empty: libraries use even the features that a setting hides from stillroom
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": available_cores(),
        "flags": [flag for flag in FLAGS_OF_INTEREST if flag in flags],
        "memory_gib": round(memory_bytes / 2**30, 1),
        "os": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


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
    stat = _text(Path("/proc/stat"))
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


class Resident(NamedTuple):
    """Memory of this process in RAM, shared libraries and mapped files included."""

    steady_bytes: int | None  # now; None on macOS, which reports only the peak
    peak_bytes: int  # highest since the process started


def resident_bytes(status: Path = Path("/proc/self/status")) -> Resident | None:
    """Current and peak memory of this process in RAM; None on a system without this figure (Windows)."""
    fields = _fields(status)
    if "VmRSS" in fields and "VmHWM" in fields:
        return Resident(_kib(fields["VmRSS"]), _kib(fields["VmHWM"]))
    if sys.platform == "darwin":
        import resource

        return Resident(None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS, KiB on Linux
    return None


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory available without swapping: the system's, or the control group's limit if that is smaller.

    The limit is read at the root, which in a container is its own group; the memory that it already uses is not subtracted.
    """
    fields = _fields(meminfo)
    if "MemAvailable" not in fields:
        return None
    limits = [_number(cgroup_root / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([_kib(fields["MemAvailable"]), *(limit for limit in limits if limit is not None)])


def last_level_cache_bytes(cpus: Path = CPUS) -> int | None:
    """Size of the largest cache of the first core; a virtual machine may report the whole cache of its host."""
    sizes_kib = [_text(file).strip().removesuffix("K") for file in cpus.glob("cpu0/cache/index*/size")]
    return max((int(size_kib) * 1024 for size_kib in sizes_kib if size_kib.isdigit()), default=None)


class EnergyCounter(NamedTuple):
    """The energy counter of one processor package, which wraps to 0 after `range_uj`."""

    energy_uj: int
    range_uj: int


def energy_counters(powercap: Path = POWERCAP) -> dict[str, EnergyCounter] | None:
    """The energy counter of each processor package, by domain such as `intel-rapl:0`, which AMD uses too.

    None without counters, as in most virtual machines, or if one cannot be read: since CVE-2020-8694 Linux lets only root
    read them. A package is its cores and caches, without memory and the rest of the machine. Work of all processes counts.
    """
    counters = {}
    for domain in sorted(powercap.glob("intel-rapl:*")):
        # `psys` is the whole board, packages included; `core` is part of a package, and `dram` is outside it.
        if not _text(domain / "name").startswith("package"):
            continue
        energy_uj, range_uj = _number(domain / "energy_uj"), _number(domain / "max_energy_range_uj")
        if energy_uj is None or range_uj is None:
            return None  # the other packages alone would be too little
        counters[domain.name] = EnergyCounter(energy_uj, range_uj)
    return counters or None


def joules_between(before: Mapping[str, EnergyCounter], after: Mapping[str, EnergyCounter]) -> float:
    """Energy in joules of all packages between two readings of `energy_counters`.

    A counter may wrap once between them; it takes minutes or longer to wrap, so read at least every minute.
    """
    microjoules = 0
    for domain, end in after.items():
        spent_uj = end.energy_uj - before[domain].energy_uj
        microjoules += spent_uj if spent_uj >= 0 else spent_uj + end.range_uj
    return microjoules / 1e6


def _fields(file: Path) -> dict[str, str]:
    """The `name: value` lines of a file of /proc."""
    return {key.strip(): value.strip() for key, _, value in _lines(file)}


def _lines(file: Path) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in _text(file).splitlines()]


def _kib(value: str) -> int:
    """Bytes of a value such as `1234 kB`; Linux's kB is a KiB."""
    return int(value.removesuffix("kB")) * 1024


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such file on this system, or not readable for this user
        return ""
