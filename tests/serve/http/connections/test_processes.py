"""Several processes behind one socket: what their clients and their operator notice."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from processes import started
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
from server_process import HTTP, Server, closed, read_answer, request, serving, until

from serve import Pipeline
from serve.errors import RateLimited
from serve.http.api_keys import MOST_KEYS, Key, KeyLimits, SharedCounts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork processes")

TWO = ("--processes", "2")
TEXT = "order a table in Paris"
KEY, SLOW_KEY = "a-key-without-a-rate-01", "a-key-with-a-rate-01234"
ODD_NAME = "a\u2028b\u2029c\x85d\x0be\x1cf\rg\nh"  # its separators of lines may be none in the metrics


def asking(key: str = KEY) -> bytes:
    return request(json.dumps({"text": TEXT}).encode(), f"X-Api-Key: {key}")


ASK = asking()


@pytest.fixture(scope="module")
def server(entities_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two processes, with keys, of a model with an odd name."""
    folder = tmp_path_factory.mktemp("processes")
    bundle = Path(shutil.copytree(entities_bundle, folder / "cities"))
    write_manifest(bundle, name=ODD_NAME)
    (folder / "keys").write_text(f"alice:{SLOW_KEY} rate=2/h\nbob:{KEY}\n")
    with serving(bundle, *TWO, "--keys", folder / "keys", "--open-metrics") as running:
        yield running


def processes(server: Server) -> list[psutil.Process]:
    """Its processes."""
    return psutil.Process(server.process.pid).children()


def replacements(server: Server) -> list[str]:
    """The lines of its log about processes that were replaced."""
    return [line for line in server.log() if "process" in line and "starting another" in line]


