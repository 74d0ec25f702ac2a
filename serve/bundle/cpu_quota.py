"""How many threads of matrix kernels this process can really run at once, and why."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """What this process may compute on."""

    affinity: int  # CPUs that it may be scheduled on
    physical: int  # cores that these CPUs are: hyperthreads of one core count once
    quota_cores: float | None  # the least quota of its control group and of all that hold it; None: there is none

    @property
    def chosen(self) -> int:
        """Threads to run, at least 1.

        One a core: a matrix kernel fills its core's vector units by itself, so a second hyperthread adds nothing. And
        not more than whole cores in the quota: with a quota of 1.5 cores two threads would use it up before the period
        ends, and the kernel would then stop both, which a caller sees as a long tail of latency.
        """
        return self.physical if self.quota_cores is None else max(1, min(self.physical, int(self.quota_cores)))


def available_cores() -> int:
    """Threads to run matrix kernels on, in serving and in training alike: `Cores.chosen` of this process."""
    return read_cores().chosen


def read_cores(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    own_groups: Path = Path("/proc/self/cgroup"),
    cpu_root: Path = Path("/sys/devices/system/cpu"),
) -> Cores:
    """What the system says of this process: its CPU affinity, which of those CPUs share a core, and its quota.

    Both versions of control groups are read; a container that sees only its own group as the root is handled by reading
    the root too. Where the system tells nothing of shared cores, every CPU counts as a core.
    """
    # macOS and Windows have no affinity to ask for.
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {frozenset(_hyperthreads(cpu_root, cpu)) for cpu in cpus}
    return Cores(len(cpus), len(cores), min(_quotas_cores(cgroup_root, own_groups), default=None))


def one_cpu_a_core(cpu_root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """A CPU of each core that this process may use, the first of its hyperthreads, in order; empty where nothing is told."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cpus = os.sched_getaffinity(0)
    return sorted({min(_hyperthreads(cpu_root, cpu) & cpus) for cpu in cpus})


def why(cores: Cores) -> str:
    """The number of threads and what decided it, such as "1 thread: the control group's quota is 1.0 of 2 cores"."""
    physical = _counted(cores.physical, "core")
    if cores.quota_cores is not None and int(cores.quota_cores) < cores.physical:
        reason = f"the control group's quota is {round(cores.quota_cores, 3)} of {physical}"
    elif cores.physical < cores.affinity:
        reason = f"the {cores.affinity} CPUs of this process are hyperthreads of {physical}"
    else:
        reason = f"this process may use {physical}"
    return f"{_counted(cores.chosen, 'thread')}: {reason}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _hyperthreads(cpu_root: Path, cpu: int) -> set[int]:
    """The CPUs that are one core with `cpu`, itself among them."""
    topology = cpu_root / f"cpu{cpu}" / "topology"
    # The second is the first's name before Linux 5.3. Numbers and ranges, "0-1,8": List format of cpuset(7).
    listed = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {cpu}.union(*(range(int(first), int(last or first) + 1) for first, last in ranges))


def _quotas_cores(cgroup_root: Path, own_groups: Path) -> Iterator[float]:
    """The quotas, in cores, of the process's control group and of all groups that hold it."""
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
    """Quota over period, where there is a quota: `max` (version 2), `-1` (version 1) and an absent file mean none."""
    quota_us, period_us = quota_us.strip(), period_us.strip()
    if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:
        yield int(quota_us) / int(period_us)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        # Not on Linux, or a group that this process cannot see: no quota is known from it.
        return ""
