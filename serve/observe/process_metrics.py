"""The metrics of all processes in one answer: each process gives its own to the others, over a Unix socket."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from serve.observe.metrics import Metrics

# How long the metrics of another process are waited for.
ASK_S = 1.0
# The last line of a whole text.
END = "# EOF\n"


class ProcessMetrics:
    """The metrics of process `number` of `processes`, and those of the others, whose sockets' paths begin with `sockets`.

    Every series has the label `process`: a process that was replaced begins again at zero, which a sum over processes would hide.
    """

    def __init__(self, metrics: Metrics, sockets: str, number: int, processes: int) -> None:
        self._metrics = metrics
        self._sockets = sockets
        self._number = number
        self._processes = processes

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Within this context the other processes can ask for the metrics of this one."""

        async def answer(_: asyncio.StreamReader, asking: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                user = os.getuid()
                if hasattr(socket, "SO_PEERCRED"):  # some names of sockets have no owner, so that any user may ask
                    with socket.socket(fileno=os.dup(asking.get_extra_info("socket").fileno())) as other:
                        _, user, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user == os.getuid():
                    asking.write((self._own() + END).encode())
                    await asking.drain()
            asking.close()

        place = self._place(self._number)
        if not place.startswith("\0"):
            with suppress(FileNotFoundError):
                os.unlink(place)  # of a process that died
        async with await asyncio.start_unix_server(answer, place):
            yield

    async def text(self) -> bytes:
        """All metrics in Prometheus's text format; without those of a process that does not answer."""
        return together(await asyncio.gather(*(self._of(number) for number in range(self._processes)))).encode()

    def _own(self) -> str:
        return labelled(self._metrics.text().decode(), self._number)

    async def _of(self, number: int) -> str:
        if number == self._number:
            return self._own()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                asking = socket.socket(socket.AF_UNIX)
                try:
                    # uvloop cuts a path that begins with a zero byte, so the socket is connected before.
                    asking.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(asking, self._place(number))
                    reader, writer = await asyncio.open_unix_connection(sock=asking)
                except BaseException:
                    asking.close()
                    raise
                try:
                    text = (await reader.read()).decode()
                finally:
                    writer.close()
            if text.endswith(END):
                return text.removesuffix(END)
        return ""

    def _place(self, number: int) -> str:
        return f"{self._sockets}metrics-{number}"


def labelled(text: str, process: int) -> str:
    """`text`, in Prometheus's format, with the label `process` in every series."""
    lines = []
    for line in _lines(text):
        name, brace, labels = line.partition("{")
        if line.startswith("#"):
            lines.append(line)
        elif brace and " " not in name:
            lines.append(f'{name}{{process="{process}",{labels}')
        else:
            name, _, value = line.partition(" ")
            lines.append(f'{name}{{process="{process}"}} {value}')
    return "".join(f"{line}\n" for line in lines)


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
