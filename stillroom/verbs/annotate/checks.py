"""The checks of `annotate` before it reads a row or creates a file. All faults go into one message."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from compress.input_errors import Faults
from serve.bundle.manifest import Manifest
from serve.tasks import task_of
from serve.text.answers import AnswerOptions
from serve.workers.offline_pool import OfflinePool
from stillroom.verbs.annotate import Annotation
from stillroom.verbs.annotate.reader import STDIN, InputFile, input_faults
from stillroom.verbs.annotate.rows import Columns
from stillroom.verbs.annotate.writer import STDOUT


def checked(settings: Annotation, opened: contextlib.ExitStack) -> tuple[OfflinePool, InputFile]:
    """The pool, not started yet, and the input, entered into `opened` and read up to its first row.

    Raises:
        BadInput: all faults of the settings, the bundle and the input.
    """
    faults = Faults()
    faults.messages += _setting_faults(settings)
    pool = faults.check(
        lambda: OfflinePool(
            settings.bundle,
            variant=settings.variant,
            threads=settings.threads,
            processes=settings.processes,
            device=settings.device,
        )
    )
    if pool:
        faults.messages += option_faults(settings.options, pool.manifest, pool.variant)
    columns = columns_of(settings, pool.manifest if pool else None)
    given = Path(settings.input)
    of_input = list(input_faults(given, settings.format, columns))
    faults.messages += of_input
    source = InputFile(given, settings.format, columns)
    faults.check(lambda: opened.enter_context(source))
    if not faults.messages or (not of_input and given != STDIN and given.is_file()):
        faults.check(source.prepare)  # standard input only when nothing else is wrong: reading it may block
    faults.raise_if_any()
    assert pool is not None
    return pool, source


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


def _setting_faults(settings: Annotation) -> Iterator[str]:
    given, out = Path(settings.input), Path(settings.output)
    if given != STDIN and out != STDOUT and given.exists() and out.exists() and given.samefile(out):
        yield f"--output {out} is the input file; give another file"
    if out != STDOUT and not out.absolute().parent.is_dir():
        yield f"--output {out}: there is no folder {out.absolute().parent}; make it first"


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
