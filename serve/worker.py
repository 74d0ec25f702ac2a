"""A model's process: `python -m serve.worker`, spoken to over its standard input and output.

One message is four bytes of length, little-endian, then MessagePack, see `serve.work`. The process opens its bundle, runs the
longest batch it may be asked for, and answers batches until its input ends. It ends with whoever started it: the input of
an orphan ends too.
"""

import os
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO, TypeVar

import msgspec

from serve.errors import BundleError, StillroomError
from serve.pipeline import Pipeline
from serve.work import LENGTH, Failure, Logits, Opened, Opening, Reply, Work, packed

Message = TypeVar("Message")


def main() -> None:
    """Open what the first message names, then answer until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server that owns it drains first, and closes its input
        signal.signal(number, signal.SIG_IGN)
    asked = sys.stdin.buffer
    said = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not stand between the messages
    opening = next(messages(asked, Opening))
    try:
        pipeline = opened(opening)
    except StillroomError as error:
        write(said, Opened(error.message))
        return
    write(said, Opened())
    for works in messages(asked, list[Work]):
        if opening.whole:
            write(said, together(replies(pipeline, works)))
            continue
        for reply in replies(pipeline, works):
            write(said, reply)


def opened(opening: Opening) -> Pipeline:
    """The pipeline of the bundle that the server knows, warm. BundleError when another lies there by now."""
    pipeline = Pipeline(opening.bundle, opening.variant, opening.threads)
    if pipeline.manifest.digest != opening.digest:
        raise BundleError(
            f"the bundle {opening.bundle} was changed while it was served: its digest is {pipeline.manifest.digest[:12]}..., "
            f"not {opening.digest[:12]}...; reload to serve the new one, or put the old one back"
        )
    pipeline.warm_up()
    return pipeline


def replies(pipeline: Pipeline, works: list[Work]) -> Iterator[Reply]:
    """The answers to `works`, as soon as each batch of the model is done."""
    encoder = msgspec.json.Encoder()
    left = len(works)
    for done, parts in pipeline.answered(works):
        left -= len(done)
        reply = Reply([], [], [], parts, last=left == 0)
        for place, answer in done:
            if isinstance(answer, StillroomError):
                ours = answer.fault == "ours"
                reply.failures.append((place, Failure(answer.message, answer.field, ours)))
            elif isinstance(answer, Logits):
                reply.logits.append((place, answer))
            else:
                reply.answers.append((place, encoder.encode(answer)))
        yield reply


def together(parts: Iterator[Reply]) -> Reply:
    """All of them as one, the last: fewer messages, where nobody waits for the first answer."""
    whole = Reply([], [], [], last=True)
    for part in parts:
        whole.answers.extend(part.answers)
        whole.logits.extend(part.logits)
        whole.failures.extend(part.failures)
    return whole


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
