"""Names that are no folders here are asked of the Hub: once, with a line said of it, and never for what looks like a path."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import stillroom
from compress.data.hub import may_be_on_hub
from compress.models.pretrained import open_model
from serve.errors import BadInput
from stillroom.verbs.compare import compare

LIBRARYS_OWN = "/api/agent-harnesses"  # which huggingface_hub reads now and then, whatever is asked for
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """As much of the Hub as one download asks for, of the repositories in `folders`; 503 to all if `broken`, and of some/broken."""

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
        broken = self.server.broken or "some/broken" in path
        if broken or folder is None:
            self.answer(503 if broken else 404, b"{}", {} if broken else {"X-Error-Code": "RepoNotFound"})
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


def environment(home: Path, hub: Hub) -> dict[str, str]:
    """That of a process that asks `hub`, with a cache of its own."""
    own = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "cache"), "PYTHONPATH": str(ROOT)}
    return os.environ | own


def command(home: Path, hub: Hub, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a folder of its own."""
    (home / "here").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "stillroom", *map(str, arguments)],
        cwd=home / "here", env=environment(home, hub), capture_output=True, text=True, check=False,
    )  # fmt: skip


# A run of names that are no folders.
RUN = (
    "run",
    "--teacher",
    "some/teacher",
    "--task",
    "token-classification",
    "--data",
    "my-data",
    "--student",
    "3x384",
    "--out",
    "x",
)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once_for_each_name(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    done = command(tmp_path, hub, *RUN)
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
def test_offline_datasets_are_not_requested(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    done = command(tmp_path, hub, *RUN)
    assert done.returncode == 2
    assert {path for path in hub.asked if "my-data" in path} == set()
    assert "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" in done.stderr


@pytest.mark.slow
def test_downloads_are_found_again_when_the_hub_is_down(
    hub: Hub, tmp_path: Path, tiny_teacher: Path, task_data: Path
) -> None:
    hub.folders = {"some/teacher": tiny_teacher, "some/messages": task_data}
    task = ("--task", "token-classification", "--data", "some/messages", "--epochs", "1")
    given = ("finetune", "--model", "some/teacher", *task)
    first = command(tmp_path, hub, *given, "--out", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("on the Hub.") == 2, first.stderr
    hub.broken = True
    hub.asked.clear()
    second = command(tmp_path, hub, *given, "--out", tmp_path / "second")
    assert second.returncode == 0, second.stderr
    assert hub.asked == ["/api/models/some/teacher", "/api/datasets/some/messages"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


def test_paths_are_never_requested_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    paths = ["./mine", "../mine", "/mine", "mine/", "a/b/c", "mine.jsonl", "data/mine", "~/mine"]
    assert [name for name in paths if may_be_on_hub(name)] == []
    names = ["bert-base-uncased", "conll2003", "google/bert", "some/data.v2"]
    assert [name for name in names if may_be_on_hub(name)] == names


OPEN = """
import sys
from compress.data.splits import read_splits
from compress.models.pretrained import open_model
from compress.tasks import TOKEN_CLASSIFICATION
from serve.errors import BadInput
for kind, name, revision in (each.split() for each in sys.argv[1:]):
    revision = revision.strip("-")
    try:
        if kind == "data":
            splits = read_splits(name, TOKEN_CLASSIFICATION, revision=revision)
            print(len(splits.train), splits.held_out)
        else:
            print(open_model(name, revision=revision).revision)
    except BadInput as fault:
        print(fault.message.replace("\\n", " "))
"""


def test_revisions_are_read_with_the_token_of_the_environment(
    hub: Hub, tmp_path: Path, task_data: Path, tiny_teacher: Path
) -> None:
    hub.folders = {"some/messages": task_data, "some/teacher": tiny_teacher}
    hub.revisions.add("v1")
    cases = [
        "data some/messages v9",
        "data some/messages v1",
        "data some/messages v9",  # of which the cache has another by now
        "model some/teacher v1",
        "model some/teacher v9",
        "model nosuch -",
        "model some/broken -",
        "data some/broken -",
    ]
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *cases],
        cwd=tmp_path, env=environment(tmp_path, hub) | {"HF_TOKEN": "hf_mine"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    no_data, data, other_data, model, no_model, unknown, *silent = done.stdout.splitlines()
    assert (data, model) == ("240 False", COMMIT)
    for said in (no_data, other_data):
        assert "data set that can be read from the Hub (the Hub has no revision v9" in said
    assert "the local cache names its data by commits: give the commit of v9" in other_data
    assert "model that can be read from the Hub (the Hub has no revision v9" in no_model
    assert "(the Hub has none of that name that you may read)" in unknown
    assert hub.asked[0] == "/api/datasets/some/messages/revision/v9"
    assert {"/api/datasets/some/messages/revision/v1", "/api/models/some/teacher/revision/v1"} <= {*hub.asked}
    assert not {"/api/datasets/some/messages", "/api/models/some/teacher"} & {*hub.asked}  # of no revision
    assert not any(path.endswith("/revision/main") for path in hub.asked)
    assert hub.asked.count("/api/models/nosuch") == 1
    assert len(silent) == 2
    assert all("(the Hub does not answer, HfHubHTTPError: Server error '503" in said for said in silent)
    for kind in ("models", "datasets"):
        assert hub.asked.count(f"/api/{kind}/some/broken") == 1
    assert hub.tokens == {"Bearer hf_mine"}


def test_every_verb_refuses_a_revision_of_a_folder(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    teacher, data, out, task = str(tiny_teacher), str(task_data), tmp_path / "out", "text-classification"
    text = task_data / "train.jsonl"
    given: dict[str, Any] = {"methods": ("minilm",), "corpus": (str(text),), "out": str(out)}
    calls: list[Callable[[], object]] = [
        lambda: open_model(teacher, revision="v2"),
        lambda: stillroom.run(teacher=teacher, task=task, data=data, out=out, revision="v2"),
        lambda: stillroom.finetune(teacher, task, data, out, revision="v2"),
        lambda: stillroom.distill(teacher, [text], out, revision="v2"),
        lambda: stillroom.export(teacher, out, data, revision="v2"),
        lambda: stillroom.evaluate(teacher, data, revision="v2"),
        lambda: compare(teacher=teacher, task=task, data=data, revision="v2", **given),
    ]
    for call in calls:
        with pytest.raises(BadInput, match=r"--revision is v2, but .* is a local folder"):
            call()
    assert list(tmp_path.iterdir()) == []
    assert open_model(teacher).revision is None
