"""Clients that are slow, silent, greedy or wrong, on real connections to a real server."""

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import Server, closed, read_answer, request, serving, until

from serve.http.connections.server import prepare

ROME = b'{"text": "fly to rome"}'
ANSWERED = 'stillroom_requests_total{{endpoint="/v1/entities",status="{}"}}'
CUT = 'stillroom_connections_cut_total{{reason="{}"}}'


@pytest.fixture(scope="module")
def impatient(entities_bundle: Path) -> Iterator[Server]:
    """For tests in which its patience ends. 2 s are enough for what else they ask of it, also on a busy machine."""
    limits = ("--head-s", 2, "--body-s", 2, "--write-s", 2, "--keep-alive-s", 2, "--least-bytes-per-s", 1)
    with serving(entities_bundle, *limits) as server:
        yield server


@pytest.fixture(scope="module")
def counting(entities_bundle: Path) -> Iterator[Server]:
    """For tests of how many bytes come and go: it waits long for a body and shortly for the reader of an answer."""
    short_grace = {"serve.http.connections.protocol.GRACE_S": 1.0}
    with serving(
        entities_bundle, "--body-s", 600, "--write-s", 1.5, "--least-bytes-per-s", 1000, constants=short_grace
    ) as server:
        yield server


def many_texts() -> bytes:
    """A request with 2 MB of answer, more than the system keeps for a client."""
    return request(json.dumps({"text": ["rome " * 30] * 1024}).encode())


