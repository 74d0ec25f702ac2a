"""A model's process: `python -m serve.workers.worker`, spoken to over its standard input and output.

One message is four bytes of length, little-endian, then MessagePack, see `serve.model.work_items`. The process opens its bundle, runs the
longest batch it may be asked for, and answers batches until its input ends. It ends with whoever started it: the input of
an orphan ends too.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from serve.errors import BundleError, StillroomError
from serve.model.work_items import LENGTH, Failure, Logits, Opened, Opening, Reply, Work, packed

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

# Each message wakes the server, which takes a core from those that compute: runs that end within this are told in one. With 3 ms the server
# took a tenth more of a core, and nobody was answered sooner that could be measured.
TOLD_EVERY_S = 0.008
# How far behind the server this process stands where they share cores. The server needs one for moments only, but at once: with all
# its processes equal, requests and answers lie unread for as long as a model's turn lasts, and p99 under load is a fifth to a half higher.
NICE = 5

Message = TypeVar("Message")


def main() -> None:
    """Open what the first message names, then answer until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server that owns it drains first, and closes its input
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICE)
    asked = sys.stdin.buffer
    said = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not stand between the messages
    from serve.model.pipeline import Pipeline  # only now: what a library prints as it is loaded goes astray no more

    opening = next(messages(asked, Opening))
    try:
        # Whoever started the process has logged what is to be noted of the bundle.
        made = Pipeline(opening.bundle, opening.variant, opening.threads, log_notes=False)
        pipeline = opened(made, opening)
    except StillroomError as error:
        write(said, Opened(error.message))
        return
    write(said, Opened())
    for works in messages(asked, list[Work]):
        for reply in replies(pipeline, works, math.inf if opening.whole else TOLD_EVERY_S):
            write(said, reply)


def opened(pipeline: "Pipeline", opening: Opening) -> "Pipeline":
    """`pipeline`, warm, if its bundle is the one that the server knows. BundleError when another lies there by now."""
    if pipeline.manifest.digest != opening.digest:
        raise BundleError(
            f"the bundle {opening.bundle} was changed while it was served: its digest is {pipeline.manifest.digest[:12]}..., "
            f"not {opening.digest[:12]}...; reload to serve the new one, or put the old one back"
        )
    pipeline.warm_up()
    return pipeline


def replies(pipeline: "Pipeline", works: list[Work], every_s: float) -> Iterator[Reply]:
    """The answers to `works`: those of the runs that ended in about `every_s`, then those of the next."""
    encoder = msgspec.json.Encoder()
    left, reply, sent_s = len(works), Reply([], [], [], []), time.perf_counter()
    for done, parts in pipeline.answered(works):
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
