"""The checks of `annotate` before it reads a row or creates a file. All faults go into one message."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.input_errors import Faults
from serve.bundle.manifest import Manifest
from serve.bundle.remote_files import is_url, shown
from serve.bundle.runtimes import choose
from serve.errors import BadInput
from serve.files import FILE_ENDINGS, JSON_LINES, output
from serve.options import rule_faults
from serve.tasks import open_bundle, task_of
from serve.text.answers import AnswerOptions
from serve.wording import one_of
from stillroom.console import say
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.inputs import WILD, InputPlace, inputs_of, is_inside, is_remote, local_path, some
from stillroom.verbs.annotate.on_ray import load_ray
from stillroom.verbs.annotate.parts import Job, Part, input_format, name_of
from stillroom.verbs.annotate.pool import OfflinePool
from stillroom.verbs.annotate.reader import FORMATS, STDIN, InputFile, format_of
from stillroom.verbs.annotate.rows import PAIR, Columns, Start
from stillroom.verbs.annotate.storage import MOST_NAME_BYTES
from stillroom.verbs.annotate.tables import SUFFIXES

# Formats that hold no objects, such as the head of a relation.
FLAT_FORMATS = ("csv", "tsv", "txt")
# What the lineage of one file leaves out: settings of parts, and usual values, so that outputs from before these settings can be resumed.
OF_PARTS = ("format", "bad_rows", "part_rows")
USUAL = (("device", "cpu"), ("text_pair_column", PAIR))


@dataclass
class Checked:
    """What a run needs to know: of one file its input and the pool, not started yet; of many files where they are."""

    job: Job
    manifest: Manifest
    file: InputFile | None
    pool: OfflinePool | None
    sources: list[InputPlace]


def is_bulk(settings: Annotation) -> bool:
    """Whether the output is a folder of parts: for several inputs or a URL, for an output that is a folder or a URL, and with Ray."""
    given, out = settings.input, settings.output
    several = is_url(given) or Path(given).is_dir() or (bool(WILD.search(str(given))) and not Path(given).exists())
    return bool(settings.ray) or several or is_url(out) or Path(out).is_dir()


def checked(settings: Annotation, opened: contextlib.ExitStack, *, parts: bool) -> Checked:
    """The bundle, and the inputs: one file is entered into `opened` and read up to its first row; of `parts` the names are listed.

    Raises:
        BadInput: all faults of the settings, the bundle and the input.
    """
    faults = Faults()
    faults.messages += rule_faults(settings)
    faults.messages += _folder_faults(settings) if parts else _file_faults(settings)
    if parts and settings.ray:
        address = settings.ray
        faults.check(lambda: load_ray(address))
    found = faults.check(lambda: _opened(settings, parts=parts))
    folder, manifest, variant, pool = found or ("", None, "", None)
    columns = columns_of(settings, manifest)
    sources = faults.check(lambda: inputs_of(str(settings.input))) or [] if parts else []
    kinds = {(input_format(source, settings.format), Path(source.name).suffix): Path(source.name) for source in sources}
    # Of many inputs, one file of each kind tells.
    of_input = [
        fault
        for path in (kinds.values() if parts else [Path(settings.input)])
        for fault in input_faults(path, settings.format, columns)
    ]
    faults.messages += of_input
    if parts and not is_remote(str(settings.output)):
        faults.messages += _long_names(sources, settings.format)
    if manifest:
        faults.messages += option_faults(settings.options, manifest, variant)
        if parts and manifest.variants[variant].scheme == "dynamic":
            faults.messages.append(
                f"variant {variant} is dynamic int8, whose answers depend on the texts beside them; give --variant fp32, or "
                "another bundle"
            )
    file = None
    if not parts:
        source = file = InputFile(Path(settings.input), settings.format, columns)
        faults.check(lambda: opened.enter_context(source))
        if not faults.messages or (not of_input and source.path != STDIN and source.path.is_file()):
            faults.check(source.prepare)  # standard input only when nothing else is wrong: reading it may block
    faults.raise_if_any()
    assert manifest is not None
    output = str(settings.output)
    job = Job(
        bundle=folder,
        digest=manifest.digest,
        variant=variant,
        threads=settings.threads or 1,
        device=settings.device,
        columns=columns,
        options=settings.options,
        format=settings.format,
        bad_rows=settings.bad_rows,
        part_rows=settings.part_rows,
        output=output if is_url(output) or not parts else str(local_path(output)),
        on_nodes=bool(settings.ray),
    )
    return Checked(job, manifest, file, pool, sources)


def _opened(settings: Annotation, *, parts: bool) -> tuple[str, Manifest, str, OfflinePool | None]:
    """The bundle's folder and manifest, the variant that answers, and for one file the pool."""
    if not parts:
        pool = OfflinePool(
            settings.bundle,
            variant=settings.variant,
            threads=settings.threads,
            processes=settings.processes,
            device=settings.device,
        )
        return str(settings.bundle), pool.manifest, pool.variant, pool
    bundle = open_bundle(settings.bundle)
    choice = choose(bundle, settings.variant, device=settings.device)
    for note in choice.notes:
        say(note)
    return str(bundle.path.absolute()), bundle.manifest, choice.variant, None


