"""How many threads this process can really run at once."""

import os
from collections.abc import Iterator
from pathlib import Path


def available_cores(cgroup_root: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: its CPU affinity, or its control group's quota where that is less; at least 1.

    A quota of 1.5 cores gives 1: two threads would use it up before the period ends, and the kernel would then stop
    both, which a caller sees as a long tail of latency. Both versions of control groups are read; a container that sees
    only its own group as the root is handled by reading the root too.
    """
    # macOS and Windows have no affinity to ask for.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas_cores(cgroup_root, own_groups))]))


def _quotas_cores(cgroup_root: Path, own_groups: Path) -> Iterator[float]:
    """The quotas, in cores, of the process's control group and of all groups that hold it."""
    for line in _text(own_groups).splitlines():
        # hierarchy:controllers:/path, see cgroups(7); version 2 is hierarchy 0 with no controllers.
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            for group in _group_and_parents(cgroup_root, path):
                quota_us, _, period_us = _text(group / "cpu.max").partition(" ")
                yield from _cores(quota_us, period_us)
        elif "cpu" in controllers.split(","):
            for mount in (cgroup_root / "cpu", cgroup_root / controllers):
                for group in _group_and_parents(mount, path):
                    yield from _cores(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _group_and_parents(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.strip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _cores(quota_us: str, period_us: str) -> Iterator[float]:
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
