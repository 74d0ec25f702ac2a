"""`serve` of a bundle at a URL: it answers, reads the URL again on SIGHUP, and goes on with what it has where it cannot."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from bundle_store import CUT, HELD, BundleStore, bundle_store
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
    models = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()
    return str(models["models"][0]["digest"])


def test_a_server_serves_what_is_at_its_url_and_after_sighup_what_is_there_then(
    store: BundleStore, tmp_path: Path, manifest_writer: Callable[..., None]
) -> None:
    folder = store.root / "ner"
    before = open_bundle(folder).manifest.digest
    with serving(store.url("ner").replace("//", "//someone:s3cret@"), "--log-format", "json") as server:
        answer = httpx.post(f"{server.url}/v1/entities", json={"text": "fly to Rome"}, timeout=PATIENCE_S).json()
        assert [each["text"] for each in answer["results"][0]["entities"]] == ["Rome"]
        assert digest_of(server) == before

        manifest_writer(folder, name="cities", max_length=31)
        after = open_bundle(folder).manifest.digest
        store.spoiled = {"tokenizer.json": [b"{}"]}
        server.process.send_signal(signal.SIGHUP)
        until(lambda: any("stays as it was; its bundle cannot be opened again" in line for line in server.log()))
        assert digest_of(server) == before
        server.process.send_signal(signal.SIGHUP)
        until(lambda: digest_of(server) == after)

        manifest_writer(folder, name="towns")
        server.process.send_signal(signal.SIGHUP)
        said = f"{store.url('ner')} now holds 'towns', not 'cities'; restart the server to serve it"
        until(lambda: any(said in line for line in server.log()))
        assert digest_of(server) == after
        assert not any("s3cret" in line for line in server.log())
    cached = [each.name for each in (tmp_path / "cache" / "bundles").iterdir() if not each.name.startswith(".")]
    assert {before, after} < set(cached)


def test_a_withdrawn_key_is_refused_at_once_while_a_bundle_is_still_being_fetched(
    store: BundleStore, tmp_path: Path, manifest_writer: Callable[..., None]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:0123456789abcdef\n")
    with serving(store.url("ner"), "--keys", keys, "--log-format", "json") as server:

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code

        manifest_writer(store.root / "ner", name="cities", max_length=31)
        store.spoiled = {"manifest.json": [HELD]}
        server.process.send_signal(signal.SIGHUP)
        assert store.holding.wait(PATIENCE_S)
        assert status("0123456789abcdef") == 200
        keys.write_text("bob:fedcba9876543210\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: status("fedcba9876543210") == 200)
        assert status("0123456789abcdef") == 401
        assert not any("is now" in line for line in server.log())  # the bundle is still on its way
        store.held.set()
        until(lambda: any("is now" in line for line in server.log()))


def test_a_server_starts_again_without_a_network(store: BundleStore, entities_bundle: Path) -> None:
    shutil.copytree(entities_bundle, store.root / "us" / "ner" / "resolve" / "main")
    environment = {"HF_ENDPOINT": store.url("").rstrip("/"), "HF_HUB_OFFLINE": "0"}
    with serving("hf://us/ner", environment=environment):
        pass
    store.asked.clear()
    with serving("hf://us/ner", environment=environment | {"HF_HUB_OFFLINE": "1"}) as server:
        assert digest_of(server) == open_bundle(entities_bundle).manifest.digest
        assert any("is taken from the cache" in line for line in server.log())
    assert not store.asked


def test_a_front_that_is_replaced_serves_what_the_others_do(
    store: BundleStore, manifest_writer: Callable[..., None]
) -> None:
    with serving(store.url("ner"), "--fronts", "2", "--processes", "2") as server:

        def fronts() -> list[psutil.Process]:
            return psutil.Process(server.process.pid).children()

        def digests() -> set[str]:
            text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
            return set(re.findall(r'stillroom_model_info{front="\d",digest="(\w+)"', text))

        before = digests()
        assert len(before) == 1
        manifest_writer(store.root / "ner", name="cities", max_length=31)
        killed = fronts()[0]
        killed.kill()
        until(
            lambda: (
                server.metric('stillroom_front_restarts_total{front="0"}')
                + server.metric('stillroom_front_restarts_total{front="1"}')
                == 1
            )
        )
        until(lambda: len(fronts()) == 2 and killed not in fronts() and digests() == before)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(digests()) == 1 and digests() != before)


@pytest.mark.parametrize("how", [HELD, CUT])
def test_a_server_that_is_stopped_while_it_fetches_ends_and_leaves_no_bundle(
    store: BundleStore, tmp_path: Path, how: str
) -> None:
    store.spoiled = {"model.onnx": [how] * 9}
    command = [sys.executable, "-m", "serve", store.url("ner"), "--port", "0"]
    with started(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: store.count("model.onnx") > 0)
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said
    kept = [each.name for each in (tmp_path / "cache" / "bundles").iterdir() if not each.name.startswith(".")]
    assert not kept


def test_a_server_that_is_stopped_while_it_reloads_does_not_wait_for_the_store(
    store: BundleStore, manifest_writer: Callable[..., None]
) -> None:
    with serving(store.url("ner")) as server:
        manifest_writer(store.root / "ner", name="cities", max_length=31)
        store.spoiled = {"model.onnx": [HELD]}
        server.process.send_signal(signal.SIGHUP)
        assert store.holding.wait(PATIENCE_S)
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        assert store.count("model.onnx") == 2  # the attempt under way is the last one
