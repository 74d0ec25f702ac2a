"""Meets the other processes of a training, and ends this one with a message when another has ended or no longer answers.

They talk through a store that all can reach, torch's `TCPStore` at MASTER_ADDR: that of `torchrun`, or one that rank 0 makes. Each
process writes a number there every second. The main process reads the numbers of all others, and the others read that of the main
process and whether it, or any other process, has ended.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from serve.errors import BadInput

# Longest waits for an answer of the store at MASTER_ADDR, and for the other processes to start. torchrun's launchers have met, and have the
# store, before they start any process, but one node may load torch from a cold disk; others may start nodes minutes apart.
CONNECT_S, MEET_S = 10.0, 60.0
CONNECT_WITHOUT_TORCHRUN_S, MEET_WITHOUT_TORCHRUN_S = 60.0, 180.0
BEAT_S = 1.0  # between two signs of life of a process
SILENT_S = 20.0  # without a sign of life, after which a process counts as lost
SUSPECT_S = 5.0  # the same once a connection to a process broke
HEARD_S = 3.0  # that the main process goes on for, so that the others read why it ends
OWN_FAULT_S = 5.0  # that a process has to meet itself the fault that another one ended with
LOST = 4  # exit code of a process that ends because another has

ROUND, FAILED, WELCOME, VERDICT = "stillroom/round", "failed", "welcome", "verdict"
GO_ON = "Give the same command on every node again: it goes on from the last checkpoint, also with fewer or more nodes."


@dataclass(frozen=True)
class Rank:
    """Where a process runs."""

    rank: int
    node: int
    host: str
    token: str  # unlike that of any other process

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}), process {self.rank}"


class Peers:
    """The processes that train together, watched by two threads of each of them until `stop`.

    One thread talks to the store and may be held up by a network that answers no more; the other one only looks at the clock.
    """

    def __init__(
        self, store: Any, beats: Any, own: Rank, places: Sequence[Rank], on_lost: Callable[[str], None]
    ) -> None:
        self.store, self.places, self.own = store, places, own
        self._beats, self._on_lost = beats, on_lost
        self._watched = [place for place in places if place != own and (own.rank == 0 or place.rank == 0)]
        self._seen = {place.rank: time.monotonic() for place in self._watched}
        self._answered = time.monotonic()  # when the store last did
        self._store_ended = self._suspect = False
        self._failed: dict[str, Any] = {}
        self._stopped = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, daemon=True, name="peers").start()

    def stop(self) -> None:
        """Watch the others no more."""
        self._stopped.set()

    def failed(self, message: str) -> None:
        """Tell the others that this process ends, and why; they end too. The first process that says so is believed."""
        if not self._stopped.is_set():
            self.stop()
            self._say_failed(self.store, self.own, f"ended: {message}")

    def connection_broke(self) -> None:
        """Wait for the reason of a broken connection; the process ends here if another one was lost."""
        self._suspect = True
        self._stopped.wait(SUSPECT_S + HEARD_S + OWN_FAULT_S)

    def agreed(self, facts: Mapping[str, str], refusal: Callable[[Rank, Mapping[str, str]], str]) -> None:
        """Check that all processes have the same `facts`.

        Args:
            facts: those of this process, by name.
            refusal: called in the main process for each other process with its facts; what to refuse them with, empty if nothing.

        Raises:
            BadInput: the main process refuses a process; in all of them, with the same message.
        """
        if self.own.rank == 0:
            theirs = [(place, json.loads(self._wait_for(f"facts/{place.rank}"))) for place in self.places[1:]]
            self.store.set(VERDICT, json.dumps([said for place, found in theirs if (said := refusal(place, found))]))
        else:
            self.store.set(f"facts/{self.own.rank}", json.dumps(dict(facts)))
        if refused := json.loads(self._wait_for(VERDICT)):
            raise BadInput("\n".join(refused))

    def _wait_for(self, key: str) -> bytes:
        """The value of `key` once it is there. A process that ends meanwhile ends this one."""
        while not self.store.check([key]):
            time.sleep(0.1)
        found: bytes = self.store.get(key)
        return found

    def _say_failed(self, store: Any, place: Rank, how: str) -> None:
        try:
            store.compare_set(FAILED, "", json.dumps({"rank": place.rank, "how": how}))
        except RuntimeError:  # the store has ended
            return
        if self.own.rank == 0:
            time.sleep(HEARD_S)

    def _beat(self) -> None:
        keys = [*(f"beat/{place.rank}" for place in self._watched), FAILED]
        before: list[bytes] = []
        number = 0
        while not self._stopped.wait(BEAT_S):
            number += 1
            try:
                self._beats.set(f"beat/{self.own.rank}", str(number))
                found = self._beats.multi_get(keys)
            except RuntimeError:
                self._store_ended = True
                return
            now = self._answered = time.monotonic()
            for place, value, last in zip(self._watched, found, before or found, strict=False):
                if value != last:
                    self._seen[place.rank] = now
            before = found
            if found[-1]:
                self._failed = json.loads(found[-1])

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(BEAT_S / 2):
            now = time.monotonic()
            if now - last > SUSPECT_S:  # this process itself stood still, and heard nobody meanwhile
                self._seen, self._answered = dict.fromkeys(self._seen, now), now
            last = now
            if self._failed and self._failed["rank"] != self.own.rank:
                if not self._stopped.wait(OWN_FAULT_S):
                    self._end(self.places[self._failed["rank"]], self._failed["how"])
            elif lost := self._lost(now):
                self._end(*lost)

    def _lost(self, now: float) -> tuple[Rank, str] | None:
        """A process that ended or answers no more, and how that shows."""
        longest = SUSPECT_S if self._suspect else SILENT_S
        if self._store_ended:
            return self.places[0], "lost its launcher" if self.own.rank == 0 else "ended"
        silent = [(now - self._answered, self.places[0])]
        silent += [(now - self._seen[place.rank], place) for place in self._watched]
        seconds, place = max(silent, key=lambda each: each[0])
        return (place, f"has not answered for {seconds:.0f} s") if seconds > longest else None

    def _end(self, place: Rank, how: str) -> None:
        """End this process, whatever its other threads do: they may wait for the process that was lost."""
        if self.own.rank == 0 and place != self.own and not self._failed:
            self._say_failed(self._beats, place, how)
        if not self._stopped.is_set():
            end = "" if how.endswith(".") else "."
            message = f"{str(place).capitalize()}, {how}{end} This training stopped on all nodes. {GO_ON}"
            # The thread that holds the console's lock may be the one that waits for the lost process.
            saying = threading.Thread(target=self._on_lost, args=(message,), daemon=True)
            saying.start()
            saying.join(HEARD_S)
            os._exit(LOST)


def meet(rank: int, count: int, node: int, on_lost: Callable[[str], None]) -> Peers:
    """Wait for the `count` processes of this training to start, and watch them from now on.

    Args:
        rank: of this process.
        count: of all processes.
        node: the number of this process's machine.
        on_lost: called with a message before this process ends because another has.

    Raises:
        BadInput: nothing answers at MASTER_ADDR, or a process does not start.
    """
    try:
        return _met(rank, count, node, on_lost)
    except RuntimeError:  # the store ended
        raise BadInput(f"The launcher of node 0 ended before all processes had started. {GO_ON}") from None


def _met(rank: int, count: int, node: int, on_lost: Callable[[str], None]) -> Peers:
    """See `meet`. RuntimeError if the store ends."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store, beats = _store(rank), _store(rank)
    own = Rank(rank, node, socket.gethostname(), uuid.uuid4().hex)
    longest_s = MEET_S if _has_torchrun() else MEET_WITHOUT_TORCHRUN_S
    until = time.monotonic() + longest_s
    if rank == 0:
        # torchrun's store outlives a restart of its processes. What an earlier start left there is under another prefix.
        prefix = f"stillroom/{own.token}"
        store.set(f"{prefix}/beat/0", "0")
        store.set(f"{prefix}/{FAILED}", "")
        store.set(ROUND, prefix)
        hello = [f"{prefix}/hello/{other}" for other in range(1, count)]
        while missing := [int(key.rpartition("/")[2]) for key in hello if not store.check([key])]:
            if time.monotonic() > until:
                raise BadInput(
                    f"{len(missing)} of {count} processes did not start within {longest_s:g} s, of rank "
                    f"{', '.join(map(str, missing))}. Start the same command on every node, with the same --nnodes and --nproc-per-node."
                )
            time.sleep(0.1)
        places = [own, *(Rank(**json.loads(store.get(key))) for key in hello)]
        store.set(f"{prefix}/{WELCOME}", json.dumps([asdict(place) for place in places]))
    else:
        prefix, places = _welcomed(store, own, longest_s)
    return Peers(PrefixStore(prefix, store), PrefixStore(prefix, beats), own, places, on_lost)


