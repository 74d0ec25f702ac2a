"""The messages between the server and a worker process."""

import struct

import msgspec

from serve.bundle.runtimes import Device, Runtime
from serve.text.inputs import TextWork

LENGTH = struct.Struct("<I")  # before each message: its length in bytes


class TokenWork(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """A row of token ids whose logits are wanted."""

    input_ids: list[int]
    attention_mask: list[int]
    token_type_ids: list[int]


Work = TextWork | TokenWork


class Dropped(msgspec.Struct, frozen=True):
    """Work items that nobody waits for any longer: their places in a batch, which has its number in order of arrival, from 0."""

    batch: int
    places: list[int]


class Logits(msgspec.Struct, frozen=True, array_like=True):
    """The logits of one `TokenWork`: float32 in C order, little-endian."""

    shape: list[int]
    data: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why one work item has no answer: a `StillroomError` as a message. `ours`: whether it is a bug in this program."""

    message: str
    field: str | None
    ours: bool


class Parts(msgspec.Struct, frozen=True, array_like=True):
    """Times of one run of the model, how many of its tokens were padding, and how sure it was of the answers that it completed."""

    texts: int
    tokens: int
    padded_tokens: int
    tokenise_s: float
    run_s: float
    decode_s: float
    scores: list[float] = []


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answers to some work items of a batch, each with its index in the batch, and the runs of the model that gave them.

    An answer to a text is JSON, so that the server passes it on without decoding it.
    """

    answers: list[tuple[int, bytes]] = []
    logits: list[tuple[int, Logits]] = []
    failures: list[tuple[int, Failure]] = []
    parts: list[Parts] = []
    last: bool = False


class Opening(msgspec.Struct, frozen=True):
    """The first message to a worker process: the bundle to open."""

    bundle: str
    digest: str
    variant: str | None
    threads: int
    runtime: Runtime = "onnxruntime"
    device: Device = "cpu"
    whole: bool = False
    """For one caller with all the time: a batch is answered by one message at its end, and has no time limit."""


class Opened(msgspec.Struct, frozen=True):
    """The worker's first message, once it has warmed up; or why it cannot serve."""

    error: str | None = None


def packed(message: object) -> bytes:
    """`message` as bytes: its length, then MessagePack."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
