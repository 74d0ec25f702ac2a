"""What a front process has of the whole server: its parts, the numbers in shared memory, and its line to the accepting process."""

import json
import mmap
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class SharedCounters:
    """Numbers of each front in memory that all processes of one server share."""

    def __init__(self, fronts: int) -> None:
        self.fronts = fronts
        numbers = memoryview(mmap.mmap(-1, 24 * fronts)).cast("Q")
        self._closed, self._warm, self._starts = (numbers[i * fronts : (i + 1) * fronts] for i in range(3))

    def closed(self, front: int) -> int:
        """Connections of `front` that have ended."""
        return self._closed[front]

    def count_closed(self, front: int) -> None:
        """Counts one more."""
        self._closed[front] += 1

    def warmed(self, front: int) -> None:
        """Notes that the models of `front` are warm."""
        self._warm[front] = 1

    @property
    def warm(self) -> bool:
        """Whether every front has been warm, be it once."""
        return all(self._warm)

    def starts(self, front: int) -> int:
        """Processes that have been this front."""
        return self._starts[front]

    def begin(self, front: int) -> None:
        """Counts another process that is this front from now on; none of its connections has ended."""
        self._closed[front] = 0
        self._starts[front] += 1


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

    def processes(self, whole: int) -> int:
        """This front's worker processes, of `whole`."""
        return whole // self.fronts + (self.number < whole % self.fronts)

    def send(self, what: dict[str, Any]) -> None:
        """Tells the accepting process."""
        with suppress(OSError):
            self.control.sendall(json.dumps(what).encode() + b"\n")
