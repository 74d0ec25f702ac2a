"""The texts that callers give: one or many, with pairs or without; their checks, limits and estimated tokens."""

from collections.abc import Sequence

import msgspec

from serve.errors import BadInput, TooLarge
from serve.settings import Limits
from serve.text.answers import AnswerOptions

# Tokens that are tokenised while a small encoder computes one: tokenising takes 2.6 us a token, computing 40 to 60 us.
TOKENISED_FOR_ONE = 16


class TextWork(msgspec.Struct, frozen=True):
    """A text, perhaps with its pair, to be answered."""

    text: str
    pair: str | None = None
    options: AnswerOptions = AnswerOptions()


class TokenWork(msgspec.Struct, frozen=True):
    """A row of token ids whose logits are wanted."""

    input_ids: list[int]
    attention_mask: list[int]
    token_type_ids: list[int]


Work = TextWork | TokenWork


def as_texts(text: object, field: str = "text") -> list[str]:
    """One text or several, as a list. BadInput, which names `field`, for anything else and for an empty list."""
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list):
        raise BadInput(f"{field} is {_kind(text)}; give a string or a list of strings", field=field)
    if not texts:
        raise BadInput(f"{field} is an empty list; give at least one text", field=field)
    for index, each in enumerate(texts):
        if not isinstance(each, str):
            raise BadInput(f"{field}[{index}] is {_kind(each)}; give a string", field=f"{field}[{index}]")
    return texts


def _kind(given: object) -> str:
    name = type(given).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def pairs_of(text: object, text_pair: str | list[str] | None) -> list[str] | None:
    """The second texts as a list; None without them. BadInput unless there are as many as first texts."""
    if text_pair is None:
        return None
    if isinstance(text, str) != isinstance(text_pair, str) or len(as_texts(text)) != len(as_texts(text_pair)):
        raise BadInput("text_pair: give a string for a string, or a list as long as text", field="text_pair")
    return as_texts(text_pair)


def second_texts(pairs: list[str] | None, count: int, *, contexts: bool = False) -> Sequence[str | None]:
    """The second text of each of `count` texts. An empty one is none, as in training; but not of `contexts`, which may be empty."""
    if pairs is None:
        return [None] * count
    return pairs if contexts else [pair or None for pair in pairs]


def text_works(
    text: str | list[str],
    text_pair: str | list[str] | None,
    options: AnswerOptions,
    limits: Limits,
    field: str = "text",
) -> list[TextWork]:
    """Each text, with its pair if there are pairs. BadInput as of `pairs_of`; TooLarge as of `check_limits`; `field` is that of `text`."""
    texts, pairs = as_texts(text, field), pairs_of(text, text_pair)
    check_limits(texts, field, limits)
    check_limits(pairs or [], "text_pair", limits)
    return [TextWork(*each, options) for each in zip(texts, second_texts(pairs, len(texts)), strict=True)]


def require_unicode(text: str, field: str, index: int, count: int) -> None:
    """BadInput for a text with half a surrogate pair. It is text `index` of `count` texts in `field`."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = field if count == 1 else f"{field}[{index}]"
        raise BadInput(
            f"{name} has half a surrogate pair at code point {error.start}; send whole characters",
            field=name,
        ) from error


def check_limits(texts: list[str], field: str, limits: Limits) -> None:
    """TooLarge if there are too many texts, or one is too long."""
    if len(texts) > limits.texts:
        raise TooLarge(f"{field} has {len(texts):,} texts; this server takes {limits.texts:,} at once", field=field)
    for index, text in enumerate(texts):
        if len(text) > limits.text_characters:
            name = field if len(texts) == 1 else f"{field}[{index}]"
            raise TooLarge(
                f"{name} has {len(text):,} characters; this server takes {limits.text_characters:,} in one text: split it",
                field=name,
            )


def estimated_tokens(work: TextWork, cut_to: int | None = None) -> int:
    """The cost of a text in computed tokens: one for about four bytes.

    If it is cut to `cut_to` tokens, the rest costs only its tokenising. The queue is counted in these estimates, so that it does not
    wait for the tokenizer; the model counts exactly.
    """
    tokens = 2 + _bytes(work.text) // 4 + (0 if work.pair is None else 1 + _bytes(work.pair) // 4)
    return tokens if cut_to is None or tokens <= cut_to else cut_to + (tokens - cut_to) // TOKENISED_FOR_ONE


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))
