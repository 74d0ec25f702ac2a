import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from patience import PATIENCE_S
from processes import started

from latency.candidates.candidate import Candidate
from latency.measure import interleave
from latency.measure.interleave import StoppingRule, Worker, Workload, measure, start_workers, timing_environment
from latency.measure.worker import timed_calls
from serve.bundle.cpu import Cores, one_cpu_a_core, read_cores
from serve.errors import BadInput, InternalError

QUICK = StoppingRule(seconds=0.0, turn_seconds=0.0)
TWO_TEXTS = Workload("batch 2 x 6 tokens", 2, 6, np.array([[2, 4, 5, 6, 7, 3], [2, 8, 9, 10, 11, 3]]))


def test_a_visit_keeps_at_least_and_at_most_as_many_calls_as_asked_in_whole_passes() -> None:
    made: list[int] = []
    take = timed_calls([lambda: made.append(0), lambda: made.append(1)], seconds=0.0, least=3, most=50)
    assert made == [0, 1] * (len(made) // 2)
    assert len(take["samples_ms"]) == 4
    assert len(made) == 4 + take["warmup"]
    take = timed_calls([lambda: None], seconds=60.0, least=1, most=7)
    assert len(take["samples_ms"]) == 7
    assert all(sample_ms >= 0 for sample_ms in take["samples_ms"])


@pytest.mark.parametrize(
    ("left_s", "warmups"),
    [([0.02, 0.012, 0.007, 0.004], (5, 100)), ([0.05 * 0.9**i for i in range(60)], (1, 4))],
    ids=["a core that wakes", "calls that never settle"],
)
def test_calls_that_still_get_faster_are_not_kept_but_for_those_that_never_settle(
    left_s: list[float], warmups: tuple[int, int]
) -> None:
    left_s = [*left_s]
    take = timed_calls([lambda: time.sleep(left_s.pop(0) if left_s else 0.001)], seconds=0.0, least=1, most=1)
    assert warmups[0] <= take["warmup"] <= warmups[1]


def test_the_garbage_collector_rests_during_a_visit_and_works_again_after_one_that_fails() -> None:
    import gc

    running: list[bool] = []

    def fail_second() -> None:
        running.append(gc.isenabled())
        if len(running) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timed_calls([fail_second], seconds=0.0, least=5, most=5)
    assert running == [False, False]
    assert gc.isenabled()


def test_torch_and_onnxruntime_take_turns_and_every_sample_is_kept(
    torch_candidate: Candidate, onnx_candidate: Candidate, workload: Workload
) -> None:
    seen: list[str] = []
    with start_workers([torch_candidate, onnx_candidate], [workload]) as workers:
        measurements = measure(workers, workload, patience=QUICK, progress=lambda _d, _t, what: seen.append(what))
    assert [m.candidate for m in measurements] == ["teacher", "student"]
    for measurement in measurements:
        assert (measurement.batch, measurement.tokens) == (2, 6)
        assert measurement.turn_sizes == (1,) * 6  # no interval from fewer
        assert all(sample_ms > 0 for sample_ms in measurement.samples_ms)
        assert measurement.warmup >= 6
        assert measurement.conditions["threads"] == 1
        assert measurement.conditions["turns"] == 6
    turns = [seen[i : i + 2] for i in range(0, len(seen), 2)]
    assert all(sorted(turn) == ["student", "teacher"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) == 2  # not always the same first


@pytest.fixture(scope="module")
def three(tiny_onnx: Path) -> Iterator[dict[str, Worker]]:
    """Workers of one graph, of one thread each."""
    named = [Candidate(name, "onnxruntime", "fp32", tiny_onnx, threads=1) for name in "abc"]
    with start_workers(named, [TWO_TEXTS]) as workers:
        yield workers


def test_the_seed_decides_the_order(three: dict[str, Worker]) -> None:
    def order(seed: int) -> list[str]:
        seen: list[str] = []
        measure(three, TWO_TEXTS, patience=QUICK, seed=seed, progress=lambda _d, _t, what: seen.append(what))
        return seen

    assert order(4) == order(4) != order(5)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_candidates_of_fewer_threads_than_cores_stay_on_the_same_ones(
    onnx_candidate: Candidate, workload: Workload
) -> None:
    cores = one_cpu_a_core()
    if len(cores) < 2 or len(cores) < len(os.sched_getaffinity(0)) or read_cores().quota_cores is not None:
        pytest.skip("there is one core, or hyperthreads, or a quota")
    names = [
        replace(onnx_candidate, name=name, threads=threads) for name, threads in (("a", 1), ("b", 1), ("c", len(cores)))
    ]
    with start_workers(names, [workload]) as workers:
        for name, expected in (("a", cores[:1]), ("b", cores[:1]), ("c", cores)):
            tasks = Path(f"/proc/{workers[name].process.pid}/task")
            assert all(sorted(os.sched_getaffinity(int(task.name))) == expected for task in tasks.iterdir())
        measured = measure(workers, workload, patience=QUICK)
    assert [m.conditions["cores"] for m in measured] == [str(cores[0]), str(cores[0]), "all"]


def test_measuring_goes_on_until_the_ratio_is_known_and_says_when_time_or_turns_ran_out(
    three: dict[str, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = measure(three, TWO_TEXTS, patience=StoppingRule(seconds=60.0, tight=math.inf, turn_seconds=0.001))
    assert {m.conditions["stopped"] for m in loose} == {"tight"}
    assert loose[0].conditions["turns"] == 6
    # Narrower than nothing: a clock of whole steps may find two such small graphs equal to the last digit.
    strict = measure(three, TWO_TEXTS, patience=StoppingRule(seconds=0.3, tight=-1.0, turn_seconds=0.001))
    assert {m.conditions["stopped"] for m in strict} == {"time"}
    assert any("the time was up" in doubt for doubt in strict[0].doubts())
    monkeypatch.setattr(interleave, "MOST_TURNS", 8)
    endless = measure(three, TWO_TEXTS, patience=StoppingRule(seconds=600.0, tight=-1.0, turn_seconds=0.0))
    assert endless[0].conditions["turns"] == len(endless[0].turn_sizes) == 8


def test_under_a_quota_of_time_candidates_are_not_bound_to_cores(
    onnx_candidate: Candidate, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleave, "read_cores", lambda: Cores(64, 64, 2.0))
    monkeypatch.setattr(interleave, "one_cpu_a_core", lambda: list(range(64)))
    with start_workers([onnx_candidate], [workload]) as workers:
        (found,) = measure(workers, workload, patience=QUICK)
    assert found.conditions["cores"] == "all"


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
        loaded = worker.receive()
        assert isinstance(loaded, dict)
        assert 0 < loaded["load_ms"] + loaded["first_answer_ms"] < loaded["cold_start_ms"]
        assert len(worker.run(workload, seconds=0.0, least=2, most=2)["samples_ms"]) == 2
        assert {"native noise", "python noise"} <= set(worker.last_words().splitlines())


def test_a_file_of_the_users_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnx_candidate: Candidate, workload: Workload
) -> None:
    (tmp_path / "latency.py").write_text("raise SystemExit('this is the user's own')")
    monkeypatch.chdir(tmp_path)
    with Worker(onnx_candidate) as worker:
        worker.send_load([workload])
        assert isinstance(worker.receive(), dict)


def test_models_that_cannot_be_timed_are_named_without_a_traceback_before_anything_is_timed(
    tmp_path: Path, onnx_candidate: Candidate, workload: Workload
) -> None:
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"not a graph")
    zeros = Workload("batch 1 x 4 tokens", 1, 4, np.zeros((1, 4), dtype=np.int64))  # the logarithm of 0
    for candidates, asked, named in (
        ([replace(onnx_candidate, path=broken)], workload, r"(?s)'student': .*model\.onnx .*INVALID_PROTOBUF"),
        ([replace(onnx_candidate, path=tmp_path / "gone.onnx")], workload, r"no file at .*gone\.onnx.* file$"),
        ([onnx_candidate], zeros, "one row of finite numbers for each text"),
        ([onnx_candidate, onnx_candidate], workload, "two candidates are named student"),
        ([], workload, "no candidate"),
    ):
        with pytest.raises(BadInput, match=named), start_workers(candidates, [asked]):
            raise AssertionError("they loaded")


def test_a_worker_that_is_killed_is_reported_and_no_process_is_left(
    onnx_candidate: Candidate, workload: Workload
) -> None:
    with Worker(onnx_candidate) as worker, Worker(onnx_candidate) as other:
        worker.send_load([workload])
        worker.receive()
        worker.process.kill()
        with pytest.raises(InternalError, match="'student' ended with status -9"):
            worker.run(workload, seconds=0.0, least=1, most=1)
    assert worker.process.poll() is not None
    assert other.process.poll() is not None


def test_a_worker_that_does_not_end_when_asked_is_killed(
    onnx_candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleave, "TERMINATION_S", 0.5)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which it inherits
    try:
        with Worker(onnx_candidate) as worker:
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert worker.process.returncode == -signal.SIGKILL


def test_ctrl_c_in_the_middle_leaves_no_worker_behind(onnx_candidate: Candidate, workload: Workload) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        children.extend(set(_children()) - before)
        raise KeyboardInterrupt

    before, children = set(_children()), []
    with (
        pytest.raises(KeyboardInterrupt),
        start_workers([onnx_candidate, replace(onnx_candidate, name="other")], [workload]) as workers,
    ):
        measure(workers, workload, progress=interrupt)
    assert len(children) == 2
    assert not set(children) & set(_children())


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "latency.measure.worker" in child.cmdline()]


def test_a_worker_ends_by_itself_when_its_parent_is_killed(tiny_onnx: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from latency.candidates.candidate import Candidate\n"
        "from latency.measure.interleave import Worker\n"
        "with Worker(Candidate('c', 'onnxruntime', 'fp32', Path(sys.argv[1]), 1)) as worker:\n"
        "    worker.send_load([]); worker.receive(); print(worker.process.pid, flush=True); time.sleep(600)\n"
    )
    with started([sys.executable, "-c", program, tiny_onnx], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        worker_pid = int(parent.stdout.readline())
        assert _alive(worker_pid)
        parent.kill()
        parent.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while _alive(worker_pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _alive(worker_pid)


def test_a_worker_ends_with_its_parent_also_in_the_middle_of_its_work(tiny_onnx: Path) -> None:
    candidate = Candidate("c", "onnxruntime", "fp32", tiny_onnx, 1)
    load = {
        "command": "load",
        "candidate": candidate.as_dict(),
        "work": {"w": [[1, 2, 3]]},
        "texts": [],
        "spawned_s": 0.0,
    }
    run = {"command": "run", "work": "w", "seconds": 3600, "least": 1, "most": 10**9}
    command = [sys.executable, "-P", "-m", "latency.measure.worker"]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": timing_environment()}
    with started(command, **how) as worker:
        assert worker.stdin
        assert worker.stdout
        worker.stdin.write(f"{json.dumps(load)}\n{json.dumps(run)}\n")
        worker.stdin.flush()
        assert "error" not in worker.stdout.readline()
        worker.stdin.close()  # as by the end of its parent
        worker.wait(PATIENCE_S)


def _alive(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
