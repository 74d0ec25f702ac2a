"""The suites: which tasks they have, in which files, how these are read, what is scored, and how a task is fine-tuned."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from compress.data.columns import USUAL
from compress.data.conll import conll_rows
from compress.data.file_formats import lines_in, squad_rows
from compress.data.row_fields import Fault, UnreadableFrom
from compress.data.task import Task
from compress.tasks import QUESTION_ANSWERING, TEXT_CLASSIFICATION, TEXT_REGRESSION, TOKEN_CLASSIFICATION
from serve.errors import BadInput
from serve.wording import counted

SHORT_ROWS = 0.01  # most of a file's rows that may be left out for lacking columns; QQP's and CoLA's have some
SHOWN_LINES = 5


@dataclass(frozen=True)
class Columns:
    """Where a table of tab-separated lines has text, second text and label: by the names in its header, or by place without one."""

    text: str | int
    label: str | int
    text_pair: str | int | None = None
    header: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names of labels in this file, by the one that is written there."""
    only: tuple[str, str] | None = None
    """A column and the value that it must have."""


@dataclass
class Rows:
    """The rows of one file, and what was left out."""

    rows: list[dict[str, Any]]
    warnings: list[str]


def table_rows(file: Path, columns: Columns, *, numbers: bool = False) -> Rows:
    """The rows of a table; `numbers` tells that labels are numbers.

    Raises BadInput: it has no such column, no row, a label that is no number, or too many rows lack columns.
    """
    lines = (line.split("\t") for line in _lines(file))  # quotes are text
    at = _places(file, next(lines, []) if columns.header else None, columns)
    rows, short, count = [], list[int](), 0
    for number, cells in enumerate(lines, 2 if columns.header else 1):
        if columns.only and len(cells) > at["only"] and cells[at["only"]] != columns.only[1]:
            continue
        count += 1
        wanted = {name: cells[place].strip() for name, place in at.items() if name != "only" and place < len(cells)}
        if len(wanted) < len(at) - ("only" in at) or not all(wanted.values()):
            short.append(number)
            continue
        label = columns.names.get(wanted["label"], wanted["label"])
        rows.append({**wanted, "label": _number(file, number, label) if numbers else label})
    if not rows:
        raise BadInput(f"{file} has no rows. Give the file as it was published.")
    shown = ", ".join(map(str, short[:SHOWN_LINES])) + (", ..." if short[SHOWN_LINES:] else "")
    if len(short) > SHORT_ROWS * count + 1:
        raise BadInput(
            f"{file}: {len(short):,} of {count:,} rows lack a text or a label (lines {shown}). Give the file as it was published."
        )
    lacking = counted(len(short), "row without a text or a label was", "rows without a text or a label were")
    left = [f"{file.parent.name}/{file.name}: {lacking} left out (lines {shown})"]
    return Rows(rows, left if short else [])


def tagged_rows(file: Path, *, prefix: str = "") -> Rows:
    """The sentences of lines with a word first and its tag last, by blanks or tabs; `prefix` is removed from each word.

    Raises BadInput: a line has no tag, or there is no sentence.
    """
    faults: list[Fault] = []
    found = conll_rows(file, partial(lines_in, file), USUAL, faults)
    try:
        rows: list[dict[str, Any]] = [dict(row) for _, row in found if isinstance(row, dict)]
    except UnreadableFrom as fault:
        faults += fault.faults
    if faults:
        raise BadInput(f"{faults[0]}. Give the file as it was published.")
    for row in rows:
        row["tokens"] = [word.removeprefix(prefix) or word for word in row["tokens"]]
    if not rows:
        raise BadInput(f"{file} has no sentences. Give the file as it was published.")
    return Rows(rows, [])


def question_rows(file: Path, *, language: str = "") -> Rows:
    """The questions of SQuAD's JSON; with a `language` they are scored by MLQA's rules for it.

    Raises BadInput: it is not SQuAD's JSON, or has no question.
    """
    faults: list[Fault] = []
    found = squad_rows(file, USUAL, faults)
    rows: list[dict[str, Any]] = [{**row, "language": language} for _, row in found or () if isinstance(row, dict)]
    if faults or not rows:
        what = str(faults[0]) if faults else f"{file} has no questions under data, paragraphs and qas"
        raise BadInput(f"{what}. Give the file as it was published.")
    return Rows(rows, [])


def _lines(file: Path) -> Iterator[str]:
    try:
        for line in lines_in(file):
            yield line.rstrip("\r")
    except UnreadableFrom as fault:
        raise BadInput(str(fault.faults[0])) from None


