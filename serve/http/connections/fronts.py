"""Several front processes behind one listening socket, so that no process reads for all.

This process accepts every connection and hands it to the front with the fewest open ones (`socket.send_fds`); it reads no request.
A front is a whole server with its share of the worker processes and of the limits. One that dies is replaced, a signal reaches
all of them, and the server ends when all have ended.

Front processes are forked: each has what this process has loaded, and this process runs neither an event loop nor a model.
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
from serve.observe.logs import stop_inherited

log = logging.getLogger("serve")

# A front that lived for this time is replaced at once, another one after a pause, doubled each time.
AT_ONCE_S = 1.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


class SharedCounters:
    """Numbers of each front in memory that all processes of one server share."""

    def __init__(self, fronts: int) -> None:
        numbers = memoryview(mmap.mmap(-1, 24 * fronts)).cast("Q")
        self.closed, self.warm, self.starts = (numbers[i * fronts : (i + 1) * fronts] for i in range(3))
        """Connections of each front that have ended, whether its models have been warm, and the processes that have been it."""


@dataclass(frozen=True)
class ProcessShare:
    """What one front process has of the server."""

    number: int
    fronts: int
    control: socket.socket
    """Brings connections, one with each byte, and takes what the front says, a JSON object a line."""
    board: SharedCounters
    sockets: str
    """How the paths of the sockets begin at which fronts ask each other."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of the models that the other fronts serve, by name; empty at first."""

    def part(self, whole: int) -> int:
        """This front's part of `whole`, rounded up."""
        return -(-whole // self.fronts)

    def send(self, what: dict[str, Any]) -> None:
        """Tells the accepting process."""
        with suppress(OSError):
            self.control.sendall(json.dumps(what).encode() + b"\n")


@dataclass
class _Front:
    """A front process, as the accepting process sees it."""

    number: int
    pid: int
    control: socket.socket
    began_s: float
    handed: int = 0
    open: bool = False
    warm: bool = False
    reloads: bool = False
    """Whether it is to read everything again once it can."""
    said: bytes = b""
    error: StillroomError | None = None


class HttpProcesses:
    """Accepts connections for `count` front processes until a signal stops all of them.

    `work` serves in the forked process. `opened` is called once all fronts take connections. After the first SIGTERM or SIGINT
    connections are still accepted for `linger_s`; then the fronts have `leave_s` to end. A second signal kills them.
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
        self._fronts: dict[int, _Front] = {}
        self._board = SharedCounters(count)
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._announced = False
        self._digests: dict[str, str] = {}
        self._due_s: dict[int, float] = dict.fromkeys(range(count), 0.0)
        """When a front that is missing is to be started."""
        self._pauses_s: dict[int, float] = {}
        self._turn = 0
        self._stop_s: float | None = None
        """When connections are no longer accepted; None until a signal."""
        self._signals: list[int] = []

    def run(self) -> None:
        """Serves until stopped. The error of a front that cannot start, unless all of them have once served."""
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
            self._step(None if next_s == math.inf else max(0.0, next_s - now_s))
            for number in self._taken_signals():
                if number == signal.SIGHUP:  # every front reads keys, certificate and bundles again
                    self._digests = {}
                    for front in self._fronts.values():
                        if front.open:
                            os.kill(front.pid, signal.SIGHUP)
                        else:  # it may have read them already, and does not hear the signal yet
                            front.reloads = True
                elif self._stop_s is None:
                    self._stop_s = time.monotonic() + self._linger_s
                    for front in self._fronts.values():
                        os.kill(front.pid, signal.SIGTERM)
                        os.kill(front.pid, signal.SIGCONT)  # a stopped one would not hear it
                else:
                    self._end_by(number)

    def _end(self) -> None:
        """Accepts what still waits, lets the fronts finish, and waits for them."""
        while self._accept():
            pass
        self._accepts(False)
        self._listener.close()
        for front in self._fronts.values():
            with suppress(OSError):
                front.control.shutdown(socket.SHUT_WR)
        late_s = time.monotonic() + self._leave_s
        while self._fronts and (left_s := late_s - time.monotonic()) > 0:
            self._step(left_s)
            for number in self._taken_signals():
                if number != signal.SIGHUP:
                    self._end_by(number)

    def _step(self, timeout_s: float | None) -> None:
        """Waits for connections, words and ends of fronts, and signals, and takes them."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                with suppress(BlockingIOError):
                    key.fileobj.recv(4096)  # type: ignore[union-attr]  # woken by a signal
            elif key.data == "listener":
                self._accept()
            else:
                self._read_message(key.data)
        for front in list(self._fronts.values()):
            pid, status = os.waitpid(front.pid, os.WNOHANG)
            if pid:
                self._on_exit(front, os.waitstatus_to_exitcode(status))
        if os.getpid() == 1:  # of a container: the worker processes of a front that died are left to this process
            fronts = {front.pid for front in self._fronts.values()}
            with suppress(ChildProcessError):
                while fronts and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                    if ended.si_pid in fronts:
                        break
                    os.waitpid(ended.si_pid, 0)

    def _start(self, number: int) -> None:
        """Forks a front. If that is not possible, the server goes on with the others, and tries again."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._not_started(number, error)
            return
        for each in (ours, theirs):
            each.setblocking(False)
        self._board.closed[number] = 0
        self._board.starts[number] += 1
        share = ProcessShare(number, self._count, theirs, self._board, self._sockets, dict(self._digests))
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
        self._fronts[number] = front = _Front(number, pid, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, front)

    def _not_started(self, number: int, error: OSError) -> None:
        if not self._announced:
            raise Unavailable(f"no front process can be started ({error}); give fewer --fronts") from error
        log.error("front process %d cannot be started (%s); trying again", number, error)
        self._try_later(number)

    def _try_later(self, number: int, *, at_once: bool = False) -> None:
        """Has the front started after a pause, twice the one before it."""
        before_s = self._pauses_s.get(number, 0.0)
        pause_s = self._pauses_s[number] = 0.0 if at_once else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * before_s))
        self._due_s[number] = time.monotonic() + pause_s

    def _run_child(self, share: ProcessShare, ours: socket.socket) -> NoReturn:
        """Serves as a front, in the forked process, and ends it."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
            signal.signal(
                signal.SIGHUP, signal.SIG_IGN
            )  # until there is a server; `_accept_until_stopped` keeps it in mind
            stop_inherited()
            with suppress(OSError):  # some systems do not let a forked process have the selector
                self._selector.close()
            self._listener.close()
            for control in (ours, *(other.control for other in self._fronts.values())):
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
        """Gives `client` to the front with the fewest open connections; of several, to the one whose turn it is.

        A front whose models are not warm yet gets none while another is.
        """
        able = [front for front in self._fronts.values() if front.open]
        able = [front for front in able if front.warm] or able
        self._turn += 1
        load = {id(front): front.handed - self._board.closed[front.number] for front in able}
        for front in sorted(able, key=lambda each: (load[id(each)], (each.number - self._turn) % self._count)):
            with suppress(OSError):  # it is dying, or does not take what it was given
                socket.send_fds(front.control, [b"c"], [client.fileno()])
                front.handed += 1
                return

    def _read_message(self, front: _Front) -> None:
        try:
            words = front.control.recv(65536)
        except (BlockingIOError, ConnectionError):
            return
        if not words:  # it ends; `_step` waits for it
            self._selector.unregister(front.control)
            return
        *lines, front.said = (front.said + words).split(b"\n")
        for said in map(json.loads, lines):
            if "error" in said:
                front.error = getattr(errors, said["error"])(said["message"])
            elif "warm" in said:
                front.warm = True
            else:
                self._digests = said["digests"]
                front.open = True
                if front.reloads:
                    front.reloads = False
                    os.kill(front.pid, signal.SIGHUP)
        opened = [each.open for each in self._fronts.values()]
        self._accepts(any(opened))
        if not self._announced and len(opened) == self._count and all(opened):
            self._announced = True
            self._opened()

    def _on_exit(self, front: _Front, status: int) -> None:
        """Takes note of a front that has ended, and has it replaced."""
        with suppress(KeyError, ValueError, OSError):
            self._read_message(front)  # its last
        del self._fronts[front.number]
        with suppress(KeyError, ValueError):
            self._selector.unregister(front.control)
        front.control.close()
        self._accepts(self._accepting and any(each.open for each in self._fronts.values()))
        if self._stop_s is not None:
            if status not in (0, -signal.SIGTERM):  # by the signal, if it had not begun to serve
                log.error("front process %d ended with status %s", front.number, status)
            return
        if not self._announced:
            raise front.error or Unavailable(f"front process {front.number} ended with status {status}; see its log")
        why = f": {front.error.message}" if front.error else ""
        log.error("front process %d ended with status %s%s; starting another", front.number, status, why)
        self._try_later(front.number, at_once=front.open and time.monotonic() - front.began_s > AT_ONCE_S)

    def _end_by(self, number: int) -> NoReturn:
        """Ends everything at once, by the second signal."""
        self._kill()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    def _kill(self) -> None:
        """Kills the fronts that are left. Their worker processes end with them."""
        for front in self._fronts.values():
            with suppress(ProcessLookupError):
                os.kill(front.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(front.pid, 0)
            front.control.close()
        self._fronts = {}

    def _taken_signals(self) -> list[int]:
        taken, self._signals = self._signals, []
        return taken

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        """Within this context signals are collected, and wake `_step`, as does the end of a front."""

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
