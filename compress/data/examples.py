"""Labelled text, read from files people have: JSON lines, CSV/TSV, parquet, CoNLL columns, or a `datasets` name.

Every bad row of every file is collected and reported at once, each with its file, line number and reason.
"""

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from compress.data.hub import load_dataset, may_be_on_hub
from serve.errors import BadInput
from serve.text.entity_markers import MARKERS, marked
from serve.text.labels import OUTSIDE, split_tag

Task = Literal["token-classification", "text-classification"]
SPLITS = ("train", "validation", "test")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".conll")
SHOWN_FAULTS = 20
MOST_FAULTS = 1_000  # after so many in one file it is read no further


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled piece of text; offsets are Unicode code points, `end` exclusive."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class Example:
    """One text with what is known of it: its `label`, or its `entities`; both absent when unlabelled.

    Where any number of labels may apply to a text, `label` is all that do, sorted: a tuple, and an empty one says that none does.
    Where `label` says what one part of the text is to another, `head` and `tail` are where these stand: (start, end) in code
    points, end exclusive.
    """

    text: str
    text_pair: str | None = None
    label: str | tuple[str, ...] | None = None
    entities: tuple[Entity, ...] | None = None
    head: tuple[int, int] | None = None
    tail: tuple[int, int] | None = None

    @property
    def text_read(self) -> str:
        """The text as a model reads it: with markers round head and tail, if it has these."""
        return marked(self.text, self.head, self.tail) if self.head and self.tail else self.text

    @property
    def text_or_pair(self) -> str | tuple[str, str]:
        """What a tokenizer is given: the text as it is read, or both texts of a pair."""
        return (self.text, self.text_pair) if self.text_pair else self.text_read


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with the input: where it stands and why it cannot be used."""

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}"


# A capital and a dash, as prefixes are written, that no tag scheme has; or a prefix with no label.
KNOWN_PREFIX = re.compile(r"[BIESLU]-")
STRANGE_PREFIX = re.compile(r"(?![BIESLU]-)[A-Z]-|[BIESLU]-$")


class BadRows(BadInput):
    """Every fault found in the data, in one error."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        shown = [f"  {fault}" for fault in faults[:SHOWN_FAULTS]]
        if len(faults) > SHOWN_FAULTS:
            shown.append(f"  ... and {len(faults) - SHOWN_FAULTS} more")
        count, these = ("1 fault", "it") if len(faults) == 1 else (f"{len(faults)} faults", "these")
        super().__init__(f"The data has {count}; nothing was done. Mend {these} and run again:\n" + "\n".join(shown))


class NotText(BadRows):
    """A file that is not UTF-8, told of its first line that is not: what comes after it cannot be read either."""


@dataclass(frozen=True)
class Splits:
    """The three splits of a task. `held_out` says that validation was cut from train for want of a file."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    held_out: bool = False
    fingerprint: str = ""

    def labels(self, task: Task, splits: Iterable[str] = ("train",)) -> tuple[str, ...]:
        """The class or entity labels that stand in `splits`, sorted."""
        return labels_in([example for name in splits for example in getattr(self, name)], task)

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may apply to a text."""
        return is_multi_label(self.train)

    @property
    def relations(self) -> bool:
        """Whether labels say what one marked part of a text is to another."""
        return are_relations(self.train)

    @property
    def pairs(self) -> bool:
        """Whether there are texts that come in pairs."""
        return any(example.text_pair for example in self.train)


def labels_in(examples: Iterable[Example], task: Task) -> tuple[str, ...]:
    """The class or entity labels of `examples`, sorted."""
    found: set[str] = set()
    for example in examples:
        if task == "text-classification":
            found.update(example.label if isinstance(example.label, tuple) else [example.label or ""])
        else:
            found.update(entity.label for entity in example.entities or ())
    return tuple(sorted(found))


def is_multi_label(examples: Sequence[Example]) -> bool:
    """Whether any number of labels may apply to each of `examples`, which are all of one kind."""
    return bool(examples) and isinstance(examples[0].label, tuple)


def are_relations(examples: Sequence[Example]) -> bool:
    """Whether the labels of `examples`, which are all of one kind, say what one marked part of a text is to another."""
    return bool(examples) and examples[0].head is not None