def _places(file: Path, header: list[str] | None, columns: Columns) -> dict[str, int]:
    """By part of a row its place in a line, from the names in the `header`; without one `columns` has places."""
    asked = {"text": columns.text, "text_pair": columns.text_pair, "label": columns.label}
    if header is None:
        return {name: place for name, place in asked.items() if isinstance(place, int)}
    asked |= {"only": columns.only[0]} if columns.only else {}
    names = [name.strip().lstrip("\ufeff") for name in header]
    if lacks := [str(name) for name in asked.values() if name is not None and name not in names]:
        raise BadInput(
            f"{file} lacks the columns {', '.join(lacks)}; its first line has {', '.join(names) or 'nothing'}. Give the file as it was "
            "published."
        )
    return {name: names.index(str(column)) for name, column in asked.items() if column is not None}


def _number(file: Path, line: int, label: str) -> float:
    try:
        return float(label)
    except ValueError:
        raise BadInput(f"{file}, line {line}: {label!r} is no number. Give the file as it was published.") from None


Reader = Callable[[Path], Rows]
Grid = Literal["one", "minilm", "compared"]
SEEDS: dict[Grid, int] = {"one": 1, "minilm": 4, "compared": 3}
# MiniLM fine-tunes the first three for up to 10 epochs (appendix B); WNLI is ours.
SMALL = ("CoLA", "RTE", "MRPC", "WNLI")
CROSSNER = ("politics", "science", "music", "literature", "ai")  # Liu et al. 2021


