"""Model processes at work together for one caller."""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from server_process import until

from serve.errors import BadInput, BundleError, InternalError, StillroomError
from serve.model.pipeline import Pipeline
from serve.text.inputs import TextWork
from serve.workers import offline_pool, supervisor
from serve.workers import process as process_module
from serve.workers.offline_pool import OfflinePool, Result, length_chunks

Own = Callable[[], set[psutil.Process]]


@pytest.fixture
def own() -> Iterator[Own]:
    """The processes that the test has started now; none is left at its end. Servers of fixtures are not among them."""
    before = set(psutil.Process().children())
    yield lambda: set(psutil.Process().children()) - before
    assert set(psutil.Process().children()) <= before


@given(tokens=st.lists(st.integers(1, 50)), chunk_tokens=st.integers(1, 100))
def test_chunks_hold_every_text_once_and_no_more_tokens_than_allowed(tokens: list[int], chunk_tokens: int) -> None:
    chunks = length_chunks(tokens, chunk_tokens)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(tokens)))
    assert all(len(chunk) == 1 or sum(tokens[place] for place in chunk) <= chunk_tokens for chunk in chunks)
    lengths = [tokens[place] for chunk in chunks for place in chunk]
    assert lengths == sorted(lengths, reverse=True)


def test_windows_are_answered_in_the_order_of_their_works(entities_bundle: Path) -> None:
    texts = [["rome", "please " * 30, "", "fly to oslo 😀"][number % 4] for number in range(500)]
    pipeline = Pipeline(entities_bundle)
    expected = [str(pipeline(text)) for text in texts[:4]]
    with OfflinePool(entities_bundle, processes=2) as pool:
        futures = [pool.submit([TextWork(text) for text in texts[first:]]) for first in (0, 1)]
        for first, future in enumerate(futures):
            found = [str(msgspec.json.decode(each)) for each in future.result() if isinstance(each, bytes)]
            assert found == [expected[number % 4] for number in range(first, 500)]
        assert pool.submit([]).result() == []


def test_a_work_that_fails_fails_alone(broken_bundle: Path) -> None:
    with OfflinePool(broken_bundle, processes=1) as pool:
        results = pool.submit([TextWork("rome"), TextWork("refund"), TextWork("rome", "a pair")]).result()
    assert isinstance(results[0], bytes)
    assert isinstance(results[1], InternalError)
    assert isinstance(results[2], BadInput)


def test_a_bundle_that_changes_before_the_processes_start_is_refused(bundle_copy: Path, own: Own) -> None:
    pool = OfflinePool(bundle_copy)
    write_manifest(bundle_copy, lineage={"teacher": "another"})
    with pytest.raises(BundleError, match="was changed"), pool:
        raise AssertionError("it opened")


def test_processes_that_die_again_and_again_end_in_an_error_and_not_in_silence(entities_bundle: Path, own: Own) -> None:
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(0.01):
            for child in own():
                child.kill()

    with OfflinePool(entities_bundle, processes=1) as pool:
        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            window = pool.submit([TextWork("please " * 25)] * 20_000)
            with pytest.raises(StillroomError, match=r"died|no worker process of model 'cities' can be started"):
                window.result(timeout=PATIENCE_S)
        finally:
            ended.set()
            killer.join()


def killed_while_computing(pool: OfflinePool, own: Own) -> Future[list[Result]]:
    """Texts whose process was killed while it had them."""
    (process,) = own()
    process.suspend()
    future = pool.submit([TextWork("rome"), TextWork("fly to oslo")])
    until(lambda: sum(slot.under_way for slot in pool._model.batcher._slots) > 0)
    process.kill()
    return future


def test_texts_whose_process_dies_are_computed_by_another(entities_bundle: Path, own: Own) -> None:
    with OfflinePool(entities_bundle, processes=1) as pool:
        results = killed_while_computing(pool, own).result(timeout=PATIENCE_S)
    pipeline = Pipeline(entities_bundle)
    assert [msgspec.json.decode(each) for each in results if isinstance(each, bytes)] == [
        json.loads(json.dumps(pipeline(text))) for text in ("rome", "fly to oslo")
    ]


def test_texts_that_kill_processes_are_given_up(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, own: Own
) -> None:
    monkeypatch.setattr(offline_pool, "MOST_DEATHS", 1)
    with OfflinePool(entities_bundle, processes=1) as pool:
        future = killed_while_computing(pool, own)
        with pytest.raises(InternalError, match=r"of model 'cities' died 1 times .*\(count: 2\)"):
            future.result(timeout=PATIENCE_S)


def test_a_pool_that_is_left_waits_for_no_text(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, own: Own
) -> None:
    monkeypatch.setattr(supervisor, "UNWANTED_S", math.inf)
    monkeypatch.setattr(process_module, "LEAVE_S", math.inf)
    with OfflinePool(entities_bundle, processes=1) as pool:
        (process,) = own()
        process.suspend()  # it computes for ever
        future = pool.submit([TextWork("please " * 25)] * 2_000)
        until(lambda: pool._model.batcher.waiting > 0)
    assert future.cancelled()


def test_a_bundle_that_is_gone_when_a_process_is_replaced_is_told(bundle_copy: Path, own: Own) -> None:
    with OfflinePool(bundle_copy, processes=1) as pool:
        shutil.rmtree(bundle_copy)
        future = killed_while_computing(pool, own)
        with pytest.raises(BundleError, match="does not exist"):
            future.result(timeout=PATIENCE_S)


def test_a_pool_that_was_paused_for_long_goes_on(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, own: Own
) -> None:
    with OfflinePool(entities_bundle, processes=1) as pool:
        monkeypatch.setattr(process_module, "HUNG_S", 0.2)
        (process,) = own()
        process.suspend()
        future = pool.submit([TextWork("rome")])
        time.sleep(0.5)
        process.resume()
        assert isinstance(future.result(timeout=PATIENCE_S)[0], bytes)
        assert process.is_running()
