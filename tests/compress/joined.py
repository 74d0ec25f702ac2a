"""Two processes that train together, joined by Gloo, as a launcher would start them on one machine or on two."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from forking import FORKING
from patience import PATIENCE_S

from compress import peers

Main = Callable[[Sequence[str]], int]


def run_two(
    main: Main,
    arguments: Callable[[int], Sequence[str]],
    *,
    nodes: bool = False,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    stays: int | None = None,
) -> list[tuple[int, str]]:
    """The exit code of each, and its lines on stderr. Each calls `main`; `arguments` and `environment` are of a rank.

    The process `stays`, which stands still, is killed once those before it have ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1" if nodes else "2",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(2)]
        both = []
        for rank, log in enumerate(logs):
            own = common | {"RANK": str(rank), "LOCAL_RANK": "0" if nodes else str(rank)} | environment(rank)
            both.append(FORKING.Process(target=_run, args=(main, list(arguments(rank)), own, log)))
        try:
            for process in both:
                process.start()
            for rank, process in enumerate(both):
                if rank == stays:
                    process.kill()
                process.join()
        finally:
            for process in both:
                process.kill()
                process.join()
        return [(process.exitcode or 0, log.read_text()) for process, log in zip(both, logs, strict=True)]


def _run(main: Main, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    tempfile.tempdir = None  # is looked for again
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    # It waits as long for the other one as a busy machine may need; some jobs shorten what they let expire.
    peers.CONNECT_WITHOUT_TORCHRUN_S = peers.MEET_WITHOUT_TORCHRUN_S = PATIENCE_S
    peers.SILENT_S = peers.SUSPECT_S = peers.OWN_FAULT_S = PATIENCE_S
    sys.exit(main(arguments))
