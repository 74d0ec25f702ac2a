"""Reads texts that somebody or something is asked about: of any format, with labels or without."""

from pathlib import Path

from compress.data.columns import Columns
from compress.data.examples import Example
from compress.data.file_formats import SUFFIXES, looks_like_columns, rows_in, suffix_of
from compress.data.labelled_files import check_there
from compress.data.row_faults import BadRows, Fault, UnreadableFrom, note
from compress.data.rows import unlabelled_example
from compress.data.tags import from_tags
from compress.data.task import Task
from compress.data.texts import read_texts
from serve.errors import BadInput
from serve.text.labels import OUTSIDE


def read_asked(path: Path, task: Task, columns: Columns, role: str) -> list[Example]:
    """The texts of the file that the flag `role` names, without their labels; words with tags are read as the text that they make.

    Raises:
        BadInput: no such file, another format, or no text in it.
        BadRows: rows have faults, all of which it lists.
    """
    suffix = suffix_of(path)
    if suffix == ".txt" and task.labels_words and path.is_file() and looks_like_columns(path, tagged=True):
        suffix = ".conll"
    if suffix == ".txt":
        return [Example(text) for text in read_texts(path, columns)]
    check_there(path)
    if suffix not in SUFFIXES:
        raise BadInput(f"{role} {path} does not end in {', '.join(SUFFIXES)} or .txt. Give its texts in one of them.")
    found: list[Example] = []
    faults: list[Fault] = []
    try:
        for line, row in rows_in(path, suffix, columns, task if suffix == ".conll" else None, faults):
            try:
                found.append(_example(row, task, columns))
            except ValueError as reason:
                note(faults, Fault(str(path), line, str(reason)))
    except UnreadableFrom as error:
        faults += error.faults
    if faults:
        raise BadRows(faults)
    if not found:
        raise BadInput(f"{role} {path} holds no text. Give a file with one text a row.")
    return found


def _example(row: object, task: Task, columns: Columns) -> Example:
    if task.labels_words and isinstance(row, dict) and columns.text not in row and columns.tokens in row:
        tokens = row[columns.tokens]
        return Example(from_tags(tokens, [OUTSIDE] * len(tokens) if isinstance(tokens, list) else tokens).text)
    return unlabelled_example(row, columns, alone=task.labels_words)
