"""A run as a list of stages, and the runner that makes those that are not finished.

A stage names what it is made of, what it costs and the function that makes it. Fingerprints, resuming and estimates follow from the list.
Several processes have the same code, models, data and settings, which is checked before any of them trains.
"""

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compress
from compress import distributed
from compress.data.examples import Example, examples_fingerprint
from compress.peers import Rank
from compress.progress import message
from compress.runs.hardware import device_here
from compress.runs.resumable_stages import Workdir
from serve.bundle.manifest import canonical_json, sha256_file

# Increase it when stages of an older version can no longer be reused.
STAGE_FORMAT = 5
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
# Settings in which processes may differ: paths, whose contents are compared, and what each decides for its machine.
MAY_DIFFER = (
    "teacher", "model", "start", "data", "corpus", "unlabelled", "teacher_labels", "keep_words_of", "promise_data", "teacher_cache", "out",
    "threads", "trackers",
)  # fmt: skip
MUST_ALL_BE_GIVEN = ("teacher_cache", "keep_words_of")
SHOWN = 60  # most characters of a value that a message names


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


def check_same_inputs(settings: Any, contents: Mapping[str, object]) -> None:
    """Check that each process has the code, `settings` (a dataclass) and `contents` of the main one.

    Args:
        settings: those of the command, resolved for this machine.
        contents: by the flag that names them, what was read: fingerprints, or anything that JSON can hold.

    Raises:
        BadInput: a process differs; the message names its node and every difference.
    """
    if distributed.count() == 1:
        return
    folder = Path(compress.__file__).parent.parent
    code = sorted(
        (str(file.relative_to(folder)), sha256_file(file))
        for package in ("compress", "serve", "stillroom")
        for file in (folder / package).rglob("*.py")
    )

    def digest(value: object) -> str:
        return hashlib.sha256(canonical_json(value)).hexdigest()

    own = {"stillroom": digest(code), "Python": platform.python_version()}
    own |= {name: version(name) for name in LIBRARIES} | {name: digest(value) for name, value in contents.items()}
    own |= {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in dataclasses.asdict(settings).items()
        if name not in MAY_DIFFER
    }
    # Where they are may differ, and not whether: with a cache, processes do other work together.
    own |= {
        f"--{name.replace('_', '-')}": "given" if getattr(settings, name, "") else "not given"
        for name in MUST_ALL_BE_GIVEN
    }

    def refusal(place: Rank, theirs: Mapping[str, str]) -> str:
        apart = []
        for name in own | dict(theirs):
            here, there = own.get(name, "none"), theirs.get(name, "none")
            if name in contents and here != there:
                apart.append(f"the contents of {name}")
            elif here != there:
                told = f"{name} is {there[:SHOWN]} there and {here[:SHOWN]} in the main process"
                apart.append("the code of stillroom" if name == "stillroom" else told)
        if not apart:
            return ""
        return (
            f"{str(place).capitalize()}, differs from the main process: {'; '.join(apart)}. All nodes need the same code, the same files "
            "at the paths that are given, and the same settings. Make them the same and start again; nothing was trained."
        )

    distributed.agreed(own, refusal)
