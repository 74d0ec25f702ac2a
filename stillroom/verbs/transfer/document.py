"""The document of a transfer: the table of scores from source to target, the chosen source, and its curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.examples import clusters_of
from compress.evaluation.metrics import Metric, Pairs, gain, mean_over_tasks
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import trained_with
from compress.runs.task_inputs import TaskInputs
from stillroom.verbs.transfer import Transferring
from stillroom.verbs.transfer.tasks import METHOD, Tasks
from stillroom.verbs.transfer.training import STUDENT, Cell

Found = Mapping[Cell, Mapping[str, np.ndarray]]
ALONE = None  # the source of a student that learned none


def document_of(given: Transferring, tasks: Tasks, work: Workdir, found: Found, chosen: str) -> dict[str, Any]:
    """What was trained, as `stillroom transfer --json` prints it."""
    sources = (ALONE, *tasks.sources)
    table = [_row(tasks, found, source, chosen) for source in sources]
    curves = [_curve(found, tasks, target, chosen) for target in tasks.targets]
    first = next(iter(tasks.targets.values()))
    return {
        "teacher": first.opened.public_name,
        "student": str(tasks.shape),
        "method": METHOD,
        "sources": [
            _task(name, inputs)
            | {"left_out": tasks.left_out[name], "teacher_validation": task_stages.teacher_score(inputs, work.root / f"teacher-{name}")}
            for name, inputs in tasks.sources.items()
        ],
        "targets": [_task(name, inputs) for name, inputs in tasks.targets.items()],
        "table": sorted(table, key=lambda row: -float(row["mean"]["validation"]["value"])),
        "chosen": chosen,
        "checkpoint": str(work.root / f"source-{chosen}-seed-0" / STUDENT),
        "curves": curves,
        "mean_differences": _mean_differences(found, tasks, chosen),
        "seeds": len({cell.seed for cell in found if cell.labels is None}),
        "seconds": {
            part: round(sum(seconds for name, seconds in work.seconds.items() if name.startswith(f"{part}-")), 1)
            for part in ("teacher", "source", "target")
        },
        "settings": {
            name: value for name, value in asdict(given).items() if name not in ("teacher", "sources", "targets", "out", "student")
        }
        | {name: getattr(first.settings, name) for name in ("device", "precision", "threads")},
        "versions": trained_with(first.settings.device),
    }  # fmt: skip


def _task(name: str, inputs: TaskInputs) -> dict[str, Any]:
    """What a task is, without private paths."""
    data = inputs.settings.data
    return {
        "name": name,
        "task": inputs.settings.task,
        "data": Path(data).name if Path(data).exists() else data,
        "metric": inputs.metric,
        "labels": len(inputs.labels),
        "texts": {split: len(getattr(inputs.splits, split)) for split in ("train", "validation", "test")},
    }


def _row(tasks: Tasks, found: Found, source: str | None, chosen: str) -> dict[str, Any]:
    """A row of the table: the scores of the students of one source on every target with all of its labels."""
    return {
        "source": source,
        "cells": {
            target: {
                split: asdict(
                    metric.mean_score(_seeds(found, source, target, split), clusters=_clusters(tasks.targets[target], split))
                )
                for split in ("validation", "test")
            }
            | {"seeds": _values(metric, _seeds(found, source, target, "test"))}
            for target, metric in tasks.metrics.items()
        },
        "mean": {
            split: asdict(
                mean_over_tasks(
                    [*tasks.metrics.values()],
                    _by_target(tasks, found, source, split),
                    clusters=[_clusters(target, split) for target in tasks.targets.values()],
                )
            )
            for split in ("validation", "test")
        },
        "minus_none": None if source is ALONE else _difference(tasks, found, source, ALONE),
        "minus_chosen": None if source == chosen else _difference(tasks, found, source, chosen),
    }  # fmt: skip


def _difference(tasks: Tasks, found: Found, source: str | None, other: str | None) -> dict[str, Any]:
    """The mean over targets of `source` minus that of `other`, on test: validation has chosen, and favours what it chose."""
    return _apart(tasks.targets.values(), *(_by_target(tasks, found, each, "test") for each in (source, other)))


def _apart(
    targets: Iterable[TaskInputs], ours: Sequence[Sequence[np.ndarray]], theirs: Sequence[Sequence[np.ndarray]]
) -> dict[str, Any]:
    """The mean over targets of `ours` minus `theirs`, see `gain`, of the seeds that all targets have."""
    pairs = [
        Pairs(target.task.metric, mine, others, _clusters(target, "test"))
        for target, mine, others in zip(targets, ours, theirs, strict=True)
    ]
    return asdict(gain([pairs]))


def _clusters(target: TaskInputs, split: str) -> np.ndarray:
    return clusters_of(getattr(target.splits, split))


def _curve(found: Found, tasks: Tasks, target: str, chosen: str) -> dict[str, Any]:
    """A point for each number of labels that was trained with and without the source, the last with all of them."""
    points, metric = [], tasks.targets[target].task.metric
    clusters = _clusters(tasks.targets[target], "test")
    for count in _counts(found, target):
        ours, theirs = (_seeds(found, source, target, "test", count, chosen=chosen) for source in (chosen, ALONE))
        points.append({
            "labels": count or len(tasks.targets[target].splits.train),
            "all": count is None,
            "with_source": asdict(metric.mean_score(ours, clusters=clusters)) | {"seeds": _values(metric, ours)},
            "without": asdict(metric.mean_score(theirs, clusters=clusters)) | {"seeds": _values(metric, theirs)},
            "difference": _apart([tasks.targets[target]], [ours], [theirs]),
        })  # fmt: skip
    return {"target": target, "metric": metric.name, "points": points}


def _mean_differences(found: Found, tasks: Tasks, chosen: str) -> list[dict[str, Any]]:
    """The mean over targets of what the source adds, for each number of labels that every target has; null is all."""
    differences = []
    for count in _counts(found, next(iter(tasks.targets))):
        if all(count in _counts(found, target) for target in tasks.targets):
            both = (_by_target(tasks, found, source, "test", count, chosen=chosen) for source in (chosen, ALONE))
            differences.append({"labels": count} | _apart(tasks.targets.values(), *both))
    return differences


def _counts(found: Found, target: str) -> list[int | None]:
    """The numbers of labels that were trained with and without a source with one seed at least, ascending; None is all."""
    trained = [
        {cell.labels for cell in found if cell.target == target and bool(cell.source) is has} for has in (True, False)
    ]
    return sorted(trained[0] & trained[1], key=lambda count: (count is None, count or 0))


def _seeds(
    found: Found, source: str | None, target: str, split: str, labels: int | None = None, *, chosen: str = ""
) -> list[np.ndarray]:
    """The counts of every seed of a cell on `split`; with `chosen` of those alone that were trained with it and without a source."""
    seeds = [cell.seed for cell in found if (cell.source, cell.target, cell.labels) == (source, target, labels)]
    if chosen:
        seeds = [s for s in seeds if all(Cell(each, target, s, labels) in found for each in (chosen, ALONE))]
    return [found[Cell(source, target, seed, labels)][split] for seed in seeds]


def _by_target(
    tasks: Tasks, found: Found, source: str | None, split: str, labels: int | None = None, *, chosen: str = ""
) -> list[list[np.ndarray]]:
    return [_seeds(found, source, target, split, labels, chosen=chosen) for target in tasks.targets]


def _values(metric: Metric, counted: Sequence[np.ndarray]) -> list[float]:
    """The metric of each seed."""
    return [metric.value(each) for each in counted]
