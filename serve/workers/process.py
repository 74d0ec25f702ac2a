"""A worker process, as seen by the server: start it, send batches, receive answers, end it."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

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

Answered = bytes | Logits


class Asked(NamedTuple):
    """A work item and the context of its request."""

    work: Work
    context: RequestContext


class ModelProcess:
    """One `serve.workers.worker` process; `run` is a slot's function, see `serve.workers.batcher`."""

    def __init__(self, process: asyncio.subprocess.Process, observe: Callable[[Parts], None], *, patient: bool) -> None:
        self.process = process
        self._observe = observe
        self._patient = patient
        self._receiving = asyncio.Lock()  # first come, first served
        self._lost = False  # whether an answer was not read to its end
        self._sent = 0  # batches
        self._decoder = msgspec.msgpack.Decoder(Reply)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._to, self._from = process.stdin, process.stdout
        self._forwarding = asyncio.get_running_loop().create_task(_forward_stderr(process.pid, process.stderr))

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
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # otherwise a file serve.py in the current folder would be imported instead of ours
            "-m",
            "serve.workers.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **{name: value for name, value in os.environ.items() if name not in SECRETS},
                "PYTHONPATH": search_path,
                # By default the tokenizer has a thread for every core, and takes the cores of the other processes.
                "TOKENIZERS_PARALLELISM": "true" if opening.threads > 1 else "false",
                "RAYON_NUM_THREADS": str(opening.threads),
            },
        )
        made = cls(process, observe, patient=opening.whole)
        try:
            made._to.write(packed(opening))
            async with asyncio.timeout(HUNG_S):
                said = msgspec.msgpack.decode(await made._message(), type=Opened)
        except TimeoutError as error:
            await made.kill()
            raise Unavailable(f"the worker process was not ready within {HUNG_S:g} s") from error
        except BaseException:
            await made.kill()
            raise
        if said.error is not None:
            await made.end()
            raise BundleError(said.error)
        return made

    async def run(self, asked: list[Asked], done: Done[Answered]) -> None:
        """Sends a batch and receives its answers, with their times in each item's context. Unavailable if the process dies.

        Batches may be sent while earlier ones are computed; they are answered in order. Items whose request is abandoned are dropped.
        """
        sent_s, waits = time.perf_counter(), self._receiving.locked()
        number = self._sent
        self.send([each.work for each in asked])
        run, places = object(), dict[int, list[int]]()
        for place, each in enumerate(asked):
            of_request = places.setdefault(id(each.context), [])
            of_request.append(place)
            each.context.when_abandoned[run] = partial(self._drop, number, of_request)
        try:
            await self._answers_to(asked, done, sent_s, waits=waits)
        finally:
            for each in asked:
                each.context.when_abandoned.pop(run, None)

    async def _answers_to(self, asked: list[Asked], done: Done[Answered], sent_s: float, *, waits: bool) -> None:
        """Receives the answers to a batch once those before it have come."""
        async with self._receiving:
            # An idle worker starts when the batch is sent, even if this coroutine resumes later; that time is not waiting.
            begun_s = time.perf_counter() if waits else sent_s
            if self._lost:  # the next message may be the rest of an earlier batch
                raise Unavailable(DIED)
            try:
                async with asyncio.timeout(None if self._patient else HUNG_S):
                    await self.receive(done, [each.context for each in asked], begun_s)
            except TimeoutError as error:
                self._lost = True
                raise Unavailable(f"the worker process gave no answer within {HUNG_S:g} s; try again") from error
            except BaseException:
                self._lost = True
                raise

    def send(self, works: list[Work]) -> None:
        """Sends a batch. If earlier ones are being computed, it starts when they are done.

        Unavailable if the process is known to have died.
        """
        try:
            self._to.write(packed(works))
        except (
            RuntimeError
        ) as error:  # uvloop raises it for a closed pipe; asyncio's own loop does not, and no answer comes
            raise Unavailable(DIED) from error
        self._sent += 1

    def _drop(self, batch: int, places: list[int]) -> None:
        """Tells the process that nobody waits for these items any longer."""
        with suppress(RuntimeError):  # of a pipe that is closed; see `send`
            self._to.write(packed(Dropped(batch, places)))

    async def receive(
        self, done: Done[Answered], contexts: Sequence[RequestContext] = (), begun_s: float | None = None
    ) -> None:
        """Passes the answers to the oldest unanswered batch to `done`. Unavailable if the process dies.

        If `contexts` has one for each work item, each gets the times of the batch from `begun_s` (None: now) until its answer.
        """
        stages = Stages(time.perf_counter() if begun_s is None else begun_s, 0.0, 0.0, 0.0)
        while True:
            reply = self._decoder.decode(await self._message())
            for parts in reply.parts:
                self._observe(parts)
                stages = stages.after(parts.tokenise_s, parts.run_s, parts.decode_s)
            answers: list[tuple[int, Answered]] = [*reply.answers, *reply.logits]
            for place, answer in answers:
                if contexts:
                    contexts[place].stages = stages
                done(place, answer)
            for place, failure in reply.failures:
                done(place, (InternalError if failure.ours else BadInput)(failure.message, field=failure.field))
            if reply.last:
                return

    async def end(self) -> None:
        """Closes the input of the process, so that it ends; kills it if it does not."""
        self._to.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), LEAVE_S)
                await asyncio.wait([self._forwarding], timeout=LAST_OUTPUT_S)
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
        if self._from.at_eof():
            # It has ended, or is about to. Sending a signal now would collect its exit status before the thread of asyncio that waits
            # for it; that thread would then report a made-up status.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), LAST_OUTPUT_S)
        with suppress(ProcessLookupError):
            self.process.kill()
        pipes = self.process._transport  # type: ignore[attr-defined]  # asyncio has no public name for it
        # asyncio's own loop, unlike uvloop, also waits for the end of each pipe, and does not see it for a pipe that is no longer read.
        if answers := pipes.get_pipe_transport(1):
            answers.close()
        await self.process.wait()
        await asyncio.wait([self._forwarding], timeout=LAST_OUTPUT_S)
        pipes.close()
        await asyncio.sleep(0)  # the pipes close in the next iteration of the loop

    async def _message(self) -> bytes:
        try:
            size = LENGTH.unpack(await self._from.readexactly(LENGTH.size))[0]
            if size > MOST_BYTES:
                raise InternalError(
                    f"a worker process announced a message of {size:,} bytes; at most {MOST_BYTES:,} are read"
                )
            return await self._from.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Unavailable(DIED) from error


async def _forward_stderr(process_id: int, said: asyncio.StreamReader) -> None:
    """Logs what a process writes to stderr. The lines get the log's format, and a slow reader of the log does not block the process."""
    while words := await said.read(65536):
        log.warning("stderr of worker process %d: %s", process_id, words.decode(errors="replace").rstrip())
