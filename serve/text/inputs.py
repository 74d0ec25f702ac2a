"""Checks of the texts that callers give: one or many, with pairs or without, valid Unicode."""

from serve.errors import BadInput


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
