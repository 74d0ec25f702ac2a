"""Texts in which two parts are marked: how a model reads the question of what one of them is to the other.

Special tokens stand round both parts (Baldini Soares et al. 2019, "Matching the Blanks", section 3.2).
"""

from tokenizers import Tokenizer

MARKERS = ("[E1]", "[/E1]", "[E2]", "[/E2]")  # round the head, then round the tail, whichever stands first


def marked(text: str, head: tuple[int, int], tail: tuple[int, int]) -> str:
    """`text` with markers round its parts `head` and `tail`: (start, end) in code points, end exclusive, not overlapping.

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
    """Whether all four markers stand in `text`."""
    return all(marker in text for marker in MARKERS)


def knows_markers(tokenizer: Tokenizer) -> bool:
    """Whether the markers are tokens, which they are of a model that was trained on marked texts."""
    return all(tokenizer.token_to_id(marker) is not None for marker in MARKERS)
