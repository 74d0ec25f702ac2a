"""Trains every row of a comparison that is not finished, and writes the document, the page and the table."""

import dataclasses
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from compress.engine import task_stages
from compress.engine.hardware import same_bits
from compress.engine.lineage import read_lineage
from compress.engine.method_runner import asks_words, fit_head
from compress.engine.resumable_stages import Workdir
from compress.engine.task_inputs import TaskInputs
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from stillroom.commands.compare.document import document_of
from stillroom.commands.compare.inputs import (
    checked,
    corpus_fingerprint,
    method_inputs_of,
    source_of,
    teacher_fingerprint,
)
from stillroom.commands.compare.rows import Row, links_of, methods_of, name_of, reads_source, row_fingerprint
from stillroom.commands.compare.training import make_row
from stillroom.console import bar, say
from stillroom.report.comparison_page import markdown, page
from stillroom.report.pages import write_page, write_text
from stillroom.settings.compare import Comparison


def compare(given: Comparison) -> dict[str, Any]:
    """Train every method on every student with every seed, and score each; the document that `--json` prints.

    Methods that begin on plain text start from the given teacher, and end with training on labels. Methods that begin on the
    task start from the teacher fine-tuned on it. All read the same number of tokens of the task's text, and plain text on top.
    Finished rows and their students are kept, so a stopped comparison resumes, and methods can be added.

    Raises:
        BadInput: anything wrong with what was given, before any training.
    """
    given = dataclasses.replace(
        given, methods=tuple(dict.fromkeys(given.methods)), students=tuple(dict.fromkeys(given.students))
    )
    inputs_of = checked(given)
    inputs = next(iter(inputs_of.values()))
    out = Path(given.out)
    work = Workdir(out / "work")
    rows = [Row(m, s, seed) for s in given.students for m in methods_of(given) for seed in range(given.seeds)]
    links = {row: links_of(given, inputs_of[row.student], row) for row in rows}
    source = source_of(given, inputs) if any(reads_source(several) for several in links.values()) else None
    fingerprints = {row: row_fingerprint(given, inputs_of[row.student], source, row, links[row]) for row in rows}
    with work.locked():
        same_bits(inputs.settings.threads)
        teacher = work.stage("teacher", teacher_fingerprint(inputs), partial(make_teacher, inputs=inputs))
        if source:
            work.stage("teacher-source", teacher_fingerprint(source), partial(make_teacher, inputs=source))
        if any(asks_words(link.stages) for several in links.values() for link in several):
            plain = method_inputs_of(given, inputs, seed=0)
            fit = partial(fit_head, given=plain, tokens=given.distill_tokens)
            work.stage("teacher-head", corpus_fingerprint(given, inputs), fit)
        waiting = [row for row in rows if not work.finished(name_of(row), fingerprints[row])]
        say(f"{len(rows)} trainings, {len(rows) - len(waiting)} of them finished earlier")
        train_rows(given, waiting, fingerprints)
        document = document_of(given, inputs_of, work, rows, read_lineage(teacher))
    for row in document["rows"]:
        for doubt in row["doubts"]:
            say(f"warning: {doubt}")
    write_text(out / "compare.json", canonical_json(document).decode())
    write_page(out / "report.html", partial(page, document))
    write_text(out / "table.md", markdown(document))
    return document


def make_teacher(folder: Path, inputs: TaskInputs) -> None:
    """Fine-tune the teacher on the task and save it in `folder`."""
    steps = inputs.teacher_steps
    say(f"teacher: {steps} steps at most" if steps else "teacher: it has a head for this task")
    task_stages.make_teacher(folder, inputs, steps)


def train_rows(given: Comparison, rows: Sequence[Row], fingerprints: dict[Row, str]) -> None:
    """Trains each row in its own process, so that its peak memory is its own; `given.jobs` at a time."""
    if not rows:
        return
    context = multiprocessing.get_context("spawn")
    with (
        bar("trainings") as shown,
        ProcessPoolExecutor(given.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        shown(0, len(rows))
        futures = {pool.submit(make_row, given, row, fingerprints[row]): row for row in rows}
        failed: list[str] = []
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                except BadInput as error:
                    failed.append(f"{futures[future]}: {error}")
                say(f"  {done}/{len(rows)}  {futures[future]}")
                shown(done, len(rows), str(futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        raise BadInput(
            f"{len(failed)} of {len(rows)} trainings failed; the others are kept. Leave these methods out, or change the tokens or "
            "--batch:\n" + "\n".join(failed)
        )