def lineage(settings: Annotation, job: Job, *, parts: bool) -> dict[str, Any]:
    """What decides the answers, and of parts also their rows and form: a run goes on only in an output with the same lineage."""
    everything = {
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
    return {
        each: everything[each]
        for each in everything
        if parts or (each not in OF_PARTS and (each, everything[each]) not in USUAL)
    }


def columns_of(settings: Annotation, manifest: Manifest | None) -> Columns:
    """The names of a row's fields, for the bundle with this manifest, if it could be opened."""
    task = task_of(manifest) if manifest else None
    text, pair = task.text_fields if task else (Columns.text, Columns.pair)
    return Columns(
        text if settings.text_column == Columns.text else settings.text_column,
        pair if settings.text_pair_column == Columns.pair else settings.text_pair_column,
        settings.answer_field,
        contexts=task is not None and task.needs_pair,
        relations=task is not None and task.reads_markers,
        offsets=settings.options.offsets,
    )


def _file_faults(settings: Annotation) -> Iterator[str]:
    given, out = Path(settings.input), Path(settings.output)
    if out != STDIN and (out.is_file() or not out.exists()):  # a device and a pipe take lines of any name
        others = {out.suffix.lower()} - FILE_ENDINGS
        try:
            output(out, "--output", endings=(*JSON_LINES, *SUFFIXES, *others), inputs=[] if given == STDIN else [given])
        except BadInput as fault:
            yield fault.message


def _folder_faults(settings: Annotation) -> Iterator[str]:
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
        yield (
            f"parts of these inputs would have names of more than {MOST_NAME_BYTES} bytes: {some(long)}; give the files shorter names"
        )


def input_faults(path: Path, format: str | None, columns: Columns) -> Iterator[str]:
    """The faults of an input that show before it is opened."""
    found = format or format_of(path)
    if found not in FORMATS:
        given = f"--format {format}" if format else f"the name {path}"
        yield f"{given} is no known format; give --format {one_of(FORMATS)}"
    if found == "parquet" and (path == STDIN or path.suffix.lower() == ".gz"):
        what = "standard input" if path == STDIN else f"{path}, compressed with gzip,"
        yield f"{what} cannot be parquet, which is read from its end; give an uncompressed file"
    if columns.relations and found in FLAT_FORMATS:
        yield (
            f"{found} cannot hold the head and tail of a relation; give "
            f"{one_of([each for each in FORMATS if each not in FLAT_FORMATS])}"
        )
    if found == "txt" and columns.contexts:
        yield "txt has no contexts, which the questions of this bundle need; give JSON lines, CSV, TSV or parquet"
        return
    if found == "txt" and columns.text != "text":
        yield f"--text-column {columns.text}: txt has no columns; leave it out"
    if found == "txt" and columns.pair != PAIR:
        yield f"--text-pair-column {columns.pair}: txt has no columns; leave it out"
    if not columns.pair:
        yield "--text-pair-column is empty; give the name of a column of texts, or leave it out"
    if columns.text in ("", *columns.taken()):
        yield f"--text-column {columns.text!r} is not a column of texts; give the name of one"
    if columns.answer in ("", columns.text, *columns.taken()):
        yield f"--field {columns.answer!r} is empty or a field of the input; give another name for the answer"


def option_faults(options: AnswerOptions, manifest: Manifest, variant: str) -> Iterator[str]:
    """The options that have no effect on the answers of a variant of the bundle with this manifest."""
    task = task_of(manifest)
    used = task.option_names
    for option in dataclasses.fields(options):
        if option.name not in used and getattr(options, option.name) != option.default:
            yield f"--{option.name.replace('_', '-')} has no effect on a model for {task.kind}; leave it out"
    known = manifest.variants[variant].promises
    if options.promise is not None and "promise" in used and options.promise not in known:
        makes = f"; its promises are {', '.join(sorted(known))}" if known else ""
        yield f"--promise {options.promise}: {manifest.name!r} does not make it{makes}; leave it out"
    if options.abstain and "abstain" in used and manifest.variants[variant].abstain_below is None:
        why = (
            "decides on each label separately, and already answers without labels where none applies"
            if manifest.multi_label
            else f"has no `abstain_below` for {variant} in its manifest; export the bundle again to compute it"
        )
        yield f"--abstain: {manifest.name!r} {why}; leave it out"
