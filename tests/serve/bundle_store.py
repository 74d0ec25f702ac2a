"""A web server with bundles, some of whose answers a test spoils; and a process that opens a bundle of a URL."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from patience import PATIENCE_S
from processes import started
from repository import ROOT

CUT, DROPPED, HELD = "cut", "dropped", "held"
OPEN = "import sys; from serve import open_bundle; b = open_bundle(sys.argv[1]); print(b.path, b.manifest.digest, sep='\\n')"


class BundleStore(ThreadingHTTPServer):
    """The files below `root`. `spoiled` has for a file's name how its next answers go wrong, one after another.

    A number is a status, bytes are sent in place of the file's. CUT is half of it, DROPPED nothing, and HELD half until `held` is set.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.root = root
        self.spoiled: dict[str, list[int | str | bytes]] = {}
        self.asked: list[str] = []
        self.authorizations: list[str | None] = []
        self.paths: list[str] = []
        self.redirect = ""
        self.held, self.holding = threading.Event(), threading.Event()
        self.after = lambda name: None

    def url(self, name: str) -> str:
        """Of the folder `name`."""
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def count(self, name: str) -> int:
        """How often the file of that name was asked for."""
        return self.asked.count(name)


class _Answers(BaseHTTPRequestHandler):
    server: BundleStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path, store = unquote(self.path.partition("?")[0]), self.server
        file = store.root / path.lstrip("/")
        store.asked.append(file.name)
        store.paths.append(self.path)
        store.authorizations.append(self.headers["Authorization"])
        how = store.spoiled[file.name].pop(0) if store.spoiled.get(file.name) else 200
        if store.redirect:
            return self.answer(302, b"", {"Location": store.redirect + self.path})
        if isinstance(how, int) and how != 200:
            return self.answer(how, b"later", {"Retry-After": "0"})
        if not file.is_file():
            return self.answer(404, b"none", {})
        body = how if isinstance(how, bytes) else file.read_bytes()
        if how == DROPPED:
            self.close_connection = True
            return None
        if how in (CUT, HELD):
            self.answer(200, body[: len(body) // 2], {"Content-Length": str(len(body))})
            if how == HELD:
                self.wfile.flush()
                store.holding.set()
                assert store.held.wait(PATIENCE_S)
                self.wfile.write(body[len(body) // 2 :])
            self.close_connection = True
            return None
        self.answer(200, body, {})
        store.after(file.name)
        return None

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def bundle_store(root: Path) -> Iterator[BundleStore]:
    """The store, until the end of the block."""
    with BundleStore(root) as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.held.set()
            store.shutdown()


def opening(url: str, **how: object) -> "AbstractContextManager[subprocess.Popen[str]]":
    """A process that opens the bundle at `url`, and prints its folder and its digest."""
    return started(
        [sys.executable, "-c", OPEN, url],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **how,
    )  # fmt: skip
