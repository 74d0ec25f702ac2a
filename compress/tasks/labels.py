"""What tasks share whose answers are labels: names, probabilities, and the checks of what a language model replied."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.data.encoded import IGNORED
from compress.data.teacher_labels import LEAST
from serve.bundle.manifest import label_faults

LEAST_TOLD = 1e-5  # smaller probabilities are left out: a reader shares what is left to 1 among them
DIGITS = 6
REPLY_CHARACTERS = 120  # of a reply that a message shows


def name_faults(labels: Sequence[str]) -> list[str]:
    """Why a head's `labels` cannot be read or served: one is there twice, or has no name."""
    faults = list(label_faults(labels))
    unnamed = [i for i, label in enumerate(labels) if not any(c.isprintable() and not c.isspace() for c in label)]
    return [*faults, *([f"the label of number {unnamed[0]} has an empty name"] if unnamed else [])]


def certain(targets: np.ndarray, labels: int) -> np.ndarray:
    """Logits (rows, labels) by which `targets` (rows,) are certain; a row without one leaves all labels alike."""
    logits = np.full((len(targets), labels), np.log(LEAST), dtype=np.float32)
    for row, target in enumerate(targets):
        logits[row, slice(None) if target == IGNORED else target] = 0.0
    return logits


def written(probabilities: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """The probabilities by label, the largest first; those below `LEAST_TOLD` are left out, but never the largest."""
    order = np.argsort(-probabilities, kind="stable")
    return {
        labels[i]: float(f"{probabilities[i]:.{DIGITS}g}")
        for rank, i in enumerate(order.tolist())
        if not rank or probabilities[i] >= LEAST_TOLD
    }


def known(label: object, labels: Sequence[str]) -> str:
    """`label` itself. ValueError if it is none of `labels`."""
    if label not in labels:
        raise ValueError(f"{label!r} is not one of the labels: {', '.join(labels)}")
    return str(label)


def entities_in(given: object, text: str, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The entities at their places: each is looked for behind the one before, and else anywhere where none is."""
    if not isinstance(given, list):
        raise ValueError("`entities` is not a list")
    found: list[dict[str, Any]] = []
    behind = 0
    for item in given:
        if not isinstance(item, dict) or not isinstance(item.get("text"), str) or not item["text"].strip():
            raise ValueError(f"{item!r} is not an object with `text` and `label`")
        label, words = known(item.get("label"), labels), item["text"].strip()
        start = _free(text, words, behind, found)
        if start < 0:
            start = _free(text, words, 0, found)
        if start < 0:
            raise ValueError(f"{words[:REPLY_CHARACTERS]!r} does not stand in the text; copy entities from it exactly")
        found.append({"start": start, "end": start + len(words), "label": label})
        behind = start + len(words)
    return sorted(found, key=lambda entity: entity["start"])


def _free(text: str, words: str, behind: int, taken: Sequence[dict[str, Any]]) -> int:
    """The first place of `words` from `behind` on that overlaps none of `taken`; -1 if there is none.

    Places where they are whole words come first: "Rome" is found in "Romeo" only if it stands nowhere else.
    """
    inside = -1
    start = text.find(words, behind)
    while start >= 0:
        end = start + len(words)
        if not any(start < each["end"] and each["start"] < end for each in taken):
            if not (_joined(text[start - 1 : start], words[0]) or _joined(words[-1], text[end : end + 1])):
                return start
            inside = start if inside < 0 else inside
        start = text.find(words, start + 1)
    return inside


def _joined(one: str, other: str) -> bool:
    """Whether both are characters of words."""
    return one.isalnum() and other.isalnum()
