"""A model's process as the server holds it, when something goes wrong in the middle of an answer."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop
from coroutines import asynchronous
from lookup_bundles import write_manifest
from patience import PATIENCE_S
from processes import started
from repository import ROOT

from serve.errors import InternalError, Unavailable
from serve.model.work_items import Dropped, Opening, Parts, Work, packed
from serve.observe.request_context import RequestContext
from serve.tasks import open_bundle
from serve.text.inputs import TextWork
from serve.workers import process as process_module
from serve.workers.process import ModelProcess, WorkOutput, WorkRequest
from serve.workers.worker import BatchReader, messages


async def two_batches(process: ModelProcess) -> tuple[list[BaseException | None], list[object]]:
    """Both given at once: how each ended, and what was answered to the second."""
    answers: list[object] = []

    def second(place: int, answer: WorkOutput | Exception) -> None:
        answers.append(answer)

    ends = await asyncio.gather(
        process.run([WorkRequest(TextWork("fly to rome"), RequestContext())], lambda place, answer: None),
        process.run([WorkRequest(TextWork("love it"), RequestContext())], second),
        return_exceptions=True,
    )
    await process.kill()
    return ends, answers


def opening(bundle: Path) -> Opening:
    return Opening(str(bundle), open_bundle(bundle).manifest.digest, None, 1)


@asynchronous
async def test_no_file_of_the_users_is_run(
    entities_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serve.py").write_text("raise SystemExit('this is the user's own')")
    monkeypatch.chdir(tmp_path)
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    await process.end()
    assert process.exited.result() == 0


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_killed_as_it_answers_is_gone(
    entities_bundle: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
        heard = asyncio.Event()
        asked = [WorkRequest(TextWork("fly to rome and oslo"), RequestContext()) for _ in range(5000)]
        running = process.run(asked, lambda place, answer: heard.set())
        async with asyncio.timeout(PATIENCE_S):
            await heard.wait()
        async with asyncio.timeout(PATIENCE_S):
            await process.kill()
        assert process.exited.result() == -signal.SIGKILL
        with pytest.raises(Unavailable, match="died; try again"):
            await running
        assert not any(each.context.when_abandoned for each in asked)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())


@pytest.mark.parametrize("ended", ["kill", "end"])
@asynchronous
async def test_a_process_is_gone_also_when_whoever_ends_it_is_cancelled(entities_bundle: Path, ended: str) -> None:
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    os.kill(process.pid, signal.SIGSTOP)  # it would not leave by itself
    ending = asyncio.create_task(getattr(process, ended)())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.exited.result() == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this system cannot wait for a process and leave its status")
def test_the_signal_that_ended_a_process_is_known_late_too(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_wait = os.waitpid

    def waits_late(process_id: int, options: int) -> tuple[int, int]:
        if options == 0:  # asyncio's thread, which waits for each process; on a busy machine it comes late
            os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
            time.sleep(0.2)
        return really_wait(process_id, options)

    async def scenario() -> None:
        process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
        os.kill(process.pid, signal.SIGSEGV)
        with pytest.raises(Unavailable):
            await process.run([WorkRequest(TextWork("rome"), RequestContext())], lambda place, answer: None)
        await process.kill()
        assert process.exited.result() == -signal.SIGSEGV

    monkeypatch.setattr(os, "waitpid", waits_late)
    asyncio.run(scenario())
    assert "Unknown child process" not in caplog.text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in-order", "the-later-batch-first"])
def test_what_is_dropped_of_a_batch_is_heard_whatever_was_dropped_of_another(order: tuple[int, int]) -> None:
    reader = BatchReader()
    works: list[Work] = [TextWork("rome"), TextWork("oslo")]
    reader.read(io.BytesIO(b"".join(map(packed, (works, works, *(Dropped(batch, [batch]) for batch in order))))))
    assert [reader.batches.get() for _ in range(3)] == [works, works, None]
    assert (reader.unwanted(0), reader.unwanted(0)) == ([0], [])
    assert reader.unwanted(1) == [1]


@asynchronous
async def test_where_openvino_crashes_onnxruntime_answers(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crashing = tmp_path / "openvino"
    crashing.mkdir()
    (crashing / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "openvino", "cpu": []}
    write_manifest(bundle_copy, variants={"fp32": variant}, default_variant="fp32")
    answers: dict[int, object] = {}
    asked = msgspec.structs.replace(opening(bundle_copy), runtime="openvino")
    process = await ModelProcess.started(asked, lambda parts: None)
    await process.run([WorkRequest(TextWork("fly to rome"), RequestContext())], answers.__setitem__)
    await process.end()
    assert b"rome" in answers[0]  # type: ignore[operator]
    assert "and onnxruntime runs it instead: the worker process died at its start (signal 11)" in caplog.text


IN_A_PROCESS_THAT_MAY_NOT_WRITE_CODE = """
import asyncio, ctypes, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    raise SystemExit("no such prctl")
from serve.tasks import open_bundle
from serve.model.work_items import Dropped, Opening
from serve.text.inputs import TextWork
from serve.observe.request_context import RequestContext
from serve.workers.process import WorkRequest, ModelProcess

