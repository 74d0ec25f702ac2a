"""`stillroom annotate` over many files, on this machine or by Ray on many: plan, parts, manifest, summary."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compress.input_errors import Faults
from serve.bundle.manifest import Bundle
from serve.bundle.remote_files import is_url, shown
from serve.bundle.runtimes import choose
from serve.errors import BadInput, StillroomError
from serve.files import lock_at
from serve.tasks import open_bundle
from serve.wording import counted
from serve.workers.supervisor import processes_for
from stillroom.console import bar, say
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.bulk.annotator import Made
from stillroom.verbs.annotate.bulk.manifest import PartsManifest
from stillroom.verbs.annotate.bulk.on_ray import check_node, load_ray, ray_workers
from stillroom.verbs.annotate.bulk.plan import Job, Part, Scan, input_format, name_of
from stillroom.verbs.annotate.bulk.storage import (
    MOST_NAME_BYTES,
    SHOWN_FILES,
    WILD,
    DiskFolder,
    InputPlace,
    Storage,
    inputs_of,
    is_inside,
    is_remote,
    local_path,
    storage_of,
)
from stillroom.verbs.annotate.bulk.workers import LocalWorker, WorkerGroup
from stillroom.verbs.annotate.checks import columns_of, option_faults
from stillroom.verbs.annotate.ctrl_c import ctrl_c_kept
from stillroom.verbs.annotate.reader import FORMATS, STDIN, Start, input_faults
from stillroom.verbs.annotate.tables import ERROR, SUFFIXES

LOCK = ".annotate.lock"
LATE_S = 60.0  # the longest that NFS keeps a listing of a folder, by default
SHOWN_INPUTS = 5  # with bad rows, in a message


def is_bulk(settings: Annotation) -> bool:
    """Whether the output is a folder of parts: for several inputs or a URL, for an output that is a folder or a URL, and with Ray."""
    given, out = settings.input, settings.output
    several = is_url(given) or Path(given).is_dir() or (bool(WILD.search(str(given))) and not Path(given).exists())
    return bool(settings.ray) or several or is_url(out) or Path(out).is_dir()


def annotate_files(settings: Annotation) -> dict[str, Any]:
    """Answer all rows of the inputs that have no part in the output yet.

    Returns `input`, `output`, `model`, `variant`, `digest`, `files`, `parts`, `parts_before` (in the output at the start), `rows`,
    `rows_before`, `bad_rows` (of this run), `seconds` (of answering), `texts_per_s` (None where nothing was answered),
    `processes`, `threads` and `ray`.

    Raises:
        BadInput: a fault of the settings, the bundle, an input or the cluster, before a row is answered; with `bad_rows` "stop" a bad row,
            once the parts under way are written; an output of another job; or a disk or store that fails.
        InternalError: the model failed, or workers died repeatedly.
    """
    bundle, sources, job = _checked(settings)
    storage = storage_of(job.output)
    with contextlib.ExitStack() as opened:
        opened.enter_context(_alone(storage))
        manifest = PartsManifest(storage, _lineage(settings, job), restart=settings.restart)
        opened.enter_context(_partial_files_removed(storage, anew=settings.restart))
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
                made_by_now = (
                    f"{len(manifest.parts):,} of {len(parts) + len(there):,} parts are in {shown(storage.place)}"
                )
                raise type(fault)(
                    f"{fault.message}\n{made_by_now}. Give the same command again for the others, after what is wrong is put right."
                ) from None
            seconds = time.monotonic() - began_s
        _check_there(manifest, job)
        manifest.save(complete=True)
    rows = sum(each.rows for each in made)
    _tell_bad_rows(made, job)
    return {
        "input": shown(settings.input),
        "output": shown(storage.place),
        "model": bundle.manifest.name,
        "variant": job.variant,
        "digest": job.digest,
        "files": len(sources),
        "parts": len(parts) + len(there),
        "parts_before": len(there),
        "rows": rows + sum(part.rows for part in there),
        "rows_before": sum(part.rows for part in there),
        "bad_rows": sum(each.bad.count for each in made),
        "seconds": seconds,
        "texts_per_s": rows / seconds if rows else None,
        "processes": processes,
        "threads": job.threads,
        "ray": settings.ray,
    }


def summary(document: dict[str, Any]) -> Sequence[str]:
    """The line that ends a run."""
    parts = counted(document["parts"], "part")
    if not document["rows"]:
        return [f"{document['input']} has no rows; nothing was done."]
    if document["texts_per_s"] is None:
        return [f"{document['output']} holds all {document['rows']:,} rows in {parts} already; nothing was done."]
    done, count = document["rows"] - document["rows_before"], document["processes"]
    before = f" after {document['rows_before']:,} that were there" if document["rows_before"] else ""
    where = f" of Ray ({document['ray']})" if document["ray"] else ""
    return [
        f"{counted(done, 'row')}{before} of {counted(document['files'], 'file')} by {document['model']} "
        f"({document['variant']}) in {document['seconds']:.1f} s: {document['texts_per_s']:,.0f} texts/s on {count} "
        f"process{'es' * (count != 1)}{where}. Output {document['output']} ({parts})"
    ]


def _checked(settings: Annotation) -> tuple[Bundle, list[InputPlace], Job]:
    """The bundle, the inputs, and what the workers need to know.

    Raises:
        BadInput: all faults of settings, bundle and the names of the inputs.
    """
    faults = Faults()
    faults.messages += _setting_faults(settings)
    if settings.ray:
        address = settings.ray
        faults.check(lambda: load_ray(address))
    bundle = faults.check(lambda: open_bundle(settings.bundle))
    choice = None
    if bundle:
        choice = faults.check(lambda: choose(bundle, settings.variant, device=settings.device))
    columns = columns_of(settings, bundle.manifest if bundle else None)
    sources = faults.check(lambda: inputs_of(str(settings.input))) or []
    kinds = {(input_format(source, settings.format), Path(source.name).suffix): source for source in sources}
    for source in kinds.values():  # one file of each kind tells
        faults.messages += input_faults(Path(source.name), settings.format, columns)
    if not is_remote(str(settings.output)):
        faults.messages += _long_names(sources, settings.format)
    if bundle and choice:
        faults.messages += option_faults(settings.options, bundle.manifest, choice.variant)
        if bundle.variant(choice.variant)[1].scheme == "dynamic":
            faults.messages.append(
                f"variant {choice.variant} is dynamic int8, whose answers depend on the texts beside them; give --variant fp32, or "
                "another bundle"
            )
    faults.raise_if_any()
    assert bundle is not None
    assert choice is not None
    for note in choice.notes:
        say(note)
    output = str(settings.output) if is_url(settings.output) else str(local_path(str(settings.output)))
    job = Job(
        bundle=str(bundle.path.absolute()),
        digest=bundle.manifest.digest,
        variant=choice.variant,
        threads=settings.threads or 1,
        device=settings.device,
        columns=columns,
        options=settings.options,
        format=settings.format,
        bad_rows=settings.bad_rows,
        part_rows=settings.part_rows,
        output=output,
        on_nodes=bool(settings.ray),
    )
    return bundle, sources, job


def _setting_faults(settings: Annotation) -> Iterator[str]:
    if STDIN in (settings.input, settings.output):
        yield "standard input and output have no parts; give --input a file, folder or pattern, and --output a folder"
        return
    if settings.ray and settings.device != "cpu":
        yield f"--device {settings.device} with --ray: workers of Ray run on CPUs; leave one of the two out"
    if not is_remote(str(settings.output)):
        out = local_path(str(settings.output))
        if out.exists() and not out.is_dir():
            yield f"--output {out} is a file; many inputs, and --ray, need a folder, which gets a file for each part"
        elif not out.exists() and out.suffix in {*SUFFIXES, *(f".{each}" for each in FORMATS)}:
            yield f"--output {out} has the name of a file; many inputs, and --ray, need a folder, which gets a file for each part"
    if is_inside(str(settings.output), str(settings.input)):
        yield (
            f"--output {shown(settings.output)} is in the input folder, and its parts would be inputs of the next run; give another folder"
        )


def _long_names(sources: Sequence[InputPlace], format: str | None) -> Iterator[str]:
    """A fault if parts would have longer names than a disk can have."""
    parts = [(source, name_of(Part(source, Start(), 0), format).rpartition("/")[2]) for source in sources]
    if long := [shown(source.place) for source, name in parts if len(os.fsencode(name)) > MOST_NAME_BYTES]:
        more = f" and {len(long) - SHOWN_FILES:,} more" if len(long) > SHOWN_FILES else ""
        yield (
            f"parts of these inputs would have names of more than {MOST_NAME_BYTES} bytes: {', '.join(long[:SHOWN_FILES])}{more}; give the "
            "files shorter names"
        )


def _lineage(settings: Annotation, job: Job) -> dict[str, Any]:
    """What decides the parts and their bytes."""
    return {
        "bundle": job.digest,
        "variant": job.variant,
        "threads": job.threads,
        "device": job.device,
        "format": job.format,
        "text_column": settings.text_column,
        "text_pair_column": settings.text_pair_column,
        "field": settings.answer_field,
        "bad_rows": job.bad_rows,
        "part_rows": job.part_rows,
        **dataclasses.asdict(job.options),
    }


@contextlib.contextmanager
def _alone(storage: Storage) -> Iterator[None]:
    """Makes the output, which on a disk no other run may write to meanwhile. If nothing is written, it is removed again."""
    if not isinstance(storage, DiskFolder):
        yield
        return
    new, lock = not storage.path.exists(), storage.path / LOCK
    storage.make()
    with storage.refused():
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not lock_at(lock, descriptor):
            raise BadInput(f"another `annotate` is writing {storage.place}; wait for it, or give another --output")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            if new:
                with contextlib.suppress(OSError):  # where something was written
                    storage.path.rmdir()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _partial_files_removed(storage: Storage, *, anew: bool) -> Iterator[None]:
    """Removes what writers that were killed have left, at the start and at the end. Enter it once the output was accepted."""
    if not isinstance(storage, DiskFolder):
        yield
        return
    storage.remove_partial_files(anew=anew)
    try:
        yield
    finally:
        storage.remove_partial_files(anew=False)


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
    bad = [found for found in scans.values() if found.bad.count]
    if bad and job.bad_rows == "stop":
        listed = "\n".join(each.bad.as_lines(shown(each.source.place), each.unit) for each in bad[:SHOWN_INPUTS])
        more = f"\n  ... and bad rows in {len(bad) - SHOWN_INPUTS:,} more files" if len(bad) > SHOWN_INPUTS else ""
        raise BadInput(
            f"No row was answered; these rows cannot be used:\n{listed}{more}\n"
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
    more = f" and {len(missing) - SHOWN_FILES:,} more" if len(missing) > SHOWN_FILES else ""
    remedy = "all nodes must share the output" if job.on_nodes else "another program may have removed or changed them"
    raise BadInput(
        f"--output {shown(job.output)} does not have these parts as they were written: {', '.join(missing[:SHOWN_FILES])}{more}; "
        f"{remedy}. Give the same command again to make them"
    )


def _tell_bad_rows(made: Sequence[Made], job: Job) -> None:
    bad = [found for found in made if found.bad.count]
    if not bad:
        return
    count = sum(found.bad.count for found in bad)
    listed = "\n".join(found.bad.as_lines(found.place, found.unit) for found in bad[:SHOWN_INPUTS])
    more = f"\n  ... and more in {len(bad) - SHOWN_INPUTS:,} other parts" if len(bad) > SHOWN_INPUTS else ""
    has = counted(count, "bad row has", "bad rows have")
    say(f"{has} an error in place of an answer ({ERROR}):\n{listed}{more}")
