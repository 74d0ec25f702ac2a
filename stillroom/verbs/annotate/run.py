"""`stillroom annotate`: one file, or many by parts on this machine or by Ray on many."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve.bundle.remote_files import shown
from serve.errors import BadInput, StillroomError
from serve.tasks import open_bundle, task_of
from serve.wording import counted
from serve.workers.served_model import processes_for
from stillroom.console import bar, say
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.annotator import Made
from stillroom.verbs.annotate.answering import RowFaults
from stillroom.verbs.annotate.checks import Checked, checked, is_bulk, lineage
from stillroom.verbs.annotate.inputs import InputPlace, some
from stillroom.verbs.annotate.on_ray import check_node, ray_workers
from stillroom.verbs.annotate.one_file import AnswerFile, FileRun
from stillroom.verbs.annotate.parts import Job, Part, PartsManifest, Scan
from stillroom.verbs.annotate.storage import storage_of
from stillroom.verbs.annotate.tables import ARRAY, ERROR, SUFFIXES, TABLE, rows_beside, write_array, write_table
from stillroom.verbs.annotate.workers import LocalWorker, WorkerGroup, ctrl_c_kept

LATE_S = 60.0  # the longest that NFS keeps a listing of a folder, by default
SHOWN_INPUTS = 5  # with bad rows, in a message


def annotate(settings: Annotation) -> dict[str, Any]:
    """Answers every row that the output does not hold yet, and of one file the rows with an error that have changed since.

    Returns `input`, `output`, `model`, `variant`, `digest`, `rows` (in the output now), `rows_before` (in it at the start),
    `bad_rows` (of this run), `seconds` (of answering), `texts_per_s` (None where no row needed an answer), `processes` and `threads`. Of
    one file also `rows_asked_again` (of `rows_before`, those with an error that were answered again); of many also `files`, `parts`,
    `parts_before` (in the output at the start) and `ray`. An output of one file that ends in `.parquet` or `.npy` is a table, or an array
    of vectors, made of the lines in a file beside it once all are there.

    Raises:
        BadInput: a fault of the settings, the bundle, an input or the cluster, before a row is answered; with `bad_rows` "stop" a bad
            row, once all rows before it, or the parts under way, are written; an output with other answers; a closed pipe; or a disk
            or store that fails.
        InternalError: the model failed on a row, with `bad_rows` "skip" on every row that it reads at once, once all rows before it, or
            the parts under way, are written; or worker processes died repeatedly.
    """
    if is_bulk(settings):
        return annotate_files(settings)
    return _as_table(settings) if Path(settings.output).suffix in SUFFIXES else annotate_file(settings)


def annotate_file(settings: Annotation) -> dict[str, Any]:
    """`annotate` of one file, or of standard input, to a file of lines."""
    with contextlib.ExitStack() as opened:
        found = checked(settings, opened, parts=False)
        assert found.file is not None
        assert found.pool is not None
        output = opened.enter_context(
            AnswerFile(Path(settings.output), lineage(settings, found.job, parts=False), restart=settings.restart)
        )
        done = FileRun(found.job, found.file, output, found.pool)
        done.answer()
    return _document(
        found,
        found.file.name,
        output.name,
        done.rows + done.asked_again,
        done.seconds,
        rows=done.rows_before + done.rows,
        rows_before=done.rows_before,
        rows_asked_again=done.asked_again,
        bad_rows=done.bad.count,
        processes=found.pool.processes,
    )


def _as_table(settings: Annotation) -> dict[str, Any]:
    """`annotate` with the answers as a table: first as lines in a file beside it, then from these."""
    out = Path(settings.output)
    rows = rows_beside(out)
    if settings.answer_field == ERROR and out.suffix == TABLE:
        raise BadInput(f"--field {ERROR} is the column of errors in a {TABLE} file; give another name")
    manifest = open_bundle(settings.bundle).manifest
    kind = task_of(manifest).answer_kind(manifest.labels)
    if out.suffix == ARRAY and not manifest.vector_width:
        raise BadInput(
            f"--output {out} is an array of vectors, and {manifest.name!r} gives {kind}; give a name that ends in .jsonl or {TABLE}"
        )
    options = settings.options
    if manifest.vector_width:
        options = dataclasses.replace(options, encoding_format="base64")
    document = annotate_file(dataclasses.replace(settings, output=rows, options=options))
    say(f"writing {out}")
    if out.suffix == ARRAY:
        width = options.dimensions or manifest.vector_width
        write_array(rows, out, settings.answer_field, width, document["rows"])
    else:
        write_table(rows, out, settings.answer_field, manifest, Path(settings.input))
    return document | {"output": str(out)}


def annotate_files(settings: Annotation) -> dict[str, Any]:
    """`annotate` of files to a folder of parts."""
    with contextlib.ExitStack() as opened:
        found = checked(settings, opened, parts=True)
        sources, job = found.sources, found.job
        storage = storage_of(job.output)
        opened.enter_context(storage.alone())
        manifest = PartsManifest(storage, lineage(settings, job, parts=True), restart=settings.restart)
        storage.remove_partial_files(anew=settings.restart)
        opened.callback(storage.remove_partial_files)
        manifest.check_inputs(sources)
        new = [source for source in sources if not manifest.known(source)]
        parts, there = _parts(manifest, sources, job) if not new else ([], [])
        seconds, made, processes = 0.0, list[Made](), 0
        if new or parts:
            stop_if_asked = opened.enter_context(ctrl_c_kept())
            workers = opened.enter_context(_workers(settings, job))
            processes = len(workers.workers)
            _plan(manifest, new, workers, job)
            parts, there = _parts(manifest, sources, job)
            began_s = time.monotonic()
            try:
                made = _make(manifest, parts, there, workers, stop_if_asked)
            except StillroomError as fault:
                raise type(fault)(
                    f"{fault.message}\n{len(manifest.parts):,} of {len(parts) + len(there):,} parts are in {shown(storage.place)}. Give "
                    "the same command again for the others, after what is wrong is put right."
                ) from None
            seconds = time.monotonic() - began_s
        _check_there(manifest, job)
        manifest.save(complete=True)
    bad = [each.bad for each in made if each.bad.count]
    if bad:
        has = counted(sum(each.count for each in bad), "bad row has", "bad rows have")
        say(f"{has} an error in place of an answer ({ERROR}):\n{_listed(bad, 'more in', 'other parts')}")
    rows, before = sum(each.rows for each in made), sum(part.rows for part in there)
    return _document(
        found,
        shown(settings.input),
        shown(storage.place),
        rows,
        seconds,
        files=len(sources),
        parts=len(parts) + len(there),
        parts_before=len(there),
        rows=before + rows,
        rows_before=before,
        bad_rows=sum(each.count for each in bad),
        processes=processes,
        ray=settings.ray,
    )


def _document(found: Checked, given: str, output: str, answered: int, seconds: float, **told: Any) -> dict[str, Any]:
    """What is told of every run, which `answered` so many rows, and what is `told` of this one."""
    return {
        "input": given,
        "output": output,
        "model": found.manifest.name,
        "variant": found.job.variant,
        "digest": found.job.digest,
        **told,
        "seconds": seconds,
        "texts_per_s": answered / seconds if answered else None,
        "threads": found.job.threads,
    }


def summary(document: dict[str, Any]) -> str:
    """The line that ends a run."""
    rows, before, again = document["rows"], document["rows_before"], document.get("rows_asked_again", 0)
    parts = counted(document["parts"], "part") if "parts" in document else ""
    if not rows:
        return f"{document['input']} has no rows; nothing was done."
    if document["texts_per_s"] is None:
        answers = "the answer to its 1 row" if rows == 1 else f"the answers to all {rows:,} rows"
        return f"{document['output']} holds {answers}{parts and ' in '}{parts} already; nothing was done."
    there = f" after {before:,} that were there" if before else ""
    mended = f", {again:,} of which had an error and {'was' if again == 1 else 'were'} answered again" if again else ""
    files = f" of {counted(document['files'], 'file')}" if parts else ""
    where = f" of Ray ({document['ray']})" if document.get("ray") else ""
    return (
        f"{counted(rows - before, 'row')}{there}{mended}{files} by {document['model']} ({document['variant']}) in "
        f"{document['seconds']:.1f} s: {document['texts_per_s']:,.0f} texts/s on "
        f"{counted(document['processes'], 'process', 'processes')}{where}. Output {document['output']}{f' ({parts})' if parts else ''}"
    )


def _listed(bad: Sequence[RowFaults], more: str, others: str) -> str:
    """The bad rows of the first inputs or parts; `more` and `others` tell of the rest."""
    rest = f"\n  ... and {more} {len(bad) - SHOWN_INPUTS:,} {others}" if len(bad) > SHOWN_INPUTS else ""
    return "\n".join(map(str, bad[:SHOWN_INPUTS])) + rest


@contextlib.contextmanager
def _workers(settings: Annotation, job: Job) -> Iterator[WorkerGroup]:
    if settings.ray:
        say(f"connecting to Ray ({settings.ray})")
        with ray_workers(settings.ray, job, settings.processes) as found, WorkerGroup(found, check_node) as group:
            yield group
        return
    count = settings.processes or processes_for(job.device, job.threads)
    with WorkerGroup([LocalWorker(job) for _ in range(count)]) as group:
        yield group


def _parts(manifest: PartsManifest, sources: Sequence[InputPlace], job: Job) -> tuple[list[Part], list[Part]]:
    """The parts of the inputs that are missing in the output, and those that are there."""
    missing, there = list[Part](), list[Part]()
    for source in sources:
        for part in manifest.parts_of(source):
            (there if manifest.is_there(part, job.format) else missing).append(part)
    return missing, there


def _plan(manifest: PartsManifest, new: Sequence[InputPlace], workers: WorkerGroup, job: Job) -> None:
    """Reads the inputs that the manifest does not list, and lists them. BadInput if rows are bad, and that stops the work."""
    scans: dict[str, Scan] = {}
    whole = sum(source.bytes for source in new)
    with bar("check the rows, in MB") as drawn:
        for source, found in workers.results("scan", new):
            scans[source.name] = found
            drawn(sum(each.source.bytes for each in scans.values()) // 2**20, whole // 2**20)
    bad = [found.bad for found in scans.values() if found.bad.count]
    if bad and job.bad_rows == "stop":
        raise BadInput(
            f"No row was answered; these rows cannot be used:\n{_listed(bad, 'bad rows in', 'more files')}\n"
            "Correct these rows, --text-column or --format; or give --bad-rows skip."
        )
    for source in new:
        manifest.add_input(scans[source.name])
    manifest.save()


def _make(
    manifest: PartsManifest, parts: Sequence[Part], there: Sequence[Part], workers: WorkerGroup, stop_if_asked: Any
) -> list[Made]:
    """Has the parts made, and lists them as they come."""
    made: list[Made] = []
    before = sum(part.rows for part in there)
    whole, done = before + sum(part.rows for part in parts), before
    try:
        with bar("annotate") as drawn:
            drawn(done, whole)
            for _, found in workers.results("annotate", parts, stop_if_asked):
                made.append(found)
                manifest.add_part(found.name, found.rows, found.bytes, found.sha256)
                manifest.save(now=False)
                done += found.rows
                drawn(done, whole)
    except BaseException:
        with contextlib.suppress(StillroomError):  # the error that ended the work is told
            manifest.save()
        raise
    return made


def _check_there(manifest: PartsManifest, job: Job) -> None:
    """BadInput if a part is not in the output: a node may have written it to a folder of its own.

    A shared disk may show late what other machines have written, NFS after up to a minute.
    """
    until_s = time.monotonic() + (LATE_S if job.on_nodes else 0)
    while missing := manifest.missing():
        if time.monotonic() >= until_s:
            break
        time.sleep(1.0)
    if not missing:
        return
    for name in missing:
        del manifest.parts[name]
    manifest.save()
    remedy = "all nodes must share the output" if job.on_nodes else "another program may have removed or changed them"
    raise BadInput(
        f"--output {shown(job.output)} does not have these parts as they were written: {some(missing)}; "
        f"{remedy}. Give the same command again to make them"
    )
