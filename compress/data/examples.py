"""Labelled examples and the splits of a task, independent of file formats."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compress.data.task import Task
from serve.errors import BadInput
from serve.text.entity_markers import MARKERS, has_markers, marked
from serve.wording import counted

# A task that is trained and scored, and not served; its rows are `compress.data.text_pairs`.
GENERATION = "text2text-generation"
# In config.json of a model that generates: {"tokens": of text and target together, "target_tokens": of a target}, both the most.
GENERATOR = "unilm"
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
# Names that are looked for where there is none of these.
FURTHER_NAMES = {"train": (), "validation": ("eval", "validation_matched", "dev_matched"), "test": ("test_matched",)}

# Categories of Unicode that tell texts apart; Indic vowels are marks, and emoji and plus signs are symbols.
TELLING = "LNMS"
BETWEEN_DIGITS = re.compile(r"(?<=\d)([^\d])(?=\d)")


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled piece of text; offsets are Unicode code points, `end` exclusive."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Example:
    """One text with its `label` or its `entities`; both are None if it is unlabelled.

    A `label` is a class, or for `text-regression` a number. If any number of labels may apply to a text, it is the sorted tuple of
    those that do; an empty tuple means that none does. If it is the relation of two parts of the text, `head` and `tail` are their
    places: (start, end) in code points, end exclusive. A question is the `text`, its context the `text_pair`, and `answers` are places in
    the context that each answer it; none of them if it has no answer there. `language` is what its row names, for scores by language. Of
    words that were joined by blanks, `blanks_in_words` are the places of those blanks of the text that are inside of words; it is None if
    the text was given whole. These two do not tell examples apart.
    """

    text: str
    text_pair: str | None = None
    label: str | tuple[str, ...] | float | None = None
    entities: tuple[Entity, ...] | None = None
    head: tuple[int, int] | None = None
    tail: tuple[int, int] | None = None
    answers: tuple[tuple[int, int], ...] | None = None
    language: str = field(default="", compare=False)
    blanks_in_words: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The texts of its answers."""
        return tuple((self.text_pair or "")[start:end] for start, end in self.answers or ())

    @property
    def text_alone(self) -> str:
        """The text that a model of plain text reads of it: `text_read`, or the context of a question."""
        return self.text_pair if self.answers is not None and self.text_pair else self.text_read

    @property
    def text_read(self) -> str:
        """The text as a model reads it: with markers around head and tail, if it has these."""
        return marked(self.text, self.head, self.tail) if self.head and self.tail else self.text

    @property
    def text_or_pair(self) -> str | tuple[str, str]:
        """The input of a tokenizer: `text_read`, or both texts of a pair."""
        return (self.text, self.text_pair) if self.text_pair else self.text_read


@dataclass(frozen=True)
class Splits:
    """The three splits of a task.

    `held_out` is true if validation was taken from train because it had no file, `answered` if the labels of train are a teacher's
    answers because it had none. `notes` tell what was left out of the files. `apart` are texts of validation on which nothing is learned,
    chosen or scored: promises are made on them.
    """

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    held_out: bool = False
    fingerprint: str = ""
    answered: bool = False
    notes: tuple[str, ...] = ()
    apart: Sequence[Example] = ()

    def labels(self, task: Task, splits: Iterable[str] = ("train",)) -> tuple[str, ...]:
        """The class or entity labels of `splits`, sorted."""
        return task.labels_in([example for name in splits for example in getattr(self, name)])

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may apply to a text."""
        return is_multi_label(self.train)

    @property
    def relations(self) -> bool:
        """Whether labels are relations between two marked parts of a text."""
        return are_relations(self.train)

    @property
    def pairs(self) -> bool:
        """Whether there are pairs of texts."""
        return any(example.text_pair for example in self.train)

    @property
    def single_texts(self) -> bool:
        """Whether there are texts without a second one."""
        return not all(example.text_pair for example in self.train)


class _Telling(dict[int, int | None]):
    """Each code point that tells texts apart as it is; None for the others, which `str.translate` removes."""

    def __missing__(self, point: int) -> int | None:
        found = self[point] = point if unicodedata.category(chr(point))[0] in TELLING else None
        return found


_TELLING = _Telling()


def normalised_text(text: str) -> str:
    """What tells a text apart, without regard to case, blanks, punctuation and the way in which Unicode spells a letter.

    Whatever is between two digits stays: 1.5 is not 15.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    parts = BETWEEN_DIGITS.split(folded)
    kept = "".join(part if i % 2 else part.translate(_TELLING) for i, part in enumerate(parts))
    return kept or text.strip()


