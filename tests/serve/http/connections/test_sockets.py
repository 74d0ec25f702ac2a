"""How many connections may be open, and the signal to reload."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from repository import ROOT

from serve.http.connections.sockets import OTHER_FILES, openable_connections, reloading_on_hangup

LIMITED = """
import logging, resource, sys
from serve.http.connections.sockets import openable_connections
logging.basicConfig(stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
print(openable_connections(int(sys.argv[2])), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_limit_of_open_files_is_raised_for_the_connections_as_far_as_it_may_be() -> None:
    def openable(hard: int, connections: int) -> list[str]:
        command = [sys.executable, "-c", LIMITED, str(hard), str(connections)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert openable(400, 100) == [f"100 {100 + OTHER_FILES}"]
    warning, found = openable(400, 1000)
    assert found == f"{400 - OTHER_FILES} 400"
    assert {"400", "1000", str(400 - OTHER_FILES)} <= set(re.findall(r"\d+", warning))


def test_without_such_a_limit_all_connections_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert openable_connections(1_000_000) == 1_000_000


def test_a_reload_that_fails_is_told_and_the_next_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[bool] = []

    async def reload() -> None:
        calls.append(True)
        if len(calls) == 1:
            raise ValueError("unforeseen")

    async def scenario() -> None:
        async with reloading_on_hangup(reload), asyncio.timeout(PATIENCE_S):
            for number in (1, 2):
                os.kill(os.getpid(), signal.SIGHUP)
                while len(calls) < number:
                    await asyncio.sleep(0.001)

    asyncio.run(scenario())
    assert "unforeseen" in caplog.text
