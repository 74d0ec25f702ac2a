from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from latency.candidates.candidate import Candidate
from latency.measure.interleave import Worker, Workload
from latency.scenarios import DrivenTurn, at_once, sweep, sweep_row, together_ms, ways
from serve.errors import BadInput, InternalError


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, {(1, 1)}),
        (2, {(1, 1), (2, 1), (1, 2)}),
        (4, {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}),
        (6, {(1, 1), (2, 1), (4, 1), (6, 1), (1, 2), (2, 2), (1, 4), (1, 6)}),
    ],
)
def test_every_way_to_spend_the_cores_is_tried_and_none_that_needs_more(
    cores: int, expected: set[tuple[int, int]]
) -> None:
    assert set(ways(cores)) == expected
    assert len(ways(cores)) == len(expected)


def test_every_way_gets_its_row_in_an_order_of_the_seed_and_no_process_is_left(
    onnx_candidate: Candidate, workload: Workload
) -> None:
    def swept(seed: int) -> tuple[list[dict[str, Any]], list[str]]:
        seen: list[tuple[int, int, str]] = []
        children: set[int] = set()

        def look(done: int, total: int, what: str) -> None:
            seen.append((done, total, what))
            children.update(_workers())

        rows = sweep(onnx_candidate, workload, cores=2, seconds=0.03, turns=4, seed=seed, progress=look)
        assert [done for done, _, _ in seen] == list(range(16))  # a turn to warm up and four that count, of three ways
        assert seen[-1] == (15, 15, "done")
        assert len(children) == 3  # two of one thread, one of two
        assert not children & set(_workers())
        return rows, [what for _, _, what in seen[:-1]]

    rows, order = swept(0)
    ways_taken = [("student", 1, 1), ("student", 1, 2), ("student", 2, 1)]
    assert [(row["name"], row["threads"], row["processes"]) for row in rows] == ways_taken
    assert all(0 < row["p50_ms"] <= row["p99_ms"] and row["texts_per_s"] > 0 for row in rows)
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(set(turn) == set(turns[0]) for turn in turns)
    assert len(set(turns)) > 1
    assert order == swept(0)[1]


def test_processes_side_by_side_all_answer(onnx_candidate: Candidate, workload: Workload) -> None:
    with Worker(onnx_candidate) as one, Worker(onnx_candidate) as other:
        for worker in (one, other):
            worker.send_load([workload])
        for worker in (one, other):
            worker.receive()
        before_s = [_cpu_s(worker) for worker in (one, other)]
        calls_ms = at_once([one, other], workload, 0.1)
        assert [len(ms) > 0 and bool((ms > 0).all()) for ms in calls_ms] == [True, True]
        assert all(_cpu_s(worker) > before_s[i] for i, worker in enumerate((one, other)))
        other.process.kill()
        with pytest.raises(InternalError, match="'student' ended with status -9"):
            at_once([one, other], workload, 0.05)


def test_only_calls_that_begin_while_all_are_at_work_count() -> None:
    early = DrivenTurn(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1000.0, 1001.0, 1002.0, 1003.0]), 4.0)
    late = DrivenTurn(np.array([0.5, 2.5, 4.5]), np.array([2000.0, 2001.0, 2002.0]), 6.5)
    assert [list(ms) for ms in together_ms([early, late])] == [[1001.0, 1002.0, 1003.0], [2000.0, 2001.0]]
    after = DrivenTurn(np.array([5.0]), np.array([1.0]), 5.1)
    assert [list(ms) for ms in together_ms([early, after])] == [[], []]


def test_the_texts_of_all_processes_count() -> None:
    turns_ms = [[np.array([10.0, 10.0]), np.array([20.0])], [np.array([10.0]), np.array([20.0, 20.0])]]
    row = sweep_row("student", 4, (1, 2), turns_ms)
    assert row == {
        "name": "student",
        "threads": 1,
        "processes": 2,
        "p50_ms": 15.0,
        "p99_ms": 20.0,
        "texts_per_s": 4 * (100 + 50),
    }


def test_a_model_that_does_not_open_or_ctrl_c_in_the_middle_leaves_no_process_behind(
    onnx_candidate: Candidate, workload: Workload, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BadInput, match="candidate 'student'"):
        sweep(replace(onnx_candidate, path=tmp_path / "model.onnx"), workload, cores=2, seconds=0.1)
    assert not _workers()
    children: list[int] = []

    def interrupt(done: int, total: int, what: str) -> None:
        children.extend(_workers())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(onnx_candidate, workload, cores=2, seconds=0.1, progress=interrupt)
    assert len(children) == 3
    assert not _workers()


@pytest.mark.parametrize("wrong", [{"cores": 0, "seconds": 1.0}, {"cores": 1, "seconds": 0.0}])
def test_no_cores_or_no_time_are_refused(onnx_candidate: Candidate, workload: Workload, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="above 0"):
        sweep(onnx_candidate, workload, **wrong)


def _workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "latency.measure.worker" in child.cmdline()]


def _cpu_s(worker: Worker) -> float:
    times = psutil.Process(worker.process.pid).cpu_times()
    return float(times.user + times.system)
