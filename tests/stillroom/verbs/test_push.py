"""`stillroom push`, and the verbs that take its URL: what is uploaded is what is opened, and nothing else is overwritten."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from bundle_store import BundleStore, bundle_store
from in_process import command
from lookup_bundles import INTENTS, city_table, intent_table, write_bundle, write_manifest
from patience import PATIENCE_S
from repository import ROOT
from small_task import write_rows

from serve import Pipeline, open_bundle
from serve.bundle import fetched, remote_files
from serve.errors import BadInput, BundleError
from stillroom import push
from stillroom.inputs.folders import local_bundle
from stillroom.verbs.profile.models import Ways, candidates_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(fetched.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0, 0.0))
    return tmp_path / "cache"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a model card."""
    folder = write_bundle(tmp_path / "cities", city_table())
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# cities\n")
    write_manifest(folder)
    return folder


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another bundle, without a card and with one file more."""
    folder = write_bundle(tmp_path / "other", city_table())
    (folder / "more.json").write_text("{}")
    write_manifest(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store" / "a folder"


def files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_bundle_is_pushed_once_and_then_opened_from_there(bundle: Path, place: Path) -> None:
    url = f"file://{place}"
    first = push(bundle, url)
    assert files(place) == files(bundle)
    assert (first["uploaded"], first["replaced"], first["files"]) == (True, False, 4)
    assert Pipeline(url)("fly to Rome") == Pipeline(bundle)("fly to Rome")
    written = (place / "manifest.json").stat().st_mtime_ns
    assert push(bundle, url) == first | {"uploaded": False}
    assert (place / "manifest.json").stat().st_mtime_ns == written
    assert push(url, f"{url} twice")["digest"] == first["digest"]


def test_another_bundle_is_replaced_only_where_that_is_asked_for(bundle: Path, other: Path, place: Path) -> None:
    url = f"file://{place}"
    push(other, url)
    with pytest.raises(BadInput, match=r"holds another bundle .*; give another URL, or --replace"):
        push(bundle, url)
    assert files(place) == files(other)
    assert push(bundle, url, replace=True)["replaced"]
    assert files(place) == files(bundle)
    (place / "tokenizer.json").write_text("{}")
    assert not push(bundle, url)["uploaded"]
    assert push(bundle, url, replace=True)["uploaded"]  # which repairs it
    assert files(place) == files(bundle)


def test_files_that_are_no_bundle_are_not_overwritten(bundle: Path, place: Path) -> None:
    place.mkdir(parents=True)
    (place / "README.md").write_text("mine")
    with pytest.raises(
        BadInput, match=r"holds other files \(README.md\) and no bundle; give another URL, or --replace"
    ):
        push(bundle, f"file://{place}")
    assert files(place) == {"README.md": b"mine"}
    (place / "README.md").unlink()
    (place / "manifest.json").write_text("{}")  # such as of a web page
    with pytest.raises(BundleError, match=r"manifest.json lacks"):
        push(bundle, f"file://{place}")
    assert push(bundle, f"file://{place}", replace=True)["uploaded"]
    assert files(place) == files(bundle)


def test_an_upload_that_fails_leaves_no_manifest_and_can_be_repeated(bundle: Path, other: Path, place: Path) -> None:
    push(other, f"file://{place}")
    (place / "tokenizer.json").unlink()
    (place / "tokenizer.json").mkdir()  # the file after the model cannot be written
    with pytest.raises(BadInput, match=r"tokenizer.json cannot be written \(IsADirectoryError"):
        push(bundle, f"file://{place}", replace=True)
    assert (place / "onnx" / "model.onnx").is_file()
    assert not (place / "manifest.json").exists()
    (place / "tokenizer.json").rmdir()
    (place / "more.json").unlink()
    assert push(bundle, f"file://{place}")["uploaded"]
    assert files(place) == files(bundle)


def test_a_damaged_bundle_is_not_pushed(bundle: Path, place: Path) -> None:
    (bundle / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer.json has 2 bytes instead of"):
        push(bundle, f"file://{place}")
    assert not place.exists()


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("https://u:s3cret@example.com/ner", {}, "https://example.com/ner can only be read; give s3://"),
        ("s3://models/ner", {"public": True}, "--public is for hf://"),
        ("ner.bundle", {}, "bundles are read from"),
        ("hf://ner", {}, "give hf://OWNER/NAME"),
    ],
)
def test_a_url_that_takes_no_bundle_is_refused(bundle: Path, url: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        push(bundle, url, **settings)
    assert "s3cret" not in refused.value.message


def test_the_command_says_what_it_pushed_and_when_there_was_nothing_to_do(
    bundle: Path, other: Path, place: Path
) -> None:
    url = f"file://{place}"
    code, out, said = command("push", bundle, url)
    assert code == 0, said
    assert out.startswith("cities (")
    assert out.endswith(f"is at {url}\n")
    assert command("push", bundle, url).out.endswith(f"is at {url} already; nothing was uploaded\n")
    code, out, said = command("push", other, url)
    assert (code, out) == (2, "")
    assert "holds another bundle" in said
    document = json.loads(command("push", other, url, "--replace", "--json").out)
    assert (document["replaced"], document["name"]) == (True, "other")


@pytest.fixture
def intents(tmp_path: Path) -> Iterator[BundleStore]:
    """A store with a classifier at /intents, and two texts for it in test.jsonl."""
    write_bundle(tmp_path / "store" / "intents", intent_table(), task="text-classification", labels=INTENTS)
    rows = [{"text": "fly to rome", "label": "book"}, {"text": "refund please", "label": "refund"}]
    write_rows(tmp_path / "test.jsonl", rows)
    with bundle_store(tmp_path / "store") as store:
        yield store


def test_every_verb_that_reads_a_bundle_takes_its_url(intents: BundleStore, tmp_path: Path) -> None:
    url, secret = intents.url("intents"), intents.url("intents").replace("//", "//me:s3cret@")
    code, said, complaint = command("inspect", secret, "--json")
    assert code == 0, complaint
    assert json.loads(said)["bundle"] == url
    assert "intents: text-classification" in command("inspect", secret).out
    code, said, complaint = command("evaluate", secret, "--data", tmp_path / "test.jsonl", "--json")
    assert code == 0, complaint
    assert (json.loads(said)["model"], json.loads(said)["value"]) == (url, 1.0)
    answers = tmp_path / "answers.jsonl"
    given = ("--input", tmp_path / "test.jsonl", "--output", answers, "--processes", "1")
    code, _, complaint = command("annotate", secret, *given)
    assert code == 0, complaint
    labels = [json.loads(line)["answer"]["labels"][0]["label"] for line in answers.read_text().splitlines()]
    assert labels == ["book", "refund"]
    found = candidates_of(local_bundle(intents.url("intents")), Ways(), tmp_path, ())
    assert [each.name for each in found] == ["intents ORT fp32"]
    assert intents.count("model.onnx") == 1
    intents.spoiled = {"manifest.json": [404]}
    code, said, complaint = command("inspect", secret)
    assert (code, said) == (2, "")
    assert f"there is no {url}/manifest.json; give the URL" in complaint


@pytest.mark.slow
def test_profile_times_a_bundle_of_a_url(intents: BundleStore) -> None:
    given = ("--seconds", "1", "--lengths", "8", "--batches", "1", "--json")
    code, said, complaint = command("profile", intents.url("intents"), *given)
    assert code == 0, complaint
    assert [each["name"] for each in json.loads(said)["candidates"]] == ["intents ORT fp32"]


class Hub(ThreadingHTTPServer):
    """As much of the Hub as an upload asks for: repositories with their files, and whether they are private."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubAnswers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []


