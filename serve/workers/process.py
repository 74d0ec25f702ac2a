"""A model's process as the server holds it: started, fed with batches, replaced when it dies."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from serve.errors import BadInput, BundleError, InternalError, Unavailable
from serve.model.work_items import LENGTH, Logits, Opened, Opening, Parts, Reply, Work, packed
from serve.observe.request_context import RequestContext, Stages
from serve.workers.batcher import Done

log = logging.getLogger("serve")

# What the process that computes need not know.
SECRETS = frozenset({"STILLROOM_KEYS", "STILLROOM_TLS_PASSWORD", "OTEL_EXPORTER_OTLP_HEADERS"})

DIED = "the process that computed this died; try again"

# The largest message that a process is believed to send: logits of a batch, with room to spare.
MOST_BYTES = 1 << 30
# A process of the server that takes longer for one batch hangs, and one that takes longer to start will not; both are ended and replaced.
HUNG_S = 120.0
# How long a process whose input was closed may take to end before it is killed.
LEAVE_S = 5.0
# How long the last of what an ended process wrote may take to be read, and its status to be heard of.
LAST_WORDS_S = 1.0

Answered = bytes | Logits


class Asked(NamedTuple):
    """A piece of work, and the request that it is for."""

    work: Work
    context: RequestContext


class ModelProcess:
    """One `serve.workers.worker` process; `run` is a slot's function, see `serve.workers.batcher`."""

    def __init__(self, process: asyncio.subprocess.Process, observe: Callable[[Parts], None]) -> None:
        self.process = process
        self._observe = observe
        self._receiving = asyncio.Lock()  # given to who waits longest
        self._lost = False  # whether an answer was not heard to its end
        self._decoder = msgspec.msgpack.Decoder(Reply)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._to, self._from = process.stdin, process.stdout
        self._forwarding = asyncio.get_running_loop().create_task(_forward_stderr(process.pid, process.stderr))

    @classmethod
    async def started(cls, opening: Opening, observe: Callable[[Parts], None]) -> "ModelProcess":
        """A process that has opened its bundle and is warm. BundleError with what it says when it cannot; Unavailable when it dies."""
        root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # or a file called serve.py where the server was started would be taken for ours
            "-m",
            "serve.workers.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **{name: value for name, value in os.environ.items() if name not in SECRETS},
                "PYTHONPATH": search_path,
                # The tokenizer's threads, one for every core, would take the cores of the other processes.
                "TOKENIZERS_PARALLELISM": "true" if opening.threads > 1 else "false",
                "RAYON_NUM_THREADS": str(opening.threads),
            },
        )
        made = cls(process, observe)
        try:
            made._to.write(packed(opening))
            async with asyncio.timeout(HUNG_S):
                said = msgspec.msgpack.decode(await made._message(), type=Opened)
        except TimeoutError as error:
            await made.kill()
            raise Unavailable(f"the process was not ready within {HUNG_S:g} s") from error
        except BaseException:
            await made.kill()
            raise
        if said.error is not None:
            await made.end()
            raise BundleError(said.error)
        return made

    async def run(self, asked: list[Asked], done: Done[Answered]) -> None:
        """Has a batch answered, and notes in each one's context what that took. Unavailable when the process dies of it.

        Batches may be given while earlier ones are computed; they are answered in their order.
        """
        sent_s, waits = time.perf_counter(), self._receiving.locked()
        self.send([each.work for each in asked])
        async with self._receiving:
            # An idle process begins at once, however late this one goes on: what it computes meanwhile is no waiting.
            begun_s = time.perf_counter() if waits else sent_s
            if self._lost:  # what comes now is the rest of somebody else's answer
                raise Unavailable(DIED)
            try:
                async with asyncio.timeout(HUNG_S):
                    await self.receive(done, [each.context for each in asked], begun_s)
            except TimeoutError as error:
                self._lost = True
                raise Unavailable(f"the process that computed this gave no answer within {HUNG_S:g} s") from error
            except BaseException:
                self._lost = True
                raise

    def send(self, works: list[Work]) -> None:
        """Sends a batch, which may be while earlier ones are computed: it is begun when they are done.

        Unavailable when the process is known to be gone.
        """
        try:
            self._to.write(packed(works))
        except (
            RuntimeError
        ) as error:  # uvloop's word on a closed pipe; asyncio's own writes into the void, and no answer comes
            raise Unavailable(DIED) from error

    async def receive(
        self, done: Done[Answered], contexts: Sequence[RequestContext] = (), begun_s: float | None = None
    ) -> None:
        """Hands on the answers to the first batch asked that was not heard yet. Unavailable when the process dies of it.

        In `contexts`, one for each work or none, is noted what the batch has taken from `begun_s`, or now, until their answer.
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
        """Lets the process leave by closing its input; kills one that does not."""
        self._to.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), LEAVE_S)
                await asyncio.wait([self._forwarding], timeout=LAST_WORDS_S)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Ends the process at once; whoever is cancelled meanwhile hears of it when the process is gone."""
        killing = asyncio.ensure_future(self._kill())
        try:
            await asyncio.shield(killing)
        except asyncio.CancelledError:
            await asyncio.wait([killing])
            raise

    async def _kill(self) -> None:
        if self._from.at_eof():
            # It has ended, or is about to. A signal now would take its status from the thread of asyncio that waits for it, which would
            # then report one that it makes up.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), LAST_WORDS_S)
        with suppress(ProcessLookupError):
            self.process.kill()
        pipes = self.process._transport  # type: ignore[attr-defined]  # asyncio has no public name for it
        # asyncio's own loop (uvloop does not) waits for the end of each pipe as well, and does not see that of one whose answers
        # nobody reads any more.
        if answers := pipes.get_pipe_transport(1):
            answers.close()
        await self.process.wait()
        await asyncio.wait([self._forwarding], timeout=LAST_WORDS_S)
        pipes.close()
        await asyncio.sleep(0)  # the pipes are told in the next turn of the loop

    async def _message(self) -> bytes:
        try:
            size = LENGTH.unpack(await self._from.readexactly(LENGTH.size))[0]
            if size > MOST_BYTES:
                raise InternalError(f"a model's process announced a message of {size:,} bytes")
            return await self._from.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Unavailable(DIED) from error


async def _forward_stderr(process_id: int, said: asyncio.StreamReader) -> None:
    """Puts what a process writes to its stderr into the log, so that it has the log's form, and no reader of it holds up the process."""
    while words := await said.read(65536):
        log.warning("process %d of a model says: %s", process_id, words.decode(errors="replace").rstrip())
