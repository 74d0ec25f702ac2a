"""Warnings about labels that may be mistakes: spelt in two ways, or rare."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from compress.data.examples import SPLITS, Example, Splits, Task, classes_of

RARE = 3  # a label with fewer examples in train is rare, if most examples have a label with `MANY`
MANY = 10 * RARE
ALIKE = 0.75  # difflib's similarity, 0 to 1, from which a rare label may be a misspelt frequent one
SHOWN = 3


def label_warnings(splits: Splits, task: Task) -> list[str]:
    """One sentence for each kind of warning about the labels of `splits`; none about numbers and questions."""
    if task in ("text-regression", "question-answering"):
        return []
    counts = {split: _counts(getattr(splits, split), task) for split in SPLITS}
    words = [example for example in splits.train if example.blanks_in_words is not None]
    found = outside_warning("in train", "the data") if words and all(map(_all_in_entities, words)) else []
    found += [*_alike(sum(counts.values(), Counter())), *_rare(counts["train"])]
    for split in ("validation", "test"):
        if unseen := sorted(counts[split].keys() - counts["train"].keys()):
            found.append(f"{split} has labels that train lacks: {some(unseen)}. Every model gets them wrong.")
    if unscored := sorted(counts["train"].keys() - counts["validation"].keys() - counts["test"].keys()):
        found.append(f"Only train has the labels {some(unscored)}: no score measures how well they are learned.")
    return found


def outside_warning(where: str, named: str) -> list[str]:
    """A warning that no tag `where` is `O`, in a list; `named` is what to correct."""
    return [
        f"No tag {where} is O, so every word is in an entity. If a tag means outside, write O in its place in {named}."
    ]


def _all_in_entities(example: Example) -> bool:
    outside, at = "", 0
    for entity in example.entities or ():
        outside, at = outside + example.text[at : entity.start], entity.end
    return not (outside + example.text[at:]).strip()


def some(names: Sequence[str]) -> str:
    """The first `SHOWN` of `names`, and the number of others."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _counts(examples: Iterable[Example], task: Task) -> Counter[str]:
    """How often each label occurs in `examples`."""
    if task == "token-classification":
        return Counter(entity.label for example in examples for entity in example.entities or ())
    return Counter(name for example in examples for name in classes_of(example))


def _alike(counts: Counter[str]) -> list[str]:
    """A warning about labels that differ only in capitals, blanks, dashes and underscores."""
    alike: dict[str, list[str]] = {}
    for label in sorted(counts):
        alike.setdefault(re.sub(r"[\s_-]+", " ", label).casefold(), []).append(label)
    groups = [" and ".join(f"{label} ({counts[label]})" for label in labels) for labels in alike.values() if labels[1:]]
    if not groups:
        return []
    listed = "; ".join(groups[:SHOWN]) + (f"; and {len(groups) - SHOWN} more" if len(groups) > SHOWN else "")
    return [f"Some labels differ only in capitals, blanks or dashes, and are learned as different labels: {listed}."]


def _rare(train: Counter[str]) -> list[str]:
    """A warning about labels that are rare in train while others are frequent, each with the label it may misspell."""
    frequent = [label for label in sorted(train) if train[label] >= MANY]
    if 2 * sum(train[label] for label in frequent) <= train.total():
        return []  # few examples of any label
    rare = []
    for label in sorted(label for label in train if train[label] < RARE):
        near = difflib.get_close_matches(label, frequent, 1, ALIKE)
        rare.append(f"{label} ({train[label]}{f'; {near[0]} misspelt?' if near else ''})")
    return [f"Train has fewer than {RARE} examples of some labels, too few to learn: {some(rare)}."] if rare else []
