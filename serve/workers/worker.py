"""A worker process of a model: `python -m serve.workers.worker`. Messages go over its standard input and output.

A message is four bytes of length, little-endian, then MessagePack, see `serve.model.work_items`. The process opens its bundle, runs
the model for warm-up, and answers batches until its input ends. Its input also ends when the process that started it ends. A thread
reads, so that work which nobody waits for any longer is dropped between two runs of the model.
"""

import itertools
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from serve.errors import BundleError, StillroomError
from serve.model.work_items import LENGTH, Dropped, Failure, Logits, Opened, Opening, Reply, Work, packed

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

# Runs that end within this time are reported in one message, since each message wakes the server and takes a core from the workers.
# With 3 ms the server used a tenth of a core more, and latency was not measurably lower.
REPLY_EVERY_S = 0.008
# Niceness of this process. The server needs a core for moments only, but at once. With equal priority, requests and answers wait
# unread for as long as a worker's time slice, and p99 under load is a fifth to a half higher.
NICE = 5

LATE_S = 2.0  # after the end of its input

# Batches that are read before their turn. A server gives two at most.
AHEAD = 4

Message = TypeVar("Message")


def main() -> None:
    """Opens the bundle that the first message names, then answers until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the server drains first, then closes this process's input
        if hasattr(signal, name):  # not each of them on Windows
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICE)
    incoming = os.fdopen(os.dup(0), "rb")  # a thread that waits for `sys.stdin` would break the exit of the interpreter
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not go between the messages
    from serve.model.pipeline import Pipeline  # only now, since libraries may print when they are loaded

    opening = next(messages(incoming, Opening))
    reader = BatchReader()
    threading.Thread(target=reader.read, args=(incoming, end_late), name="reader", daemon=True).start()
    try:
        # The process that started this one has chosen the runtime, and logged the notes.
        pipeline = Pipeline(
            opening.bundle,
            opening.variant,
            opening.threads,
            openvino=opening.runtime == "openvino",
            device=opening.device,
            log_notes=False,
        )
        if pipeline.manifest.digest != opening.digest:
            raise BundleError(
                f"the bundle {opening.bundle} was changed while it was served: its digest is {pipeline.manifest.digest[:12]}..., "
                f"not {opening.digest[:12]}...; send SIGHUP to serve the new bundle, or put the old one back"
            )
        pipeline.warm_up()
    except StillroomError as error:
        write(outgoing, Opened(error.message))
        return
    write(outgoing, Opened())
    for number in itertools.count():
        if (works := reader.batches.get()) is None:
            return
        every_s = math.inf if opening.whole else REPLY_EVERY_S
        for reply in replies(pipeline, works, every_s, partial(reader.unwanted, number)):
            write(outgoing, reply)


class BatchReader:
    """The batches that have been read and are to be answered, and what of them is unwanted by now."""

    def __init__(self) -> None:
        self.batches: queue.Queue[list[Work] | None] = queue.Queue(AHEAD)
        """None at the end of the input."""
        self._drop_messages: queue.SimpleQueue[Dropped] = queue.SimpleQueue()
        self._dropped: dict[int, list[int]] = {}  # places by batch; only `unwanted` uses it

    def read(self, incoming: BinaryIO, at_end: Callable[[], None] = lambda: None) -> None:
        """Reads messages until the input ends, then calls `at_end`."""
        try:
            for message in messages(incoming, list[Work] | Dropped):  # type: ignore[arg-type]  # a union is a type for msgspec
                if isinstance(message, Dropped):
                    self._drop_messages.put(message)
                else:
                    self.batches.put(message)
        finally:  # after a message that cannot be read too, so that the process ends and is replaced
            at_end()
            self.batches.put(None)

    def unwanted(self, batch: int) -> list[int]:
        """The places in `batch` that were dropped since the last call. What was dropped of earlier batches came too late."""
        while not self._drop_messages.empty():
            dropped = self._drop_messages.get()
            if dropped.batch >= batch:
                self._dropped.setdefault(dropped.batch, []).extend(dropped.places)
        return self._dropped.pop(batch, [])


def end_late() -> None:
    """Ends this process soon, also if its model is being opened or runs for long: its input has ended, and nobody waits for it."""

    def end() -> None:
        time.sleep(LATE_S)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def replies(
    pipeline: "Pipeline", works: list[Work], every_s: float, unwanted: Callable[[], Iterable[int]] = tuple
) -> Iterator[Reply]:
    """Messages with the answers to `works`, one for the runs of about each `every_s` seconds; `unwanted` as in `Pipeline.answered`."""
    encoder = msgspec.json.Encoder()
    left, reply, sent_s = len(works), Reply([], [], [], []), time.perf_counter()
    for done, parts in pipeline.answered(works, unwanted=unwanted):
        left -= len(done)
        reply.parts.append(parts)
        for place, answer in done:
            if isinstance(answer, StillroomError):
                ours = answer.fault == "ours"
                reply.failures.append((place, Failure(answer.message, answer.field, ours)))
            elif isinstance(answer, Logits):
                reply.logits.append((place, answer))
            else:
                reply.answers.append((place, encoder.encode(answer)))
        if not left or time.perf_counter() - sent_s > every_s:
            yield msgspec.structs.replace(reply, last=not left)
            reply, sent_s = Reply([], [], [], []), time.perf_counter()
    if left:  # the others were dropped
        yield msgspec.structs.replace(reply, last=True)


def messages(stream: BinaryIO, kind: type[Message]) -> Iterator[Message]:
    """The messages of `stream`, until it ends."""
    decoder = msgspec.msgpack.Decoder(kind)
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        size = LENGTH.unpack(head)[0]
        body = stream.read(size)
        if len(body) < size:
            return
        yield decoder.decode(body)


def write(stream: BinaryIO, message: object) -> None:
    """Sends one message whole."""
    left = memoryview(packed(message))
    while left:
        left = left[stream.write(left) :]


if __name__ == "__main__":
    main()
