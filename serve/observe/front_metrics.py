"""The metrics of all front processes in one answer: each front gives its own to the others, over a Unix socket."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from serve.observe.metrics import Metrics

# How long the metrics of another front are waited for.
ASK_S = 1.0
# The last line of a whole text.
END = "# EOF\n"


class FrontMetrics:
    """The metrics of front `number` of `fronts`, and those of the others, whose sockets' paths begin with `sockets`.

    Every series has the label `front`: a front that was replaced begins again at zero, which a sum over fronts would hide.
    """

    def __init__(self, metrics: Metrics, sockets: str, number: int, fronts: int) -> None:
        self._metrics = metrics
        self._sockets = sockets
        self._number = number
        self._fronts = fronts

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Within this context the other fronts can ask for the metrics of this one."""

        async def answer(_: asyncio.StreamReader, asking: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                if _same_user(asking.get_extra_info("socket").fileno()):
                    asking.write((self._own() + END).encode())
                    await asking.drain()
            asking.close()

        place = self._place(self._number)
        if not place.startswith("\0"):
            with suppress(FileNotFoundError):
                os.unlink(place)  # of a front that died
        async with await asyncio.start_unix_server(answer, place):
            yield

    async def text(self) -> bytes:
        """All metrics in Prometheus's text format; without those of a front that does not answer."""
        return together(await asyncio.gather(*(self._of(number) for number in range(self._fronts)))).encode()

    def _own(self) -> str:
        return labelled(self._metrics.text().decode(), self._number)

    async def _of(self, number: int) -> str:
        if number == self._number:
            return self._own()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                reader, writer = await _connected(self._place(number))
                try:
                    text = (await reader.read()).decode()
                finally:
                    writer.close()
            if text.endswith(END):
                return text.removesuffix(END)
        return ""

    def _place(self, number: int) -> str:
        return f"{self._sockets}metrics-{number}"


async def _connected(place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the Unix socket at `place`. uvloop cuts a path that begins with a zero byte, so the socket is connected before."""
    asking = socket.socket(socket.AF_UNIX)
    try:
        asking.setblocking(False)
        await asyncio.get_running_loop().sock_connect(asking, place)
        return await asyncio.open_unix_connection(sock=asking)
    except BaseException:
        asking.close()
        raise


def _same_user(descriptor: int) -> bool:
    """Whether the process at the other end of a socket is of this process's user: some names of sockets have no owner."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    with socket.socket(fileno=os.dup(descriptor)) as other:
        _, user, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def labelled(text: str, front: int) -> str:
    """`text`, in Prometheus's format, with the label `front` in every series."""
    return "".join(f"{_labelled_line(line, front)}\n" for line in _lines(text))


def _labelled_line(line: str, front: int) -> str:
    if line.startswith("#"):
        return line
    name, brace, labels = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{front="{front}",{labels}'
    name, _, value = line.partition(" ")
    return f'{name}{{front="{front}"}} {value}'


def together(texts: Iterable[str]) -> str:
    """Texts in Prometheus's format as one, each family once."""
    families: dict[str, list[str]] = {}
    for text in texts:
        kept: list[str] = []
        for line in _lines(text):
            if line.startswith("# HELP "):
                kept = families.setdefault(line, [])
            elif line not in kept[:1]:  # its `# TYPE` follows, and stands there once
                kept.append(line)
    return "".join(f"{line}\n" for head, lines in families.items() for line in (head, *lines))


def _lines(text: str) -> list[str]:
    """Lines of Prometheus's format. Only a newline ends one: a name in a label may hold what `splitlines` takes for an end."""
    return text.removesuffix("\n").split("\n") if text else []
