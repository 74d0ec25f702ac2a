"""Names that are no folders here are asked of the Hub: once, with a line said of it, and never for what looks like a path."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from repository import ROOT

from compress.data.hub import may_be_on_hub

LIBRARYS_OWN = "/api/agent-harnesses"  # which huggingface_hub reads now and then, whatever is asked for
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """As much of the Hub as one download asks for, of the repositories in `folders`; `broken` answers 503 to all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.folders: dict[str, Path] = {}
        self.broken = False
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.revisions = {"main", COMMIT}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.do_GET(wanted=[part.partition("=")[2].replace("%2F", "/") for part in asked.split("&")])

    def do_GET(self, wanted: list[str] | None = None) -> None:
        path = self.path.partition("?")[0]
        if path != LIBRARYS_OWN:
            self.server.asked.append(path)
            self.server.tokens.add(self.headers["Authorization"])
        folder = next((folder for name, folder in self.server.folders.items() if f"/{name}/" in f"{path}/"), None)
        if self.server.broken or folder is None:
            error = {} if self.server.broken else {"X-Error-Code": "RepoNotFound"}
            self.answer(503 if self.server.broken else 404, b"{}", error)
        elif "/revision/" in path and path.rpartition("/revision/")[2] not in self.server.revisions:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in path:
            file = folder / path.rpartition(f"/resolve/{COMMIT}/")[2].removeprefix("main/")
            if file.is_file():
                self.answer(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'})
            else:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif "/tree/" in path or "/paths-info/" in path:
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                for f in folder.iterdir()
                if wanted is None or f.name in wanted
            ]
            self.answer(200, json.dumps(files).encode(), {})
        else:
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            told = {"id": folder.name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def stillroom(home: Path, hub: Hub, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a folder of its own, with a cache of its own."""
    root = ROOT
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "cache"), "PYTHONPATH": str(root),
    }  # fmt: skip
    (home / "here").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "stillroom", *map(str, arguments)],
        cwd=home / "here", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_hub_that_does_not_answer_is_asked_once_for_each_name(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    done = stillroom(
        tmp_path, hub, "run", "--teacher", "some/teacher", "--task", "token-classification", "--data", "my-data",
        "--student", "3x384", "--out", tmp_path / "x.bundle",
    )  # fmt: skip
    assert done.returncode == 2
    assert hub.asked == ["/api/models/some/teacher", "/api/datasets/my-data"]
    lines = done.stderr.splitlines()
    assert lines[:2] == [
        "some/teacher is not a local folder; looking for a model of that name on the Hub.",
        "my-data is not a local folder; looking for a data set of that name on the Hub.",
    ]
    assert lines[2].startswith("stillroom: 2 faults were found")
    assert len(lines) == 5, done.stderr
    assert all("(the Hub does not answer, HfHubHTTPError: Server error '503" in line for line in lines[3:])


@pytest.mark.slow
def test_data_sets_are_not_asked_for_where_their_library_is_offline(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    done = stillroom(
        tmp_path, hub, "run", "--teacher", "some/teacher", "--task", "token-classification", "--data", "my-data",
        "--student", "3x384", "--out", tmp_path / "x.bundle",
    )  # fmt: skip
    assert done.returncode == 2
    assert {path for path in hub.asked if "my-data" in path} == set()
    assert "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" in done.stderr


def test_a_name_that_the_hub_does_not_know_is_said_to_be_none(hub: Hub, tmp_path: Path) -> None:
    done = stillroom(tmp_path, hub, "distill", "--teacher", "nosuch", "--corpus", __file__, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "model that can be read from the Hub (the Hub has none of that name that you may read)" in done.stderr
    assert hub.asked == ["/api/models/nosuch"]


@pytest.mark.slow
def test_a_model_and_data_of_the_hub_are_downloaded_and_found_again_without_it(
    hub: Hub, tmp_path: Path, tiny_teacher: Path, task_data: Path
) -> None:
    hub.folders = {"some/teacher": tiny_teacher, "some/messages": task_data}
    given = (
        "finetune",
        "--model",
        "some/teacher",
        "--task",
        "token-classification",
        "--data",
        "some/messages",
        "--epochs",
        "1",
    )
    first = stillroom(tmp_path, hub, *given, "--out", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("on the Hub.") == 2, first.stderr
    hub.broken = True
    hub.asked.clear()
    second = stillroom(tmp_path, hub, *given, "--out", tmp_path / "second")
    assert second.returncode == 0, second.stderr
    assert hub.asked == ["/api/models/some/teacher", "/api/datasets/some/messages"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


def test_what_looks_like_a_path_is_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    paths = ["./mine", "../mine", "/mine", "mine/", "a/b/c", "mine.jsonl", "data/mine", "~/mine"]
    assert [name for name in paths if may_be_on_hub(name)] == []
    names = ["bert-base-uncased", "conll2003", "google/bert", "some/data.v2"]
    assert [name for name in names if may_be_on_hub(name)] == names


READ = """
import sys
from compress.data.splits import read_splits
from compress.tasks import TOKEN_CLASSIFICATION
splits = read_splits("some/messages", TOKEN_CLASSIFICATION, revision=sys.argv[1])
print(len(splits.train), splits.held_out)
"""


def reading(home: Path, hub: Hub, revision: str) -> subprocess.CompletedProcess[str]:
    """A process that reads the splits of some/messages at `revision`, with a token for the Hub in its environment."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "cache"), "PYTHONPATH": str(ROOT),
        "HF_TOKEN": "hf_of_a_test",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", READ, revision],
        cwd=home, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_data_is_read_at_the_revision_given_with_the_token_of_the_environment(
    hub: Hub, tmp_path: Path, task_data: Path
) -> None:
    hub.folders = {"some/messages": task_data}
    hub.revisions.add("v1")
    done = reading(tmp_path, hub, "v1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "False"
    assert hub.asked[0] == "/api/datasets/some/messages/revision/v1"
    assert not any(path.endswith("/revision/main") for path in hub.asked)
    assert hub.tokens == {"Bearer hf_of_a_test"}


def test_a_revision_that_a_data_set_does_not_have_is_named(hub: Hub, tmp_path: Path, task_data: Path) -> None:
    hub.folders = {"some/messages": task_data}
    done = reading(tmp_path, hub, "v9")
    assert "data set that can be read from the Hub (the Hub has no revision v9 of that name)" in done.stderr
    assert hub.asked == ["/api/datasets/some/messages/revision/v9"]
