"""`serve` of a bundle at a URL: it answers, reads the URL again on SIGHUP, and goes on with what it has where it cannot."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bundle_store import CUT, HELD, BundleStore, bundle_store
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from processes import started
from repository import ROOT
from server_process import Server, serving, until

from serve.bundle.fetched import CACHE_VARIABLE
from serve.tasks import open_bundle


@pytest.fixture
def store(tmp_path: Path, entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BundleStore]:
    """A store with a bundle at /ner, and a cache of its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    shutil.copytree(entities_bundle, tmp_path / "store" / "ner")
    with bundle_store(tmp_path / "store") as running:
        yield running


def digest_of(server: Server) -> str:
    models = server.get("/v1/models").json()
    return str(models["models"][0]["digest"])


def test_a_server_serves_its_url_and_after_sighup_what_is_there_then(
    store: BundleStore, tmp_path: Path, intents_bundle: Path
) -> None:
    folder = store.root / "ner"
    before = open_bundle(folder).manifest.digest
    with serving(store.url("ner").replace("//", "//someone:s3cret@"), "--log-format", "json") as server:
        answer = server.post("/v1/entities", json={"text": "fly to Rome"}).json()
        assert [each["text"] for each in answer["results"][0]["entities"]] == ["Rome"]
        assert digest_of(server) == before

        write_manifest(folder, name="cities", max_length=31)
        after = open_bundle(folder).manifest.digest
        store.spoiled = {"tokenizer.json": [b"{}"]}
        server.process.send_signal(signal.SIGHUP)
        until(lambda: any("stays as it was; its bundle cannot be opened again" in line for line in server.log()))
        assert digest_of(server) == before
        server.process.send_signal(signal.SIGHUP)
        until(lambda: digest_of(server) == after)

        write_manifest(folder, name="towns")  # what is served keeps its name
        named = open_bundle(folder).manifest.digest
        server.process.send_signal(signal.SIGHUP)
        until(lambda: digest_of(server) == named)
        assert server.get("/v1/models/cities").status_code == 200

        shutil.rmtree(folder)
        shutil.copytree(intents_bundle, folder)  # of another task
        server.process.send_signal(signal.SIGHUP)
        until(
            lambda: any(
                "it is for text-classification now, not for token-classification" in line for line in server.log()
            )
        )
        assert digest_of(server) == named
        assert not any("s3cret" in line for line in server.log())
    cached = [each.name for each in (tmp_path / "cache" / "bundles").iterdir() if not each.name.startswith(".")]
    assert {before, after} < set(cached)


def test_a_reload_that_waits_for_the_store_delays_no_keys_and_no_stop(store: BundleStore, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:0123456789abcdef\n")
    with serving(store.url("ner"), "--keys", keys, "--log-format", "json") as server:

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return server.get("/v1/models", headers=headers).status_code

        write_manifest(store.root / "ner", name="cities", max_length=31)
        store.spoiled = {"manifest.json": [HELD]}
        server.process.send_signal(signal.SIGHUP)
        assert store.holding.wait(PATIENCE_S)
        assert status("0123456789abcdef") == 200
        keys.write_text("bob:fedcba9876543210\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status("fedcba9876543210") == 200)
        assert status("0123456789abcdef") == 401
        assert not any("is now" in line for line in server.log())  # the bundle is still on its way
        # The attempt under way is the last one for a server that is stopped.
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        assert store.count("manifest.json") == 2


def test_a_server_starts_again_without_a_network(
    store: BundleStore, entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(entities_bundle, store.root / "us" / "ner" / "resolve" / "main")
    monkeypatch.setenv("HF_ENDPOINT", store.url("").rstrip("/"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    open_bundle("hf://us/ner")  # which leaves it in the cache, as a server does
    store.asked.clear()
    with serving("hf://us/ner", environment={"HF_HUB_OFFLINE": "1"}) as server:
        assert digest_of(server) == open_bundle(entities_bundle).manifest.digest
        assert any("is taken from the cache" in line for line in server.log())
    assert not store.asked


def test_a_process_that_is_replaced_serves_what_the_others_do(store: BundleStore) -> None:
    with serving(store.url("ner"), "--processes", "2") as server:

        def processes() -> list[psutil.Process]:
            return psutil.Process(server.process.pid).children()

        def digests() -> set[str]:
            text = server.get("/metrics").text
            return set(re.findall(r'stillroom_model_info{process="\d",digest="(\w+)"', text))

        before = digests()
        assert len(before) == 1
        write_manifest(store.root / "ner", name="towns", max_length=31)
        killed = processes()[0]
        killed.kill()
        until(
            lambda: any("starting another" in line for line in server.log())
        )  # until then it may be given connections
        restarts = [f'stillroom_process_restarts_total{{process="{process}"}}' for process in (0, 1)]
        until(lambda: sum(map(server.metric, restarts)) == 1)
        until(lambda: len(processes()) == 2 and killed not in processes() and digests() == before)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(digests()) == 1 and digests() != before)
        killed = processes()[0]
        killed.kill()  # the one in its place has the name that is served, too
        until(lambda: len(processes()) == 2 and killed not in processes() and len(digests()) == 1)
        until(lambda: sum(map(server.metric, restarts)) == 2)
        assert server.get("/v1/models/cities").status_code == 200


@pytest.mark.parametrize("how", [HELD, CUT])
def test_a_server_that_is_stopped_as_it_fetches_leaves_no_bundle(store: BundleStore, tmp_path: Path, how: str) -> None:
    store.spoiled = {"model.onnx": [how] * 9}
    command = [sys.executable, "-m", "serve", store.url("ner"), "--port", "0"]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: store.count("model.onnx") > 0)
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said
    kept = [each.name for each in (tmp_path / "cache" / "bundles").iterdir() if not each.name.startswith(".")]
    assert not kept
