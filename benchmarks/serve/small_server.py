"""A real server of small models (entities, classes, relations, numbers, answers, vectors) in its own process, to test bad requests."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVE = """
import json, sys
from serve.http.app import serve
from serve.settings import Limits, ServeSettings
limits = Limits(**json.loads(sys.argv[1]))
serve(sys.argv[2:], ServeSettings(port=0, threads=1, processes=1, access_log=False, limits=limits))
"""


def write_bundles(folder: Path) -> list[Path]:
    """Writes the six bundles into `folder`; `tests/lookup_bundles.py` has the answers of their models."""
    sys.path += [folder for folder in (str(ROOT), str(ROOT / "tests")) if folder not in sys.path]
    from lookup_bundles import (
        INTENTS,
        city_table,
        intent_table,
        number_table,
        write_answers_bundle,
        write_bundle,
        write_relations_bundle,
        write_vectors_bundle,
    )

    return [
        write_bundle(folder / "cities", city_table()),
        write_bundle(folder / "intents", intent_table(), task="text-classification", labels=INTENTS),
        write_relations_bundle(folder / "relations"),
        write_bundle(folder / "stars", number_table(), task="text-regression", labels=["score"]),
        write_vectors_bundle(folder / "vectors"),
        write_answers_bundle(folder / "places"),
    ]


@contextlib.contextmanager
def serving(bundles: list[Path], **limits: float) -> Iterator[str]:
    """Starts a server of `bundles`, with `limits` in place of the defaults; yields its URL once it is ready."""
    command = [sys.executable, "-c", SERVE, json.dumps(limits), *map(str, bundles)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            wait_until_ready(url)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


@contextlib.contextmanager
def small_server(**limits: float) -> Iterator[str]:
    """The URL of a server of the five small models."""
    with tempfile.TemporaryDirectory() as folder, serving(write_bundles(Path(folder)), **limits) as url:
        yield url


def wait_until_ready(url: str) -> None:
    """Waits until every model of the server is warm; TimeoutError after 60 s."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(urllib.error.URLError):
            if urllib.request.urlopen(f"{url}/readyz", timeout=60).status == 200:  # noqa: S310  # our own http URL
                return
        time.sleep(0.05)
    raise TimeoutError(f"the server at {url} is not ready after a minute")