def _welcomed(store: Any, own: Rank, longest_s: float) -> tuple[str, list[Rank]]:
    """The prefix of this start's keys in the store, and the processes of it."""
    said, until = "", time.monotonic() + longest_s
    while time.monotonic() < until:
        prefix = store.get(ROUND).decode() if store.check([ROUND]) else ""
        if prefix != said:
            store.set(f"{prefix}/beat/{own.rank}", "0")
            store.set(f"{prefix}/hello/{own.rank}", json.dumps(asdict(own)))
            said = prefix
        if prefix and store.check([f"{prefix}/{WELCOME}"]):
            places = [Rank(**each) for each in json.loads(store.get(f"{prefix}/{WELCOME}"))]
            if own in places:
                return prefix, places
        time.sleep(0.1)
    raise BadInput(
        f"The main process did not start within {longest_s:g} s. Start the same command on every node, and see what node 0 says."
    )


def _store(rank: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise BadInput(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}, where processes that train together meet. Start them by torchrun, which "
            "sets both."
        )
    ours = rank == 0 and not _has_torchrun()
    if not ours:
        _wait_for_answer(host, int(port))
    wait = timedelta(seconds=CONNECT_WITHOUT_TORCHRUN_S)
    try:
        return TCPStore(host, int(port), None, ours, timeout=wait, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if not ours:
            raise
        raise BadInput(
            f"Port {port} (MASTER_PORT) cannot be opened here: {str(error).splitlines()[0]} Another program may use it; give another "
            "MASTER_PORT to all processes."
        ) from None


def _wait_for_answer(host: str, port: int) -> None:
    """Wait until something listens there; `TCPStore` itself waits longer than it is told to, and then writes its stack to stderr."""
    longest_s = CONNECT_S if _has_torchrun() else CONNECT_WITHOUT_TORCHRUN_S
    until = time.monotonic() + longest_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + BEAT_S > until:
                raise BadInput(
                    f"Nothing answers at {host}:{port} (MASTER_ADDR, MASTER_PORT) within {longest_s:g} s: {error}. Start the command on "
                    "node 0 too, or again if it ended; and check the address and the firewall."
                ) from None
            time.sleep(BEAT_S)


def _has_torchrun() -> bool:
    """Whether torchrun started this process, whose launcher then has the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
