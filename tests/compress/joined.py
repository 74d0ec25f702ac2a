"""Two processes that train together, joined by Gloo, as a launcher would start them on one machine or on two."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from patience import PATIENCE_S
from processes import started
from repository import ROOT

from compress import peers


def run_two(
    script: str,
    arguments: Callable[[int], Sequence[str]],
    *,
    nodes: bool = False,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    stays: int | None = None,
) -> list[tuple[int, str]]:
    """The exit code of each, and its lines on stderr. The script is one of this folder; `arguments` and `environment` are of a rank.

    The process `stays`, which stands still, is killed once those before it have ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, here.parent, here))),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1" if nodes else "2",
    }
    found = []
    with ExitStack() as stack:
        both = []
        for rank in range(2):
            own = common | {"RANK": str(rank), "LOCAL_RANK": "0" if nodes else str(rank)} | environment(rank)
            command = [sys.executable, str(here / script), *arguments(rank)]
            both.append(stack.enter_context(started(command, env=own, stderr=subprocess.PIPE, text=True)))
        for rank, process in enumerate(both):
            if rank == stays:
                process.kill()
            _, said = process.communicate()
            found.append((process.returncode, said))
    return found


def be_patient() -> None:
    """Called in such a process: it waits as long for the other one as a busy machine may need."""
    peers.CONNECT_WITHOUT_TORCHRUN_S = peers.MEET_WITHOUT_TORCHRUN_S = PATIENCE_S
    peers.SILENT_S = peers.SUSPECT_S = peers.OWN_FAULT_S = PATIENCE_S
