"""The processor: the instruction sets on which answers of 8-bit files and the precision of training depend, and how many threads of matrix
kernels this process can run at once, and why.
"""

import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from serve.errors import BadInput
from serve.wording import counted

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
    features = {"arm64"} if (machine or platform.machine()).lower() in ("arm64", "aarch64") else set()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for key, _, values in (line.partition(":") for line in lines):
        if key.strip().lower() in ("flags", "features"):
            features |= set(values.split())
            break
    return frozenset(features) - hidden


def hidden_features(environment: Mapping[str, str]) -> frozenset[str]:
    """The instruction sets that STILLROOM_HIDE_CPU_FEATURES names. BadInput for one that is not in `FEATURES`."""
    hidden = {name.strip() for name in environment.get(HIDDEN_VARIABLE, "").split(",")} - {""}
    if unknown := sorted(hidden - set(FEATURES)):
        raise BadInput(
            f"{HIDDEN_VARIABLE} names {', '.join(unknown)}, which is unknown; give some of {', '.join(FEATURES)}, separated by commas"
        )
    return frozenset(hidden)


def suits(needed: Collection[str], features: Collection[str]) -> bool:
    """Whether a processor with `features` has one of `needed`, or `needed` is empty: then a file gives its measured answers."""
    return not needed or bool(set(needed) & set(features))


class Cores(NamedTuple):
    """The CPUs and cores that this process may use."""

    affinity: int  # CPUs that it may be scheduled on
    physical: int  # cores of these CPUs: hyperthreads of one core count once
    quota_cores: float | None  # the smallest quota of its control group and the groups above it; None without one

    @property
    def chosen(self) -> int:
        """Threads to run, at least 1.

        One for each core: a matrix kernel fills its core's vector units, so a second hyperthread adds nothing. The quota is
        rounded down to whole cores: with a quota of 1.5 cores, two threads would use it up before the period ends, and
        Linux would then stop both. Callers would see a long tail of latency.
        """
        return self.physical if self.quota_cores is None else max(1, min(self.physical, int(self.quota_cores)))


def available_cores() -> int:
    """Threads for matrix kernels, in serving and in training: `Cores.chosen` of this process."""
    return read_cores().chosen


def read_cores(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    own_groups: Path = Path("/proc/self/cgroup"),
    cpu_root: Path = Path("/sys/devices/system/cpu"),
) -> Cores:
    """The CPU affinity of this process, how many cores those CPUs share, and its CPU quota.

    Both versions of control groups are read. The root is read too, since a container may see its own group as the root.
    If the system does not say which CPUs share a core, every CPU counts as a core.
    """
    # macOS and Windows have no affinity.
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {frozenset(_hyperthreads(cpu_root, cpu)) for cpu in cpus}
    return Cores(len(cpus), len(cores), min(_quotas_cores(cgroup_root, own_groups), default=None))


def one_cpu_a_core(cpu_root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One CPU of each core that this process may use, the first of its hyperthreads, sorted; empty on macOS and Windows."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = os.sched_getaffinity(0)
    return sorted({min(_hyperthreads(cpu_root, cpu) & cpus) for cpu in cpus})


def why(cores: Cores) -> str:
    """The number of threads and its reason, such as "1 thread: the control group's quota is 1.0 of 2 cores"."""
    physical = counted(cores.physical, "core")
    if cores.quota_cores is not None and int(cores.quota_cores) < cores.physical:
        reason = f"the control group's quota is {round(cores.quota_cores, 3)} of {physical}"
    elif cores.physical < cores.affinity:
        reason = f"the {cores.affinity} CPUs of this process are hyperthreads of {physical}"
    else:
        reason = f"this process may use {physical}"
    return f"{counted(cores.chosen, 'thread')}: {reason}"


def _hyperthreads(cpu_root: Path, cpu: int) -> set[int]:
    """The CPUs that share a core with `cpu`, itself included."""
    topology = cpu_root / f"cpu{cpu}" / "topology"
    # Before Linux 5.3 the file has the second name. It holds numbers and ranges, such as "0-1,8": List format of cpuset(7).
    listed = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {cpu}.union(*(range(int(first), int(last or first) + 1) for first, last in ranges))


def _quotas_cores(cgroup_root: Path, own_groups: Path) -> Iterator[float]:
    """The quotas, in cores, of the process's control group and of the groups above it."""
    for line in _text(own_groups).splitlines():
        # hierarchy:controllers:/path, see cgroups(7); version 2 is hierarchy 0 with no controllers.
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            for group in _group_and_parents(cgroup_root, path):
                quota_us, _, period_us = _text(group / "cpu.max").partition(" ")
                yield from _quota_cores(quota_us, period_us)
        elif "cpu" in controllers.split(","):
            for mount in (cgroup_root / "cpu", cgroup_root / controllers):
                for group in _group_and_parents(mount, path):
                    yield from _quota_cores(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _group_and_parents(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.strip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _quota_cores(quota_us: str, period_us: str) -> Iterator[float]:
    """Quota over period; nothing without a quota: `max` (version 2), `-1` (version 1) or no file."""
    quota_us, period_us = quota_us.strip(), period_us.strip()
    if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:
        yield int(quota_us) / int(period_us)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        # Not Linux, or a group that this process cannot see.
        return ""


def settle_threads(threads: int) -> None:
    """Bounds the tokenizer's threads, which are one for every core otherwise. Call it before tokenizers is loaded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
