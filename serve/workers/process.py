"""A worker process, as seen by the server: start it, send batches, receive answers, end it."""

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from serve.errors import BadInput, BundleError, InternalError, Unavailable
from serve.model.work_items import LENGTH, Dropped, Logits, Opened, Opening, Parts, Reply, Work, packed
from serve.observe.request_context import RequestContext, Stages
from serve.workers.batcher import Done

log = logging.getLogger("serve")

# Environment variables that are not passed to worker processes.
SECRETS = frozenset({"STILLROOM_KEYS", "STILLROOM_TLS_PASSWORD", "OTEL_EXPORTER_OTLP_HEADERS"})

DIED = "the worker process that computed this died; try again"

# The largest message accepted from a worker process: logits of a batch, with room to spare.
MOST_BYTES = 1 << 30
# Longest time for one batch, and for a start. A worker process that takes longer counts as hung; it is killed and replaced.
HUNG_S = 120.0
# How long a process whose input was closed may take to end before it is killed.
LEAVE_S = 5.0
# How long to wait for the last output of an ended process, and for its exit status.
LAST_OUTPUT_S = 1.0

WorkOutput = bytes | Logits


class WorkRequest(NamedTuple):
    """A work item, the context of its request, and its index there."""

    work: Work
    context: RequestContext
    place: int = 0


class _Batch:
    """A batch that a process was given and has not answered to the end."""

    __slots__ = ("answered", "done", "process", "requests", "stages")

    def __init__(
        self, process: "ModelProcess", requests: list[WorkRequest], done: Done[WorkOutput], begun_s: float
    ) -> None:
        self.process = process
        self.requests = requests
        self.done = done
        self.stages = Stages(begun_s, 0.0, 0.0, 0.0)
        self.answered: asyncio.Future[None] = process.loop.create_future()
        for each in requests:
            each.context.when_abandoned.add(self.drop)

    def drop(self, context: RequestContext) -> None:
        """Tells the process that nobody waits for the items of this request any longer."""
        places = [place for place, each in enumerate(self.requests) if each.context is context]
        self.process.drop(self, places)

    def end(self, error: Exception | None = None) -> None:
        """Ends the wait for the batch, with `error` if there is one."""
        for each in self.requests:
            each.context.when_abandoned.discard(self.drop)
        if self.answered.done():  # cancelled
            return
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)


