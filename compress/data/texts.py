"""Unlabelled text, read from files as one list or one text at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from compress.data.fields import pair_of, text_of
from compress.data.file_formats import SUFFIXES, lines_in, rows_in
from compress.data.row_faults import BadRows, Fault, note
from serve.errors import BadInput


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
    return _some(path, (line.strip() for line in lines_in(path)) if path.suffix == ".txt" else _row_texts(path, pairs))


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
    for line, row in rows_in(path, path.suffix, faults):
        try:
            if not isinstance(row, dict):
                raise ValueError(f"is {type(row).__name__}, not an object with fields")
            yield text_of(row, "text")
            if pairs and (pair := pair_of(row)):
                yield pair
        except ValueError as reason:
            note(faults, Fault(str(path), line, str(reason)))
    if faults:
        raise BadRows(faults)