def ask(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One request and its answer."""
    connection.sendall(ASK)
    return read_answer(connection)


def test_connections_are_spread_evenly_and_each_answers_as_the_pipeline(server: Server, entities_bundle: Path) -> None:
    expected = json.loads(json.dumps(Pipeline(entities_bundle)(TEXT)))
    answered = 'stillroom_requests_total{{process="{}",endpoint="/v1/entities",status="200"}}'
    before = [server.metric(answered.format(process)) for process in (0, 1)]
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(6)]
        answers = [ask(each) for _ in range(2) for each in connections]
        assert all(json.loads(body)["results"][0] == expected for _, _, body in answers)
        ids = {headers["x-request-id"] for _, headers, _ in answers}
        assert len(ids) == 12
        after = [server.metric(answered.format(process)) for process in (0, 1)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [6, 6]
    # Connections that have ended do not count: the next ones are spread evenly too.
    with ExitStack() as stack:
        for _ in range(4):
            ask(stack.enter_context(server.connect()))

        def open_at(process: int) -> float:
            return server.metric(f'stillroom_connections{{process="{process}"}}')

        until(lambda: abs(open_at(0) - open_at(1)) <= 1)


def test_two_connections_that_stay_open_are_at_two_processes_after_each_of_300_reconnects(server: Server) -> None:
    for _ in range(300):
        with server.connect() as one, server.connect() as two:
            # An id begins with 16 digits of its process.
            assert len({ask(each)[1]["x-request-id"][:16] for each in (one, two)}) == 2


def test_every_series_says_which_process_it_is_of_and_each_family_is_described_once(server: Server) -> None:
    for _ in range(3):  # of each process, as each new connection goes to the one with fewer
        _check_series(server.get("/metrics").text)


def _check_series(text: str) -> None:
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() >= {"stillroom_requests", "stillroom_process_restarts"}
    of_processes = [sample.labels for sample in families["stillroom_model_info"].samples]
    assert [(labels["process"], labels["model"]) for labels in of_processes] == [("0", ODD_NAME), ("1", ODD_NAME)]
    series = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert all(re.search(r'process="[01]"', line) for line in series)
    for process in "01":
        assert any(line.startswith("process_resident_memory_bytes") and f'"{process}"' in line for line in series)


def test_a_process_that_dies_or_ends_is_replaced_and_the_others_connections_go_on(entities_bundle: Path) -> None:
    def replaced(process: psutil.Process, number: int, told: int) -> None:
        until(lambda: len(processes(server)) == 2 and process.pid not in {each.pid for each in processes(server)})
        until(lambda: server.metric(f'stillroom_processes{{process="{number}",model="cities"}}') == 1)
        until(lambda: server.metric(f'stillroom_process_restarts_total{{process="{number}"}}') == 1)
        until(lambda: len(replacements(server)) >= told)  # a thread writes the log
        assert len(replacements(server)) == told

    with serving(entities_bundle, *TWO) as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(6)]  # some to each process
        assert {ask(each)[0] for each in connections} == {200}
        killed, ended = processes(server)
        killed.kill()
        assert {_goes_on(each) for each in connections} == {True, False}
        replaced(killed, 0, told=1)
        ended.terminate()
        replaced(ended, 1, told=2)
        assert "ended with status 0; starting another" in replacements(server)[1]
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


@pytest.mark.parametrize("how", ["second-signal", "killed"])
def test_a_second_signal_and_a_kill_end_all_processes_at_once(entities_bundle: Path, how: str) -> None:
    with serving(entities_bundle, *TWO, "--linger-s", "600") as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        assert len(below) == 2
        if how == "killed":
            server.process.kill()
        else:
            server.process.send_signal(signal.SIGINT)
            until(lambda: server.get("/readyz").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == -(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        assert not psutil.wait_procs(below, timeout=PATIENCE_S)[1]


def test_a_signal_to_every_process_is_as_one_to_the_server(entities_bundle: Path) -> None:
    with serving(entities_bundle, *TWO, "--linger-s", "1") as server, server.connect() as one, server.connect() as two:
        for each in (one, two):
            assert ask(each)[0] == 200
        for process in processes(server):
            process.terminate()
        server.process.terminate()
        until(lambda: _stopping(server))
        for each in (one, two):
            assert ask(each)[1].get("connection") == "close"
        assert server.process.wait(PATIENCE_S) == 0


def _stopping(server: Server) -> bool:
    """Whether /readyz answers 503, by every process."""
    return all(server.get("/readyz").status_code == 503 for _ in range(4))


def test_a_server_that_is_stopped_while_it_starts_ends_without_an_error(entities_bundle: Path) -> None:
    command = [sys.executable, "-m", "serve", str(entities_bundle), "--port", "0", "--linger-s", "0", *TWO]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        below = psutil.Process(process.pid)
        until(lambda: bool(below.children()))
        processes_of_it = below.children()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert "Traceback" not in process.stderr.read()
        assert not psutil.wait_procs(processes_of_it, timeout=PATIENCE_S)[1]


IMPATIENT = """
import serve.__main__
from serve.http.connections import processes
processes.HUNG_S, processes.LOOK_S = 2.0, 0.5
raise SystemExit(serve.__main__.main())
"""


def test_a_process_that_hangs_is_killed_and_replaced(entities_bundle: Path, tmp_path: Path) -> None:
    arguments = [str(entities_bundle), "--port", "0", "--processes", "1", "--linger-s", "0"]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", IMPATIENT, *arguments]
        with started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            url = process.stdout.readline().strip()
            until(lambda: HTTP.get(f"{url}/readyz").status_code == 200)
            (hung,) = psutil.Process(process.pid).children()
            hung.suspend()
            until(lambda: "has not moved for 2 s, and is killed" in (tmp_path / "log").read_text())

            def answers() -> bool:
                try:
                    return HTTP.post(f"{url}/v1/entities", json={"text": "rome"}).status_code == 200
                except httpx.TransportError:  # the process that had it was just killed
                    return False

            until(answers)
            assert not hung.is_running()


def test_a_bundle_that_was_changed_is_served_by_all_processes_or_by_none(bundle_copy: Path) -> None:
    with serving(bundle_copy, *TWO) as server:

        def digests() -> set[str]:
            text = server.get("/metrics").text
            return set(re.findall(r'stillroom_model_info{process="\d",digest="(\w+)"', text))

        before = digests()
        assert len(before) == 1
        write_manifest(bundle_copy, name="cities", max_length=31)
        processes(server)[0].kill()
        until(lambda: any("send SIGHUP or restart the server" in line for line in server.log()))
        with server.connect() as connection:
            assert ask(connection)[0] == 200  # by the process that is left
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(processes(server)) == 2 and len(digests()) == 1 and digests() != before)
        (served,) = digests()
        labels = f'digest="{served}",model="cities",task="token-classification",variant="fp32"'
        until(lambda: server.metric(f'stillroom_model_info{{process="0",{labels}}}') == 1)


def test_what_the_processes_cannot_serve_is_one_message(entities_bundle: Path) -> None:
    command = [sys.executable, "-m", "serve", str(entities_bundle), "--port", "0", *TWO, "--variant", "fp16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "fp16" in error
    assert "Traceback" not in done.stderr


def test_a_keys_rate_counts_at_all_processes_together(server: Server) -> None:
    with ExitStack() as stack:
        statuses = []
        for connection in [stack.enter_context(server.connect()) for _ in range(4)]:
            connection.sendall(asking(SLOW_KEY))
            statuses.append(read_answer(connection)[0])
    assert statuses == [200, 429, 429, 429]


def test_a_keys_requests_at_once_count_at_all_processes_together_and_those_of_a_dead_process_no_longer() -> None:
    shared = SharedCounts(2)
    first, second = (shared.of_process(process) for process in (0, 1))
    one, two = (Key("alice", b"a" * 32, KeyLimits(None, 3), counts) for counts in (first, second))
    for each in (one, two, two):
        each.enter(0.0)
    for each in (one, two):
        with pytest.raises(RateLimited):
            each.enter(0.0)
    bob = Key("bob", b"b" * 32, KeyLimits(None, 1), first)
    bob.enter(0.0)
    another = shared.of_process(1)  # in the place of the second, which had two of alice's requests under way
    assert [Key("alice", b"a" * 32, KeyLimits(None, 3), each).running for each in (first, another)] == [1, 1]
    assert bob.running == 1


def test_keys_without_limits_are_not_counted() -> None:
    counts = SharedCounts(2).of_process(0)
    keys = [Key("alice", number.to_bytes(32), KeyLimits(), counts) for number in range(2 * MOST_KEYS)]
    for key in keys:
        key.enter(0.0)
        key.leave(1.0)
    assert Key("bob", b"b" * 32, KeyLimits(None, 1), counts).running == 0  # there is room for one with a limit
