"""The processes of one server. Each is a whole server: it reads, batches, runs the model and answers.

This process accepts every connection and hands it to the process with the fewest open ones (`socket.send_fds`); it reads no request.
One that dies or hangs is replaced, a signal reaches all of them, and the server ends when all have ended.

They are forked: each has what this process has loaded, and this process runs neither an event loop nor a model.
"""

import json
import logging
import math
import mmap
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from serve import errors
from serve.errors import StillroomError, Unavailable
from serve.http.connections.server import AT_ONCE, PAUSE_S
from serve.http.connections.sockets import NotedHangup
from serve.observe.logs import stop_inherited

log = logging.getLogger("serve")

# A process that lived for this time is replaced at once, another one after a pause, doubled each time.
AT_ONCE_S = 1.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
# How long a connection waits for a process that takes it, where each has more than it has taken.
FULL_S = 2.0
# A process whose event loop has not turned for this time is killed and replaced; how often that is looked at.
HUNG_S, LOOK_S = 120.0, 5.0
CRASHES = frozenset(
    getattr(signal, name) for name in ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE") if hasattr(signal, name)
)


class SharedCounters:
    """Numbers of each process in memory that all processes of one server share."""

    def __init__(self, processes: int) -> None:
        numbers = memoryview(mmap.mmap(-1, 40 * processes)).cast("Q")
        self.closed, self.warm, self.starts, self.lives_s, self.batches = (
            numbers[i * processes : (i + 1) * processes] for i in range(5)
        )
        """Connections of each process that have ended, whether its models have been warm, the processes that have been it, and the last
        whole second, on the clock of `time.monotonic`, in which its event loop turned; the batches that it computes."""


