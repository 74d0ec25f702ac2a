"""What one worker process does: reads inputs, and answers parts of them with a bundle.

The model runs in this process, batch by batch in an order that the part alone decides. The pool of processes behind one input
(`serve.workers.offline_pool`) gives each process what it has room for, so its batches depend on time, and the last bits of fp32 vectors
depend on the batch: its parts could not be compared by their bytes.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from serve.bundle.manifest import sha256_file
from serve.bundle.remote_files import ReadFailed, is_url, shown, tried
from serve.errors import BadInput, InternalError, StillroomError
from serve.text.inputs import TextWork, estimated_tokens
from serve.workers.offline_pool import BATCH_TOKENS, GPU_BATCH_TOKENS, length_chunks
from stillroom.verbs.annotate.bulk.kept_answers import KeptAnswers, Outcome
from stillroom.verbs.annotate.bulk.manifest import MANIFEST
from stillroom.verbs.annotate.bulk.plan import (
    Job,
    Part,
    Scan,
    name_of,
    reading,
    scan,
    store_failures,
    table_groups,
)
from stillroom.verbs.annotate.bulk.storage import InputPlace, place_of, storage_of
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import InputRow, RowFaults, fails_on_some
from stillroom.verbs.annotate.runner import WINDOW_BYTES, WINDOW_ROWS
from stillroom.verbs.annotate.tables import with_answers
from stillroom.verbs.annotate.writer import answer_opening, error_line

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

# What the bytes of a part may depend on, beside the bundle.
PACKAGES = ("stillroom", "numpy", "onnxruntime", "tokenizers", "pyarrow", "msgspec")

# What an input that was changed was meanwhile, and what to do, in a message.
ANNOTATED = "annotated; give another --output, or --restart"

T = TypeVar("T")


class Ready(NamedTuple):
    """A worker process that can be asked."""

    pid: int
    node: str
    versions: dict[str, str]


class Made(NamedTuple):
    """A part that is in the output."""

    name: str
    place: str
    """Its input, for messages."""
    rows: int
    bytes: int
    sha256: str
    bad: RowFaults
    unit: str


class Annotator:
    """Reads inputs and answers parts. `bundle_folder` gives the folder of the bundle, which is opened when the first part comes."""

    def __init__(self, job: Job, bundle_folder: Callable[[], Path | str]) -> None:
        self.job, self._bundle_folder, self._shared = job, bundle_folder, not job.on_nodes
        self._pipeline: Pipeline | None = None
        self._output = storage_of(job.output)

    def ready(self) -> Ready:
        """This process, and the versions of the packages that decide the bytes of a part."""
        return Ready(os.getpid(), platform.node(), versions())

    def scan(self, source: InputPlace) -> Scan:
        """What is in an input. BadInput if it cannot be used, or is not the file that was listed."""

        def checked() -> Scan:
            self._check_unchanged(source, "read; give the same command again")
            return scan(source, self.job)

        return self._read_again(source, checked)

    def annotate(self, part: Part) -> Made:
        """Answers a part and puts it into the output.

        Raises:
            BadInput: the input has changed, a row is bad where that stops the work, or input or output fail.
            InternalError: the model fails.
        """
        if not self._shared and self._output.read(MANIFEST) is None:
            raise BadInput(
                f"does not see {MANIFEST} in --output {shown(self.job.output)}, which this machine has written; with --ray, give a "
                "folder that all nodes share, or a URL such as s3://"
            )
        self._shared = True
        return self._read_again(part.source, lambda: self._annotate(part))

    def _read_again(self, source: InputPlace, act: Callable[[], T]) -> T:
        """What `act` gives; it is called again if the store of `source` fails for a reason that may pass."""
        if not is_url(source.place):
            return act()
        folder, _, name = source.place.rpartition("/")
        return tried(folder, name, act, does="read", caught=ReadFailed)

    def _annotate(self, part: Part) -> Made:
        self._check_unchanged(part.source)
        name, bad = name_of(part, self.job.format), RowFaults()
        kept = KeptAnswers(
            None if self.job.on_nodes else self._output.unfinished(name), repr((self.job, part, versions()))
        )
        try:
            with reading(part.source, self.job, part.start) as file:
                with self._output.writing(name) as path, kept:
                    write = self._write_table if file.format == "parquet" else self._write_lines
                    rows = write(file, part, path, kept, bad)
                    self._check_unchanged(part.source)
                    if rows != part.rows:
                        raise _changed(part.source)
                    size_bytes, sha256 = path.stat().st_size, sha256_file(path)
                kept.remove()
                return Made(name, shown(part.source.place), rows, size_bytes, sha256, bad, file.unit)
        except BadInput as error:
            # What the system refused may pass, such as a full disk; once anything else is put right, the part begins anew.
            if not isinstance(error.__cause__, OSError):
                kept.remove()
            raise

    def _check_unchanged(self, source: InputPlace, meanwhile: str = ANNOTATED) -> None:
        try:
            now = place_of(source.place)
        except Exception as error:
            if is_url(source.place) and not isinstance(error, FileNotFoundError):
                raise ReadFailed from error
            hint = "; with --ray, give a place that every node reads, such as s3://" if self.job.on_nodes else ""
            raise BadInput(f"--input {shown(source.place)} cannot be read ({error}){hint}") from error
        if (now.bytes, now.mark) != (source.bytes, source.mark):
            raise _changed(source, meanwhile)

    def _write_lines(self, file: InputFile, part: Part, path: Path, kept: KeptAnswers, bad: RowFaults) -> int:
        """Answers the part as JSON lines. Returns its rows, which are fewer than planned if the input was shortened."""
        opening, count = answer_opening(self.job.columns.answer), 0
        with path.open("wb") as out:
            for rows in _windows(store_failures(part.source, file.rows()), part.rows):
                for row, outcome in zip(rows, self._outcomes(rows, file, kept, bad), strict=True):
                    out.write(
                        row.fields + opening + outcome + b"}\n"
                        if isinstance(outcome, bytes)
                        else error_line(row, *outcome)
                    )
                count += len(rows)
        return count

    def _write_table(self, file: InputFile, part: Part, path: Path, kept: KeptAnswers, bad: RowFaults) -> int:
        """Answers the part as a parquet file. Returns its rows, as `_write_lines`."""
        import pyarrow as pa
        from pyarrow import parquet

        job, writer, count = self.job, None, 0
        groups = table_groups(file, job, part.start.row, part.end)
        try:
            for batch, rows in store_failures(part.source, groups):
                outcomes = self._outcomes(rows, file, kept, bad)
                answers = [json.loads(each) if isinstance(each, bytes) else None for each in outcomes]
                errors = [None if isinstance(each, bytes) else each[1] for each in outcomes]
                made = with_answers(
                    pa.Table.from_batches([batch]),
                    job.columns.answer,
                    answers,
                    errors if job.bad_rows == "skip" else None,
                    self._model().manifest,
                )
                writer = writer or parquet.ParquetWriter(path, made.schema)
                writer.write_table(made)
                count += len(rows)
        finally:
            if writer is not None:
                writer.close()
        return count

    def _outcomes(self, rows: list[InputRow], file: InputFile, kept: KeptAnswers, bad: RowFaults) -> list[Outcome]:
        """The outcome of each row.

        Raises:
            BadInput: rows are bad, and that stops the work.
            InternalError: the model failed on a row, or, where bad rows are skipped, on all of a batch.
        """
        found: list[Outcome] = [("bad_row", row.fault or "") for row in rows]
        for chunk in self._chunks(rows):
            outcomes = kept.take(len(chunk))
            if outcomes is None:
                outcomes = self._computed([rows[place] for place in chunk], file)
                kept.add(outcomes)
            for place, outcome in zip(chunk, outcomes, strict=True):
                found[place] = outcome
        for row, outcome in zip(rows, found, strict=True):
            if not isinstance(outcome, bytes):
                bad.add(row.line, outcome[1])
        if bad.count and self.job.bad_rows == "stop":
            raise BadInput(f"these rows cannot be used:\n{bad.as_lines(file.name, file.unit)}")
        return found

    def _chunks(self, rows: list[InputRow]) -> Iterator[list[int]]:
        """The places of the rows without a fault, in batches that depend on the rows alone."""
        places = [place for place, row in enumerate(rows) if row.fault is None]
        tokens = [estimated_tokens(TextWork(rows[place].text, rows[place].pair)) for place in places]
        most = GPU_BATCH_TOKENS if self.job.device == "cuda" else BATCH_TOKENS
        for chunk in length_chunks(tokens, most):
            yield [places[index] for index in chunk]

    def _computed(self, rows: list[InputRow], file: InputFile) -> list[Outcome]:
        """The model's answers to a batch. InternalError if it fails on a row, or, where bad rows are skipped, on all of several."""
        options, encode = self.job.options, msgspec.json.Encoder().encode
        if file.format == "parquet":  # where a vector is a list of float32; other answers have no such option
            options = replace(options, encoding_format="base64")
        works = [TextWork(row.text, row.pair, options) for row in rows]
        answers = dict(answer for done, _ in self._model().answered(works) for answer in done)
        passes = self.job.bad_rows == "skip" and fails_on_some(answers.values())
        found: list[Outcome] = []
        for index, row in enumerate(rows):
            answer = answers[index]
            if not isinstance(answer, StillroomError):
                found.append(encode(answer))
            elif answer.fault == "caller" or passes:
                found.append((answer.code, answer.message))
            else:
                raise InternalError(f"{file.place(row.line)}: {answer.message}")
        return found

    def _model(self) -> "Pipeline":
        if self._pipeline is None:
            from serve.model.pipeline import Pipeline

            job = self.job
            opened = Pipeline(self._bundle_folder(), job.variant, job.threads, device=job.device, log_notes=False)
            if opened.manifest.digest != self.job.digest:
                raise bundle_changed(self.job)
            opened.warm_up()
            self._pipeline = opened
        return self._pipeline


def bundle_changed(job: Job) -> BadInput:
    """What is told when the folder of the bundle has another one than at the start."""
    return BadInput(f"the bundle {shown(job.bundle)} was changed while it was used; give the same command again")


def _changed(source: InputPlace, meanwhile: str = ANNOTATED) -> BadInput:
    return BadInput(f"{shown(source.place)} was changed while it was {meanwhile}")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide the bytes of a part; empty for one that is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _windows(rows: Iterator[InputRow], count: int) -> Iterator[list[InputRow]]:
    """The first `count` rows, or all if there are fewer, in windows of as many rows and bytes as `annotate` holds at once."""
    held: list[InputRow] = []
    held_bytes = 0
    for number, row in enumerate(rows, 1):
        held.append(row)
        held_bytes += len(row.fields)
        if len(held) >= WINDOW_ROWS or held_bytes >= WINDOW_BYTES or number == count:
            yield held
            held, held_bytes = [], 0
        if number == count:
            return
    if held:
        yield held
