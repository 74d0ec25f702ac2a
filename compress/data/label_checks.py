"""Warnings about labels that may be mistakes: spelt in two ways, several in one, two for one text, or rare."""

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from compress.data.examples import SPLITS, Example, Splits, classes_of
from compress.data.task import Task
from serve.wording import counted

RARE = 3  # a label with fewer examples in train is rare, if most examples have a label with `MANY`
MANY = 10 * RARE
ALIKE = 0.75  # difflib's similarity, 0 to 1, from which a rare label may be a misspelt frequent one
SHOWN = 3
# What lists look like that were written into one cell: ['a', 'b'], [a, b], [1 0 1], [], ('a', 'b').
LIST = re.compile(r"""\[(?:\s*|.*['",].*|[\d\s.]+)\]|[({].*['"].*[)}]""", re.DOTALL)
SEPARATOR = re.compile(r"[,;|]")
NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{0,15})?")
NO_VALUE = ("nan", "null", "<na>", "#n/a", "undefined", "\\n")
TAG = re.compile(r"([BIESLU])[-_](.+)", re.DOTALL | re.IGNORECASE)


def label_warnings(splits: Splits, task: Task) -> list[str]:
    """One sentence for each kind of warning about the labels of `splits`; none where answers are no labels."""
    if not task.names_labels:
        return one_answer_warnings(splits, task)
    counts = {split: task.label_counts(getattr(splits, split)) for split in SPLITS}
    words = [example for example in splits.train if example.blanks_in_words is not None]
    found = outside_warning("in train", "the data") if words and all(map(_all_in_entities, words)) else []
    found += task.label_warnings([example for split in SPLITS for example in getattr(splits, split)])
    found += _rare(counts["train"]) + one_answer_warnings(splits, task)
    for split in ("validation", "test"):
        if unseen := sorted(counts[split].keys() - counts["train"].keys()):
            found.append(f"{split} has labels that train lacks: {some(unseen)}. Every model gets them wrong.")
    if unscored := sorted(counts["train"].keys() - counts["validation"].keys() - counts["test"].keys()):
        found.append(f"Only train has the labels {some(unscored)}: no score measures how well they are learned.")
    return found


def one_answer_warnings(splits: Splits, task: Task) -> list[str]:
    """A warning for validation and for test if all texts there have one answer, and those of train several."""
    if task.has_contexts:
        return []
    answers = {split: {task.gold_of(example) for example in getattr(splits, split)} for split in SPLITS}
    found = []
    for split in ("validation", "test"):
        examples = getattr(splits, split)
        if len(examples) < 2 or len(answers[split]) > 1 or len(answers["train"]) < 2:
            continue
        if task.has_kinds:
            same = f"one label ({some(list(task.label_counts(examples)))})"
        else:
            same = "one answer, no entity" if task.names_labels else "one number"
        found.append(
            f"All texts of {split} have {same}: scores on them do not tell models apart. Put texts of every kind into {split}."
        )
    return found


def spelling_warnings(examples: Sequence[Example], counts: Counter[str], of_tags: Sequence[str] = ()) -> list[str]:
    """Warnings about the spelling of labels, of which there are `counts`, those `of_tags`, and about texts with two labels."""
    return [*_alike(counts), *_several_in_one(counts), *_missing(counts), *of_tags, *_contradictions(examples)]


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


def _alike(counts: Counter[str]) -> list[str]:
    """Warnings about labels that differ only in capitals, blanks, dashes and underscores, or that look the same."""
    spelt = _groups(counts, _folded)
    same = [group for group in _groups(counts, _as_seen) if group not in spelt]
    found = []
    if spelt:
        found.append(
            "Some labels differ only in capitals, blanks or dashes, and are learned as different labels: "
            f"{_listed(spelt, counts, lambda label: label if label.isprintable() else ascii(label))}."
        )
    if same:
        found.append(
            "Some labels look alike, and are learned as different labels: they differ only in characters that cannot be seen, in how "
            f"letters are composed, in the kind of a dash or quote, or in how a number is written: {_listed(same, counts, ascii)}."
        )
    return found


