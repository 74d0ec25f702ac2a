"""The plan of a bulk annotation: the parts of each input, and what decides their answers.

A part is a range of rows of one input. Its name says which, so a part that is there need not be made again. Its rows, and the order in
which they are computed, depend on the input and on the settings alone: whoever makes it writes the same bytes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from serve.bundle.remote_files import EXTRAS, ReadFailed, is_url, scheme_of, shown
from serve.bundle.runtimes import Device
from serve.errors import BadInput, StillroomError
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate.bulk.storage import InputPlace, opened
from stillroom.verbs.annotate.reader import InputFile, Start, format_of, objects_of
from stillroom.verbs.annotate.rows import HEAD, TAIL, Columns, InputRow, RowFaults, json_row_reader
from stillroom.verbs.annotate.tables import ERROR, TABLE

# A part also ends after so many characters of text, which take a core some minutes.
PART_CHARACTERS = 16 * 2**20
# Parts of a file that must be read from its start have so many times the rows: gzip, and a JSON array.
FROM_START = 16
TABLE_ROWS = 4096  # read at once of a parquet file


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
    unit: str
    """What a row is called: row or line."""


class Part(NamedTuple):
    """A part of an input."""

    source: InputPlace
    start: Start
    rows: int

    @property
    def end(self) -> int:
        """The rows of the input up to its end."""
        return self.start.row + self.rows


def name_of(part: Part, format: str | None) -> str:
    """The name of its output file: the input's name, the range of rows, and how it is written."""
    suffix = TABLE if input_format(part.source, format) == "parquet" else ".jsonl"
    return f"{part.source.name}-{part.start.row:012d}-{part.end:012d}{suffix}"


def parts_of(source: InputPlace, starts: tuple[Start, ...], rows: int) -> list[Part]:
    """The parts of an input of which a scan found the `starts`."""
    ranges = row_ranges([start.row for start in starts], rows)
    return [Part(source, start, end - begin) for start, (begin, end) in zip(starts, ranges, strict=True)]


def row_ranges(begins: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """The rows before each part and up to its end, of an input with `rows` whose parts begin at `begins`. Without rows it has no parts."""
    ends = [*begins[1:], rows][: len(begins)]
    return list(zip(begins, ends, strict=True))


def input_format(source: InputPlace, format: str | None) -> str:
    """The format of an input: the one given, or that of its name."""
    return format or format_of(Path(source.name))


def scan(source: InputPlace, job: Job) -> Scan:
    """Reads an input and checks each of its rows.

    Raises:
        BadInput: it is not in its format, or damaged.
        ReadFailed: the store that it is in failed.
    """
    bad, starts = RowFaults(), []
    part_rows, most_characters = job.part_rows, PART_CHARACTERS
    if source.name.endswith(".gz") or input_format(source, job.format) == "json":
        part_rows, most_characters = FROM_START * part_rows, FROM_START * most_characters
    with reading(source, job) as file:
        count, rows_in_part, characters = 0, part_rows, 0
        found = file.rows()
        if file.format == "parquet":
            found = (row for _, rows in table_groups(file, job, texts_only=True) for row in rows)
        position = file.position(0)
        for row in store_failures(source, found):
            if rows_in_part >= part_rows or characters >= most_characters:
                starts.append(position)
                rows_in_part = characters = 0
            if row.fault is not None:
                bad.add(row.line, row.fault)
            count, rows_in_part, characters = (
                count + 1,
                rows_in_part + 1,
                characters + len(row.text) + len(row.pair or ""),
            )
            if rows_in_part >= part_rows or characters >= most_characters:
                position = file.position(count)
        return Scan(source, tuple(starts), count, bad, file.unit)


@contextlib.contextmanager
def reading(source: InputPlace, job: Job, start: Start | None = None) -> Iterator[InputFile]:
    """The input, opened. ReadFailed if its store fails meanwhile, BadInput if a disk does."""
    try:
        with InputFile(
            Path(source.name),
            job.format,
            job.columns,
            opened=lambda: next(store_failures(source, (opened(place) for place in (source.place,)))),
            name=shown(source.place),
            start=start,
        ) as file:
            if file.format != "parquet":  # whose rows come from `table_groups`
                for _ in store_failures(source, _prepared(file)):
                    pass
            yield file
    except OSError as error:
        if is_url(source.place):
            raise
        hint = "; with --ray, give a place that every node reads, such as s3://" if job.on_nodes else ""
        raise BadInput(f"--input {source.place} cannot be read ({error.strerror or error}){hint}") from error


def _prepared(file: InputFile) -> Iterator[None]:
    """Reads the header, as an iterator so that failures of the store are told."""
    file.prepare()
    yield None


def store_failures(source: InputPlace, rows: Iterator[Any]) -> Iterator[Any]:
    """The `rows` of an input. A failure of its store becomes ReadFailed; what the caller does with them is not its concern."""
    if not (is_url(source.place) and scheme_of(source.place) in EXTRAS):
        yield from rows
        return
    try:
        yield from rows
    except StillroomError:
        raise
    except Exception as error:
        raise ReadFailed from error


def table_groups(
    file: InputFile, job: Job, begin: int = 0, end: int | None = None, *, texts_only: bool = False
) -> Iterator[tuple[Any, list[InputRow]]]:
    """The rows from `begin` to `end` of a parquet file in Arrow batches, of all columns or of those of texts; and as rows of their texts.

    Row groups outside the range are not read.
    """
    table = file.table()
    if job.bad_rows == "skip" and ERROR in table.schema_arrow.names:
        raise BadInput(
            f"{file.name} has a column {ERROR}, which is that of errors of --bad-rows skip; rename it, or give --bad-rows stop"
        )
    end = table.metadata.num_rows if end is None else end
    groups: list[int] = []
    before = first = 0
    for group in range(table.metadata.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if before < end and before + rows > begin:
            first = first if groups else before
            groups.append(group)
        before += rows
    read = json_row_reader(job.columns)
    texts = (job.columns.text, job.columns.pair, *((HEAD, TAIL) if job.columns.relations else ()))
    names = [name for name in texts if name in table.schema_arrow.names]
    only = names if texts_only else None
    with file.table_damage_reported():
        for batch in table.iter_batches(batch_size=TABLE_ROWS, row_groups=groups, columns=only, use_threads=False):
            skipped, last = max(0, begin - first), min(end - first, batch.num_rows)
            number = first + skipped + 1
            first += batch.num_rows
            if skipped < last:
                inside = batch.slice(skipped, last - skipped)
                objects = objects_of(inside.select(names))
                yield inside, [read(number + place, each) for place, each in enumerate(objects)]
            if first >= end:
                return
