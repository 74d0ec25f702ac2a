import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S
from processes import started

from stillroom.child_process import ChildProcesses, ProcessDied

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
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


# Writes the beginning of an answer of 1,000 bytes, and dies.
HALF_AN_ANSWER = """
import os, sys
os.write(sys._getframe(1).f_locals["connection"].fileno(), (1000).to_bytes(4, "big") + b"x")
os._exit(1)
"""


def test_a_process_that_dies_fails_its_call_and_another_makes_the_next() -> None:
    with ChildProcesses(1) as processes:
        pid = processes.submit(os.getpid).result(PATIENCE_S)
        for program in ("import os; os._exit(1)", HALF_AN_ANSWER):
            dead, after = processes.submit(exec, program), processes.submit(os.getpid)
            with pytest.raises(ProcessDied):
                dead.result(PATIENCE_S)
            assert after.result(PATIENCE_S) not in {pid, os.getpid()}


def test_what_a_call_raises_and_what_cannot_be_sent_is_raised() -> None:
    with ChildProcesses(1) as processes:
        with pytest.raises(ZeroDivisionError) as raised:
            processes.submit(eval, "1 / 0").result(PATIENCE_S)
        assert "Traceback" in raised.value.__notes__[0]
        for unsendable in (processes.submit(eval, "lambda: 1"), processes.submit(lambda: 1)):
            with pytest.raises((AttributeError, pickle.PicklingError)):
                unsendable.result(PATIENCE_S)
        unreadable = "import urllib.error; raise urllib.error.HTTPError('http://a', 418, 'teapot', {}, None)"
        with pytest.raises(RuntimeError, match="HTTPError: HTTP Error 418: teapot"):  # it cannot be unpickled
            processes.submit(exec, unreadable).result(PATIENCE_S)
        with pytest.raises(EOFError, match="of the call itself"):
            processes.submit(exec, "raise EOFError('of the call itself')").result(PATIENCE_S)
        assert processes.submit(eval, "1 + 1").result(PATIENCE_S) == 2


def test_a_process_makes_as_many_calls_as_it_may_and_no_more_are_started_than_needed() -> None:
    with ChildProcesses(2, calls_a_process=1) as processes:
        assert len({processes.submit(os.getpid).result(PATIENCE_S) for _ in range(3)}) == 3
    with ChildProcesses(2) as processes:
        assert len({processes.submit(os.getpid).result(PATIENCE_S) for _ in range(3)}) == 1


def test_a_lock_that_ctrl_c_left_taken_does_not_keep_the_end_waiting() -> None:
    with ChildProcesses(1) as processes:
        pid = processes.submit(os.getpid).result(PATIENCE_S)
        future = processes.submit(time.sleep, 0)
        future._condition.acquire()  # as where Ctrl-C interrupts `result`
    assert not psutil.pid_exists(pid)


def test_a_call_after_the_end_is_cancelled_and_none_starts_a_process() -> None:
    with ChildProcesses(1) as processes:
        processes.submit(os.getpid).result(PATIENCE_S)
    assert processes.submit(os.getpid).cancelled()
    before = set(psutil.Process().children())
    for _ in range(3):
        processes = ChildProcesses(2)
        calls = [processes.submit(os.getpid) for _ in range(2)]
        processes.end()
        assert all(call.done() or call.exception(PATIENCE_S) for call in calls)
        assert {each for each in psutil.Process().children() if "--multiprocessing-fork" in each.cmdline()} <= before


# Eight pools at once, by a program that has no guard. Each of its runs leaves a line.
UNGUARDED = """
import os, sys
print("run", flush=True)
from stillroom.child_process import ChildProcesses

pools = [ChildProcesses(1) for _ in range(8)]
calls = [pool.submit(os.getpid) for pool in pools]
while not all(call.done() for call in calls):
    __file__, __spec__
assert len({call.result() for call in calls}) == 8
for pool in pools:
    pool.end()
"""


def test_a_program_is_not_run_again_by_processes_that_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for program in (["program.py"], ["-m", "program"]):
        done = subprocess.run(
            [sys.executable, *program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "run\n"), done.stderr
