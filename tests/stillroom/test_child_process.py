import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S
from processes import started

from stillroom.child_process import ChildProcesses

# Two processes at work on something that takes longer than any test waits. They must not run this program again.
PARENT = """
import os, time
from stillroom.child_process import ChildProcesses

with ChildProcesses(2) as processes:
    assert processes.submit(os.getpid).result() != os.getpid()
    for _ in range(2):
        processes.submit(time.sleep, 3600)
    print("started", flush=True)
    time.sleep(3600)
"""


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; whoever its parent is now may not have asked for its status yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_children_end_with_their_parent_whatever_they_do(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with started(
        [sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "started\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.send_signal(number)  # to it alone
        deadline_s = time.monotonic() + PATIENCE_S
        while (left := [child for child in children if runs(child)]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for child in left:
            child.kill()
        assert not left


def test_children_never_see_ctrl_c_and_end_when_they_are_told() -> None:
    with ChildProcesses(1) as processes:
        pid = processes.submit(os.getpid).result(PATIENCE_S)
        os.kill(pid, signal.SIGINT)
        assert processes.submit(os.getpid).result(PATIENCE_S) == pid
        asleep = processes.submit(time.sleep, 3600)
        processes.end()
        assert not psutil.pid_exists(pid)
    assert asleep.done()
