"""A server that answers every POST with the same bytes, to measure the cost of a client.

    python benchmarks/serve/noop.py BODY_BYTES

It prints its port, and ends when its standard input ends.
"""

import asyncio
import sys
from typing import cast

import uvloop


class Noop(asyncio.Protocol):
    """One connection, one request at a time."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, blank, body = self.received.partition(b"\r\n\r\n")
        if blank and len(body) >= int(head.rpartition(b"Content-Length: ")[2].partition(b"\r\n")[0]):
            self.received = b""
            self.transport.write(self.answer)


async def main(body_bytes: int) -> None:
    Noop.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (body_bytes, b"x" * body_bytes)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Noop, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
