"""Bundles of URLs: whatever goes wrong on the way, what is opened is whole, and nothing half-fetched is left."""

import json
import logging
import os
import random
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bundle_store import CUT, DROPPED, HELD, BundleStore, bundle_store, opening
from lookup_bundles import write_manifest
from loopback import answer, self_signed, serving
from patience import PATIENCE_S

from benchmarks.export.corruptions import KINDS
from serve import Pipeline, open_bundle
from serve.bundle import fetched, remote_files
from serve.bundle.manifest import canonical_json, digest
from serve.bundle.remote_files import Absent, Refused, Unreachable, is_url, shown
from serve.errors import BundleError
from serve.tasks import check_manifest

MODEL = "model.onnx"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, and attempts that follow each other at once."""
    monkeypatch.setenv(fetched.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0, 0.0, 0.0, 0.0))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path, entities_bundle: Path, cache: Path) -> Iterator[BundleStore]:
    """A store with a bundle at /ner."""
    shutil.copytree(entities_bundle, tmp_path / "store" / "ner")
    with bundle_store(tmp_path / "store") as running:
        yield running


def left(cache: Path) -> list[str]:
    """What is in the folder of bundles, the locks aside."""
    folder = cache / "bundles"
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(".lock")) if folder.exists() else []


def test_a_bundle_of_a_url_is_fetched_once_and_answers(store: BundleStore, cache: Path) -> None:
    progress: list[tuple[int, int]] = []
    show = lambda done, whole: progress.append((done, whole))  # noqa: E731
    folder = fetched.open_remote(store.url("ner"), show, check=check_manifest).path
    digest = open_bundle(store.root / "ner").manifest.digest
    assert folder == cache / "bundles" / digest
    assert left(cache) == [digest]
    assert progress[-1][0] == progress[-1][1] > 1000
    assert Pipeline(store.url("ner") + "/")("fly to Rome")["entities"][0]["text"] == "Rome"
    assert (store.count(MODEL), store.count("tokenizer.json"), store.count("manifest.json")) == (1, 1, 2)


def test_a_bundle_that_its_task_does_not_allow_is_refused_before_it_is_fetched(store: BundleStore, cache: Path) -> None:
    good = open_bundle(store.url("ner")).manifest.digest
    path = store.root / "ner" / "manifest.json"
    document = json.loads(path.read_text()) | {"task": "text-regression", "labels": ["a", "b"]}
    path.write_bytes(canonical_json(document | {"digest": digest(document)}))
    with pytest.raises(BundleError, match="gives a text one number, and there are 2 labels"):
        open_bundle(store.url("ner"))
    assert (left(cache), store.count(MODEL)) == ([good], 1)


@pytest.mark.parametrize("how", [503, 500, 429, 408, CUT, DROPPED])
@pytest.mark.parametrize("file", ["manifest.json", MODEL])
def test_a_failure_that_passes_is_tried_again(store: BundleStore, how: int | str, file: str) -> None:
    store.spoiled[file] = [how] * 4
    assert open_bundle(store.url("ner")).manifest.name == "cities"
    assert store.count(file) == 5


@pytest.mark.parametrize("how", [503, CUT, DROPPED])
def test_a_server_that_goes_on_failing_is_given_up(store: BundleStore, cache: Path, how: int | str) -> None:
    store.spoiled[MODEL] = [how] * 99
    with pytest.raises(Unreachable, match=r"onnx/model\.onnx .* 5 attempts"):
        open_bundle(store.url("ner"))
    assert left(cache) == []


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (404, Absent, "manifest.json"),
        (401, Refused, "HTTP 401"),
        (403, Refused, "HTTP 403"),
        (400, BundleError, "HTTP 400"),
    ],
)
def test_a_lasting_refusal_is_not_asked_again(
    store: BundleStore, status: int, kind: type[BundleError], said: str
) -> None:
    store.spoiled["manifest.json"] = [status]
    with pytest.raises(kind, match=said):
        open_bundle(store.url("ner"))
    assert store.count("manifest.json") == 1


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (MODEL, lambda content: content[:-1] + bytes([content[-1] ^ 1]), "SHA-256"),
        (MODEL, lambda content: content[:-7], "bytes instead of"),
        (MODEL, lambda content: content + b"more", "more than"),
        (MODEL, lambda content: b"", "0 bytes"),
        ("manifest", lambda content: b"<html>", "JSON"),
        ("manifest", lambda content: b" " * (16 * 2**20 + 1), "16,777,216"),
        ("manifest", lambda content: content.replace(b'"max_length": 32', b'"max_length": 31'), "digest"),
    ],
    ids=["other-bytes", "cut", "longer", "empty", "no-json", "too-large-a-manifest", "another-digest"],
)
def test_a_file_that_is_not_what_the_manifest_lists_is_refused(
    store: BundleStore, cache: Path, name: str, change: Callable[[bytes], bytes], said: str
) -> None:
    file = store.root / "ner" / ("onnx/model.onnx" if name == MODEL else "manifest.json")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(BundleError, match=said) as refused:
        open_bundle(store.url("ner"))
    assert file.name in refused.value.message
    assert str(cache) not in refused.value.message
    assert left(cache) == []


def test_names_that_lead_out_of_the_bundle_are_not_asked_for(store: BundleStore, cache: Path) -> None:
    (store.root / "outside.json").write_text("{}")
    listed = open_bundle(store.root / "ner").manifest.files
    files = {name: {"sha256": each.sha256, "bytes": each.bytes} for name, each in listed.items()}
    write_manifest(store.root / "ner", files=files | {"../outside.json": {"sha256": "0" * 64, "bytes": 2}})
    with pytest.raises(BundleError, match="is not a plain path inside the bundle"):
        open_bundle(store.url("ner"))
    assert set(store.asked) == {"manifest.json"}


def test_a_bundle_that_is_replaced_while_it_is_fetched_is_fetched_again(store: BundleStore, cache: Path) -> None:
    def replace(name: str) -> None:
        if name == "manifest.json":
            store.after = lambda _: None
            tokenizer = store.root / "ner" / "tokenizer.json"
            tokenizer.write_text(tokenizer.read_text() + "\n")
            write_manifest(store.root / "ner", name="new")

    store.after = replace
    assert open_bundle(store.url("ner")).manifest.name == "new"
    assert len(left(cache)) == 1


def test_without_a_network_the_last_bundle_is_opened(
    store: BundleStore, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = store.url("ner")
    first = open_bundle(url)
    store.spoiled = {"manifest.json": [503] * 99}
    with caplog.at_level(logging.WARNING, "serve"):
        assert open_bundle(url) == first
    (warning,) = caplog.messages
    assert first.manifest.digest[:12] in warning
    with pytest.raises(Unreachable, match="no bundle"):
        open_bundle(store.url("other"))
    (first.path / "onnx" / MODEL).unlink()
    with pytest.raises(Unreachable, match="damaged"):
        open_bundle(url)


def test_a_server_that_dies_in_the_middle_leaves_the_bundle_before(store: BundleStore, cache: Path) -> None:
    first = open_bundle(store.url("ner")).manifest
    write_manifest(store.root / "ner", name="new")
    store.spoiled = {MODEL: [CUT] * 99}
    assert open_bundle(store.url("ner")).manifest == first
    assert left(cache) == [first.digest]
    store.spoiled = {}
    assert open_bundle(store.url("ner")).manifest.name == "new"


def test_a_url_whose_bundle_is_known_is_not_asked_again(store: BundleStore) -> None:
    first = open_bundle(store.url("ner")).manifest
    write_manifest(store.root / "ner", name="new")
    store.asked.clear()
    assert open_bundle(store.url("ner"), known=first.digest).manifest == first
    assert not store.asked
    assert open_bundle(store.url("ner"), known="0" * 64).manifest.name == "new"


def test_two_processes_fetch_a_bundle_once(store: BundleStore, cache: Path) -> None:
    store.spoiled = {MODEL: [HELD]}
    with opening(store.url("ner")) as one, opening(store.url("ner")) as other:
        both = (one, other)
        assert store.holding.wait(PATIENCE_S)
        while store.count("manifest.json") < 2:
            assert all(process.poll() is None for process in both)
            time.sleep(0.01)
        store.held.set()
        said = [process.communicate(timeout=PATIENCE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len({out for out, _ in said}) == 1
    assert (store.count(MODEL), store.count("tokenizer.json")) == (1, 1)


def test_what_a_killed_process_left_is_never_used(store: BundleStore, cache: Path) -> None:
    store.spoiled = {"tokenizer.json": [HELD]}
    with opening(store.url("ner")):
        assert store.holding.wait(PATIENCE_S)
        assert [name.endswith(".partial") for name in left(cache)] == [True]
    assert len(left(cache)) == 1
    store.held.set()
    bundle = open_bundle(store.url("ner"))
    assert left(cache) == [bundle.manifest.digest]


def test_a_disk_without_room_is_named(store: BundleStore, cache: Path) -> None:
    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    with opening(store.url("ner"), preexec_fn=little) as process:
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert "there is no room for its" in said
    assert "make room, or set STILLROOM_CACHE to another folder" in said
    assert left(cache) == []


def test_a_cache_without_a_place_is_named(store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(fetched.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(BundleError, match=r"it cannot be written .*; set STILLROOM_CACHE to another folder"):
        open_bundle(store.url("ner"))


def test_another_bundle_in_the_place_of_the_cached_one_is_fetched_over(store: BundleStore) -> None:
    good = open_bundle(store.url("ner"))
    write_manifest(good.path, name="another")  # a whole bundle, whose digest is not the folder's name
    assert open_bundle(store.url("ner")) == good


@pytest.mark.parametrize("place", ["bundle", "partial"])
@pytest.mark.parametrize("leads", ["nowhere", "to a folder", "to a file"])
def test_a_link_in_the_cache_is_replaced_not_followed(
    store: BundleStore, tmp_path: Path, place: str, leads: str
) -> None:
    good = open_bundle(store.url("ner"))
    (tmp_path / "to a folder").mkdir()
    for file in (tmp_path / "to a folder" / "mine", tmp_path / "to a file"):
        file.write_text("mine")
    shutil.rmtree(good.path)
    link = good.path if place == "bundle" else good.path.with_name(f".{good.path.name}.partial")
    link.symlink_to(tmp_path / leads)
    assert open_bundle(store.url("ner")) == good
    assert not good.path.is_symlink()
    assert left(good.path.parents[1]) == [good.path.name]
    assert [file.read_text() for file in (tmp_path / "to a folder" / "mine", tmp_path / "to a file")] == ["mine"] * 2


def test_no_other_user_may_read_the_folders_of_the_cache(store: BundleStore, cache: Path) -> None:
    before = os.umask(0o022)
    try:
        open_bundle(store.url("ner"))
    finally:
        os.umask(before)
    folders = [each for each in (cache, *cache.rglob("*")) if each.is_dir()]
    assert len(folders) == 5  # the cache, its two parts, the bundle and its graphs
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}


def test_a_url_with_another_query_is_another_bundle(store: BundleStore) -> None:
    url = store.url("ner")
    first = open_bundle(f"{url}?version=1&signature=a&X-Amz-Date=b")
    open_bundle(f"{url}?version=3")
    assert store.count("manifest.json") == 2
    store.spoiled = {"manifest.json": [503] * 99}
    assert open_bundle(f"{url}?version=1&signature=c&X-Amz-Date=d") == first  # signed again
    for query in ("", "?version=2", "?version=1&of=b", "?version=2&signature=a", "?of=1"):
        with pytest.raises(Unreachable, match="has no bundle of it"):
            open_bundle(url + query)


def corrupted(store: BundleStore, count: int, seed: int) -> None:
    """Corrupts the copy in the cache again and again: it is fetched again, or refused where it cannot be."""
    chance = random.Random(seed)
    url = store.url("ner")
    good = open_bundle(url)
    names = sorted(good.path.rglob("*"))
    for number in range(count):
        what, undo = chance.choice(KINDS)(good.path, chance)
        if number % 2:
            store.spoiled = {"manifest.json": [503] * 5}
            with pytest.raises(Unreachable, match="damaged"):
                open_bundle(url)
            undo()
        before = store.count(MODEL)
        assert open_bundle(url) == good, what
        assert store.count(MODEL) == before + (number + 1) % 2, what
        assert sorted(good.path.rglob("*")) == names


def test_a_corrupted_copy_in_the_cache_is_fetched_again(store: BundleStore) -> None:
    corrupted(store, 100, seed=1)


@pytest.mark.slow
def test_a_copy_in_the_cache_that_is_corrupted_in_a_thousand_ways_is_fetched_again(store: BundleStore) -> None:
    corrupted(store, 1000, seed=2)


def test_a_user_a_password_and_a_query_are_sent_not_shown(store: BundleStore, cache: Path, tmp_path: Path) -> None:
    signed = store.url("ner").replace("http://", "http://someone:s3cret%21@") + "?signature=hidden"
    open_bundle(signed)
    assert set(store.authorizations) == {"Basic c29tZW9uZTpzM2NyZXQh"}
    assert all(path.endswith("?signature=hidden") for path in store.paths)
    assert store.url("ner") == shown(signed)
    kept = b"".join(file.read_bytes() for file in cache.rglob("*") if file.is_file())
    assert b"s3cret" not in kept
    assert b"hidden" not in kept
    for how in (403, 404, 400, b"{", DROPPED):
        store.spoiled = {"manifest.json": [how] * 5}
        shutil.rmtree(cache, ignore_errors=True)
        with pytest.raises(BundleError) as refused:
            open_bundle(signed)
        assert not any(secret in refused.value.message for secret in ("s3cret", "someone", "signature", "hidden"))


def test_a_redirect_to_another_server_gets_no_password(store: BundleStore, tmp_path: Path) -> None:
    with bundle_store(store.root) as other:
        store.redirect = other.url("").rstrip("/")
        open_bundle(store.url("ner").replace("http://", "http://someone:s3cret@"))
    assert set(store.authorizations) == {"Basic c29tZW9uZTpzM2NyZXQ="}
    assert set(other.authorizations) == {None}


def test_https_is_checked(
    store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entities_bundle: Path
) -> None:
    certificate, tls = self_signed(tmp_path)

    async def file(asked: object) -> bytes:
        path = str(asked.head).split()[1]  # type: ignore[attr-defined]
        if path.startswith("/away"):
            return answer(302, b"", f"Location: {store.url('ner')}/manifest.json")
        return answer(200, (entities_bundle / path.removeprefix("/ner/")).read_bytes())

    with serving(file, tls) as secure:
        url = f"https://localhost:{secure.port}"
        with pytest.raises(BundleError, match="the server's certificate is not trusted"):
            open_bundle(f"{url}/ner")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert open_bundle(f"{url}/ner").manifest.name == "cities"
        with pytest.raises(BundleError, match=r"leads to .* which is not https"):
            open_bundle(f"{url}/away")
    assert not store.asked


def test_a_repository_of_the_hub_is_read_with_the_token(
    store: BundleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for revision in ("main", "v1"):
        shutil.copytree(store.root / "ner", store.root / "us" / "ner" / "resolve" / revision)
    monkeypatch.setenv("HF_ENDPOINT", store.url("").rstrip("/"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert open_bundle("hf://us/ner") == open_bundle("hf://us/ner@v1")
    assert set(store.authorizations) == {"Bearer hf_of_a_test"}
    with pytest.raises(Absent, match=r"there is no hf://us/ner@v2/manifest.json"):
        open_bundle("hf://us/ner@v2")
    with pytest.raises(BundleError, match="give hf://OWNER/NAME"):
        open_bundle("hf://ner")
    store.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_bundle("hf://us/ner").manifest.name == "cities"
    assert not store.asked


def test_https_and_the_hub_need_no_library(store: BundleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fsspec", "aiohttp", "httpx", "requests", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, module, None)
    shutil.copytree(store.root / "ner", store.root / "us" / "ner" / "resolve" / "main")
    monkeypatch.setenv("HF_ENDPOINT", store.url("").rstrip("/"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert open_bundle(store.url("ner")) == open_bundle("hf://us/ner")
    with pytest.raises(BundleError, match="memory:// needs fsspec; pip install fsspec"):
        open_bundle("memory://ner")


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("s3://models/ner", r"s3fs.*pip install .*s3"),
        ("gs://models/ner", r"gcsfs.*pip install .*gs"),
        ("az://models/ner", r"adlfs.*pip install .*az"),
        ("ftp://someone:s3cret@host/ner", "ftp://host/ner"),
    ],
)
def test_a_scheme_without_its_library_and_an_unknown_one_are_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, url: str, named: str
) -> None:
    for module in ("s3fs", "gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BundleError, match=named):
        open_bundle(url)


def test_paths_are_no_urls(tmp_path: Path) -> None:
    assert not any(map(is_url, ("ner", "./s3:/x", "C:\\ner", "/a//b", Path("s3://x"), "x:y", "")))
    assert all(map(is_url, ("s3://x/y", "https://x", "hf://a/b", "HTTPS://x")))