class ModelProcess(asyncio.SubprocessProtocol):
    """One `serve.workers.worker` process; `run` is a slot's function, see `serve.workers.batcher`."""

    def __init__(self, observe: Callable[[Parts], None], *, patient: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = self.loop.create_future()
        """Done once the process has ended, with its status."""
        self._observe = observe
        self._patient = patient
        self._opened: asyncio.Future[Opened] = self.loop.create_future()
        self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._batches: deque[_Batch] = deque()
        """In order of arrival. The first is being computed."""
        self._sent = 0  # batches
        self._lost = False  # whether no more answers are read
        self.lost: asyncio.Future[None] = self.loop.create_future()
        """Done once no more answers are read."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called at that moment, before anything else can be given to the process."""
        self._silent = False  # whether its output has ended
        self._said_all: asyncio.Future[None] = self.loop.create_future()  # whether its stderr has ended
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._begun_s = 0.0  # when the first batch began
        self._looking: asyncio.TimerHandle | None = None

    @classmethod
    async def started(cls, opening: Opening, observe: Callable[[Parts], None]) -> "ModelProcess":
        """A process after its warm-up. BundleError with its message if it cannot open the bundle; Unavailable if it dies.

        OpenVINO has crashed on some processors, and compiles nothing where a process must not write code
        (`MemoryDenyWriteExecute` of systemd). If a process cannot start with it, onnxruntime runs the same file in another one.
        """
        try:
            return await cls._started(opening, observe)
        except (Unavailable, BundleError) as error:
            if opening.runtime != "openvino":
                raise
            log.error("OpenVINO cannot run %s here, and onnxruntime runs it instead: %s", opening.bundle, error)
            return await cls._started(msgspec.structs.replace(opening, runtime="onnxruntime"), observe)

    @classmethod
    async def _started(cls, opening: Opening, observe: Callable[[Parts], None]) -> "ModelProcess":
        root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        _, made = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(observe, patient=opening.whole),
            sys.executable,
            "-P",  # otherwise a file serve.py in the current folder would be imported instead of ours
            "-m",
            "serve.workers.worker",
            env={
                **{name: value for name, value in os.environ.items() if name not in SECRETS},
                "PYTHONPATH": search_path,
                # By default the tokenizer has a thread for every core, and takes the cores of the other processes.
                "TOKENIZERS_PARALLELISM": "true" if opening.threads > 1 else "false",
                "RAYON_NUM_THREADS": str(opening.threads),
            },
            # A signal to the group of the server's process is for that alone, which ends or keeps its worker processes.
            start_new_session=True,
        )
        try:
            made._write(opening)
            async with asyncio.timeout(HUNG_S):
                said = await made._opened
        except TimeoutError as error:
            await made.kill()
            raise Unavailable(f"the worker process was not ready within {HUNG_S:g} s") from error
        except Unavailable as error:
            await made.kill()
            status = made.exited.result()
            how = f"signal {-status}" if status and status < 0 else f"status {status}"
            raise Unavailable(f"the worker process died at its start ({how})") from error
        except BaseException:
            await made.kill()
            raise
        if said.error is not None:
            await made.end()
            raise BundleError(said.error)
        return made

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._transport.get_pid()

    def run(self, requests: list[WorkRequest], done: Done[WorkOutput]) -> asyncio.Future[None]:
        """Sends a batch. Its answers go to `done`, with their times in each item's context; the future is done after the last.

        The future raises Unavailable if the process dies or hangs. Batches may be sent while earlier ones are computed; they are
        answered in order. Items whose request is abandoned are dropped.
        """
        begun_s = time.perf_counter()
        message = packed([each.work for each in requests])
        batch = _Batch(self, requests, done, begun_s)
        if not self._lost:
            try:
                self._to.write(message)
            except RuntimeError:  # uvloop raises it for a closed pipe; asyncio's own loop does not, and no answer comes
                self._lose(Unavailable(DIED))
        if self._lost:
            batch.end(Unavailable(DIED))
            return batch.answered
        self._sent += 1
        self._batches.append(batch)
        if len(self._batches) == 1:
            self._begin(batch.stages.begun_s)
        return batch.answered

    def drop(self, batch: _Batch, places: list[int]) -> None:
        """Tells the process that nobody waits for the items at `places` of `batch` any longer."""
        with suppress(RuntimeError, ValueError):  # of a pipe that is closed, and of a batch that has ended
            self._write(Dropped(self._sent - len(self._batches) + self._batches.index(batch), places))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process has started."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._to = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def pipe_data_received(self, descriptor: int, data: bytes) -> None:
        """Takes the messages of the process; what it says on stderr is logged.

        So the lines get the log's format, and a slow reader of the log does not block the process.
        """
        if descriptor == 1 and self._lost:
            return
        if descriptor != 1:
            log.warning("stderr of worker process %d: %s", self.pid, data.decode(errors="replace").rstrip())
            return
        received = self._received
        received += data
        while len(received) >= LENGTH.size and not self._lost:
            end = LENGTH.size + LENGTH.unpack_from(received)[0]
            try:
                if end > MOST_BYTES:
                    raise InternalError(
                        f"a worker process announced a message of {end:,} bytes; at most {MOST_BYTES:,} are read"
                    )
                if len(received) < end:
                    return
                message = bytes(memoryview(received)[LENGTH.size : end])
                del received[:end]
                self._heard(message)
            except Exception as error:
                self._lose(error)

    def pipe_connection_lost(self, descriptor: int, error: Exception | None) -> None:
        """The process has closed a pipe, as it does when it dies."""
        if descriptor == 1:
            self._silent = True
            self._lose(Unavailable(DIED))
        elif descriptor == 2 and not self._said_all.done():
            self._said_all.set_result(None)

    def process_exited(self) -> None:
        """The process has ended."""
        if not self.exited.done():
            self.exited.set_result(self._transport.get_returncode())

    def _heard(self, message: bytes) -> None:
        """Passes on what the process said: that it is open, or answers to its first batch."""
        if not self._opened.done():
            self._opened.set_result(msgspec.msgpack.decode(message, type=Opened))
            return
        reply = self._decoder.decode(message)
        if not self._batches:
            raise InternalError("a worker process answered without being asked")
        batch = self._batches[0]
        for parts in reply.parts:
            self._observe(parts)
            batch.stages = batch.stages.after(parts.tokenise_s, parts.run_s, parts.decode_s)
        if reply.last:
            # Before the answers are passed on: their callers wake after the next batch is given, so that the process does not wait for
            # all of them to be written.
            self._batches.popleft()
            batch.end()
            if self._batches:
                now_s = time.perf_counter()
                self._batches[0].stages = Stages(now_s, 0.0, 0.0, 0.0)
                self._begin(now_s)
        answers: list[tuple[int, WorkOutput]] = [*reply.answers, *reply.logits]
        for place, answer in answers:
            batch.requests[place].context.stages = batch.stages
            batch.done(place, answer)
        for place, failure in reply.failures:
            if failure.ours:
                batch.requests[place].context.failed_texts.append(batch.requests[place].place)
            batch.done(place, (InternalError if failure.ours else BadInput)(failure.message, field=failure.field))

    def _lose(self, error: Exception) -> None:
        """Reads no more answers: the first batch ends with `error`, the others with Unavailable."""
        self._lost = True
        self._received.clear()
        if not self.lost.done():
            self.lost.set_result(None)
            self.on_lost()
        if not self._batches and not isinstance(error, Unavailable):
            log.error("a worker process is replaced: %s", error)
        if not self._opened.done():
            self._opened.set_exception(error)
        while self._batches:
            self._batches.popleft().end(error)
            error = Unavailable(DIED)

    def _begin(self, now_s: float) -> None:
        """Notes that the first batch begins. One timer for all batches sees if the process hangs."""
        self._begun_s = now_s
        if self._looking is None and not self._patient:
            self._looking = self.loop.call_later(HUNG_S, self._look)

    def _look(self) -> None:
        """Gives up a process that has computed one batch for too long."""
        self._looking = None
        if not self._batches:
            return
        left_s = self._begun_s + HUNG_S - time.perf_counter()
        if left_s <= 0:
            self._lose(Unavailable(f"the worker process gave no answer within {HUNG_S:g} s; try again"))
        else:
            self._looking = self.loop.call_later(left_s, self._look)

    def _write(self, message: object) -> None:
        self._to.write(packed(message))

    async def end(self) -> None:
        """Closes the input of the process, so that it ends; kills it if it does not."""
        self._to.close()
        try:
            await asyncio.wait([self.exited], timeout=LEAVE_S)
            if self.exited.done():
                await asyncio.wait([self._said_all], timeout=LAST_OUTPUT_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kills the process. If the caller is cancelled meanwhile, CancelledError is raised once the process is gone."""
        killing = asyncio.ensure_future(self._kill())
        try:
            await asyncio.shield(killing)
        except asyncio.CancelledError:
            await asyncio.wait([killing])
            raise

    async def _kill(self) -> None:
        if self._silent:
            # It has ended, or is about to. Sending a signal now would collect its exit status before the thread of asyncio that waits
            # for it; that thread would then report a made-up status.
            await asyncio.wait([self.exited], timeout=LAST_OUTPUT_S)
        with suppress(ProcessLookupError):
            self._transport.kill()
        await asyncio.wait([self.exited])
        await asyncio.wait([self._said_all], timeout=LAST_OUTPUT_S)
        if self._looking is not None:
            self._looking.cancel()
        self._transport.close()
        await asyncio.sleep(0)  # the pipes close in the next iteration of the loop
