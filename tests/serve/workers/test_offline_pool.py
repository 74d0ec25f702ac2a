"""Model processes at work together for one caller."""

import asyncio
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from serve.errors import BadInput, BundleError, InternalError, StillroomError
from serve.model.pipeline import Pipeline
from serve.model.work_items import TextWork
from serve.workers import offline_pool
from serve.workers.offline_pool import OfflinePool, _Chunk, _Window, length_chunks


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
    import msgspec

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


def test_a_bundle_that_changes_before_the_processes_start_is_refused(entities_bundle: Path, tmp_path: Path) -> None:
    import shutil

    from lookup_bundles import write_manifest

    bundle = Path(shutil.copytree(entities_bundle, tmp_path / "bundle"))
    before = set(psutil.Process().children())  # servers of fixtures that other tests share
    pool = OfflinePool(bundle)
    write_manifest(bundle, lineage={"teacher": "another"})
    with pytest.raises(BundleError, match="was changed"), pool:
        raise AssertionError("it opened")
    assert set(psutil.Process().children()) <= before


def test_processes_that_die_again_and_again_end_in_an_error_and_not_in_silence(entities_bundle: Path) -> None:
    before = set(psutil.Process().children())
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(0.01):
            for child in set(psutil.Process().children()) - before:
                child.kill()

    with OfflinePool(entities_bundle, processes=2) as pool:
        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            window = pool.submit([TextWork("please " * 25)] * 200_000)
            with pytest.raises(StillroomError, match="died"):
                window.result(timeout=PATIENCE_S)
        finally:
            ended.set()
            killer.join()
        with pytest.raises(StillroomError, match="died"):
            pool.submit([TextWork("rome")]).result(timeout=PATIENCE_S)
    assert set(psutil.Process().children()) <= before


def test_texts_that_kill_one_process_after_another_are_given_up(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())
    monkeypatch.setattr(offline_pool, "MOST_DEATHS", 1)
    with OfflinePool(entities_bundle, processes=1) as pool:
        (process,) = set(psutil.Process().children()) - before
        process.suspend()
        future = pool.submit([TextWork("rome")])
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), pool._loop).result()  # it has been given them
        process.kill()
        with pytest.raises(InternalError, match="'cities' died"):
            future.result(timeout=PATIENCE_S)
    assert set(psutil.Process().children()) <= before


def test_an_unforeseen_failure_of_a_text_is_an_error_of_ours() -> None:
    window = _Window([None, None], 1)
    chunk = _Chunk(window, [1, 0], [TextWork("rome"), TextWork("oslo")])
    chunk.done(0, ValueError("unforeseen"))
    chunk.done(1, BadInput("no text"))
    assert isinstance(window.results[1], InternalError)
    assert "unforeseen" in str(window.results[1])
    assert isinstance(window.results[0], BadInput)
