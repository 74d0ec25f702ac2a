"""What one worker process does: reads inputs, and answers parts of them with a bundle."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from serve.bundle.manifest import sha256_file
from serve.bundle.remote_files import ReadFailed, is_url, shown, tried
from serve.errors import BadInput, InternalError, StillroomError
from serve.files import lock
from serve.text.inputs import TextWork, estimated_tokens
from stillroom.verbs.annotate.answering import (
    Ask,
    Failure,
    Outcome,
    RowFaults,
    RowPosition,
    Window,
    answered,
    outcomes_of,
    output_line,
    windows,
)
from stillroom.verbs.annotate.inputs import InputPlace, place_of
from stillroom.verbs.annotate.parts import MANIFEST, Job, Part, Scan, name_of, reading, scan, unreadable
from stillroom.verbs.annotate.pool import BATCH_TOKENS, GPU_BATCH_TOKENS, length_chunks
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import InputRow
from stillroom.verbs.annotate.storage import storage_of
from stillroom.verbs.annotate.tables import write_groups

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

# What the bytes of a part may depend on, beside the bundle.
PACKAGES = ("stillroom", "numpy", "onnxruntime", "tokenizers", "pyarrow", "msgspec")
# What an input that was changed was meanwhile, and what to do, in a message.
ANNOTATED = "annotated; give another --output, or --restart"
DECODER = msgspec.json.Decoder(list[str | tuple[str, str]])

T = TypeVar("T")


class KeptAnswers:
    """The answers to the batches of one part that is not finished, in a file beside it; a context manager. `path` None: none are kept.

    A part appears whole, and a slow model takes minutes for one. Its batches depend on its rows alone, so those that were answered before
    a kill need not be computed again. The file has a line for each, in order. Only a run on this machine's disk keeps such a file: two
    machines may write the same part at once, and a store cannot append.

    `decides` is all that decides the answers: what an earlier run kept under other circumstances is not used.
    """

    def __init__(self, path: Path | None, decides: str) -> None:
        self.path, self._key = path, hashlib.sha256(decides.encode(errors="surrogatepass")).hexdigest().encode() + b"\n"
        self._reads = path is not None  # until all that is there was given

    def __enter__(self) -> "KeptAnswers":
        if self.path:
            self._file = self.path.open("a+b")
            lock(self._file.fileno())  # a worker whose run was killed ends a moment after it
            self._file.seek(0)
            if self._file.readline() != self._key:
                self._file.truncate(0)
                self._file.write(self._key)
                self._reads = False
        return self

    def __exit__(self, *_: object) -> None:
        if self.path:
            self._file.close()

    def take(self, count: int) -> list[Outcome] | None:
        """The answers to the next batch, which has `count` rows; None if it must be computed, and each after it."""
        if not self._reads:
            return None
        at = self._file.tell()
        try:
            found = DECODER.decode(self._file.readline())
        except (msgspec.DecodeError, UnicodeDecodeError):  # the end, or half a line, which a kill left
            found = []
        if len(found) == count:
            return [each.encode() if isinstance(each, str) else Failure(*each) for each in found]
        self._reads = False
        os.ftruncate(self._file.fileno(), at)
        return None

    def add(self, outcomes: list[Outcome]) -> None:
        """Keeps the answers to a batch that was computed."""
        if self.path:
            kept = [each.decode() if isinstance(each, bytes) else (each.code, each.message) for each in outcomes]
            self._file.write(msgspec.json.encode(kept) + b"\n")
            self._file.flush()

    def remove(self) -> None:
        """Removes the file: the part is there."""
        if self.path:
            self.path.unlink(missing_ok=True)


class Ready(NamedTuple):
    """A worker process that can be asked."""

    pid: int
    node: str
    versions: dict[str, str]


class Made(NamedTuple):
    """A part that is in the output."""

    name: str
    rows: int
    bytes: int
    sha256: str
    bad: RowFaults


class Annotator:
    """Reads inputs and answers parts, in a worker process; `bundle` gives the folder of the bundle, when the first part comes."""

    def __init__(self, job: Job, bundle: Callable[[], Path | str]) -> None:
        self.job, self._bundle, self._shared = job, bundle, not job.on_nodes
        self._pipeline: Pipeline | None = None
        self._output = storage_of(job.output)

    def call(self, method: str, item: Any) -> Any:
        """The result of a method, or the StillroomError that it raised."""
        try:
            return getattr(self, method)(*(() if item is None else (item,)))
        except StillroomError as fault:
            return fault

    def ready(self) -> Ready:
        """This process, and the versions of the packages that decide the bytes of a part."""
        return Ready(os.getpid(), platform.node(), versions())

    def scan(self, source: InputPlace) -> Scan:
        """What is in an input. BadInput if it cannot be used, or is not the file that was listed."""

        def checked() -> Scan:
            self._check_unchanged(source, "read; give the same command again")
            return scan(source, self.job)

        return _read_again(source, checked)

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
        return _read_again(part.source, lambda: self._annotate(part))

    def _annotate(self, part: Part) -> Made:
        self._check_unchanged(part.source)
        name = name_of(part, self.job.format)
        kept = KeptAnswers(
            None if self.job.on_nodes else self._output.unfinished(name), repr((self.job, part, versions()))
        )
        try:
            with reading(part.source, self.job, part.start) as file, self._output.writing(name) as path, kept:
                file.prepare()
                bad = RowFaults(file.name, file.unit)
                write = self._write_table if file.format == "parquet" else self._write_lines
                rows = write(file, part, path, partial(self._ask, file, kept), bad)
                self._check_unchanged(part.source)
                if rows != part.rows:
                    raise _changed(part.source)
                made = Made(name, rows, path.stat().st_size, sha256_file(path), bad)
            kept.remove()
            return made
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
            raise unreadable(source, error, self.job) from error
        if (now.bytes, now.mark) != (source.bytes, source.mark):
            raise _changed(source, meanwhile)

    def _write_lines(self, file: InputFile, part: Part, path: Path, ask: Ask, bad: RowFaults) -> int:
        """Answers the part as JSON lines. Returns its rows, which are fewer than planned if the input was shortened."""
        count = 0
        places = map(RowPosition, islice(file.rows(), part.rows))
        with path.open("wb") as out:
            for window in answered(windows(places, stops=self.job.bad_rows == "stop"), ask):
                outcomes = self._checked(window, bad)
                for place, outcome in zip(window.places, outcomes, strict=True):
                    out.write(output_line(place.row, outcome, self.job.columns.answer))
                count += len(outcomes)
        return count

    def _write_table(self, file: InputFile, part: Part, path: Path, ask: Ask, bad: RowFaults) -> int:
        """Answers the part as a parquet file. Returns its rows, as `_write_lines`."""
        import pyarrow as pa

        def groups() -> Iterator[tuple[Any, list[Any], list[str | None]]]:
            for batch, rows in file.batches(part.end):
                computed = [index for index, row in enumerate(rows) if row.fault is None]
                (window,) = answered([Window([*map(RowPosition, rows)], computed)], ask)
                outcomes = self._checked(window, bad)
                answers = [json.loads(each) if isinstance(each, bytes) else None for each in outcomes]
                errors = [each.message if isinstance(each, Failure) else None for each in outcomes]
                yield pa.Table.from_batches([batch]), answers, errors

        field, skips = self.job.columns.answer, self.job.bad_rows == "skip"
        return write_groups(path, groups(), field, self._model().manifest, with_errors=skips)

    def _checked(self, window: Window, bad: RowFaults) -> list[Outcome]:
        """The outcome of each row of the window. BadInput if rows are bad, and that stops the work."""
        outcomes = [outcome for outcome in window.outcomes if outcome is not None]
        for place, outcome in zip(window.places, window.outcomes, strict=True):
            if isinstance(outcome, Failure):
                bad.add(place.row.line, outcome.message)
        if bad.count and self.job.bad_rows == "stop":
            raise BadInput(f"these rows cannot be used:\n{bad}")
        return outcomes

    def _ask(self, file: InputFile, kept: KeptAnswers, rows: list[InputRow]) -> Callable[[], Sequence[Outcome]]:
        """Answers rows in batches that depend on the rows alone. InternalError if the model fails, as in `outcomes_of`."""
        options, encode = self.job.options, msgspec.json.Encoder().encode
        if file.format == "parquet":  # where a vector is a list of float32; other answers have no such option
            options = replace(options, encoding_format="base64")
        works = [TextWork(row.text, row.pair, options) for row in rows]
        outcomes: dict[int, Outcome] = {}
        most = GPU_BATCH_TOKENS if self.job.device == "cuda" else BATCH_TOKENS
        for chunk in length_chunks([estimated_tokens(work) for work in works], most):
            batch = kept.take(len(chunk))
            if batch is None:
                answers = dict(
                    answer for done, _ in self._model().answered([works[i] for i in chunk]) for answer in done
                )
                results = (answers[place] for place in range(len(chunk)))
                batch = outcomes_of(
                    (each if isinstance(each, StillroomError) else encode(each) for each in results),
                    skips=self.job.bad_rows == "skip",
                )
                for place, outcome in zip(chunk, batch, strict=True):
                    if isinstance(outcome, Failure) and outcome.ours:
                        raise InternalError(f"{file.place(rows[place].line)}: {outcome.message}")
                kept.add(batch)
            outcomes.update(zip(chunk, batch, strict=True))
        return lambda: [outcomes[place] for place in range(len(rows))]

    def _model(self) -> "Pipeline":
        if self._pipeline is None:
            from serve.model.pipeline import Pipeline

            job = self.job
            opened = Pipeline(self._bundle(), job.variant, job.threads, device=job.device, log_notes=False)
            if opened.manifest.digest != job.digest:
                raise bundle_changed(job)
            opened.warm_up()
            self._pipeline = opened
        return self._pipeline


def _read_again(source: InputPlace, act: Callable[[], T]) -> T:
    """What `act` gives; it is called again if the store of `source` fails for a reason that may pass."""
    if not is_url(source.place):
        return act()
    folder, _, name = source.place.rpartition("/")
    return tried(folder, name, act, does="read", caught=ReadFailed)


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