@dataclass(frozen=True)
class SuiteTask:
    """One task: its files in the folder of the suite, and its metrics."""

    name: str
    kind: Task
    train: str
    scored: Mapping[str, str]
    """What is scored, by the suffix of its name: a dev file, or for MNLI two, or one of each language."""
    reader: Reader
    metrics: tuple[str, ...]
    """The first is the one that papers report and that the grid is decided by."""
    validation: str = ""
    """The file that decides which weights are kept; the first of `scored` if that is empty."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """By suffix, where a scored file is read in another way than train."""

    @property
    def files(self) -> list[str]:
        """All of its files."""
        return list(dict.fromkeys([self.train, *filter(None, [self.validation]), *self.scored.values()]))

    def rows(self, folder: Path, file: str, suffix: str = "") -> Rows:
        """The rows of one of its files. BadInput where it is not as published."""
        return self.readers.get(suffix, self.reader)(folder / file)


def _classes(name: str, columns: Columns, metrics: tuple[str, ...] = ("accuracy",)) -> SuiteTask:
    reader = partial(table_rows, columns=columns)
    return SuiteTask(name, TEXT_CLASSIFICATION, f"{name}/train.tsv", {"": f"{name}/dev.tsv"}, reader, metrics)


_PAIRS = Columns("sentence1", "label", "sentence2")
GLUE = (
    _classes("CoLA", Columns(3, 1, header=False), ("matthews",)),
    _classes("SST-2", Columns("sentence", "label")),
    _classes("MRPC", Columns("#1 String", "Quality", "#2 String"), ("accuracy", "f1")),
    SuiteTask(
        "STS-B", TEXT_REGRESSION, "STS-B/train.tsv", {"": "STS-B/dev.tsv"},
        partial(table_rows, columns=Columns("sentence1", "score", "sentence2"), numbers=True), ("pearson", "spearman"),
    ),
    _classes("QQP", Columns("question1", "is_duplicate", "question2"), ("accuracy", "f1")),
    SuiteTask(
        "MNLI", TEXT_CLASSIFICATION, "MNLI/train.tsv", {"m": "MNLI/dev_matched.tsv", "mm": "MNLI/dev_mismatched.tsv"},
        partial(table_rows, columns=Columns("sentence1", "gold_label", "sentence2")), ("accuracy",),
    ),
    _classes("QNLI", Columns("question", "label", "sentence")),
    _classes("RTE", _PAIRS),
    _classes("WNLI", _PAIRS),
)  # fmt: skip
XNLI_LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")


def _xnli(languages: tuple[str, ...]) -> tuple[SuiteTask, ...]:
    """Trained on English, scored on the test of every language (zero shot)."""

    def of(language: str) -> Reader:
        columns = Columns("sentence1", "gold_label", "sentence2", only=("language", language))
        return partial(table_rows, columns=columns)

    train = Columns("premise", "label", "hypo", names={"contradictory": "contradiction"})
    return (
        SuiteTask(
            "XNLI", TEXT_CLASSIFICATION, "XNLI-MT-1.0/multinli/multinli.train.en.tsv",
            dict.fromkeys(languages, "XNLI-1.0/xnli.test.tsv"), partial(table_rows, columns=train), ("accuracy",),
            validation="XNLI-1.0/xnli.dev.tsv", readers={language: of(language) for language in languages},
        ),
    )  # fmt: skip


def _tagged(name: str, train: str, validation: str, test: str, reader: Reader = tagged_rows) -> SuiteTask:
    return SuiteTask(name, TOKEN_CLASSIFICATION, train, {"": test}, reader, ("entity_f1",), validation)


MLQA_LANGUAGES = ("en", "es", "de", "ar", "hi", "vi", "zh")
ANSWERS = ("answer_f1", "exact_match")


def _squad(name: str, version: str) -> SuiteTask:
    files = (f"train-v{version}.json", f"dev-v{version}.json")
    return SuiteTask(name, QUESTION_ANSWERING, files[0], {"": files[1]}, question_rows, ANSWERS)


def _mlqa(languages: tuple[str, ...]) -> SuiteTask:
    """Trained on SQuAD 1.1, scored on the test of every language (zero shot); English dev chooses."""

    def file(split: str, language: str) -> str:
        return f"MLQA_V1/{split}/{split}-context-{language}-question-{language}.json"

    return SuiteTask(
        "MLQA", QUESTION_ANSWERING, "train-v1.1.json", {language: file("test", language) for language in languages}, question_rows,
        ANSWERS, validation=file("dev", "en"), readers={language: partial(question_rows, language=language) for language in languages},
    )  # fmt: skip


def tasks_of(suite: str, data: Path) -> tuple[SuiteTask, ...]:
    """The tasks of a suite; those of WikiAnn are the languages whose folders are in `data`.

    Raises BadInput: WikiAnn has no language.
    """
    if suite == "wikiann":
        languages = (
            sorted(folder.name for folder in data.iterdir() if (folder / "train").is_file()) if data.is_dir() else []
        )
        if not languages:
            raise BadInput(
                f"--data {data} has no folder of a language with the files train, dev and test, as WikiAnn is published."
            )
        return tuple(
            _tagged(name, f"{name}/train", f"{name}/dev", f"{name}/test", partial(tagged_rows, prefix=f"{name}:"))
            for name in languages
        )
    known: dict[str, tuple[SuiteTask, ...]] = {
        "glue": GLUE,
        "xnli": _xnli(XNLI_LANGUAGES),
        "squad1": (_squad("SQuAD 1.1", "1.1"),),
        "squad2": (_squad("SQuAD 2.0", "2.0"),),
        "mlqa": (_mlqa(MLQA_LANGUAGES),),
        "conll2003": (_tagged("CoNLL-2003", "eng.train", "eng.testa", "eng.testb"),),
        "crossner": tuple(
            _tagged(name, f"{name}/train.txt", f"{name}/dev.txt", f"{name}/test.txt") for name in CROSSNER
        ),
    }
    return known[suite]


@dataclass(frozen=True)
class Tuning:
    """How a task is fine-tuned."""

    learning_rate: float
    epochs: float
    batch: int
    max_length: int
    """In tokens; shorter where the model reads less."""

    @property
    def name(self) -> str:
        """As in the names of folders."""
        return f"{self.learning_rate:g}-{self.epochs:g}"


def tunings(task: SuiteTask, grid: Grid) -> list[Tuning]:
    """The fine-tunings that are tried, of which the best on validation counts.

    `minilm` is MiniLM's (long version, appendix B), `compared` that of the comparative analysis (appendix D), whose length is MiniLM's.
    Neither names any for tagged words, which are ours, nor MiniLM a rate for MLQA, which is SQuAD's here. `one` is one of MiniLM's.
    """
    if task.kind.has_contexts:
        length = 512 if task.name == "MLQA" else 384
        return [Tuning(rate, 3, 32, length) for rate in ((6e-5,) if grid != "compared" else (2e-5,))]
    xnli, tagged = task.name == "XNLI", task.kind.labels_words
    batch, length = (128 if xnli and grid != "compared" else 32), (256 if tagged else 128)
    rates: tuple[float, ...]
    epochs: tuple[float, ...]
    if grid == "compared":
        rates, epochs = (2e-5,), (6,) if task.name == "CoLA" else (5,) if xnli else (3,)
    elif grid == "one":
        rates, epochs = (5e-5,), (10,) if task.name in SMALL else (5,) if xnli else (3,)
    else:
        rates = (3e-5, 4e-5, 5e-5, 6e-5) if xnli else (2e-5, 3e-5, 4e-5, 5e-5)
        epochs = (5,) if xnli else (3, 5, 10) if task.name in SMALL else (3, 4, 5)
    return [Tuning(rate, count, batch, length) for rate in rates for count in epochs]
