"""The parts of each input of `annotate` over many files, and the manifest of those that are there.

A part is a range of rows of one input. Its name says which, so a part that is there need not be made again. Its rows, and the order in
which they are computed, depend on the input and on the settings alone: whoever makes it writes the same bytes.

`_manifest.json` in the output has what it was begun with, its inputs, and the digest of each part that is there. It is written again
after parts are made, at most every few seconds. A part that is there without being listed was made just before the work was killed: it
appeared whole, from the same settings and inputs, so it is listed and not made again.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from serve.bundle.remote_files import is_url, shown
from serve.bundle.runtimes import Device
from serve.errors import BadInput
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate.answering import RowFaults
from stillroom.verbs.annotate.inputs import InputPlace, opened, some
from stillroom.verbs.annotate.reader import InputFile, format_of
from stillroom.verbs.annotate.rows import Columns, Start
from stillroom.verbs.annotate.storage import DiskFolder, Storage
from stillroom.verbs.annotate.tables import ERROR, TABLE

MANIFEST = "_manifest.json"
SAVE_EVERY_S = 2.0

# A part also ends after so many characters of text, which take a core some minutes.
PART_CHARACTERS = 16 * 2**20
# Parts of a file that must be read from its start have so many times the rows: gzip, and a JSON array.
FROM_START = 16


@dataclass(frozen=True)
class Job:
    """What each worker process needs to know."""

    bundle: str
    """The bundle's folder on the machine of the driver."""
    digest: str
    variant: str
    threads: int
    device: Device
    columns: Columns
    options: AnswerOptions
    format: str | None
    bad_rows: Literal["stop", "skip"]
    part_rows: int
    output: str
    on_nodes: bool = False
    """Whether workers run on other machines, too."""


class Scan(NamedTuple):
    """What was found by reading an input: where its parts start, its rows in all, and those that cannot be used."""

    source: InputPlace
    starts: tuple[Start, ...]
    rows: int
    bad: RowFaults


class Part(NamedTuple):
    """A part of an input."""

    source: InputPlace
    start: Start
    rows: int

    @property
    def end(self) -> int:
        """The rows of the input up to its end."""
        return self.start.row + self.rows

    @property
    def stem(self) -> str:
        """The name of its output file without the suffix: the input's name and the range of rows."""
        return f"{self.source.name}-{self.start.row:012d}-{self.end:012d}"


def name_of(part: Part, format: str | None) -> str:
    """The name of its output file, which also says how it is written."""
    return part.stem + (TABLE if input_format(part.source, format) == "parquet" else ".jsonl")


def input_format(source: InputPlace, format: str | None) -> str:
    """The format of an input: the one given, or that of its name."""
    return format or format_of(Path(source.name))


def scan(source: InputPlace, job: Job) -> Scan:
    """Reads an input and checks each of its rows.

    Raises:
        BadInput: it is not in its format, or damaged.
        ReadFailed: the store that it is in failed.
    """
    starts: list[Start] = []
    from_start = source.name.endswith(".gz") or input_format(source, job.format) == "json"
    times = FROM_START if from_start else 1
    count = rows_in_part = characters = 0
    with reading(source, job) as file:
        file.prepare()
        if job.bad_rows == "skip" and file.table and ERROR in file.table.schema_arrow.names:
            raise BadInput(
                f"{file.name} has a column {ERROR}, which is that of errors of --bad-rows skip; rename it, or give --bad-rows stop"
            )
        bad = RowFaults(file.name, file.unit)
        position = file.position(0)
        for row in file.rows():
            if not rows_in_part:
                starts.append(position)
            if row.fault is not None:
                bad.add(row.line, row.fault)
            count, rows_in_part = count + 1, rows_in_part + 1
            characters += len(row.text) + len(row.pair or "")
            if rows_in_part >= times * job.part_rows or characters >= times * PART_CHARACTERS:
                position = file.position(count)
                rows_in_part = characters = 0
    return Scan(source, tuple(starts), count, bad)


@contextlib.contextmanager
def reading(source: InputPlace, job: Job, start: Start | None = None) -> Iterator[InputFile]:
    """The input, opened. ReadFailed if its store fails meanwhile, BadInput if a disk does."""
    try:
        with InputFile(
            Path(source.name),
            job.format,
            job.columns,
            opened=lambda: opened(source.place),
            name=shown(source.place),
            start=start,
            texts_only=True,
        ) as file:
            yield file
    except OSError as error:
        if is_url(source.place):
            raise
        raise unreadable(source, error.strerror or error, job) from error


