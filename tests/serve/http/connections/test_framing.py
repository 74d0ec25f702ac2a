"""Requests with Upgrade, CONNECT, Expect and chunked bodies get the same answers whether they arrive whole or byte by byte."""

import asyncio
import re
import socket
from random import Random

import pytest
from patience import PATIENCE_S
from server_process import Server, closed, read_answer, request
from starlette.types import Receive, Scope, Send

from serve.errors import StillroomError
from serve.http.connections.limits import Watch
from serve.http.connections.protocol import Connection
from serve.observe.metrics import Metrics
from serve.settings import ConnectionLimits

UPGRADES = ("h2c", "websocket", "h2c, websocket", "TLS/1.3", "HTTP/2.0")
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # a frame of HTTP/2
CONNECTIONS = ("Upgrade", "upgrade, HTTP2-Settings", "keep-alive, Upgrade", "UPGRADE,keep-alive", "keep-alive")
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
Answers = list[tuple[int, bytes]]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the method, path and body that it got."""
    said, more, status = b"%s %s " % (scope["method"].encode(), scope["path"].encode()), True, 200
    try:
        while more:
            message = await receive()
            said, more = said + message.get("body", b""), message.get("more_body", False)
    except StillroomError as error:
        said, status = b"", error.http_status
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": said})


def encode_body(chance: Random, body: bytes) -> tuple[list[str], bytes]:
    """The headers that announce `body`, and its bytes as they are sent."""
    if chance.random() < 0.5:
        return [f"Content-Length: {len(body)}"], body
    sent, rest = b"", body
    while rest:
        size = chance.randint(1, len(rest))
        sent += b"%x%s\r\n%s\r\n" % (size, chance.choice([b"", b"", b";a=b"]), rest[:size])
        rest = rest[size:]
    trailers = chance.choice([b"", b"", b"X-Later: a\r\n", b"Upgrade: h2c\r\n"])
    return ["Transfer-Encoding: chunked"], sent + b"0\r\n" + trailers + b"\r\n"


def make_request(chance: Random, number: int, *, last: bool) -> tuple[bytes, tuple[int, bytes]]:
    """A request with the answer to it; the connection is to be closed after the `last`."""
    method, version, headers = chance.choice(["GET", "POST", "POST", "PUT"]), "1.1", ["Host: localhost"]
    body, sent = chance.choice([b"", b"", SMUGGLED, SMUGGLED * 2, chance.randbytes(40), b"0\r\n\r\n" + SMUGGLED]), b""
    if body or chance.random() < 0.3:
        announced, sent = encode_body(chance, body)
        headers += announced
    if chance.random() < 0.7:
        headers += [f"Upgrade: {chance.choice(UPGRADES)}", *["Upgrade: x"] * (chance.random() < 0.2)]
    if chance.random() < 0.8:
        headers.append(f"Connection: {chance.choice(CONNECTIONS)}")
    if chance.random() < 0.3:
        headers.append("Expect: 100-continue")
    answer = (200, f"{method} /{number} ".encode() + body)
    if last:
        end = chance.randrange(8)
        if end == 0:
            method, answer = "CONNECT", (400, b"")
        elif end == 1:
            headers, answer = [*headers, "Content-Length: 5", "Transfer-Encoding: chunked"], (400, b"")
        elif end == 2:
            headers, answer = [*headers, "Not a header"], (400, b"")
        elif end == 3:
            headers, answer = headers[1:], (400, b"")  # without Host
        elif end == 4:
            headers, answer = [*headers, "Host: elsewhere"], (400, b"")
        elif end == 5:
            version = "1.0"
        else:
            headers.append("Connection: close")
    chance.shuffle(headers)
    line = f"{method} {'here:80' if method == 'CONNECT' else f'/{number}'} HTTP/{version}"
    return "\r\n".join([line, *headers, "", ""]).encode() + sent, answer


def make_case(seed: int) -> tuple[bytes, Answers]:
    """Requests sent ahead of their answers, and the answers. After the last, which closes the connection, comes another."""
    chance = Random(seed)
    requests = chance.randint(1, 4)
    made = [make_request(chance, number, last=number == requests - 1) for number in range(requests)]
    return b"".join(sent for sent, _ in made) + chance.choice([b"", SMUGGLED]), [answer for _, answer in made]


async def send_parts(parts: list[bytes]) -> bytes:
    """All that comes back for `parts`, each of which is received by itself."""
    theirs, ours = socket.socketpair()
    loop = asyncio.get_running_loop()
    with theirs, ours:
        theirs.setblocking(False)
        ours.setblocking(False)
        watch = Watch(ConnectionLimits(), Metrics())
        await loop.connect_accepted_socket(lambda: Connection(echo, watch), ours)
        for part in parts:
            try:
                await loop.sock_sendall(theirs, part)
            except (BrokenPipeError, ConnectionResetError):  # closed after its last answer
                break
            for _ in range(3):  # the server's turn to read it
                await asyncio.sleep(0)
        said = b""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while part := await loop.sock_recv(theirs, 65536):
                    said += part
            except ConnectionResetError:
                pass
        return re.sub(rb"(?i)(date|x-request-id): .*?\r\n", b"", said)


def parse_answers(said: bytes) -> Answers:
    """The final answers in `said`; of errors the status alone."""
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        status, length = int(head.split()[1]), re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        if status >= 200:
            found.append((status, rest[:size] if status == 200 else b""))
        said = rest[size:]
    return found


def find_differing(seeds: range) -> list[int]:
    """The seeds whose requests are not answered as they should be, or not in the same way whole, in two parts and byte by byte."""

    async def run() -> list[int]:
        found = []
        for seed in seeds:
            sent, right = make_case(seed)
            cut = Random(seed).randrange(len(sent))
            whole = await send_parts([sent])
            halves = await send_parts([sent[:cut], sent[cut:]])
            bytewise = await send_parts([sent[place : place + 1] for place in range(len(sent))])
            if parse_answers(whole) != right or not whole == halves == bytewise:
                found.append(seed)
        return found

    return asyncio.run(run())


def test_300_rows_of_requests_are_answered_the_same_whole_and_byte_by_byte() -> None:
    assert find_differing(range(300)) == []


@pytest.mark.slow
def test_10000_rows_of_requests_are_answered_the_same_whole_and_byte_by_byte() -> None:
    assert find_differing(range(300, 10_300)) == []


def test_a_body_after_an_upgrade_header_is_not_read_as_a_request(server: Server) -> None:
    inside = request(b'{"text": "oslo"}', "X-Request-Id: smuggled")
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    with server.connect() as connection:
        for body, status in ((b'{"text": "fly to rome"}', 200), (inside, 400)):
            connection.sendall(request(body))
            right = read_answer(connection)
            assert right[0] == status
            connection.sendall(request(body, *upgrade))
            assert read_answer(connection)[0::2] == right[0::2]
            head = request(body, *upgrade, "Expect: 100-continue").removesuffix(body)
            connection.sendall(head)
            assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)  # in a packet of its own
            answer = read_answer(connection)
            assert answer[0::2] == right[0::2]
            assert answer[1]["x-request-id"] != "smuggled"


@pytest.mark.parametrize("first_bytes", [0, 200_000, 1_200_000])
def test_a_refused_body_is_read_to_its_end_and_then_the_connection_that_is_to_close_closes(
    server: Server, first_bytes: int
) -> None:
    body = b"a" * 1_200_000
    with server.connect() as connection:
        connection.sendall(request(body[:first_bytes], "Connection: close", length=len(body)))
        assert read_answer(connection)[0] == 413
        connection.sendall(body[first_bytes:] + SMUGGLED)  # which a connection that was closed would not take
        assert connection.recv(1) == b""


def test_a_client_that_goes_before_it_is_asked_for_its_body_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def come_and_go() -> None:
        theirs, ours = socket.socketpair()
        with theirs, ours:
            connection = Connection(echo, Watch(ConnectionLimits(), Metrics()))
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
            connection.data_received(request(b"", "Expect: 100-continue", length=5))
            connection.connection_lost(None)  # before the app's turn
            await asyncio.sleep(0.01)
            transport.abort()

    asyncio.run(come_and_go())
    assert "could not be answered" not in caplog.text


@pytest.mark.parametrize("packets", [[HTTP2_PREFACE + EMPTY_SETTINGS], [bytes([each]) for each in HTTP2_PREFACE]])
def test_a_client_of_http2_is_told_in_its_protocol_to_use_http_1_1(server: Server, packets: list[bytes]) -> None:
    with server.connect() as connection:
        for packet in packets:
            connection.sendall(packet)
        answer = b""
        while part := connection.recv(1000):
            answer += part
    assert answer.startswith(EMPTY_SETTINGS)
    head, words = answer[9:26], answer[26:]
    assert (
        head == (8 + len(words)).to_bytes(3) + b"\7\0\0\0\0\0" + bytes(4) + b"\0\0\0\x0d"
    )  # GOAWAY, HTTP_1_1_REQUIRED
    assert b"HTTP/1.1" in words


def test_nothing_is_read_after_connect(server: Server) -> None:
    for target in (b"here:80", b"/v1/entities"):
        with server.connect() as connection:
            connection.sendall(
                b"CONNECT %s HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
                % target
            )
            status, headers, body = read_answer(connection)
            assert (status, headers["connection"]) == (400, "close")
            assert b"CONNECT" in body
            assert closed(connection)


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", "", 400),
        ("1.1", "Connection: Upgrade\r\nUpgrade: h2c\r\n", 400),
        ("1.1", "Host: localhost\r\nHost: localhost\r\n", 400),
        ("1.0", "Host: localhost\r\nhost: elsewhere\r\n", 400),
        ("1.1", "Host: local host\r\n", 400),
        ("1.1", "Host: me@localhost\r\n", 400),
        ("1.1", "Host: localhost:port\r\n", 400),
        ("1.1", "Host: localhost/\r\n", 400),
        ("1.1", "Host: [::1]:8000 \r\n", 200),
        ("1.1", "Host: 127.0.0.1:8000\r\n", 200),
        ("1.1", "Host:\r\n", 200),
        ("1.0", "", 200),
    ],
)
def test_a_request_has_one_valid_host_or_is_answered_400(server: Server, version: str, hosts: str, status: int) -> None:
    with server.connect() as connection:
        connection.sendall(f"GET /healthz HTTP/{version}\r\n{hosts}\r\n".encode())
        answered, headers, body = read_answer(connection)
        assert answered == status
        if status == 400:
            assert headers["connection"] == "close"
            assert b"Host" in body
