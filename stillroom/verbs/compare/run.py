"""Trains every row of a comparison that is not finished, writes document, page and table, and exports the best student."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from compress.runs import task_stages
from compress.runs.hardware import same_bits
from compress.runs.lineage import read_lineage
from compress.runs.method_chain import asks_words
from compress.runs.method_trainings import fit_head
from compress.runs.resumable_stages import Workdir
from compress.runs.task_inputs import TaskInputs
from export.packing.writer import refuse_foreign
from serve.bundle.manifest import canonical_json
from serve.errors import GateMissed
from stillroom.console import say
from stillroom.report.comparison_page import markdown, page
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.best import export_best
from stillroom.verbs.compare.document import document_of
from stillroom.verbs.compare.inputs import (
    BUNDLE,
    checked,
    corpus_fingerprint,
    method_inputs_of,
    source_of,
    teacher_fingerprint,
)
from stillroom.verbs.compare.queue import Queue, train_all
from stillroom.verbs.compare.rows import Row, links_of, rates_of, reads_source, row_fingerprint, rows_of
from stillroom.verbs.compare.training import head_name


def compare(given: Comparison) -> dict[str, Any]:
    """Train every method on every student with every seed, and score each; the document that `--json` prints.

    Methods that begin on plain text start from the given teacher, and end with training on labels. Methods that begin on the
    task start from the teacher fine-tuned on it. All read the same number of tokens of the task's text, and plain text on top.
    Finished rows and their students are kept, so a stopped comparison resumes, and methods can be added.

    Raises:
        BadInput: anything wrong with what was given, before any training; or OUT/bundle holds another student.
        GateMissed: the best student missed a gate of `--export best`; all else is written, and is the error's document.
    """
    given = dataclasses.replace(
        given, methods=tuple(dict.fromkeys(given.methods)), students=tuple(dict.fromkeys(given.students))
    )
    inputs_of = checked(given)
    out = Path(given.out)
    if given.export == "best":
        refuse_foreign(out / BUNDLE)
    work = Workdir(out / "work")
    with work.locked():
        queue = _queue(given, inputs_of, work)
        train_all(given, queue)
        teacher = read_lineage(work.root / "teacher")
        document = document_of(given, inputs_of, work, queue.rows, teacher)
        for row in document["rows"]:
            for doubt in row["doubts"]:
                say(f"warning: {doubt}")
        _write(out, document)
        report = {"report": str(page_or(out / "report.html", "table.md"))}
        if given.export == "best":
            try:
                document["export"] = export_best(given, document, queue)
            except GateMissed as missed:
                document["export"] = missed.document
                _write(out, document)
                message = f"{missed.message} The comparison is kept: {report['report']}."
                raise GateMissed(message, document=document | report) from None
            _write(out, document)
    return document | report


def _queue(given: Comparison, inputs_of: dict[str, TaskInputs], work: Workdir) -> Queue:
    """The trainings of this comparison, once the teachers that they learn from are made."""
    inputs = next(iter(inputs_of.values()))
    rows = rows_of(given, inputs_of)
    links = {row: links_of(given, inputs_of[row.student], row) for row in rows}
    source = source_of(given, inputs) if any(reads_source(several) for several in links.values()) else None
    same_bits(inputs.settings.threads)
    of_teacher = teacher_fingerprint(inputs)
    of_source = teacher_fingerprint(source) if source else ""
    of_text = corpus_fingerprint(given, inputs, of_teacher)
    work.stage("teacher", of_teacher, partial(_make_teacher, inputs=inputs))
    if source:
        work.stage("teacher-source", of_source, partial(_make_teacher, inputs=source))
    asking = {head_name(row): row for row in rows if any(asks_words(link.stages) for link in links[row])}
    for name, row in asking.items():
        tokens = row.choice.distill_tokens or 0
        plain = dataclasses.replace(method_inputs_of(given, inputs, seed=0), tokens=float(tokens))
        work.stage(name, f"{of_text}-{tokens}", partial(fit_head, given=plain))

    def fingerprint_of(row: Row, rates: tuple[float, ...]) -> str:
        text = of_text if row.choice.distill_tokens else ""
        return row_fingerprint(of_teacher, text, of_source if reads_source(links[row]) else "", row, links[row], rates)

    return Queue(work, rows, {row: rates_of(given, links[row]) for row in rows}, fingerprint_of)


def _make_teacher(folder: Path, inputs: TaskInputs) -> None:
    steps = inputs.teacher_steps
    say(f"teacher: {steps} steps at most" if steps else "teacher: it has a head for this task")
    task_stages.make_teacher(folder, inputs, steps)


def _write(out: Path, document: dict[str, Any]) -> None:
    write_text(out / "compare.json", canonical_json(document).decode())
    write_page(out / "report.html", partial(page, document))
    write_text(out / "table.md", markdown(document))
