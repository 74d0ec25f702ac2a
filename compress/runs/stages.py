"""A run as a list of stages, and the runner that makes those that are not finished.

A stage names what it is made of, what it costs and the function that makes it. Fingerprints, resuming and estimates follow from the list.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.data.examples import Example, examples_fingerprint
from compress.progress import message
from compress.runs.hardware import device_here
from compress.runs.resumable_stages import Workdir
from serve.bundle.manifest import canonical_json, sha256_file

# Increase it when stages of an older version can no longer be reused.
STAGE_FORMAT = 3


@dataclass(frozen=True)
class Of:
    """Stands in `RunStage.made_of` for everything that another stage is made of."""

    stage: str


@dataclass(frozen=True)
class Cost:
    """What a stage costs: `count`, given a plan, says how many times the seconds of one `unit`."""

    listed_as: str  # in an estimate
    unit: str
    count: Callable[[Any], float]


@dataclass(frozen=True)
class RunStage:
    """One stage of a run, which fills a folder."""

    name: str
    """Of its folder."""
    made_of: tuple[object, ...]
    """Everything that decides its content: settings and fingerprints, which JSON can hold, and `Of` each stage that it reads."""
    make: Callable[[Path], None] | None = None
    """Fills the folder; None where the stage only sums up what others are made of."""
    says: str | Callable[[], str] = ""
    """What is told before it begins."""
    needed: Callable[[], bool] = lambda: True
    """Whether it is made at all; asked when its turn comes."""
    then: Callable[[Path], object] | None = None
    """Called with its folder, whether it was made now or earlier."""
    alone: bool = False
    """Whether neither it nor any stage after it trains, so that the main process goes on alone."""
    costs: tuple[Cost, ...] = ()


def run_stages(
    workdir: Workdir,
    stages: Sequence[RunStage],
    folders: dict[str, Path] | None = None,
    *,
    only: Collection[str] | None = None,
) -> dict[str, Path]:
    """The folder of each stage that is needed, in their order; finished ones are not made again.

    `folders` is filled as they finish: later stages find there what they read. `only` names the stages to make, if not all.
    """
    folders = {} if folders is None else folders
    decided_by = fingerprints_of(stages)
    for stage in stages:
        if stage.make is None or (only is not None and stage.name not in only) or not stage.needed():
            continue
        if stage.alone:
            workdir.alone()
        if text := stage.says if isinstance(stage.says, str) else stage.says():
            finished = workdir.finished(stage.name, decided_by[stage.name])
            message(workdir.notify, f"{text}: finished earlier" if finished else text)
        folders[stage.name] = folder = workdir.stage(stage.name, decided_by[stage.name], stage.make)
        if stage.then:
            stage.then(folder)
    return folders


def make_checkpoint(workdir: Workdir, stages: Sequence[RunStage], folders: dict[str, Path], target: Path) -> Path:
    """Run `stages`, rename the folder of the last to `target`, and remove the others."""
    with workdir.locked(fingerprints_of(stages)[stages[-1].name]):
        *_, last = run_stages(workdir, stages, folders).values()
        workdir.publish(last, target)
    return target


def fingerprints_of(stages: Iterable[RunStage]) -> dict[str, str]:
    """By name the fingerprint of each stage, that is of everything which decides its content."""
    by_name = {stage.name: stage for stage in stages}
    found: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in found:
            parts = [of(part.stage) if isinstance(part, Of) else part for part in by_name[name].made_of]
            found[name] = fingerprint(*parts)
        return found[name]

    for name in by_name:
        of(name)
    return found


def seconds_of(stages: Iterable[RunStage], plan: Any, rates: Mapping[str, float]) -> dict[str, float]:
    """The seconds of all `stages` by `Cost.listed_as`, if they take the steps of `plan` at the seconds a unit in `rates`."""
    found: dict[str, float] = {}
    for cost in (cost for stage in stages for cost in stage.costs):
        # A rate may be unknown where there is nothing to do.
        count = cost.count(plan)
        found[cost.listed_as] = found.get(cost.listed_as, 0.0) + (count * rates[cost.unit] if count else 0.0)
    return found


def fingerprint(*parts: object) -> str:
    """The SHA-256 of `parts`, which are anything that JSON can hold."""
    return hashlib.sha256(canonical_json([STAGE_FORMAT, *parts])).hexdigest()


def trained_with(device: str) -> list[str]:
    """The library versions and the type of device that decide the result of training and tokenising.

    `device` is the setting; `auto` is resolved.
    """
    return [*(version(name) for name in ("torch", "transformers", "tokenizers")), device_here(device).type]


def texts_fingerprint(texts: Iterable[str]) -> str:
    """The SHA-256 of `texts`."""
    return examples_fingerprint(Example(text) for text in texts)


def folder_fingerprint(folder: Path) -> str:
    """The SHA-256 of each file of weights, configuration or vocabulary in a model folder, joined by colons."""
    files = sorted(
        f for f in folder.iterdir() if f.suffix in (".safetensors", ".json", ".txt", ".model") and f.is_file()
    )
    return ":".join(sha256_file(file) for file in files)
