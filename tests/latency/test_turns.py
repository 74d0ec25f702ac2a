import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from latency.candidates import Candidate
from latency.turns import Worker, measure, visiting_orders
from latency.worker import timed_calls
from latency.workloads import Workload
from serve.errors import BadInput, InternalError


def test_each_turn_visits_everyone_once_in_an_order_that_the_seed_decides() -> None:
    orders = visiting_orders(["a", "b", "c"], turns=12, seed=4)
    assert [sorted(order) for order in orders] == [["a", "b", "c"]] * 12
    assert len({tuple(order) for order in orders}) > 1
    assert orders == visiting_orders(["a", "b", "c"], turns=12, seed=4)
    assert orders != visiting_orders(["a", "b", "c"], turns=12, seed=5)


def test_a_visit_keeps_at_least_and_at_most_as_many_calls_as_asked() -> None:
    calls: list[None] = []
    visit = timed_calls(lambda: calls.append(None), seconds=0.0, least=3, most=50, untimed=2)
    assert (len(visit["samples_ms"]), len(calls)) == (3, 5)
    visit = timed_calls(lambda: None, seconds=60.0, least=1, most=7, untimed=0)
    assert len(visit["samples_ms"]) == 7
    assert all(sample_ms >= 0 for sample_ms in visit["samples_ms"])


def test_the_garbage_collector_rests_during_a_visit_and_works_again_after_one_that_fails() -> None:
    import gc

    running: list[bool] = []

    def fail_second() -> None:
        running.append(gc.isenabled())
        if len(running) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timed_calls(fail_second, seconds=0.0, least=5, most=5, untimed=0)
    assert running == [False, False]
    assert gc.isenabled()


def test_torch_and_onnxruntime_take_turns_and_every_sample_is_kept(
    torch_candidate: Candidate, onnx_candidate: Candidate, workload: Workload
) -> None:
    seen: list[tuple[int, int, str]] = []
    measurements = measure(
        [torch_candidate, onnx_candidate],
        [workload],
        turns=3,
        seconds_per_turn=0.0,
        min_samples=7,
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    assert [m.candidate for m in measurements] == ["teacher", "student"]
    for measurement in measurements:
        assert (measurement.batch, measurement.tokens) == (2, 6)
        assert measurement.turn_sizes == (3, 3, 3)  # 7 samples over 3 turns, rounded up
        assert all(sample_ms > 0 for sample_ms in measurement.samples_ms)
        assert measurement.warmup >= 1 + 2 + 3  # the try at loading, two chunks or more, one call a turn
        assert measurement.conditions["threads"] == 1
        assert measurement.conditions["turns"] == 3
    expected_order = [name for order in visiting_orders(["teacher", "student"], 3, seed=0) for name in order]
    assert [what.split(",")[0] for _, _, what in seen[:-1]] == expected_order
    assert seen[-1] == (6, 6, "done")


def test_a_worker_keeps_its_channel_clean_when_a_library_prints_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnx_candidate: Candidate, workload: Workload
) -> None:
    # A numpy that shouts, natively and from Python, before it is the real one.
    shouting = tmp_path / "onnxruntime.py"
    shouting.write_text(
        "import os, sys\nos.write(1, b'native noise\\n')\nprint('python noise')\n"
        f"sys.path.remove({str(tmp_path)!r})\ndel sys.modules['onnxruntime']\nimport onnxruntime\n"
        "sys.modules['onnxruntime'] = onnxruntime\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker(onnx_candidate) as worker:
        worker.send_load([workload])
        assert worker.receive() == {"loaded": True}
        assert len(worker.run(workload, seconds=0.0, least=2, most=2, untimed=0)["samples_ms"]) == 2
        assert {"native noise", "python noise"} <= set(worker.last_words().splitlines())


def test_a_model_that_cannot_be_opened_is_named_with_what_the_runtime_says(
    tmp_path: Path, onnx_candidate: Candidate, workload: Workload
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(
        BadInput, match=r"(?s)candidate 'student': .*model\.onnx does not open in onnxruntime .*INVALID_PROTOBUF"
    ):
        measure([replace(onnx_candidate, path=tmp_path / "model.onnx")], [workload])


def test_our_own_message_arrives_without_a_traceback(
    tmp_path: Path, onnx_candidate: Candidate, workload: Workload
) -> None:
    with pytest.raises(BadInput, match=r"no file at .*gone\.onnx; give the path of a \.onnx file$") as raised:
        measure([replace(onnx_candidate, path=tmp_path / "gone.onnx")], [workload])
    assert "last words" not in raised.value.message


def test_a_model_that_answers_with_infinities_fails_before_anything_is_timed(onnx_candidate: Candidate) -> None:
    seen: list[str] = []
    zeros = Workload("batch 1 x 4 tokens", 1, 4, np.zeros((1, 4), dtype=np.int64))  # the logarithm of 0
    with pytest.raises(BadInput, match="its answer to batch 1 x 4 tokens is not one finite row per text"):
        measure([onnx_candidate], [zeros], progress=lambda done, total, what: seen.append(what))
    assert seen == []


def test_a_worker_that_is_killed_is_reported_and_no_process_is_left(
    onnx_candidate: Candidate, workload: Workload
) -> None:
    with Worker(onnx_candidate) as worker, Worker(onnx_candidate) as other:
        worker.send_load([workload])
        worker.receive()
        worker.process.kill()
        with pytest.raises(InternalError, match="'student' ended with status -9"):
            worker.run(workload, seconds=0.0, least=1, most=1, untimed=0)
    assert worker.process.poll() is not None
    assert other.process.poll() is not None


def test_ctrl_c_in_the_middle_leaves_no_worker_behind(onnx_candidate: Candidate, workload: Workload) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        children.extend(_children())
        raise KeyboardInterrupt

    children: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        measure([onnx_candidate, replace(onnx_candidate, name="other")], [workload], progress=interrupt)
    assert len(children) == 2
    assert not set(children) & set(_children())


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "latency.worker" in child.cmdline()]


def test_a_worker_ends_by_itself_when_its_parent_is_killed(tiny_onnx: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from latency.candidates import Candidate\n"
        "from latency.turns import Worker\n"
        "with Worker(Candidate('c', 'onnxruntime', 'fp32', Path(sys.argv[1]), 1)) as worker:\n"
        "    worker.send_load([]); worker.receive(); print(worker.process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tiny_onnx], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        worker_pid = int(parent.stdout.readline())
        assert _alive(worker_pid)
        parent.kill()
    deadline_s = time.monotonic() + 20
    while _alive(worker_pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _alive(worker_pid)


def _alive(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_candidates_that_cannot_be_told_apart_or_are_none_are_refused(
    onnx_candidate: Candidate, workload: Workload
) -> None:
    with pytest.raises(BadInput, match="two candidates are named student"):
        measure([onnx_candidate, onnx_candidate], [workload])
    with pytest.raises(BadInput, match="no candidate was given"):
        measure([], [workload])
    with pytest.raises(BadInput, match="0 turns were asked for"):
        measure([onnx_candidate], [workload], turns=0)