def normalised(example: Example) -> tuple[str, str]:
    """`normalised_text` of an example as a model reads it, and of the second text of a pair."""
    return normalised_text(example.text_read), normalised_text(example.text_pair or "")


def clusters_of(examples: Sequence[Example]) -> np.ndarray:
    """The number of each example's cluster, (examples,), whose texts are right or wrong together: they are resampled whole.

    Questions of a context, pairs with one first text, relations of one sentence, and copies of a text are in one cluster.
    """
    numbers: dict[str, int] = {}
    names = [normalised_text((each.text_pair or "") if each.answers is not None else each.text) for each in examples]
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def classes_of(example: Example) -> tuple[str, ...]:
    """The classes of an example of text classification; one empty name if it is unlabelled."""
    return example.label if isinstance(example.label, tuple) else (str(example.label or ""),)


def number_of(example: Example) -> float:
    """The number of an example of text regression; NaN if it is unlabelled."""
    return example.label if isinstance(example.label, float) else float("nan")


def is_multi_label(examples: Sequence[Example]) -> bool:
    """Whether any number of labels may apply to each of `examples`, which are all of one kind."""
    return bool(examples) and isinstance(examples[0].label, tuple)


def are_relations(examples: Sequence[Example]) -> bool:
    """Whether the labels of `examples`, which are all of one kind, are relations between two marked parts of a text."""
    return bool(examples) and examples[0].head is not None


def check_kind(
    examples: Sequence[Example],
    model: str,
    *,
    multi_label: bool,
    markers: bool,
    remedy: str = "Give data of that kind, or a new head: `stillroom run --new-head`.",
) -> None:
    """Check that a model that classifies texts gives the kind of labels that `examples` have.

    Args:
        examples: all of one kind.
        model: its name in messages.
        multi_label: whether the model can give a text any number of labels.
        markers: whether its vocabulary has the markers of head and tail, which only models of relations need.
        remedy: what to do, as messages say it.

    Raises:
        BadInput: it gives another kind.
    """
    remedy = f"It was trained for another task. {remedy}"
    if multi_label is not is_multi_label(examples):
        gives, given = ("any number of labels", "one string") if multi_label else ("one label", "a list")
        raise BadInput(
            f"{model} gives a text {gives} (`problem_type` in config.json), but `label` is {given} in the data. {remedy}"
        )
    if are_relations(examples) and not markers:
        raise BadInput(
            f"{model} lacks the markers of head and tail ({', '.join(MARKERS)}) in its vocabulary, but the data has them. {remedy}"
        )
    bare = [example for example in examples if not has_markers(example.text_read)] if markers else []
    if bare:
        raise BadInput(
            f"{model} finds the relation of two parts of a text, but {len(bare)} of "
            f"{counted(len(examples), 'row')} {'does' if len(bare) == 1 else 'do'} not mark these parts; the first is "
            f"{bare[0].text[:80]!r}. Give each row `head` and `tail`, or the markers {', '.join(MARKERS)} in its text."
        )


def examples_fingerprint(examples: Iterable[Example]) -> str:
    """The SHA-256 of the examples' content, whatever their file format."""
    digest = hashlib.sha256()
    for example in examples:
        row: list[object] = [example.text, example.text_pair, example.label]
        spans = None if example.entities is None else [[e.start, e.end, e.label] for e in example.entities]
        row += [] if example.head is None else [example.head, example.tail]
        row += [] if example.answers is None else [example.answers]
        digest.update(json.dumps([*row, spans], ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