async def main():
    asked = Opening(sys.argv[1], open_bundle(sys.argv[1]).manifest.digest, None, 1, "openvino")
    process = await ModelProcess.started(asked, lambda parts: None)
    await process.run([WorkRequest(TextWork("fly to rome"), RequestContext())], lambda place, answer: print(answer))
    await process.end()

asyncio.run(main())
"""


def test_where_no_code_may_be_written_onnxruntime_stands_in_for_openvino(bundle_copy: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    variant = {"file": "onnx/model.onnx", "scheme": "fp32", "runtime": "openvino", "cpu": []}
    write_manifest(bundle_copy, variants={"fp32": variant}, default_variant="fp32")
    command = [sys.executable, "-c", IN_A_PROCESS_THAT_MAY_NOT_WRITE_CODE, str(bundle_copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if "no such prctl" in done.stderr:
        pytest.skip("this system has no PR_SET_MDWE, which came with Linux 6.3")
    assert done.returncode == 0, done.stderr
    assert "rome" in done.stdout
    assert "onnxruntime runs it instead" in done.stderr


@asynchronous
async def test_work_that_nobody_waits_for_stops_and_its_neighbours_are_answered(entities_bundle: Path) -> None:
    rows: list[int] = []
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: rows.append(parts.texts))
    long, short = RequestContext(), RequestContext()
    asked = [WorkRequest(TextWork("rome " * 6_000), long) for _ in range(100)]  # thousands of windows each
    answers: dict[int, object] = {}
    running = process.run([*asked, WorkRequest(TextWork("fly to rome"), short)], answers.__setitem__)
    async with asyncio.timeout(PATIENCE_S):
        while sum(rows) < 2:
            await asyncio.sleep(0.001)
    long.abandon()
    await running
    assert answers.keys() <= {100, *range(10)}
    assert isinstance(answers[100], bytes)
    assert b"rome" in answers[100]
    # The process goes on, with the right answers.
    again: dict[int, object] = {}
    await process.run([WorkRequest(TextWork("oslo"), RequestContext())], again.__setitem__)
    assert b"oslo" in again[0]  # type: ignore[operator]
    assert not long.when_abandoned
    await process.end()


@asynchronous
async def test_an_answer_that_was_not_heard_to_its_end_is_nobody_elses(entities_bundle: Path) -> None:
    def fails(parts: Parts) -> None:
        raise ValueError("unforeseen")

    process = await ModelProcess.started(opening(entities_bundle), fails)
    (first, second), answers = await two_batches(process)
    assert isinstance(first, ValueError)
    assert isinstance(second, Unavailable)
    assert answers == []


@asynchronous
async def test_a_process_that_hangs_is_given_up(entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    monkeypatch.setattr(process_module, "HUNG_S", 0.2)
    os.kill(process.pid, signal.SIGSTOP)
    (first, second), answers = await two_batches(process)
    assert isinstance(first, Unavailable)
    assert "no answer within 0.2 s" in first.message
    assert isinstance(second, Unavailable)
    assert answers == []


@asynchronous
async def test_a_process_not_ready_in_time_is_gone(entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    monkeypatch.setattr(process_module, "HUNG_S", 0.001)
    with pytest.raises(Unavailable, match="not ready"):
        await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    assert set(psutil.Process().children()) <= before


@asynchronous
async def test_a_message_too_large_is_not_read(entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    monkeypatch.setattr(process_module, "MOST_BYTES", 10)
    (first, second), answers = await two_batches(process)
    assert isinstance(first, InternalError)
    assert isinstance(second, Unavailable | InternalError)
    assert answers == []


def test_a_message_that_breaks_off_is_no_message() -> None:
    whole = packed(TextWork("fly to rome"))
    assert [work.text for work in messages(io.BytesIO(whole * 2 + whole[:-1]), TextWork)] == ["fly to rome"] * 2


@asynchronous
async def test_a_worker_process_has_no_keys_and_lower_priority(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLROOM_KEYS", "me:a-secret-of-some-length")
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert psutil.Process(process.pid).nice() == min(19, os.nice(0) + 5)
    await process.kill()
    assert b"PYTHONPATH=" in environment
    assert b"STILLROOM_KEYS" not in environment


@asynchronous
async def test_time_computing_is_not_counted_as_waiting(entities_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    write = process._write

    def held_up(message: object) -> None:
        write(message)
        time.sleep(0.2)  # the system runs something else; the process has long answered

    monkeypatch.setattr(process, "_write", held_up)
    context = RequestContext()
    context.queued_s = began_s = time.perf_counter()
    await process.run([WorkRequest(TextWork("fly to rome"), context)], lambda place, answer: None)
    took_s = time.perf_counter() - began_s
    await process.end()
    assert sum(context.stage_seconds().values()) <= took_s  # its parts follow one another, so they fit the whole


@asynchronous
async def test_the_next_batch_can_be_given_before_the_callers_of_the_last_go_on(entities_bundle: Path) -> None:
    """Otherwise the process would wait until all of them have written their answers."""
    order: list[str] = []
    process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
    loop = asyncio.get_running_loop()
    callers = [loop.create_future() for _ in range(3)]
    for caller in callers:
        caller.add_done_callback(lambda _: order.append("caller"))
    asked = [WorkRequest(TextWork("fly to rome"), RequestContext()) for _ in callers]
    running = process.run(asked, lambda place, answer: callers[place].set_result(answer))
    running.add_done_callback(lambda _: order.append("slot"))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(running, *callers)
    await asyncio.sleep(0)
    await process.end()
    assert order == ["slot", "caller", "caller", "caller"]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_dies_idle_is_known_at_once(
    entities_bundle: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        process = await ModelProcess.started(opening(entities_bundle), lambda parts: None)
        told: list[bool] = []
        process.on_lost = lambda: told.append(process.lost.done())
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await process.lost
        assert told == [True]
        with pytest.raises(Unavailable, match="died; try again"):
            await process.run([WorkRequest(TextWork("rome"), RequestContext())], lambda place, answer: None)
        await process.kill()
        assert told == [True]

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())


def test_a_worker_process_ends_soon_after_its_input_whatever_it_does() -> None:
    program = (
        "import sys, threading, time; from serve.workers.worker import BatchReader, end_late\n"
        "threading.Thread(target=BatchReader().read, args=(sys.stdin.buffer, end_late), daemon=True).start()\n"
        "print('busy', flush=True); time.sleep(3600)\n"
    )
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with started([sys.executable, "-c", program], **how) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"busy\n"
        process.stdin.close()
        process.wait(PATIENCE_S)
