"""The file that rows of answers are collected in, in any order, until all texts have one.

Rows are appended to OUT.part as they come, so that a kill loses what is being asked and nothing that was answered. OUT.lineage.json says
what gives the answers; a call with another lineage begins anew. When every text has a row, they are written to OUT in the order of the
texts, in one step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from compress.data.examples import Example
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.files import disk_errors_reported, lock_at, replacing

ERROR, TOKENS = "error", "paid_tokens"
"""Fields of a row: why it has no answer, and the tokens of the prompt and of the completion that were paid for it."""


OF_THE_TEXT = ("text", "text_pair", "head", "tail")


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
        BadInput: `out` holds other answers, or another call is writing it.
    """

    def __init__(self, out: Path, texts: Sequence[Example], lineage: Mapping[str, Any]) -> None:
        self.out, self.texts, self.lineage = out, texts, dict(lineage)
        self.part = out.with_name(f"{out.name}.part")
        self.lineage_file = out.with_name(f"{out.name}.lineage.json")
        self.rows: dict[int, bytes] = {}

    def __enter__(self) -> "Journal":
        before = _read(self.lineage_file)
        if self.out.exists() and before != self.lineage:
            raise BadInput(
                f"--out {self.out} exists, and holds other answers than these. Remove it, or give another file."
            )
        self._file = self.part.open("a+b")
        if not lock_at(self.part, self._file.fileno()):
            self._file.close()
            raise BadInput(f"Another `label` is writing {self.part}. Wait until it ends, or give another --out.")
        if before == self.lineage:
            self._take_up()
        else:
            self._file.truncate(0)
            with replacing(self.lineage_file, alone=True) as beside:
                beside.write_bytes(canonical_json(self.lineage))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        nothing = kind is not None and all(ERROR in json.loads(row) for row in self.rows.values())
        if kind is None or nothing:
            self.part.unlink(missing_ok=True)
        if nothing and not self.out.exists():
            self.lineage_file.unlink(missing_ok=True)

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
            row = json.dumps(
                {
                    **fields_of(self.texts[index]),
                    **{name: value for name, value in fields.items() if name not in OF_THE_TEXT},
                },
                ensure_ascii=False,
                separators=(",", ":"),
            ).encode()
            self.rows[index] = row
            lines.append(str(index).encode() + b"\t" + row + b"\n")
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
        return {"unanswered": unanswered, "prompt_tokens": prompt, "completion_tokens": completion}

    def _take_up(self) -> None:
        """Read the rows that are there: of a finished OUT those with an answer, and the whole ones of OUT.part."""
        if self.out.exists():
            for index, row in enumerate(self.out.read_bytes().split(b"\n")[:-1]):
                self._keep(index, row)
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            number, _, row = line.partition(b"\t")
            self._keep(int(number), row[:-1])
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(whole)

    def _keep(self, index: int, row: bytes) -> None:
        """Take a row that has an answer; a text with an error is asked about again."""
        if ERROR not in json.loads(row):
            self.rows[index] = row


def _read(lineage_file: Path) -> Any:
    try:
        return json.loads(lineage_file.read_bytes())
    except (OSError, ValueError):
        return None