@dataclass(frozen=True)
class ProcessShare:
    """What one process has of the server."""

    number: int
    processes: int
    control: socket.socket
    """Brings connections, one with each byte, and takes what the process says, a JSON object a line."""
    board: SharedCounters
    sockets: str
    """How the paths of the sockets begin at which processes ask each other."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of the models that the other processes serve, by name; empty at first, and each "" while they are opened again."""
    openvino: bool | None = None
    """False once a process has crashed before its models were warm, as OpenVINO makes it on some processors."""

    def part(self, whole: int, least: int = 1) -> int:
        """This process's part of `whole`, rounded up; at least `least` of it."""
        return max(-(-whole // self.processes), min(least, whole))

    def send(self, what: dict[str, Any]) -> None:
        """Tells the accepting process."""
        with suppress(OSError):
            self.control.sendall(json.dumps(what).encode() + b"\n")


@dataclass
class _Process:
    """A process, as the accepting process sees it."""

    number: int
    pid: int
    control: socket.socket
    began_s: float
    handed: int = 0
    turn: int = 0
    """When it was last given a connection, counted in connections."""
    open: bool = False
    warm: bool = False
    said: bytes = b""
    error: StillroomError | None = None


class HttpProcesses:
    """Accepts connections for `count` processes until a signal stops all of them.

    `work` serves in the forked process. `opened` is called once all processes take connections. After the first SIGTERM or SIGINT
    connections are still accepted for `linger_s`; then the processes have `leave_s` to end. A second signal kills them.
    """

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        work: Callable[[ProcessShare], None],
        *,
        linger_s: float,
        leave_s: float,
        opened: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._count = count
        self._work = work
        self._linger_s = linger_s
        self._leave_s = leave_s
        self._opened = opened
        self._processes: dict[int, _Process] = {}
        self._board = SharedCounters(count)
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._announced = False
        self._digests: dict[str, str] = {}
        self._openvino: bool | None = None
        self._looked_s = time.monotonic()
        self._due_s: dict[int, float] = dict.fromkeys(range(count), 0.0)
        """When a process that is missing is to be started."""
        self._pauses_s: dict[int, float] = {}
        self._turn = 0
        self._stop_s: float | None = None
        """When connections are no longer accepted; None until a signal."""
        self._signals: list[int] = []

    def run(self) -> None:
        """Serves until stopped. The error of a process that cannot start, unless all of them have once served."""
        with ExitStack() as stack:
            if sys.platform == "linux":  # names beside the file system, which may be read-only
                self._sockets = f"\0stillroom-{secrets.token_hex(16)}-"
            else:
                self._sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="stillroom-")) + "/"
            stack.enter_context(self._selector)
            stack.enter_context(self._on_signals())
            try:
                self._accept_until_stopped()
                self._end()
            finally:
                self._kill()

    def _accept_until_stopped(self) -> None:
        while self._stop_s is None or time.monotonic() < self._stop_s:
            now_s = time.monotonic()
            if self._stop_s is None:
                for number in [each for each, due_s in self._due_s.items() if due_s <= now_s]:
                    del self._due_s[number]
                    self._start(number)
                next_s = min(self._due_s.values(), default=math.inf)
            else:
                next_s = self._stop_s
            self._step(max(0.0, min(next_s - now_s, LOOK_S)))
            self._kill_hung()
            for number in self._taken_signals():
                if number == signal.SIGHUP:  # every process reads keys, certificate and bundles again
                    self._digests = dict.fromkeys(self._digests, "")
                    for process in self._processes.values():
                        os.kill(process.pid, signal.SIGHUP)
                elif self._stop_s is None:
                    self._stop_s = time.monotonic() + self._linger_s
                    for process in self._processes.values():
                        os.kill(process.pid, signal.SIGTERM)
                        os.kill(process.pid, signal.SIGCONT)  # a stopped one would not hear it
                else:
                    self._end_by(number)

    def _end(self) -> None:
        """Accepts what still waits, lets the processes finish, and waits for them."""
        while self._accept():
            pass
        self._accepts(False)
        self._listener.close()
        for process in self._processes.values():
            with suppress(OSError):
                process.control.shutdown(socket.SHUT_WR)
        late_s = time.monotonic() + self._leave_s
        while self._processes and (left_s := late_s - time.monotonic()) > 0:
            self._step(left_s)
            for number in self._taken_signals():
                if number != signal.SIGHUP:
                    self._end_by(number)

    def _step(self, timeout_s: float | None) -> None:
        """Waits for connections, words and ends of processes, and signals, and takes them."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    key.fileobj.recv(4096)  # type: ignore[union-attr]  # woken by a signal
            elif key.data == "listener":
                self._accept()
            else:
                self._read_message(key.data)
        for process in list(self._processes.values()):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid:
                self._on_exit(process, os.waitstatus_to_exitcode(status))

    def _start(self, number: int) -> None:
        """Forks a process. If that is not possible, the server goes on with the others, and tries again."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._not_started(number, error)
            return
        for each in (ours, theirs):
            each.setblocking(False)
        self._board.closed[number] = self._board.batches[number] = 0
        self._board.lives_s[number] = int(time.monotonic())
        self._board.starts[number] += 1
        share = ProcessShare(
            number, self._count, theirs, self._board, self._sockets, dict(self._digests), self._openvino
        )
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            for each in (ours, theirs):
                each.close()
            self._not_started(number, error)
            return
        if not pid:
            self._run_child(share, ours)
        theirs.close()
        self._processes[number] = process = _Process(number, pid, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, process)

    def _not_started(self, number: int, error: OSError) -> None:
        if not self._announced:
            raise Unavailable(f"process {number} cannot be started ({error}); give fewer --processes") from error
        log.error("process %d cannot be started (%s); trying again", number, error)
        self._try_later(number)

    def _try_later(self, number: int, *, at_once: bool = False) -> None:
        """Has the process started after a pause, twice the one before it."""
        before_s = self._pauses_s.get(number, 0.0)
        pause_s = self._pauses_s[number] = 0.0 if at_once else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * before_s))
        self._due_s[number] = time.monotonic() + pause_s

    def _run_child(self, share: ProcessShare, ours: socket.socket) -> NoReturn:
        """Serves as a process, in the forked process, and ends it."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
            signal.signal(signal.SIGHUP, NotedHangup())  # a server that has read everything by then reads it again
            stop_inherited()
            with suppress(OSError):  # some systems do not let a forked process have the selector
                self._selector.close()
            self._listener.close()
            for control in (ours, *(other.control for other in self._processes.values())):
                control.close()  # so that it ends with the accepting process
            self._work(share)
            code = 0
        except StillroomError as error:
            share.send({"error": type(error).__name__, "message": error.message})
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _accepts(self, wanted: bool) -> None:
        """Starts or stops to take connections out of the listening socket's queue; at the end that is closed."""
        if self._listener.fileno() < 0:
            return
        if wanted != self._accepting:
            self._accepting = wanted
            if wanted:
                self._selector.register(self._listener, selectors.EVENT_READ, "listener")
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> bool:
        """Hands over the connections that wait, up to `AT_ONCE`; whether that many did."""
        for _ in range(AT_ONCE):
            if not self._accepting:
                return False
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                log.error("no connection can be accepted (%s); trying again in %g s", error, PAUSE_S)
                time.sleep(PAUSE_S)
                return False
            with client:
                self._hand_over(client)
        return True

    def _hand_over(self, client: socket.socket) -> None:
        """Gives `client` to the process with the fewest open connections; of several, to the one that was given none for longest.

        So two connections go to two processes, also where one of these has not noticed yet that its last one was closed.
        A process whose models are not warm yet gets none while another is.
        """
        able = [process for process in self._processes.values() if process.open]
        able = [process for process in able if process.warm] or able
        self._turn += 1
        late_s = time.monotonic() + FULL_S
        load = {id(process): process.handed - self._board.closed[process.number] for process in able}
        while able and time.monotonic() < late_s:
            for process in sorted(able, key=lambda each: (load[id(each)], each.turn, each.number)):
                try:
                    socket.send_fds(process.control, [b"c"], [client.fileno()])
                except BlockingIOError:  # it has not taken what it was given
                    continue
                except OSError:  # it is dying
                    able.remove(process)
                else:
                    process.handed += 1
                    process.turn = self._turn
                    return
            time.sleep(0.002)

    def _read_message(self, process: _Process) -> None:
        try:
            words = process.control.recv(65536)
        except (BlockingIOError, ConnectionError):
            return
        if not words:  # it ends; `_step` waits for it
            self._selector.unregister(process.control)
            return
        *lines, process.said = (process.said + words).split(b"\n")
        for said in map(json.loads, lines):
            if "error" in said:
                process.error = getattr(errors, said["error"])(said["message"])
            elif "warm" in said:
                process.warm = True
            elif "leaving" in said:
                process.open = False
            else:
                self._digests = said["digests"]
                self._board.lives_s[process.number] = int(time.monotonic())
                process.open = True
        opened = [each.open for each in self._processes.values()]
        self._accepts(any(opened))
        if not self._announced and len(opened) == self._count and all(opened):
            self._announced = True
            self._opened()

    def _on_exit(self, process: _Process, status: int) -> None:
        """Takes note of a process that has ended, and has it replaced."""
        with suppress(KeyError, ValueError, OSError):
            self._read_message(process)  # its last
        del self._processes[process.number]
        with suppress(KeyError, ValueError):
            self._selector.unregister(process.control)
        process.control.close()
        self._accepts(self._accepting and any(each.open for each in self._processes.values()))
        if self._stop_s is not None or {signal.SIGTERM, signal.SIGINT} & {*self._signals}:
            if status not in (0, -signal.SIGTERM):  # by the signal, if it had not begun to serve
                log.error("process %d ended with status %s", process.number, status)
            return
        if -status in CRASHES and not process.warm and self._openvino is None:
            self._openvino = False
            log.error(
                "process %d crashed before its models were warm; none runs in OpenVINO from now on", process.number
            )
            self._try_later(process.number, at_once=True)
            return
        if not self._announced:
            raise process.error or Unavailable(f"process {process.number} ended with status {status}; see its log")
        why = f": {process.error.message}" if process.error else ""
        log.error("process %d ended with status %s%s; starting another", process.number, status, why)
        self._try_later(process.number, at_once=process.open and time.monotonic() - process.began_s > AT_ONCE_S)

    def _kill_hung(self) -> None:
        now_s, late = time.monotonic(), time.monotonic() - self._looked_s > 2 * LOOK_S  # all of them were paused
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for process in self._processes.values():
            # One that opens bundles, which may be far away, has no event loop yet.
            if process.open and not late and now_s - self._board.lives_s[process.number] > HUNG_S:
                log.error("process %d has not moved for %g s, and is killed", process.number, HUNG_S)
                os.kill(process.pid, signal.SIGKILL)

    def _end_by(self, number: int) -> NoReturn:
        """Ends everything at once, by the second signal."""
        self._kill()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    def _kill(self) -> None:
        """Kills the processes that are left."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process.pid, 0)
            process.control.close()
        self._processes = {}

    def _taken_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        """Within this context signals are collected, and wake `_step`, as does the end of a process."""

        def collect(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGCHLD:
                self._signals.append(number)

        woken, waker = socket.socketpair()
        with woken, waker:
            for each in (woken, waker):
                each.setblocking(False)
            self._selector.register(woken, selectors.EVENT_READ, None)
            wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
            before = {number: signal.signal(number, collect) for number in kinds}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(wakeup)