def unreadable(source: InputPlace, why: object, job: Job) -> BadInput:
    """What is told of an input that cannot be read here."""
    hint = "; with --ray, give a place that every node reads, such as s3://" if job.on_nodes else ""
    return BadInput(f"--input {shown(source.place)} cannot be read ({why}){hint}")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In which settings the lineage `before` of an output differs from that of this run; empty where it does not."""
    return "; ".join(
        f"{name} {json.dumps(before.get(name))}, now {json.dumps(now.get(name))}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


class PartsManifest:
    """The manifest of the output `storage`; `lineage` is what decides the answers. With `restart` the parts that are there are removed.

    Raises:
        BadInput: the output holds other files, or parts of another job.
    """

    def __init__(self, storage: Storage, lineage: Mapping[str, Any], *, restart: bool = False) -> None:
        self.storage, self.lineage = storage, dict(lineage)
        self.inputs: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.sizes = storage.sizes()
        """The bytes of each file in the output at the start, by name."""
        self._saved_s = 0.0
        if MANIFEST not in self.sizes:
            if self.sizes:
                raise BadInput(
                    f"--output {shown(storage.place)} holds files that `annotate` did not write ({some(sorted(self.sizes))}); give a "
                    "folder that is empty or not there"
                )
            return
        found = self._found()
        self.inputs, self.parts = found["inputs"], found["parts"]
        if restart:
            self._remove_all()
        elif changed := changes(found["lineage"], self.lineage):
            raise BadInput(
                f"--output {shown(storage.place)} was begun with {changed}. Give another --output, or --restart to begin anew"
            )

    def known(self, source: InputPlace) -> bool:
        """Whether `source` is listed as it is now."""
        listed = self.inputs.get(source.name, {})
        now = {"place": shown(source.place), "bytes": source.bytes, "mark": source.mark}
        return all(name in listed and listed[name] == value for name, value in now.items())

    def check_inputs(self, sources: Sequence[InputPlace]) -> None:
        """BadInput if an input of which there are parts has changed or is missing. Inputs may have been added."""
        now = {source.name: source for source in sources}
        changed = [
            f"{name} is missing" if name not in now else f"{name} has changed"
            for name in self.inputs
            if name not in now or not self.known(now[name])
        ]
        if changed:
            raise BadInput(
                f"--output {shown(self.storage.place)} has parts of other inputs: {some(changed)}. Give the same inputs (files may be "
                "added), another --output, or --restart to begin anew"
            )

    def add_input(self, found: Scan) -> None:
        """Lists an input."""
        source = found.source
        self.inputs[source.name] = {
            "place": shown(source.place),
            "bytes": source.bytes,
            "mark": source.mark,
            "rows": found.rows,
            "starts": [list(start) for start in found.starts],
        }

    def parts_of(self, source: InputPlace) -> list[Part]:
        """The parts of a listed input."""
        listed = self.inputs[source.name]
        starts = [Start(*start) for start in listed["starts"]]
        ends = [*(start.row for start in starts[1:]), listed["rows"]]
        return [Part(source, start, end - start.row) for start, end in zip(starts, ends, strict=False)]

    def is_there(self, part: Part, format: str | None) -> bool:
        """Whether a part was in the output at the start, with the bytes that are listed. One that is not listed is listed now."""
        name = name_of(part, format)
        if name not in self.sizes:
            self.parts.pop(name, None)
            return False
        if name not in self.parts:
            content = self.storage.read(name)
            if content is None:
                return False
            self.add_part(name, part.rows, len(content), hashlib.sha256(content).hexdigest())
        return bool(self.parts[name]["bytes"] == self.sizes[name])

    def add_part(self, name: str, rows: int, size_bytes: int, sha256: str) -> None:
        """Lists a part."""
        self.parts[name] = {"rows": rows, "bytes": size_bytes, "sha256": sha256}

    def missing(self) -> list[str]:
        """The listed parts that are not in the output as they are listed."""
        sizes = self.storage.sizes()
        return [name for name, part in self.parts.items() if sizes.get(name) != part["bytes"]]

    def save(self, *, complete: bool = False, now: bool = True) -> None:
        """Writes it; unless `now`, only if it was not written for a while. BadInput if another run has begun the output meanwhile."""
        if not now and time.monotonic() - self._saved_s < SAVE_EVERY_S:
            return
        # On a disk a lock keeps others away; a store has none.
        others = not isinstance(self.storage, DiskFolder) and self.storage.read(MANIFEST) is not None
        if others and (changed := changes(self._found()["lineage"], self.lineage)):
            raise BadInput(
                f"--output {shown(self.storage.place)} was begun by another run meanwhile, with {changed}. Give another --output, or wait "
                "for that run and give --restart"
            )
        self._write(complete=complete)

    def _write(self, *, complete: bool) -> None:
        document = {
            "complete": complete,
            "lineage": self.lineage,
            "inputs": self.inputs,
            "parts": dict(sorted(self.parts.items())),
        }
        with self.storage.writing(MANIFEST) as path:
            # ASCII: the name of a file need not be UTF-8.
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        self._saved_s = time.monotonic()

    def _found(self) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(MANIFEST) or b"")
            if all(isinstance(found[key], dict) for key in ("lineage", "inputs", "parts")):
                return dict(found)
        except (ValueError, KeyError, TypeError):
            pass
        raise BadInput(
            f"{shown(self.storage.place)}/{MANIFEST} was not written by `annotate`, or is damaged; give another --output, or remove it"
        )

    def _remove_all(self) -> None:
        """Removes the parts that are listed, or would be made of the inputs that are; then lists nothing.

        The manifest is there at all times: without one, the output would be refused after a kill.
        """
        stems = {part.stem for name in self.inputs for part in self.parts_of(InputPlace(name, "", 0, ""))}
        for name in sorted(self.sizes):
            if name in self.parts or name.rpartition(".")[0] in stems:
                self.storage.remove(name)
        self.inputs, self.parts, self.sizes = {}, {}, {}
        self._write(complete=False)
