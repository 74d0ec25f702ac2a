"""The file that rows of answers are collected in, in any order, until all texts have one.

Rows are appended to OUT.part as they come, so that a kill loses what is being asked and nothing that was answered. OUT.lineage.json says
what gives the answers; a call with another lineage is refused. When every text has a row, they are written to OUT in the order of the
texts, in one step. A row belongs to its text, whatever line it is on: a person may have taken rows out, or put texts into the input.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from compress.data.examples import Example
from compress.data.row_fields import BadRows, Fault, note
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.files import disk_errors_reported, lock_at, replacing
from serve.wording import all_of, counted

ERROR, TOKENS = "error", "paid_tokens"
"""Fields of a row: why it has no answer, and the tokens of the prompt and of the completion that were paid for it."""


OF_THE_TEXT = ("text", "text_pair", "head", "tail")
COMMAND_FILES = "command_files"
"""In a lineage: the digest of each file that a command names, by name. If one has changed, that is told, and answers are kept."""
NOT_COMPARED = (COMMAND_FILES, "texts")  # of lineages; earlier versions have the digest of all texts
NUMBERED = re.compile(rb"^\d+\t")  # earlier versions wrote the index of its text before a row of OUT.part


def fields_of(example: Example) -> dict[str, Any]:
    """The text of `example` as the fields of a row: with the second of a pair, or with head and tail, if it has these."""
    row: dict[str, Any] = {"text": example.text}
    if example.text_pair:
        row["text_pair"] = example.text_pair
    if example.head and example.tail:
        row |= {
            name: {"start": start, "end": end}
            for name, (start, end) in (("head", example.head), ("tail", example.tail))
        }
    return row


class Journal:
    """The rows of `texts` that are answered so far, by index; a context manager.

    Raises:
        BadInput: `out` holds other answers, or nothing says what gave those of OUT.part, or another call is writing it.
    """

    def __init__(self, out: Path, texts: Sequence[Example], lineage: Mapping[str, Any]) -> None:
        self.out, self.texts, self.lineage = out, texts, dict(lineage)
        self.part = out.with_name(f"{out.name}.part")
        self.lineage_file = out.with_name(f"{out.name}.lineage.json")
        self.rows: dict[int, bytes] = {}
        self.changed: list[str] = []
        """The files of the command that have changed since the first of the rows were answered."""

    def __enter__(self) -> "Journal":
        before = _read(self.lineage_file)
        then, now = _compared(before or {}), _compared(self.lineage)
        differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        same = before is not None and not differ
        there = self.out if self.out.exists() else self.part
        if not same and (there is self.out or (before is not None and there.exists() and there.stat().st_size)):
            raise BadInput(
                f"--out {there} exists, and holds other answers than these"
                f"{f': {all_of(differ)} of `{self.lineage_file.name}` changed' if before else ''}. Remove it, or give another file."
            )
        self._file = self.part.open("a+b")
        if not lock_at(self.part, self._file.fileno()):
            self._file.close()
            raise BadInput(f"Another `label` is writing {self.part}. Wait until it ends, or give another --out.")
        try:
            if before and same:
                files, here = before.get(COMMAND_FILES, {}), self.lineage.get(COMMAND_FILES, {})
                self.changed = [name for name, digest in files.items() if here.get(name) != digest]
            if same:
                self._take_up()
                if before and COMMAND_FILES in before and not self.missing:
                    self.lineage[COMMAND_FILES] = before[COMMAND_FILES]  # nothing is asked, so these gave the answers
            else:
                if before is None and (size := os.fstat(self._file.fileno()).st_size):
                    raise BadInput(
                        f"{self.part} has {counted(size, 'byte')} of answers, and {self.lineage_file}, which says what gave them, is "
                        f"missing or cannot be read. Put that file back to go on, move {self.part} away to ask anew, or give another --out."
                    )
                self._file.truncate(0)
                self._write_lineage()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nothing = kind is not None and all(ERROR in json.loads(row) for row in self.rows.values())
        self._close(keep=kind is not None and not nothing)
        if nothing and not self.out.exists():
            self.lineage_file.unlink(missing_ok=True)

    def _close(self, *, keep: bool = True) -> None:
        if not (keep and os.fstat(self._file.fileno()).st_size):
            self.part.unlink(missing_ok=True)
        self._file.close()

    def _write_lineage(self) -> None:
        with replacing(self.lineage_file, alone=True, synced=True) as beside:
            beside.write_bytes(canonical_json(self.lineage))

    @property
    def missing(self) -> list[int]:
        """The indices of the texts without a row, in order."""
        return [index for index in range(len(self.texts)) if index not in self.rows]

    def add(self, answers: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Append a row for each (index of the text, fields of its answer).

        Raises:
            BadInput: the disk is full.
        """
        lines = []
        for index, fields in answers:
            row = _written(
                fields_of(self.texts[index])
                | {name: value for name, value in fields.items() if name not in OF_THE_TEXT}
            )
            self.rows[index] = row
            lines.append(row + b"\n")
        with disk_errors_reported(self.part):
            self._file.write(b"".join(lines))
            self._file.flush()

    def finish(self) -> dict[str, int]:
        """Write the rows to OUT in the order of the texts; how many have no answer, and the tokens that were paid."""
        unanswered = prompt = completion = 0
        with replacing(self.out) as beside, beside.open("wb") as file:
            for index in range(len(self.texts)):
                row = json.loads(self.rows[index])
                unanswered += ERROR in row
                spent = row.get(TOKENS, (0, 0))
                prompt, completion = prompt + spent[0], completion + spent[1]
                file.write(self.rows[index] + b"\n")
        self._write_lineage()
        return {"unanswered": unanswered, "prompt_tokens": prompt, "completion_tokens": completion}

    def _take_up(self) -> None:
        """Read the rows that are there: of a finished OUT those with an answer, and the whole ones of OUT.part.

        Raises:
            BadInput: a line is no row, has a text that is not asked about, or another answer to a text than a line above.
        """
        index_of = {_text_in(fields_of(text)): index for index, text in enumerate(self.texts)}
        if self.out.exists():
            with self.out.open("rb") as file:
                self._keep(self.out, file, index_of)
        self._file.seek(0)
        self._keep(self.part, self._whole(), index_of)

    def _whole(self) -> Iterator[bytes]:
        """The whole lines of OUT.part; what a kill left behind them is removed."""
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield NUMBERED.sub(b"", line)
        self._file.truncate(whole)
        self._file.seek(whole)

    def _keep(self, path: Path, lines: Iterable[bytes], index_of: Mapping[str, int]) -> None:
        """Take the rows that have an answer; a text with an error, or without a row, is asked about again."""
        found: dict[int, bytes] = {}
        strange: list[int] = []  # lines of texts that are not asked about
        faults: list[Fault] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
                index, answer = index_of.get(_text_in(row)), _written(row)
                prompt, completion = row.get(TOKENS, (0, 0))
                math.fsum((prompt, completion))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                reason = f"is no JSON object with a `text`, or its `{TOKENS}` are no two numbers; correct or remove it"
                note(faults, Fault(str(path), number, reason))
                continue
            if ERROR in row or all(value is None for name, value in row.items() if name not in (*OF_THE_TEXT, TOKENS)):
                continue
            if index is None:
                strange.append(number)
            elif found.setdefault(index, answer) != answer:
                note(faults, Fault(str(path), number, "answers a text otherwise than a line above; remove one of them"))
        if faults:
            raise BadRows(faults)
        if strange:
            raise BadInput(
                f"--out {path} exists, and holds other answers than these: {counted(len(strange), 'text')} that no --input has, the "
                f"first in line {strange[0]}. Remove these lines, put the texts into the input, or give another file."
            )
        self.rows = found | self.rows


def _text_in(row: Any) -> str:
    """What tells the text of `row` apart from others."""
    return json.dumps([row["text"], *(row.get(name) for name in OF_THE_TEXT[1:])], sort_keys=True)


def _written(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()


def _compared(lineage: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lineage.items() if name not in NOT_COMPARED}


def _read(lineage_file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(lineage_file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