class _HubAnswers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            name = path.removeprefix("api/models/").partition("/revision")[0]
            if name not in hub.repositories:
                return self.answer(404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
            siblings = [{"rfilename": each} for each in hub.repositories[name]]
            return self.answer(200, {"id": name, "sha": "0" * 40, "private": hub.private[name], "siblings": siblings})
        name, _, file = path.partition("/resolve/main/")
        if name not in hub.repositories:
            return self.answer(401, {})
        content = hub.repositories[name].get(file)
        return self.answer(404, {}) if content is None else self.answer(200, content)

    def do_POST(self) -> None:
        hub, path = self.server, self.path.partition("?")[0].strip("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_of_a_test":
            return self.answer(401, {"error": "no token"})
        if path == "api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in hub.repositories:
                return self.answer(409, {"error": "exists", "url": f"http://127.0.0.1:{hub.server_port}/{name}"})
            private = asked.get("private", asked.get("visibility") == "private")
            hub.repositories[name], hub.private[name] = {".gitattributes": b""}, bool(private)
            return self.answer(200, {"url": f"http://127.0.0.1:{hub.server_port}/{name}"})
        if path == "api/validate-yaml":
            return self.answer(200, {"warnings": [], "errors": []})
        name = "/".join(path.split("/")[2:4])
        if "/preupload/" in path:
            modes = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": modes})
        for line in body.decode().splitlines():
            each = json.loads(line)
            if each["key"] == "header":
                hub.commits.append(each["value"]["summary"])
            elif each["key"] == "file":
                hub.repositories[name][each["value"]["path"]] = base64.b64decode(each["value"]["content"])
            else:
                del hub.repositories[name][each["value"]["path"]]
        return self.answer(200, {"commitUrl": f"http://127.0.0.1/{name}", "commitOid": "0" * 40})

    def answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        changes = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_of_a_test", "HF_HOME": str(tmp_path)}
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


# The Hub's library reads its settings when it is imported, so that these calls are in a process of their own.
PUSHES = """
import json, sys
from serve.errors import BadInput
from stillroom import push
for bundle, url, settings in json.loads(sys.argv[1]):
    try:
        print(json.dumps(push(bundle, url, **settings)["uploaded"]))
    except BadInput as error:
        print(json.dumps(error.message))
"""


def pushes(*calls: tuple[Path, str, dict[str, bool]]) -> list[bool | str]:
    """For each call whether it uploaded something, or its message."""
    given = json.dumps([[str(bundle), url, settings] for bundle, url, settings in calls])
    done = subprocess.run(
        [sys.executable, "-c", PUSHES, given],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub_gets_a_private_repository_with_the_card_in_one_commit(bundle: Path, other: Path, hub: Hub) -> None:
    url = "hf://us/cities"
    uploaded, again, refused = pushes((bundle, url, {}), (bundle, url, {}), (other, url, {}))
    assert (uploaded, again) == (True, False)
    assert "holds another bundle" in str(refused)
    assert hub.private == {"us/cities": True}
    assert hub.repositories["us/cities"] == files(bundle) | {".gitattributes": b""}
    assert hub.commits == [f"cities, bundle {open_bundle(bundle).manifest.digest[:12]}"]
    assert Pipeline(url)("fly to Rome")["entities"][0]["text"] == "Rome"
    assert pushes((other, url, {"replace": True})) == [True]
    assert hub.repositories["us/cities"] == files(other) | {".gitattributes": b""}
    assert len(hub.commits) == 2


def test_a_public_repository_is_written_only_where_that_is_asked_for(bundle: Path, hub: Hub) -> None:
    hub.repositories |= {"us/public": {}, "us/own": {"model.safetensors": b"mine"}}
    hub.private |= {"us/public": False, "us/own": True}
    found = pushes(
        (bundle, "hf://us/open", {"public": True}),
        (bundle, "hf://us/public", {}),
        (bundle, "hf://us/own", {"public": True}),
        (bundle, "hf://us/own", {}),
    )
    uploaded, public, private, other = map(str, found)
    assert uploaded == "True"
    assert public.startswith("hf://us/public is public")
    assert private.startswith("hf://us/own is private")
    assert other.startswith("hf://us/own holds other files (model.safetensors)")
    assert hub.private["us/open"] is False
    assert hub.repositories["us/public"] == {}
    assert hub.repositories["us/own"] == {"model.safetensors": b"mine"}


def test_the_hub_without_a_token_is_named(bundle: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    (said,) = pushes((bundle, "hf://us/cities", {}))
    assert "hf://us/cities was not written" in str(said)
    assert "set HF_TOKEN, or run `hf auth login`" in str(said)
    assert not hub.repositories