def _groups(counts: Counter[str], key: Callable[[str], str]) -> list[list[str]]:
    """The labels that have the same `key`, where these are several."""
    alike: dict[str, list[str]] = {}
    for label in sorted(counts):
        alike.setdefault(key(label), []).append(label)
    return [labels for labels in alike.values() if labels[1:]]


def _folded(label: str) -> str:
    return re.sub(r"[\s_-]+", " ", label).casefold()


def _as_seen(label: str) -> str:
    """The label without what cannot be seen: formats of Unicode such as a zero-width space, and variants of a letter, dash or quote."""
    kinds = {"Cf": "", "Pd": "-", "Pi": "'", "Pf": "'"}
    letters = unicodedata.normalize("NFKC", label).replace("\ufe0f", "")
    seen = "".join(kinds.get(unicodedata.category(each), each) for each in letters)
    return f"{float(seen):.17g}" if NUMBER.fullmatch(seen) else _folded(seen)


def _listed(groups: Sequence[Sequence[str]], counts: Counter[str], shown: Callable[[str], str]) -> str:
    named = [" and ".join(f"{shown(label)} ({counts[label]})" for label in labels) for labels in groups]
    return "; ".join(named[:SHOWN]) + (f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else "")


def _several_in_one(counts: Counter[str]) -> list[str]:
    """A warning about labels that look like a list, or like several that other texts have too."""
    parts = {label: [part.strip() for part in SEPARATOR.split(label)] for label in counts}
    used = Counter(part for each in parts.values() for part in {*each})
    several = [
        label
        for label in sorted(counts)
        if LIST.fullmatch(label)
        or (parts[label][1:] and (counts.keys() & parts[label] or all(used[part] > 1 for part in parts[label])))
    ]
    if not several:
        return []
    return [
        f"Some labels look like a list of several in one cell, and each is learned as one label: {some(several)}. Give lists of labels in "
        "JSON lines or parquet."
    ]


def _missing(counts: Counter[str]) -> list[str]:
    """A warning about labels that programs write where a value is missing."""
    found = sorted(label for label in counts if label.lower() in NO_VALUE or label == "None")
    if not found:
        return []
    return [
        f"Some labels are what programs write where there is none, and each is learned as a label: {some(found)}. Remove these rows."
    ]


def prefix_warnings(counts: Counter[str]) -> list[str]:
    """A warning about labels of entities that are tags: one label with several prefixes, or all with B-."""
    tags = {label: match for label in counts if (match := TAG.fullmatch(label))}
    prefixes = Counter(match[2] for match in tags.values())
    begun = {match[2] for match in tags.values() if match[1] in "BIbi"}
    odd = [
        label for label, match in tags.items() if match[2] in begun and (prefixes[match[2]] > 1 or match[2] in counts)
    ]
    letters = {match[1].upper() for match in tags.values()}
    if (
        not odd
        and len(tags) == len(counts)
        and letters in ({"B"}, {"I"})
        and (tags.keys() - {*map(str.lower, tags)} or len(tags) > 1)
    ):
        odd = [*tags]
    if not odd:
        return []
    return [
        f"Some labels of entities begin with the prefix of a tag: {some(sorted(odd))}. Each prefix makes another label "
        "of one; give each entity whole with its label alone, or words with `tags`."
    ]


def _contradictions(examples: Sequence[Example]) -> list[str]:
    """A warning about texts that stand in the data twice, with different labels. It holds no text: reports are published."""
    answers: dict[tuple[str, str], dict[object, str]] = {}
    for example in examples:
        if example.label is not None or example.entities is not None:
            key = (example.text_read.strip(), (example.text_pair or "").strip())
            name = "" if example.entities is not None else " + ".join(classes_of(example)) or "none"
            answers.setdefault(key, {})[example.label if example.entities is None else example.entities] = name
    apart = [each for each in answers.values() if len(each) > 1]
    if not apart:
        return []
    pairs = Counter(" and ".join(sorted(each.values())) for each in apart if all(each.values()))
    shown = f" ({some([pair for pair, _ in pairs.most_common()])})" if pairs else ""
    texts = counted(len(apart), "text stands", "texts stand")
    return [f"{texts} in the data with different labels{shown}: no model can learn or match them all."]


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