def check_kind(examples: Sequence[Example], model: str, *, multi_label: bool, markers: bool) -> None:
    """Nothing, when a model that classifies texts answers in the kind of labels that `examples` have.

    Args:
        examples: all of one kind.
        model: what to call it.
        multi_label: whether it says of each label on its own if it applies.
        markers: whether its tokenizer knows the markers of head and tail.

    Raises:
        BadInput: it answers in another kind.
    """
    remedy = "It was trained for another task. Give data of its kind; `stillroom run --new-head` fine-tunes a new head."
    if multi_label is not is_multi_label(examples):
        gives, given = ("any number of labels", "one string") if multi_label else ("one label", "a list")
        raise BadInput(
            f"{model} gives a text {gives} (`problem_type` in config.json), and `label` is {given} in the data. {remedy}"
        )
    if are_relations(examples) and not markers:
        raise BadInput(
            f"{model} does not know the markers of head and tail ({', '.join(MARKERS)}), which the data has. {remedy}"
        )


@dataclass
class _Reader:
    """Collects examples and faults of one file; `lines` are where the examples stand."""

    file: str
    task: Task
    examples: list[Example] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lines: list[int | None] = field(default_factory=list)

    def add(self, row: object, line: int | None) -> None:
        try:
            self.examples.append(example_of(row, self.task))
            self.lines.append(line)
        except ValueError as reason:
            self.faults.append(Fault(self.file, line, str(reason)))


def read_splits(data: str, task: Task, *, seed: int = 0) -> Splits:
    """The splits under `data`: a folder holding `train.*`, `validation.*`, `test.*`, or a `datasets` name or folder.

    Without a validation file a tenth of train (at least one row) is held out, chosen by `seed`.

    Raises:
        BadInput: the folder or name cannot be opened, or a split is missing.
        BadRows: rows that cannot be read, all of them, or an empty split.
    """
    check_task(task)
    folder = Path(data)
    if folder.is_file():
        raise BadInput(
            f"--data is the file {data}; a folder holding train, validation and test files is needed. "
            f"Give its folder, with files named train.jsonl, validation.jsonl, test.jsonl (or {', '.join(SUFFIXES[1:])})."
        )
    if folder.is_dir() and not _is_datasets_folder(folder):
        found, faults = _read_folder(folder, task)
    else:
        found, faults = _read_datasets(data, task)
    for name in ("train", "test"):
        if name not in found:
            raise BadInput(
                f"--data {data} has no {name} split (found: {', '.join(found) or 'none'}). "
                f"Add a file {name}.jsonl, or one ending in {', '.join(SUFFIXES[1:])}."
            )
    faults += [Fault(f"{data} ({name})", None, "is empty: it holds no rows") for name in found if not found[name]]
    if faults:
        raise BadRows(faults)
    held_out = "validation" not in found
    if held_out and len(found["train"]) < 2:
        raise BadInput(
            f"--data {data} has one text in train and no validation split; more texts are needed, or a file validation.jsonl."
        )
    if held_out:
        found["train"], found["validation"] = _hold_out(found["train"], seed)
    digest = hashlib.sha256()
    for name in SPLITS:
        digest.update(examples_fingerprint(found[name]).encode())
    return Splits(found["train"], found["validation"], found["test"], held_out, digest.hexdigest())


def check_task(task: str) -> Task:
    """`task` itself, once it is known to be one.

    Raises:
        BadInput: any other name.
    """
    if task not in get_args(Task):
        raise BadInput(f"--task is {task!r}; it is one of {', '.join(get_args(Task))}.")
    return task  # type: ignore[return-value]


