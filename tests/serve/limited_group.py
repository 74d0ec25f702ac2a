"""A control group with a quota of CPU time, for as long as it is needed: what a container with `--cpus 1` gives its process."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@contextmanager
def limited_group(quota_cores: float) -> Iterator[Path | None]:
    """An empty group whose processes get `quota_cores` together; removed afterwards, by when they must have ended.

    None where this process may make none: it takes the root user, and a file system of groups that can be written.
    """
    group = _made(quota_cores)
    try:
        yield group
    finally:
        if group:
            group.rmdir()


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in `group`, under its own process id."""
    return ["sh", "-c", f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && exec {shlex.join(command)}"]


def _made(quota_cores: float) -> Path | None:
    name = f"stillroom-{os.getpid()}-{quota_cores:g}"
    quota_us = int(quota_cores * PERIOD_US)
    # Version 1 has a folder of each controller; version 2 has one tree, whose root lists its controllers.
    if (CGROUP_ROOT / "cpu").is_dir():
        group, limits = CGROUP_ROOT / "cpu" / name, {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota_us}
    else:
        group, limits = CGROUP_ROOT / name, {"cpu.max": f"{quota_us} {PERIOD_US}"}
    try:
        group.mkdir()
        for file, limit in limits.items():
            (group / file).write_text(str(limit))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        return None
    return group
