"""Reads unlabelled text from files, as one list or one text at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compress.data.columns import USUAL, Columns
from compress.data.file_formats import SUFFIXES, TOO_LONG, lines_in, rows_in, suffix_of
from compress.data.row_fields import MOST_CHARACTERS, BadRows, Fault, UnreadableFrom, note
from compress.data.rows import texts_of
from serve.errors import BadInput


def read_texts(path: Path, columns: Columns = USUAL, *, pairs: bool = False) -> list[str]:
    """Unlabelled text: the lines of a `.txt` file (empty lines are skipped), or the `text` fields of any example file.

    With `pairs` the `text_pair` fields too, each as a separate text. Raises BadInput: no such file, an unknown suffix, not UTF-8,
    or no text in it. BadRows: rows without a text; it lists all of them.
    """
    return list(stream_texts(path, columns, pairs=pairs))


@dataclass(frozen=True)
class TextFiles:
    """The texts of several files, read from disk by each iteration, so that one line is held at a time."""

    paths: tuple[Path, ...]
    columns: Columns = USUAL

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from stream_texts(path, self.columns)


def stream_texts(path: Path, columns: Columns = USUAL, *, pairs: bool = False) -> Iterator[str]:
    """The texts of `read_texts` one by one. Faults of rows are raised after the last text.

    Raises BadInput: no such file, or an unknown suffix; the iterator raises what `read_texts` raises.
    """
    if not path.is_file():
        raise BadInput(
            f"{path} is {'a folder' if path.is_dir() else 'not a file'}. Give text as .txt (one document a line) or one of "
            f"{', '.join(SUFFIXES[:-1])}."
        )
    suffix = suffix_of(path)
    if suffix != ".txt" and (suffix not in SUFFIXES or suffix == ".conll"):
        raise BadInput(
            f"{path} has {f'the suffix {suffix}' if suffix else 'no suffix'}. Give .txt or one of {', '.join(SUFFIXES[:-1])}."
        )
    return _texts(path, columns, pairs)


def _texts(path: Path, columns: Columns, pairs: bool) -> Iterator[str]:
    """The texts. BadInput if there is none, BadRows if rows have faults."""
    faults: list[Fault] = []
    found = False
    try:
        for text in _lines_of(path, faults) if suffix_of(path) == ".txt" else _fields_of(path, columns, pairs, faults):
            found = True
            yield text
    except UnreadableFrom as error:
        raise BadRows([*error.faults, *faults]) from None
    if faults:
        raise BadRows(faults)
    if not found:
        raise BadInput(f"{path} holds no text. Give a file with one document a line.")


def _lines_of(path: Path, faults: list[Fault]) -> Iterator[str]:
    for number, line in enumerate(lines_in(path), 1):
        if len(text := line.strip()) > MOST_CHARACTERS:
            note(faults, Fault(str(path), number, TOO_LONG))
        elif text:
            yield text


def _fields_of(path: Path, columns: Columns, pairs: bool, faults: list[Fault]) -> Iterator[str]:
    for line, row in rows_in(path, suffix_of(path), columns, None, faults):
        try:
            text, pair = texts_of(row, columns, pairs=pairs)
        except ValueError as reason:
            note(faults, Fault(str(path), line, str(reason)))
            continue
        yield text
        if pair:
            yield pair