def examples_fingerprint(examples: Iterable[Example]) -> str:
    """The sha256 of the examples' content, whatever file format they came in."""
    digest = hashlib.sha256()
    for example in examples:
        row: list[object] = [example.text, example.text_pair, example.label]
        spans = None if example.entities is None else [[e.start, e.end, e.label] for e in example.entities]
        row += [] if example.head is None else [example.head, example.tail]
        digest.update(json.dumps([*row, spans], ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def read_examples(path: Path, task: Task) -> list[Example]:
    """The examples of one file, by its suffix.

    Raises:
        BadInput: no such file, or a suffix that is not known.
        BadRows: rows that cannot be read, or a file with none.
    """
    reader = _read_file(path, task)
    if not reader.examples and not reader.faults:
        reader.faults.append(Fault(str(path), None, "is empty: it holds no rows"))
    if faults := _faults_of([reader]):
        raise BadRows(faults)
    return reader.examples


def read_texts(path: Path, *, pairs: bool = False) -> list[str]:
    """Unlabelled text: `.txt` with one document a line (empty lines skipped), or any example file's `text` fields.

    With `pairs` the `text_pair` fields too, each as a text of its own.

    Raises:
        BadInput: no such file, a suffix that is not known, not UTF-8, or no text in it.
        BadRows: rows without a text, all of them.
    """
    return list(stream_texts(path, pairs=pairs))


@dataclass(frozen=True)
class TextFiles:
    """The texts of several files, read anew each time that they are gone through, so that one line is held at a time."""

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from stream_texts(path)


def stream_texts(path: Path, *, pairs: bool = False) -> Iterator[str]:
    """The texts of `read_texts` one by one. What is wrong with rows is told when all have been read.

    Raises:
        BadInput: no such file, or a suffix that is not known; and from the iterator, what `read_texts` raises.
    """
    if not path.is_file():
        raise BadInput(
            f"{path} is not a file; text is needed as .txt (one document a line) or one of {', '.join(SUFFIXES)}."
        )
    if path.suffix != ".txt" and (path.suffix not in SUFFIXES or path.suffix == ".conll"):
        raise BadInput(
            f"{path} ends in {path.suffix or 'nothing'}; text is read from .txt or one of {', '.join(SUFFIXES[:-1])}."
        )
    return _some(path, (line.strip() for line in _lines(path)) if path.suffix == ".txt" else _row_texts(path, pairs))


def _some(path: Path, texts: Iterable[str]) -> Iterator[str]:
    """The `texts` that are not empty, of which there is one at least."""
    found = False
    for text in texts:
        if text:
            found = True
            yield text
    if not found:
        raise BadInput(f"{path} holds no text: every line is empty. One document a line is needed.")


def _row_texts(path: Path, pairs: bool) -> Iterator[str]:
    faults: list[Fault] = []
    for line, row in _rows(path, faults):
        try:
            if not isinstance(row, dict):
                raise ValueError(f"is {type(row).__name__}, not an object with fields")
            yield _text(row, "text")
            if pairs and (pair := _pair(row)):
                yield pair
        except ValueError as reason:
            _note(faults, Fault(str(path), line, str(reason)))
    if faults:
        raise BadRows(faults)


def _note(faults: list[Fault], fault: Fault) -> None:
    """Keep `fault` for the end of the file, or give the file up: one larger than memory may have a fault in every row."""
    faults.append(fault)
    if len(faults) == MOST_FAULTS:
        raise BadRows(
            [Fault(fault.file, None, f"was read no further than line {fault.line}, its {MOST_FAULTS}th fault"), *faults]
        )


def example_of(row: object, task: Task) -> Example:
    """The example that one row of a file or dataset says.

    Raises:
        ValueError: what is wrong with the row, in words.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with fields")
    if task == "token-classification":
        return _token_example(row)
    text = _text(row, "text")
    pair = _pair(row)
    if "label" not in row:
        raise ValueError(f"has no `label` (its fields: {', '.join(map(str, row)) or 'none'})")
    label = _label(row["label"])
    given = [row.get("head"), row.get("tail")]
    if None in given and not any(isinstance(place, dict) for place in given):
        return Example(text, pair, label=label)
    if pair:
        raise ValueError("has both `text_pair` and `head`; head and tail are parts of one text")
    head, tail = _head_and_tail(row, text)
    return Example(text, label=label, head=head, tail=tail)


def _head_and_tail(row: dict[str, Any], text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the two parts of a relation stand."""
    if found := [marker for marker in MARKERS if marker in text]:
        raise ValueError(f"`text` holds {found[0]}, which will mark the head or the tail; give the text without it")
    places: list[tuple[int, int]] = []
    for name in ("head", "tail"):
        place = row.get(name)
        if not isinstance(place, dict) or not {"start", "end"} <= place.keys():
            raise ValueError(
                f"`{name}` is {place!r}; an object with `start` and `end` is needed, which CSV and TSV cannot hold"
            )
        start, end = place["start"], place["end"]
        if type(start) is not int or type(end) is not int or not 0 <= start < end:
            raise ValueError(f"`{name}` is at {start}..{end}: whole numbers are needed, 0 <= start < end")
        if end > len(text):
            raise ValueError(f"`{name}` ends at {end}, past the end of the text ({len(text)} code points)")
        if not text[start:end].strip():
            raise ValueError(f"`{name}` at {start}..{end} covers only whitespace")
        places.append((start, end))
    head, tail = places
    if head[0] < tail[1] and tail[0] < head[1]:
        raise ValueError(
            f"`head` {head[0]}..{head[1]} and `tail` {tail[0]}..{tail[1]} overlap; two parts of the text are needed"
        )
    return head, tail


def _label(given: object) -> str | tuple[str, ...]:
    """One class, or all labels that apply."""
    several: list[Any] = given if isinstance(given, list) else [given]
    for name in several:
        if not isinstance(name, str) or not name:
            where = f"`label` holds {name!r}" if isinstance(given, list) else f"`label` is {given!r}"
            raise ValueError(f"{where}; a non-empty string is needed, or a list of them where several labels may apply")
    names = tuple(sorted(_unicode(name, "label") for name in several))
    if len(set(names)) < len(names):
        raise ValueError(f"`label` holds {next(a for a, b in pairwise(names) if a == b)!r} twice")
    return names if isinstance(given, list) else names[0]


def _text(row: dict[str, Any], name: str) -> str:
    if name not in row:
        raise ValueError(f"has no `{name}` (its fields: {', '.join(map(str, row)) or 'none'})")
    text = row[name]
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is {type(text).__name__}, not a string")
    if not text.strip():
        raise ValueError(f"`{name}` is empty")
    return _unicode(text, name)


def _pair(row: dict[str, Any]) -> str | None:
    """The second of two texts, where there is one."""
    pair = row.get("text_pair")
    if pair is not None and not isinstance(pair, str):
        raise ValueError(f"`text_pair` is {type(pair).__name__}, not a string")
    return _unicode(pair, "text_pair") if pair else None


def _unicode(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half of a surrogate pair at {error.start}: it is not valid Unicode") from None
    return text


def _token_example(row: dict[str, Any]) -> Example:
    if "entities" not in row:
        tags = next((row[name] for name in ("tags", "ner_tags") if name in row), None)
        if "tokens" in row and tags is not None:
            return from_tags(row["tokens"], tags)
        raise ValueError(
            f"has neither `text` + `entities` nor `tokens` + `tags` (its fields: {', '.join(map(str, row))})"
        )
    text = _text(row, "text")
    if not isinstance(row["entities"], list):
        raise ValueError(f"`entities` is {type(row['entities']).__name__}, not a list")
    entities = sorted((_entity(item, text) for item in row["entities"]), key=lambda entity: entity.start)
    for before, after in pairwise(entities):
        if after.start < before.end:
            raise ValueError(
                f"entities overlap: {before.label} {before.start}..{before.end} and {after.label} {after.start}..{after.end}"
            )
    return Example(text, entities=tuple(entities))


def _entity(item: object, text: str) -> Entity:
    if not isinstance(item, dict) or not {"start", "end", "label"} <= item.keys():
        raise ValueError(f"entity {item!r} is not an object with `start`, `end`, `label`")
    start, end, label = item["start"], item["end"], item["label"]
    if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label:
        raise ValueError(f"entity {item!r}: `start` and `end` are whole numbers, `label` a non-empty string")
    if not 0 <= start < end:
        raise ValueError(f"entity {label} is at {start}..{end}: 0 <= start < end is needed")
    if end > len(text):
        raise ValueError(f"entity {label} ends at {end}, past the end of the text ({len(text)} code points)")
    if not text[start:end].strip():
        raise ValueError(f"entity {label} at {start}..{end} covers only whitespace")
    return Entity(start, end, _unicode(label, "label"))


def from_tags(tokens: object, tags: object) -> Example:
    """The example whose text is `tokens` joined by spaces, with entities read from `tags` (BIO, IOB2, BIOES or IO).

    Raises:
        ValueError: not two lists of strings of equal length.
    """
    if not isinstance(tokens, list) or not isinstance(tags, list) or not tokens:
        raise ValueError("`tokens` and `tags` are two non-empty lists of strings")
    if not all(isinstance(item, str) and item for item in [*tokens, *tags]):
        raise ValueError("`tokens` and `tags` hold something that is not a non-empty string")
    for item in (*tokens, *tags):
        _unicode(item, "tokens")
    odd = [tag for tag in tags if STRANGE_PREFIX.match(tag)]
    # Where nothing else has a prefix, a capital and a dash may be how a label begins (`T-cell`).
    if odd and any(KNOWN_PREFIX.match(tag) for tag in tags):
        raise ValueError(
            f"has the tag {odd[0]!r} among others with a prefix; a tag is O, or a label after B-, I-, E-, S-, L- or U-"
        )
    if len(tokens) != len(tags):
        raise ValueError(f"has {len(tokens)} tokens but {len(tags)} tags")
    entities: list[Entity] = []
    position, open_entity = 0, False
    for token, tag in zip(tokens, tags, strict=True):
        prefix, label = split_tag(tag)
        end = position + len(token)
        if prefix == OUTSIDE:
            open_entity = False
        elif prefix in "IE" and open_entity and entities[-1].label == label:
            entities[-1] = Entity(entities[-1].start, end, label)
            open_entity = prefix != "E"
        else:
            entities.append(Entity(position, end, label))
            open_entity = prefix not in "SE"
        position = end + 1
    return Example(" ".join(tokens), entities=tuple(entities))


def _read_folder(folder: Path, task: Task) -> tuple[dict[str, list[Example]], list[Fault]]:
    readers: dict[str, _Reader] = {}
    for name in SPLITS:
        files = [folder / f"{name}{suffix}" for suffix in (*SUFFIXES, ".txt")]
        files = [path for path in files if path.is_file()]
        if len(files) > 1:
            raise BadInput(
                f"{folder} holds {' and '.join(f.name for f in files)}: one file a split is needed. Remove one."
            )
        if files:
            readers[name] = reader = _read_file(files[0], task)
            if not reader.examples and not reader.faults:
                reader.faults.append(Fault(str(files[0]), None, "is empty: it holds no rows"))
    if faults := _faults_of(list(readers.values())):
        raise BadRows(faults)
    return {name: reader.examples for name, reader in readers.items()}, []


def _faults_of(readers: Sequence[_Reader]) -> list[Fault]:
    """What is wrong with rows of these files, and what is wrong between them: rows of two kinds."""
    faults = [fault for reader in readers for fault in reader.faults]
    faults += _mixed(readers, lambda row: isinstance(row.label, tuple), "`label` is a list", "one string")
    return faults + _mixed(
        readers, lambda row: row.head is not None, "has `head` and `tail`", "has no `head` and `tail`"
    )


def _mixed(readers: Sequence[_Reader], has: Callable[[Example], bool], so: str, otherwise: str) -> list[Fault]:
    """Where some rows have it and others not: each row of the fewer, or of those without where there are as many."""
    places: dict[bool, list[tuple[str, int | None]]] = {True: [], False: []}
    for reader in readers:
        for example, line in zip(reader.examples, reader.lines, strict=True):
            places[has(example)].append((reader.file, line))
    fewer = len(places[True]) < len(places[False])
    words = (so, otherwise) if fewer else (otherwise, so)
    others = len(places[not fewer])
    rows = "1 other row" if others == 1 else f"{others} other rows"
    reason = f"{words[0]}, and in {rows} {words[1]}; one kind is needed in all splits"
    return [Fault(*place, reason) for place in places[fewer]] if all(places.values()) else []


def check_there(path: Path) -> None:
    """Nothing, when `path` is a file.

    Raises:
        BadInput: it is a folder, or nothing.
    """
    if not path.is_file():
        raise BadInput(f"{path} is not a file; examples are read from files ending in {', '.join(SUFFIXES)}.")


def _read_file(path: Path, task: Task) -> _Reader:
    check_there(path)
    reader = _Reader(str(path), task)
    try:
        _read_into(reader, path)
    except NotText as error:
        reader.faults += error.faults
    return reader


def _read_into(reader: _Reader, path: Path) -> None:
    suffix = path.suffix
    if suffix == ".txt" and reader.task == "token-classification" and _looks_like_columns(path):
        suffix = ".conll"
    if suffix == ".conll":
        _read_conll(path, reader)
    elif suffix in SUFFIXES:
        for line, row in _rows(path, reader.faults):
            reader.add(row, line)
    else:
        raise BadInput(f"{path} ends in {suffix or 'nothing'}; labelled examples are read from {', '.join(SUFFIXES)}.")


def _rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """Line number and content of each row; rows that do not parse go to `faults`."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                batches = file.iter_batches(batch_size=1_000)
                yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not a parquet file: {error}") from None
    elif path.suffix in (".csv", ".tsv"):
        yield from _table_rows(path, faults)
    else:
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                _note(faults, Fault(str(path), number, f"is not JSON ({error.msg} at column {error.colno})"))


def _table_rows(path: Path, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    for _ in _lines(path):  # it is UTF-8, or this says where it is not
        pass
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t")
        try:
            for row in table:
                if None in row:
                    wanted = len(table.fieldnames or ())
                    reason = f"has {wanted + len(row[None])} fields, its header {wanted}: quote a text that holds the separator"
                    _note(faults, Fault(str(path), table.line_num, reason))
                else:
                    yield table.line_num, {name: value for name, value in row.items() if value is not None}
        except csv.Error as error:
            reason = f"is not a table from here on ({error}): is a quote left open?"
            faults.append(Fault(str(path), table.line_num, reason))


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, each without the line feed that ends it; other ends of line stand as they are.

    Raises:
        NotText: at the first line that is not UTF-8.
    """
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start = position
            position += len(line)
            if start == 0:
                line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901 - what is read is the line without it
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError as error:
                at = position - len(line) + error.start
                reason = f"is not UTF-8 text (byte {at} of the file); save the file as UTF-8"
                raise NotText([Fault(str(path), number, reason)]) from None


def _looks_like_columns(path: Path) -> bool:
    lines = [line.split() for line in islice(_lines(path), 50) if line.strip()]
    return bool(lines) and len({len(columns) for columns in lines}) == 1 and len(lines[0]) >= 2


def _read_conll(path: Path, reader: _Reader) -> None:
    """Columns separated by blanks: the first is the token, the last its tag; a blank line ends a sentence."""
    tokens: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in enumerate(chain(_lines(path), [""]), 1):
        columns = line.split()
        if not columns:
            if tokens:
                reader.add({"tokens": tokens, "tags": tags}, start)
            tokens, tags, start = [], [], number + 1
        elif columns[0] == "-DOCSTART-":
            continue
        elif len(columns) < 2:
            reader.faults.append(
                Fault(str(path), number, f"has one column ({columns[0]!r}); a token and its tag are needed")
            )
        else:
            tokens.append(columns[0])
            tags.append(columns[-1])


def _is_datasets_folder(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file()


def _read_datasets(data: str, task: Task) -> tuple[dict[str, list[Example]], list[Fault]]:
    loaded = _saved_dataset(data) if Path(data).is_dir() else _hub_dataset(data)
    readers: dict[str, _Reader] = {}
    for name in SPLITS:
        if name not in loaded:
            continue
        readers[name] = reader = _Reader(f"{data} ({name})", task)
        named = _class_names(loaded[name].features)
        for number, row in enumerate(loaded[name], 1):
            try:
                reader.add({key: named[key](value) if key in named else value for key, value in row.items()}, number)
            except (ValueError, IndexError, KeyError):
                reader.faults.append(Fault(reader.file, number, "holds a class number that has no name"))
    return {name: reader.examples for name, reader in readers.items()}, _faults_of(list(readers.values()))


def _saved_dataset(folder: str) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        # Whatever `datasets` raises (files that are missing, or of a version to come) is about the folder given.
        raise BadInput(
            f"--data {folder} holds a dataset_dict.json, and cannot be opened by `datasets` ({type(error).__name__}: {error}). "
            "Save it again with save_to_disk, or give a folder with train, validation and test files."
        ) from None


def _hub_dataset(name: str) -> Any:
    if not may_be_on_hub(name):
        raise BadInput(
            f"--data {name} is not there. Give a folder with train, validation and test files, or a `datasets` name."
        )
    try:
        return load_dataset(name)
    except LookupError as reason:
        raise BadInput(
            f"--data {name} is neither a folder here nor a data set that the Hub gives ({reason}). "
            "Give a folder with train, validation and test files."
        ) from None


def _class_names(features: Any) -> dict[str, Callable[[Any], Any]]:
    """For columns that hold class numbers, the function that turns them into names."""
    named: dict[str, Callable[[Any], Any]] = {}
    for column, feature in features.items():
        if hasattr(feature, "int2str"):
            named[column] = feature.int2str
        elif hasattr(getattr(feature, "feature", None), "int2str"):
            # `int2str` of a list gives the list of names.
            named[column] = feature.feature.int2str
    return named


def _hold_out(train: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    order = sorted(range(len(train)), key=lambda i: hashlib.sha256(f"{seed}:{i}:{train[i].text}".encode()).digest())
    held = set(order[: max(1, len(train) // 10)])
    return [e for i, e in enumerate(train) if i not in held], [e for i, e in enumerate(train) if i in held]