def connect_reading_little(server: Server, stack: contextlib.ExitStack, receive_bytes: int) -> socket.socket:
    """A connection of a client that keeps as little of an answer."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(PATIENCE_S)
    client.connect(server.address)
    return client


def still_answers(server: Server) -> bool:
    # Its queue may be full for a moment of what was asked before, and then it says just that; nothing else is let pass.
    statuses: list[int] = []

    def answered() -> bool:
        answer = server.post("/v1/entities", json={"text": "rome"})
        statuses.append(answer.status_code)
        return answer.status_code != 429

    until(answered)
    return statuses[-1] == 200


def test_a_head_that_does_not_end_is_answered_408(impatient: Server) -> None:
    begun = (
        b"P",
        b"POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
    )
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(impatient.connect()) for _ in begun]
        for connection, head in zip(connections, begun, strict=True):
            connection.sendall(head)
        for connection in connections:
            status, headers, body = read_answer(connection)
            assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
            assert headers["connection"] == "close"
            assert closed(connection)
            cut = impatient.logged(lambda entry, of=headers["x-request-id"]: entry["request_id"] == of, "cut")
            assert (cut["reason"], cut["client"]) == ("head", "127.0.0.1")


def test_bytes_now_and_then_do_not_keep_a_connection(impatient: Server) -> None:
    with impatient.connect() as in_a_head, impatient.connect() as between:
        for connection in (in_a_head, between):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(connection)[0] == 200
        in_a_head.sendall(b"GET / HTTP/1.1\r\nX: ")
        kept = {in_a_head: b"X", between: b"\r\n"}
        for _ in range(PATIENCE_S * 10):
            for connection, drop in list(kept.items()):
                try:
                    connection.sendall(drop)
                except (ConnectionResetError, BrokenPipeError):
                    del kept[connection]
            if not kept:
                break
            time.sleep(0.1)
        assert not kept


def test_a_connection_that_says_nothing_is_closed_at_first_and_after_an_answer(impatient: Server) -> None:
    with impatient.connect() as at_first, impatient.connect() as after_an_answer:
        after_an_answer.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(after_an_answer)[0] == 200
        assert at_first.recv(10) == after_an_answer.recv(10) == b""


def test_a_body_that_does_not_come_is_answered_408_as_any_other_request(impatient: Server) -> None:
    before = impatient.metric(ANSWERED.format(408))
    with impatient.connect() as connection:
        connection.sendall(request(ROME + b" " * 900, "X-Request-Id: slow-1", length=1000))
        status, headers, body = read_answer(connection)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert (headers["connection"], headers["x-request-id"]) == ("close", "slow-1")
        assert closed(connection)
    assert impatient.metric(ANSWERED.format(408)) == before + 1
    assert impatient.logged(lambda entry: entry["request_id"] == "slow-1")["status"] == 408


def test_a_body_that_comes_too_slowly_is_answered_408(counting: Server) -> None:
    with counting.connect() as slow, counting.connect() as fast:
        for connection in (slow, fast):
            connection.sendall(request(b"", length=500_000))
            connection.settimeout(0.1)
        answer = b""
        began_s, sent_bytes = time.monotonic(), 0
        while not answer and time.monotonic() < began_s + PATIENCE_S:
            # Always enough for 10 s more at the least rate, in case nobody comes to send for a while.
            due_bytes = int(1000 * (time.monotonic() - began_s + 10)) - sent_bytes
            fast.sendall(b" " * due_bytes)
            sent_bytes += due_bytes
            slow.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        with pytest.raises(TimeoutError):
            fast.recv(1)


def test_a_client_that_does_not_read_its_answer_is_cut_off(impatient: Server) -> None:
    before = impatient.metric(CUT.format("unread"))
    with contextlib.ExitStack() as stack:
        connection = connect_reading_little(impatient, stack, 4096)
        connection.sendall(many_texts())
        until(lambda: impatient.metric(CUT.format("unread")) == before + 1)
        assert closed(connection)
    assert still_answers(impatient)


def test_a_client_that_reads_slowly_gets_all_of_its_answer(counting: Server) -> None:
    with contextlib.ExitStack() as stack:
        connection = connect_reading_little(counting, stack, 65536)
        connection.sendall(many_texts())
        data = b""
        while not data.endswith(b"]}"):
            part = connection.recv(65536)
            assert part
            data += part
            time.sleep(0.06)  # in all longer than what it has for taking something
    assert data.count(b"rome") >= 1024


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431, "head_too_large", id="headers"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"y" * 33_000 + b"\r\n\r\n", 431, "head_too_large", id="a-header"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"y" * 400_000, 431, "head_too_large", id="a-header-without-end"),
        pytest.param(b"GET /" + b"y" * 400_000, 431, "head_too_large", id="a-path-without-end"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request", id="tls"),
        pytest.param(b"HELO here\r\n", 400, "bad_request", id="mail"),
        pytest.param(b"GET / HTTP/1.1\r\nA b: c\r\n\r\n", 400, "bad_request", id="a-blank-in-a-name"),
    ],
)
def test_heads_that_are_too_large_or_none_are_refused(server: Server, sent: bytes, status: int, code: str) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        answered, headers, body = read_answer(connection)
        assert (answered, json.loads(body)["error"]["code"]) == (status, code)
        assert headers["x-request-id"]
        assert closed(connection)
    assert still_answers(server)


CHUNKED = request(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


def test_trailers_are_bounded_and_not_believed_and_what_is_wrong_with_chunks_is_answered_400(server: Server) -> None:
    whole = CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(ROME), ROME)
    with server.connect() as connection:
        connection.sendall(whole + b"X-Request-Id: later\r\n\r\n")
        status, headers, _ = read_answer(connection)
        assert status == 200
        assert headers["x-request-id"] != "later"
        connection.sendall(whole + b"X-Y: z\r\n" * 200)
        assert read_answer(connection)[0] == 431
        assert closed(connection)
    for chunk, refusal in ((b"1;" + b"x" * 400_000, 431), (b"nonsense\r\n", 400)):
        with server.connect() as connection:
            connection.sendall(CHUNKED + chunk)
            assert read_answer(connection)[0] == refusal
            assert closed(connection)


def test_requests_sent_ahead_are_answered_in_order_and_bounded(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"".join(request(ROME, f"X-Request-Id: ahead-{number}") for number in range(20)))
        data = b""
        while data.count(b"HTTP/1.1 200") < 20:
            data += connection.recv(65536)
        assert [data.index(b"ahead-%d\r" % number) for number in range(20)] == sorted(
            data.index(b"ahead-%d\r" % number) for number in range(20)
        )
    with server.connect() as connection:
        connection.sendall(request(ROME) * 500)
        data = b""
        while part := connection.recv(65536):
            data += part
        assert 1 <= data.count(b"HTTP/1.1 200") <= 100  # and then it was closed
    assert still_answers(server)


def test_the_heads_of_answers_without_a_body_are_sent(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        answer = client.head("/healthz")
        assert (answer.status_code, answer.content) == (200, b"")
        assert client.get("/healthz").json() == {"status": "ok"}  # on the same connection


def test_a_client_that_has_closed_its_half_gets_the_answers_to_its_whole_requests(server: Server) -> None:
    cases = (
        (request(ROME), 1),
        (request(ROME) * 3, 3),
        (request(ROME) + request(ROME)[:-5], 1),
        (request(ROME) + b"CONNECT localhost:80 HTTP/1.1\r\n\r\n", 1),
        (request(ROME).replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
    )
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in cases]
        with server.held():
            for connection, (sent, _) in zip(connections, cases, strict=True):
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
            time.sleep(0.6)  # they are looked at once or twice
        for connection, (sent, answers) in zip(connections, cases, strict=True):
            data = b""
            while part := connection.recv(65536):
                data += part
            assert data.count(b"HTTP/1.1 ") == answers + (b"CONNECT" in sent)
            assert data.startswith(b"HTTP/1.1 200")
            assert data.count(b"HTTP/1.1 200") == data.count(b'"rome"') == answers
    assert still_answers(server)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\n", request(ROME)[:-5]], ids=["idle", "head", "body"])
def test_a_client_that_has_closed_its_half_without_a_whole_request_is_closed(server: Server, sent: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert closed(connection)


def test_the_time_of_a_head_begins_when_the_answer_before_it_is_given(impatient: Server) -> None:
    with impatient.connect() as connection:
        with impatient.held():
            connection.sendall(request(ROME) + b"GET /healthz HTTP/1.1\r\n")
            time.sleep(2.5)  # longer than a head may take
        assert read_answer(connection)[0] == 200
        time.sleep(0.6)  # it is looked at once or twice
        connection.sendall(b"Host: localhost\r\n\r\n")
        assert read_answer(connection)[0] == 200


def test_a_full_server_turns_new_clients_away_but_rather_closes_idle_ones(entities_bundle: Path) -> None:
    with serving(entities_bundle, "--connections", 4) as server:
        begun = [server.connect() for _ in range(4)]
        try:
            for connection in begun:
                connection.sendall(b"GET /healthz HTTP/1.1\r\n")
            at_once = [server.connect() for _ in range(3)]
            for refused in at_once:
                with refused:
                    status, headers, body = read_answer(refused)
                    assert (status, headers["retry-after"]) == (503, "1")
                    assert json.loads(body)["error"]["code"] == "unavailable"
                    assert closed(refused)
            for connection in begun:
                connection.sendall(b"Host: localhost\r\n\r\n")
                assert read_answer(connection)[0] == 200
            time.sleep(0.1)  # it refused somebody just now, and looks for an idle one again only after a while
            # All four are idle by now; the one that has been so for longest makes room.
            assert server.get("/healthz").status_code == 200
            assert begun[0].recv(10) == b""
            begun[3].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(begun[3])[0] == 200
        finally:
            for connection in begun:
                connection.close()
        assert server.metric(CUT.format("full")) >= 1
        assert server.metric(CUT.format("idle_for_room")) >= 1
        until(lambda: server.metric("stillroom_connections") == 1)


@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="this system does not change the limits of another process"
)
def test_a_server_without_files_for_a_connection_says_so_and_lets_it_in_when_it_can(server: Server) -> None:
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # As many as it has open, so that each new one is beyond its limit.
    fewest = min(set(range(4096)) - {int(file.name) for file in Path(f"/proc/{pid}/fd").iterdir()})
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (fewest, before[1]))
    try:
        with server.connect() as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: any("no connection can be accepted" in line for line in server.log()))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert read_answer(connection)[0] == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert still_answers(server)


def test_slow_bodies_of_many_clients_do_not_grow_the_server(entities_bundle: Path) -> None:
    """200 clients send 1 MB each, a part at a time. 8 MiB of bodies may be held, however many send."""
    # Nobody is too slow, however long all of it takes.
    limits = ["--bodies-bytes", 8 << 20, "--least-bytes-per-s", 1, "--body-s", 600]
    with serving(entities_bundle, *limits) as server:
        (process,) = server.processes()
        before_bytes = process.memory_info().rss
        body = b'{"text": "' + b"a" * 990_000 + b'"}'
        clients = [server.connect() for _ in range(200)]
        most_bytes = 0
        try:
            for connection in clients:
                connection.sendall(request(b"", length=len(body)))
                connection.setblocking(False)
            left = {connection: memoryview(body)[:-2] for connection in clients}  # nobody ends
            while left:
                for connection in list(left):
                    try:
                        sent = connection.send(left[connection][:20_000])
                        left[connection] = left[connection][sent:]
                    except BlockingIOError:
                        continue
                    if not left[connection]:
                        del left[connection]
                most_bytes = max(most_bytes, process.memory_info().rss)
            # 8 bodies of 990,000 bytes fit; the others are refused.
            until(lambda: server.metric(ANSWERED.format(429)) >= 190)
            assert 4 << 20 < server.metric("stillroom_held_body_bytes") <= 8 << 20
        finally:
            for connection in clients:
                connection.close()
        # Twice what may be held (a bytearray grows by parts), 64 KiB and a little more for each connection, and some for the heap.
        assert most_bytes - before_bytes < 2 * (8 << 20) + 200 * (80 << 10) + (16 << 20)
        until(lambda: server.metric("stillroom_held_body_bytes") == 0)
        assert still_answers(server)


def test_answers_that_many_clients_leave_unread_do_not_grow_the_server(entities_bundle: Path) -> None:
    # All of it is accepted, however slow the machine.
    accepting = ("--request-texts", 2000, "--queued-texts", 100_000, "--queue-s", 600)
    with serving(entities_bundle, "--unsent-bytes", 4 << 20, "--write-s", 600, *accepting) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                connect_reading_little(server, stack, 4096).sendall(many_texts() * 2)
            until(lambda: server.metric(CUT.format("unread")) >= 1)
            assert still_answers(server)


def test_a_client_that_keeps_up_gets_an_answer_larger_than_what_all_may_leave_unread_and_others_are_not_refused(
    entities_bundle: Path,
) -> None:
    with serving(entities_bundle, "--unsent-bytes", 1 << 20, "--queued-texts", 100_000, "--queue-s", 600) as server:
        with server.connect() as connection:
            connection.sendall(request(json.dumps({"text": ["rome " * 120] * 512}).encode()))
            answer = connection.recv(1 << 16)
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert length > 3 << 20
            while len(answer) < length and (part := connection.recv(1 << 18)):
                answer += part
                time.sleep(0.02)
                assert still_answers(server)
            assert len(answer) > length
        assert server.metric('stillroom_shed_requests_total{reason="unread"}') == 0
        assert server.metric(CUT.format("unread")) == 0


def test_a_connection_whose_other_end_is_gone_without_a_word_is_found_out() -> None:
    ours, theirs = socket.socket(), socket.socket()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        theirs.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            prepare(accepted)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
