"""The examples of one labelled file, with their lines and the faults of its rows."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compress.data.columns import USUAL, Columns
from compress.data.examples import Example
from compress.data.file_formats import SUFFIXES, looks_like_columns, rows_in, suffix_of
from compress.data.row_fields import BadRows, Fault, UnreadableFrom, note
from compress.data.rows import example_of
from compress.data.tags import TagRows, names_of, scheme_faults, with_names
from compress.data.task import Task
from serve.errors import BadInput
from serve.wording import counted, one_of

# Words as a tokenizer cuts them, and what it adds; and words as multilingual WikiANN and PAN-X write them: en:Oslo.
LANGUAGES = "begin with a language, as most words of their texts do (remove it)"
ODD_WORDS = {
    "are pieces or signs of a tokenizer (join pieces to words, and leave signs out)": re.compile(
        r"##\w.*|[▁Ġ].+|.+(@@|</w>)|\[(CLS|SEP|PAD|MASK)\]|</?s>"
    ),
    LANGUAGES: re.compile(r"([a-z]{2,3}|simple)(-[a-z]{1,12})*:\S+", re.IGNORECASE),
}
ENTITIES_AS_JSON = 'Write a line {"text": ..., "entities": [{"start": ..., "end": ..., "label": ...}]} for each text into a .jsonl file.'
# The field in which Prodigy writes what a person said of a row, and the words for one that is no gold.
VERDICT, REJECTED = "answer", ("reject", "ignore")


@dataclass
class LabelledFile:
    """Collects examples and faults of one file; `lines` are the line numbers of the examples."""

    file: str
    task: Task
    columns: Columns
    examples: list[Example] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lines: list[int | None] = field(default_factory=list)
    rejected: int = 0
    """Rows that a person rejected or ignored, which are left out."""
    words: Counter[str] = field(default_factory=Counter)
    """How many words rows of words have, and of these how many are odd in which way, one of `ODD_WORDS`."""
    first_odd: dict[str, str] = field(default_factory=dict)
    tags: TagRows = field(init=False)

    def __post_init__(self) -> None:
        self.tags = TagRows(self.file)

    def add(self, row: object, line: int | None) -> None:
        """Keep the example in `row`, or its fault. UnreadableFrom if too many rows have faults."""
        read = [getattr(self.columns, each) for each in self.task.columns]
        if isinstance(row, dict) and row.get(VERDICT) in REJECTED and VERDICT not in read:
            self.rejected += 1
            return
        try:
            self.examples.append(example_of(row, self.task, self.columns))
        except ValueError as reason:
            note(self.faults, Fault(self.file, line, str(reason)))
            return
        self.lines.append(line)
        if self.examples[-1].blanks_in_words is not None and isinstance(row, dict):  # it was read from words
            self.tags.add(line, row[self.columns.tags_in(row)])
            self._add_words(row[self.columns.tokens])

    def _add_words(self, words: Sequence[str]) -> None:
        self.words[""] += len(words)
        for kind, form in ODD_WORDS.items():
            odd = [*filter(form.fullmatch, words)]
            if odd and (kind != LANGUAGES or 2 * len(odd) > len(words)):
                self.words[kind] += len(odd)
                self.first_odd.setdefault(kind, odd[0])

    def odd_words(self, *, most: bool) -> list[str]:
        """What is odd about words of the file: of each kind that more than half of its words are, or else of the others."""
        return [
            f"has {self.words[kind]} of {counted(self.words[''], 'word')} that {kind}, such as {first!r}"
            for kind, first in self.first_odd.items()
            if (2 * self.words[kind] > self.words[""]) is most
        ]

    @property
    def notes(self) -> list[str]:
        """What was left out of the file, one sentence each."""
        said = [f"{self.file} {odd}." for odd in self.odd_words(most=False)]
        if not self.rejected:
            return said
        rows = counted(self.rejected, f"row of {self.file} was", f"rows of {self.file} were")
        return [f"{rows} left out: `{VERDICT}` is {' or '.join(REJECTED)} there.", *said]


def read_examples(
    path: Path | Sequence[Path], task: Task, columns: Columns = USUAL, notes: list[str] | None = None
) -> list[Example]:
    """The examples of one file, by its suffix, or of the files that are its parts. `notes` gets what was left out.

    Raises BadInput: no such file, a suffix that is not known, or a column was named that the task does not read. BadRows: rows
    that cannot be read, or a file with none.
    """
    columns.refuse_unused(task)
    readers = [read_file(each, task, columns) for each in ([path] if isinstance(path, Path) else path)]
    read_names(readers)
    if faults := [*faults_of(readers), *no_rows(readers)]:
        raise BadRows(faults)
    if notes is not None:
        notes.extend(note for reader in readers for note in reader.notes)
    return [example for reader in readers for example in reader.examples]


def no_rows(parts: Sequence[LabelledFile]) -> list[Fault]:
    """The fault of a file, or of all parts of a split, without a row that is read; none if it has one."""
    if any(part.examples or part.faults for part in parts):
        return []
    left_out = [note for part in parts for note in part.notes]
    return [
        Fault(parts[0].file, None, f"holds no other rows: {left_out[0]}" if left_out else "is empty: it holds no rows")
    ]


def check_there(path: Path) -> None:
    """Check that `path` is a file. Raises BadInput: it is a folder, or does not exist."""
    if not path.is_file():
        raise BadInput(
            f"{path} is {'a folder' if path.is_dir() else 'not a file'}. Give a file that ends in {one_of(SUFFIXES)}."
        )


def read_file(path: Path, task: Task, columns: Columns) -> LabelledFile:
    """The examples and faults of one file. BadInput if it does not exist or has an unknown suffix."""
    check_there(path)
    reader = LabelledFile(str(path), task, columns)
    try:
        _read_into(reader, path)
    except UnreadableFrom as error:
        reader.faults += error.faults
    return reader


def _read_into(reader: LabelledFile, path: Path) -> None:
    suffix = suffix_of(path)
    if suffix == ".txt" and path.with_suffix(".ann").is_file():
        raise BadInput(f"{path} is a text of brat, with its entities in the .ann file beside it. {ENTITIES_AS_JSON}")
    if suffix == ".txt" and reader.task.labels_words and looks_like_columns(path):
        suffix = ".conll"
    if suffix in SUFFIXES:
        for line, row in rows_in(path, suffix, reader.columns, reader.task, reader.faults):
            reader.add(row, line)
    else:
        ends = f"ends in {suffix}" if suffix else "has no suffix"
        raise BadInput(f"{path} {ends}. Give labelled examples as {one_of(SUFFIXES)}.")


def read_names(readers: Sequence[LabelledFile]) -> None:
    """Name the entities of these files, which are all of a data set, anew if their tags turn out to be names: `E-MAIL`, not `MAIL`."""
    if names := names_of([reader.tags for reader in readers]):
        for reader in readers:
            reader.examples = [with_names(example, names) for example in reader.examples]


def faults_of(readers: Sequence[LabelledFile]) -> list[Fault]:
    """The faults of the rows of these files, and those between rows: two kinds of labels, two schemes of tags."""
    faults = [fault for reader in readers for fault in reader.faults]
    faults += [Fault(reader.file, None, odd) for reader in readers for odd in reader.odd_words(most=True)]
    faults += scheme_faults([reader.tags for reader in readers])
    faults += _mixed(readers, lambda row: isinstance(row.label, tuple), "`label` is a list", "one string")
    return faults + _mixed(
        readers, lambda row: row.head is not None, "has `head` and `tail`", "has no `head` and `tail`"
    )


def _mixed(readers: Sequence[LabelledFile], has: Callable[[Example], bool], so: str, otherwise: str) -> list[Fault]:
    """A fault for each row of the minority, if only some rows have a property; on a tie, for each row without it."""
    places: dict[bool, list[tuple[str, int | None]]] = {True: [], False: []}
    for reader in readers:
        for example, line in zip(reader.examples, reader.lines, strict=True):
            places[has(example)].append((reader.file, line))
    fewer = len(places[True]) < len(places[False])
    words = (so, otherwise) if fewer else (otherwise, so)
    others = len(places[not fewer])
    rows = counted(others, "other row")
    reason = f"{words[0]}, but in {rows} {words[1]}; give all rows of all splits the same kind"
    return [Fault(*place, reason) for place in places[fewer]] if all(places.values()) else []
