"""Several front processes behind one socket: what their clients and their operator notice."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from patience import PATIENCE_S
from processes import started
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
from server_process import Server, closed, read_answer, request, serving, until

from serve import Pipeline
from serve.errors import RateLimited
from serve.http.api_keys import MOST_KEYS, Key, KeyLimits, SharedCounts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork processes")

TWO = ("--fronts", "2", "--processes", "2")
TEXT = "order a table in Paris"
ASK = request(json.dumps({"text": TEXT}).encode())


@pytest.fixture(scope="module")
def server(entities_bundle: Path) -> Iterator[Server]:
    """A server of two fronts."""
    with serving(entities_bundle, *TWO) as running:
        yield running


def fronts(server: Server) -> list[psutil.Process]:
    """Its front processes."""
    return psutil.Process(server.process.pid).children()


def replacements(server: Server) -> list[str]:
    """The lines of its log about fronts that were replaced."""
    return [line for line in server.log() if "front process" in line and "starting another" in line]


def ask(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One request and its answer."""
    connection.sendall(ASK)
    return read_answer(connection)


def test_the_metrics_of_a_model_whose_name_has_separators_of_lines_can_be_read(
    entities_bundle: Path, copied: Callable[[Path], Path], manifest_writer: Callable[..., None]
) -> None:
    folder, name = copied(entities_bundle), "a\u2028b\u2029c\x85d\x0be\x1cf\rg\nh"
    manifest_writer(folder, name=name)
    with serving(folder, *TWO) as server:
        families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text))
    of_fronts = [
        sample.labels for family in families if family.name == "stillroom_model_info" for sample in family.samples
    ]
    assert [(labels["front"], labels["model"]) for labels in of_fronts] == [("0", name), ("1", name)]


def test_connections_are_spread_evenly_and_each_answers_as_the_pipeline(server: Server, entities_bundle: Path) -> None:
    expected = json.loads(json.dumps(Pipeline(entities_bundle)(TEXT)))
    before = [
        server.metric(f'stillroom_requests_total{{front="{n}",endpoint="/v1/entities",status="200"}}') for n in (0, 1)
    ]
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(6)]
        answers = [ask(each) for _ in range(2) for each in connections]
        assert all(json.loads(body)["results"][0] == expected for _, _, body in answers)
        ids = {headers["x-request-id"] for _, headers, _ in answers}
        assert len(ids) == 12
        after = [
            server.metric(f'stillroom_requests_total{{front="{n}",endpoint="/v1/entities",status="200"}}')
            for n in (0, 1)
        ]
    assert [now - then for now, then in zip(after, before, strict=True)] == [6, 6]
    # Connections that have ended do not count: the next ones are spread evenly too.
    with ExitStack() as stack:
        for _ in range(4):
            ask(stack.enter_context(server.connect()))
        until(
            lambda: (
                abs(
                    server.metric('stillroom_connections{front="0"}')
                    - server.metric('stillroom_connections{front="1"}')
                )
                <= 1
            )
        )


def test_every_series_says_which_front_it_is_of_and_each_family_is_described_once(server: Server) -> None:
    for _ in range(3):  # of each front, as each new connection goes to the one with fewer
        _check_series(httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text)


def _check_series(text: str) -> None:
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(families) == len(set(families))
    assert {family.name for family in text_string_to_metric_families(text)} >= {
        "stillroom_requests",
        "stillroom_front_restarts",
    }
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.search(r'front="[01]"', line) for line in series)
    for front in "01":
        assert any(line.startswith("process_resident_memory_bytes") and f'"{front}"' in line for line in series)


def test_a_front_that_dies_is_replaced_and_the_others_connections_go_on(entities_bundle: Path) -> None:
    with serving(entities_bundle, *TWO) as server, server.connect() as one, server.connect() as other:
        assert ask(one)[0] == ask(other)[0] == 200
        before = fronts(server)
        before[0].kill()
        assert {_goes_on(one), _goes_on(other)} == {True, False}
        until(lambda: len(fronts(server)) == 2 and before[0].pid not in {each.pid for each in fronts(server)})
        until(lambda: server.metric('stillroom_processes{front="0",model="cities"}') == 1)
        until(lambda: bool(replacements(server)))  # a thread writes the log
        assert len(replacements(server)) == 1
        with server.connect() as new:
            assert ask(new)[0] == 200


def _goes_on(connection: socket.socket) -> bool:
    try:
        return ask(connection)[0] == 200
    except (AssertionError, ConnectionError):  # it was closed
        return False


def test_what_was_accepted_is_answered_before_all_of_it_ends(entities_bundle: Path) -> None:
    with (
        serving(entities_bundle, *TWO, "--linger-s", "0.3") as server,
        server.connect() as one,
        server.connect() as two,
    ):
        below = psutil.Process(server.process.pid).children(recursive=True)
        for each in (one, two):
            each.sendall(ASK)
        server.process.terminate()
        for each in (one, two):
            status, headers, _ = read_answer(each)
            assert (status, headers.get("connection", "close")) == (200, "close")
            assert closed(each)
        assert server.process.wait(PATIENCE_S) == 0
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(entities_bundle: Path, first: signal.Signals) -> None:
    with serving(entities_bundle, *TWO, "--linger-s", "600") as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(first)
        until(lambda: httpx.get(f"{server.url}/readyz", timeout=PATIENCE_S).status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == -signal.SIGTERM
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]


