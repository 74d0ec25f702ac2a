"""Trains every cell of the table, chooses the source, trains the points of its curves, and writes document and page."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.evaluation.metrics import Metric
from compress.runs.hardware import same_bits
from compress.runs.resumable_stages import Workdir
from latency.measure.machine import machine_facts
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from stillroom.console import say
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.report.transfer_page import page
from stillroom.student_search.search import make_teacher
from stillroom.verbs.transfer import Transferring
from stillroom.verbs.transfer.document import document_of
from stillroom.verbs.transfer.tasks import DOCUMENT, PAGE, Tasks, open_tasks
from stillroom.verbs.transfer.training import Cell, Trainings

Counted = dict[str, np.ndarray]


def transfer_between(given: Transferring) -> dict[str, Any]:
    """See `stillroom.transfer`."""
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(out.with_name(f"{out.name}.work"))
    tasks = open_tasks(given, out, work)
    for warning in dict.fromkeys(tasks.warnings):
        say(f"warning: {warning}")
    for name, count in tasks.left_out.items():
        if count:
            say(f"{name}: {count:,} texts of its train are in validation or test of a target and were left out")
    same_bits(next(iter(tasks.targets.values())).settings.threads)
    with work.locked():
        found, chosen = _train(given, tasks, work)
        document = document_of(given, tasks, work, found, chosen) | {"machine": machine}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DOCUMENT, canonical_json(document).decode())
    write_page(out / PAGE, partial(page, document))
    return document | {"report": str(page_or(out / PAGE, DOCUMENT))}


def _train(given: Transferring, tasks: Tasks, work: Workdir) -> tuple[dict[Cell, Counted], str]:
    """What was trained before the minutes were over, the table first, and the source that was chosen by it.

    Raises:
        BadInput: not even one seed of the table was.
    """
    table, found = table_cells(given, tasks), dict[Cell, Counted]()

    def over() -> bool:
        # Finished ones of earlier calls count too, so that the same call trains the same.
        return sum(work.seconds.values()) >= given.most_minutes * 60

    teachers = dict[str, tuple[Path, str]]()
    for name, inputs in tasks.sources.items():
        if over():
            break
        try:
            teachers[name] = make_teacher(inputs, work, f"teacher-{name}")
        except BadInput as fault:
            raise BadInput(f"--source {name}: {fault.message}") from None
    trainings = Trainings(given, tasks, work, teachers)
    total = len(table) + sum(1 for _ in curve_cells(given, tasks, "", given.seeds))

    def train(cell: Cell) -> bool:
        """Train `cell`, or say that the minutes are over."""
        if over():
            say(f"  {given.most_minutes:g} minutes are over after {len(found)} of {total} trainings")
            return False
        found[cell] = trainings.counted(cell)
        value = tasks.metrics[cell.target].value(found[cell]["validation"])
        say(f"  {len(found)}/{total}  {cell}: {tasks.targets[cell.target].metric} {value:.4f} on validation")
        return True

    whole = all(map(train, table))
    a_seed = len(table) // given.seeds
    seeds = len(found) // a_seed
    if not seeds:
        raise BadInput(
            f"--most-minutes {given.most_minutes:g} were over before one seed of the table was complete: {len(found)} of {a_seed} "
            f"trainings are kept in {work.root}. Give more minutes, and the same command goes on."
        )
    found = {cell: counted for cell, counted in found.items() if cell.seed < seeds}
    chosen = best_source(tasks.sources, tasks.metrics, found)
    say(f"best on validation: {chosen}")
    if whole:
        all(map(train, curve_cells(given, tasks, chosen, seeds)))
    return found, chosen


def table_cells(given: Transferring, tasks: Tasks) -> list[Cell]:
    """The cells of the table, a whole table for each seed after the other."""
    return [
        Cell(source, target, seed)
        for seed in range(given.seeds)
        for source in (None, *tasks.sources)
        for target in tasks.targets
    ]


def curve_cells(given: Transferring, tasks: Tasks, chosen: str, seeds: int) -> Iterator[Cell]:
    """The cells of the curves, every point with one seed before the next; a point with the source and without are neighbours."""
    for seed in range(seeds):
        for target, inputs in tasks.targets.items():
            for count in label_counts(given, len(inputs.splits.train)):
                for source in (None, chosen):
                    yield Cell(source, target, seed, count)


def label_counts(given: Transferring, texts: int) -> list[int]:
    """The points of a curve of a target with so many labelled texts, but for that of all of them."""
    return sorted({count for count in given.labels if count < texts})


def best_source(sources: Iterable[str], metrics: Mapping[str, Metric], found: Mapping[Cell, Counted]) -> str:
    """The source with the best mean over targets on validation (XtremeDistil, section 2.2); the first of equals."""

    def mean(source: str) -> float:
        values = [
            metrics[cell.target].value(counted["validation"])
            for cell, counted in found.items()
            if cell.source == source
        ]
        return float(np.mean(values))  # every target has as many seeds

    return max(sources, key=mean)
