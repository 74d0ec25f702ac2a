"""What a model's process is asked and what it answers: the messages that travel between it and the server."""

import struct

import msgspec

from serve.text.answers import AnswerOptions

# Tokens that are tokenised in the time in which a small encoder computes one: 2.6 microseconds of 40 to 60.
TOKENISED_FOR_ONE = 16

LENGTH = struct.Struct("<I")  # stands before each message: its bytes


class TextWork(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """A text (with its pair) to be answered."""

    text: str
    pair: str | None = None
    options: AnswerOptions = AnswerOptions()


class TokenWork(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """A row of token ids whose logits are wanted."""

    input_ids: list[int]
    attention_mask: list[int]
    token_type_ids: list[int]


Work = TextWork | TokenWork


class Logits(msgspec.Struct, frozen=True, array_like=True):
    """The logits of one `TokenWork`: float32 in C order, little-endian."""

    shape: list[int]
    data: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why one piece of work has no answer: a `StillroomError` as it travels. `ours`: a fault of this program."""

    message: str
    field: str | None
    ours: bool


class Parts(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of one run of the model went, and how much of it was padding."""

    texts: int
    tokens: int
    padded_tokens: int
    tokenise_s: float
    run_s: float
    decode_s: float


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answers to some of the works asked, by their places in what was asked, and the runs of the model that gave them.

    An answer to a text is its JSON, so that the server need not read it to pass it on.
    """

    answers: list[tuple[int, bytes]] = []
    logits: list[tuple[int, Logits]] = []
    failures: list[tuple[int, Failure]] = []
    parts: list[Parts] = []
    last: bool = False


class Opening(msgspec.Struct, frozen=True):
    """The first message to a model's process: what to open."""

    bundle: str
    digest: str
    variant: str | None
    threads: int
    whole: bool = False
    """Whether a batch is answered by one message once all of it is done, and not as each run of the model ends."""


class Opened(msgspec.Struct, frozen=True):
    """Its first message back, once it has run its longest batch; or why it cannot serve."""

    error: str | None = None


def estimated_tokens(work: Work, cut_to: int | None = None) -> int:
    """About how many tokens of computing a piece of work is: exact for token ids, about four bytes to a token for text.

    Of a text that is cut to `cut_to` tokens the rest is only tokenised.
    The queue is counted in these, so that nobody waits for the tokenizer there; the model's process counts exactly.
    """
    if isinstance(work, TokenWork):
        return len(work.input_ids)
    tokens = 2 + _bytes(work.text) // 4 + (0 if work.pair is None else 1 + _bytes(work.pair) // 4)
    return tokens if cut_to is None or tokens <= cut_to else cut_to + (tokens - cut_to) // TOKENISED_FOR_ONE


def packed(message: object) -> bytes:
    """A message as it travels."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))