def test_a_signal_to_every_process_is_as_one_to_the_server(entities_bundle: Path) -> None:
    with serving(entities_bundle, *TWO, "--linger-s", "1") as server, server.connect() as one, server.connect() as two:
        for each in (one, two):
            assert ask(each)[0] == 200
        for front in fronts(server):
            front.terminate()
        server.process.terminate()
        until(lambda: _stopping(server))
        for each in (one, two):
            assert ask(each)[1].get("connection") == "close"
        assert server.process.wait(PATIENCE_S) == 0


def _stopping(server: Server) -> bool:
    """Whether /readyz answers 503, by every front."""
    return all(httpx.get(f"{server.url}/readyz", timeout=PATIENCE_S).status_code == 503 for _ in range(4))


def test_a_front_that_was_ended_by_itself_is_replaced_too(entities_bundle: Path) -> None:
    with serving(entities_bundle, *TWO) as server:
        before = {each.pid for each in fronts(server)}
        fronts(server)[1].terminate()
        until(lambda: len(fronts(server)) == 2 and {each.pid for each in fronts(server)} != before)
        until(lambda: server.metric('stillroom_front_restarts_total{front="1"}') == 1)
        until(lambda: bool(replacements(server)))  # a thread writes the log
        (said,) = replacements(server)
        assert "ended with status 0; starting another" in said


def test_a_server_that_is_stopped_while_it_starts_ends_without_an_error(entities_bundle: Path) -> None:
    command = [sys.executable, "-m", "serve", str(entities_bundle), "--port", "0", "--linger-s", "0", *TWO]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        below = psutil.Process(process.pid)
        until(lambda: bool(below.children()))
        fronts_of_it = below.children()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert "Traceback" not in process.stderr.read()
        assert not psutil.wait_procs(fronts_of_it, timeout=PATIENCE_S)[1]


def test_no_front_is_left_when_the_accepting_process_is_killed(entities_bundle: Path) -> None:
    with serving(entities_bundle, *TWO) as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        assert len(below) == 4
        server.process.kill()
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]


def test_a_bundle_that_was_changed_is_served_by_all_fronts_or_by_none(
    entities_bundle: Path, copied: Callable[[Path], Path], manifest_writer: Callable[..., None]
) -> None:
    bundle = copied(entities_bundle)
    with serving(bundle, *TWO) as server:

        def digests() -> set[str]:
            text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
            return set(re.findall(r'stillroom_model_info{front="\d",digest="(\w+)"', text))

        before = digests()
        assert len(before) == 1
        manifest_writer(bundle, name="cities", max_length=31)
        fronts(server)[0].kill()
        until(lambda: any("send SIGHUP to serve the new bundle" in line for line in server.log()))
        with server.connect() as connection:
            assert ask(connection)[0] == 200  # by the front that is left
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(fronts(server)) == 2 and len(digests()) == 1 and digests() != before)
        until(
            lambda: (
                server.metric(
                    f'stillroom_model_info{{front="0",digest="{next(iter(digests()))}",model="cities",task="token-classification",variant="fp32"}}'
                )
                == 1
            )
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fronts", "3", "--processes", "2"), "--fronts is 3, and each model has 2 worker processes"),
        ((*TWO, "--variant", "fp16"), "fp16"),
        ((*TWO, "--tls-key", "nowhere.pem"), "--tls-key needs --tls-cert"),
    ],
)
def test_what_cannot_be_served_is_one_message(entities_bundle: Path, arguments: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "serve", str(entities_bundle), "--port", "0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_keys_rate_counts_at_all_fronts_together(entities_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:0123456789abcdef0123 rate=2/h\n")
    with serving(entities_bundle, *TWO, "--keys", tmp_path / "keys") as server, ExitStack() as stack:
        asked = request(json.dumps({"text": TEXT}).encode(), "X-Api-Key: 0123456789abcdef0123")
        statuses = []
        for connection in [stack.enter_context(server.connect()) for _ in range(4)]:
            connection.sendall(asked)
            statuses.append(read_answer(connection)[0])
    assert statuses == [200, 429, 429, 429]


def test_a_keys_requests_at_once_count_at_all_fronts_together_and_those_of_a_dead_front_no_longer() -> None:
    shared = SharedCounts(2)
    first, second = (shared.of_front(front) for front in (0, 1))
    one, two = (Key("alice", b"a" * 32, KeyLimits(None, 3), counts) for counts in (first, second))
    for each in (one, two, two):
        each.enter(0.0)
    for each in (one, two):
        with pytest.raises(RateLimited):
            each.enter(0.0)
    bob = Key("bob", b"b" * 32, KeyLimits(None, 1), first)
    bob.enter(0.0)
    another = shared.of_front(1)  # in the place of the second, which had two of alice's requests under way
    assert [Key("alice", b"a" * 32, KeyLimits(None, 3), each).running for each in (first, another)] == [1, 1]
    assert bob.running == 1


def test_keys_without_limits_are_not_counted() -> None:
    counts = SharedCounts(2).of_front(0)
    keys = [Key("alice", number.to_bytes(32), KeyLimits(), counts) for number in range(2 * MOST_KEYS)]
    for key in keys:
        key.enter(0.0)
        key.leave(1.0)
    assert Key("bob", b"b" * 32, KeyLimits(None, 1), counts).running == 0  # there is room for one with a limit
