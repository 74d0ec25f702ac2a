"""Markers around the two parts of a text whose relation a model is asked for.

They are special tokens (Baldini Soares et al. 2019, "Matching the Blanks", section 3.2).
"""

from tokenizers import Tokenizer

MARKERS = ("[E1]", "[/E1]", "[E2]", "[/E2]")  # two around the head and two around the tail, whichever comes first


def marked(text: str, head: tuple[int, int], tail: tuple[int, int]) -> str:
    """`text` with markers around its parts `head` and `tail`: (start, end) in code points, end exclusive, without overlap.

    >>> marked("Rome is in Italy", (0, 4), (11, 16))
    '[E1] Rome [/E1] is in [E2] Italy [/E2]'
    """
    places = sorted([(*head, *MARKERS[:2]), (*tail, *MARKERS[2:])])
    parts: list[str] = []
    at = 0
    for start, end, opening, closing in places:
        parts += [text[at:start], f"{opening} {text[start:end]} {closing}"]
        at = end
    return "".join([*parts, text[at:]])


def has_markers(text: str) -> bool:
    """Whether `text` has all four markers."""
    return all(marker in text for marker in MARKERS)


def knows_markers(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has the markers as tokens. Models that were trained on marked texts have such tokenizers."""
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)
