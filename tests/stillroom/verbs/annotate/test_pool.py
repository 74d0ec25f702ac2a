"""The processes that answer the texts of one file, and what follows when one of them dies."""

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from server_process import until

from serve.errors import BadInput, BundleError, InternalError
from serve.model.pipeline import Pipeline
from serve.text.inputs import TextWork
from stillroom.child_process import ProcessDied
from stillroom.verbs.annotate.pool import OfflinePool, Result, length_chunks

Processes = Callable[[], set[psutil.Process]]

# Too many for one batch.
TEXTS = [["rome", "please " * 30, "", "fly to oslo 😀"][number % 4] for number in range(500)]


@pytest.fixture
def processes() -> Iterator[Processes]:
    """The processes of pools that run now; none is left after the test."""

    def running() -> set[psutil.Process]:
        found = set()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # nor of one that has ended
                if "--multiprocessing-fork" in child.cmdline():
                    found.add(child)
        return found

    yield running
    assert not psutil.wait_procs(running(), timeout=PATIENCE_S)[1]


@pytest.fixture
def cities_copy(cities: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cities, tmp_path / "cities"))


def works(*texts: str) -> list[TextWork]:
    return [TextWork(text) for text in texts]


def read(results: list[Result]) -> list[Any]:
    return [msgspec.json.decode(each) if isinstance(each, bytes) else each for each in results]


def expected(bundle: Path, texts: list[str]) -> list[Any]:
    pipeline = Pipeline(bundle)
    answers = {text: json.loads(json.dumps(pipeline(text))) for text in set(texts)}
    return [answers[text] for text in texts]


@given(tokens=st.lists(st.integers(1, 50)), chunk_tokens=st.integers(1, 100))
def test_chunks_hold_each_text_once_and_no_more_tokens_than_allowed(tokens: list[int], chunk_tokens: int) -> None:
    chunks = length_chunks(tokens, chunk_tokens)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(len(tokens)))
    assert all(len(chunk) == 1 or sum(tokens[place] for place in chunk) <= chunk_tokens for chunk in chunks)
    lengths = [tokens[place] for chunk in chunks for place in chunk]
    assert lengths == sorted(lengths, reverse=True)


def test_answers_come_in_the_order_of_the_texts(cities: Path, processes: Processes) -> None:
    with OfflinePool(cities, processes=2) as pool:
        windows = [pool.submit(works(*TEXTS[first:])) for first in (0, 1)]
        assert [read(window.result()) for window in windows] == [expected(cities, TEXTS[first:]) for first in (0, 1)]
        assert pool.submit([]).result() == []


def test_a_text_that_fails_fails_alone(cities: Path, processes: Processes) -> None:
    with OfflinePool(cities, processes=1) as pool:
        results = pool.submit([*works("rome", "it"), TextWork("rome", "a pair"), *works("oslo")]).result()
    assert [type(each) for each in results] == [bytes, InternalError, BadInput, bytes]


def test_texts_whose_process_dies_are_computed_by_others(cities: Path, processes: Processes) -> None:
    with OfflinePool(cities, processes=2) as pool:
        victim = processes().pop()
        victim.suspend()
        windows = [pool.submit(works(*TEXTS)) for _ in range(2)]
        until(lambda: len(processes()) == 2)
        victim.kill()
        for window in windows:
            assert read(window.result()) == expected(cities, TEXTS)
        assert victim not in processes()


def test_texts_are_computed_after_a_process_died_idle(cities: Path, processes: Processes) -> None:
    with OfflinePool(cities, processes=1) as pool:
        victim = processes().pop()
        victim.kill()
        victim.wait(PATIENCE_S)
        assert read(pool.submit(works("rome")).result()) == expected(cities, ["rome"])


@contextlib.contextmanager
def killed(processes: Processes) -> Iterator[set[psutil.Process]]:
    """Kills each process that there is or comes; gives those that it killed."""
    ended, victims = threading.Event(), set()

    def kill_all() -> None:
        while not ended.wait(0.01):
            for each in processes():
                victims.add(each)
                each.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        yield victims
    finally:
        ended.set()
        killer.join()


def test_texts_with_which_processes_die_again_and_again_are_given_up(cities: Path, processes: Processes) -> None:
    with OfflinePool(cities, processes=1) as pool, killed(processes) as victims:
        until(lambda: bool(victims))
        with pytest.raises(InternalError, match=r"of model 'cities' died 3 times .*\(count: 2\)"):
            pool.submit(works("rome", "fly to oslo")).result()
    assert len(victims) == 3  # the first one died before it had the texts


def test_processes_that_die_at_their_start_are_reported(cities: Path, processes: Processes) -> None:
    with killed(processes), pytest.raises(BadInput, match=r"'cities' cannot run: the worker process died at its start"):
        OfflinePool(cities, processes=1).__enter__()


def test_where_openvino_crashes_onnxruntime_answers(
    cities_copy: Path,
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    crashing = tmp_path / "openvino"
    crashing.mkdir()
    (crashing / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "openvino", "cpu": []}
    write_manifest(cities_copy, variants={"fp32": variant}, default_variant="fp32")
    with caplog.at_level(logging.ERROR), OfflinePool(cities_copy, processes=1) as pool:
        results = pool.submit(works("fly to rome")).result()
    assert b"rome" in results[0]  # type: ignore[operator]
    assert "onnxruntime runs it instead" in caplog.text


def test_a_pool_that_is_left_does_not_compute_what_is_queued(slow: Path, processes: Processes) -> None:
    with OfflinePool(slow, processes=1) as pool:
        batches = [pool.ask(works(*TEXTS)) for _ in range(50)]
    assert not processes()
    with pytest.raises((CancelledError, ProcessDied)):
        batches[-1].result()


def test_a_bundle_that_changes_before_the_processes_start_is_refused(cities_copy: Path, processes: Processes) -> None:
    pool = OfflinePool(cities_copy, processes=1)
    write_manifest(cities_copy, lineage={"teacher": "another"})
    with pytest.raises(BundleError, match="was changed"), pool:
        raise AssertionError("it opened")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda bundle: write_manifest(bundle, lineage={"teacher": "another"}), "was changed"),
    ],
    ids=["gone", "changed"],
)
def test_a_bundle_that_is_not_the_same_when_a_process_is_replaced_is_reported(
    cities_copy: Path, processes: Processes, change: Callable[[Path], None], message: str
) -> None:
    with OfflinePool(cities_copy, processes=1) as pool:
        victim = processes().pop()
        victim.suspend()
        window = pool.submit(works("rome"))
        change(cities_copy)
        victim.kill()
        with pytest.raises(BundleError, match=message):
            window.result()
