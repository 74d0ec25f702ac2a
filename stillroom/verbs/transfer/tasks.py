"""The tasks of a transfer: named on the command line, opened and checked. Nothing here trains or writes."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compress.data.examples import examples_fingerprint
from compress.evaluation.metrics import Metric
from compress.input_errors import Faults
from compress.methods.catalogue import Stage
from compress.models.pretrained import open_model
from compress.models.shapes import Shape, shape_of
from compress.runs.method_chain import method_chain
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint
from compress.runs.task_inputs import TaskInputs, unseen
from compress.settings import FineTunedTeacher, TaskSettings
from compress.tasks import LABELLED
from serve.errors import BadInput
from stillroom.console import show
from stillroom.inputs.folders import check_out_folder, check_outside
from stillroom.settings import shared
from stillroom.verbs.transfer import FILES, FORM, Transferring

METHOD = "xtremedistil-transfer"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")  # of a folder too
# What other verbs offer for a missing column; here a flag would be for all data sets, and they differ.
COLUMN_FLAGS = re.compile(r",? or give (--[\w-]+-column \S+ ?)+(?=$|\n)", re.MULTILINE)


class Named(NamedTuple):
    """A task as it was given."""

    name: str
    task: str
    data: str


@dataclass(frozen=True)
class Tasks:
    """What was given, opened: every source without the texts on which a target is scored."""

    sources: dict[str, TaskInputs]
    targets: dict[str, TaskInputs]
    left_out: dict[str, int]
    """By source, how many texts of its train are in validation or test of a target."""
    shape: Shape
    stages: tuple[Stage, ...]
    """What trains the student on a source."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metric of each target."""
        return {name: inputs.task.metric for name, inputs in self.targets.items()}

    @property
    def warnings(self) -> list[str]:
        """Those of every task, each with its name."""
        every = {**self.sources, **self.targets}
        return [f"{name}: {warning}" for name, inputs in every.items() for warning in inputs.warnings]


def named_task(given: str, flag: str) -> Named:
    """The task that `given` names, in the form `[NAME=]TASK:DATA`.

    Raises:
        BadInput: it has another form, or a kind of task that is not transferred.
    """
    before, _, data = given.partition(":")
    name, _, task = before.rpartition("=")
    if not data or not task:
        raise BadInput(f"{flag} {given} is not {FORM}. Give for example snips=text-classification:my-data/snips.")
    possible = [
        name for name, each in LABELLED.items() if each.names_labels
    ]  # whose logits the method's stages compare
    if task not in possible:
        known = "is not transferred" if task in LABELLED else "is no task"
        raise BadInput(f"{flag} {given}: {task} {known}. Give one of {', '.join(possible)}.")
    name = name or Path(data).name
    if not NAME.fullmatch(name):
        raise BadInput(
            f"{flag} {given}: {name!r} cannot be a name. Put one of letters, digits, - and _ before it, as in NAME={task}:{data}."
        )
    return Named(name, task, os.path.expanduser(data))


def open_tasks(given: Transferring, out: Path, work: Workdir) -> Tasks:
    """The sources and targets of `given`.

    Raises:
        BadInput: one message with everything that is wrong with them, the teacher, the student or `out`.
    """
    faults = Faults()
    faults.check(partial(check_out_folder, out, FILES, beside=True))
    faults.check(work.refuse_foreign)
    faults.check(partial(check_outside, "--teacher", given.teacher, work.root))
    teacher = faults.check(lambda: open_model(given.teacher, revision=given.revision))
    shape = faults.check(lambda: shape_of(given.student))
    chain = faults.check(lambda: method_chain(METHOD, shape, teacher.config)) if teacher and shape else None
    named = {
        flag: [each for text in texts if (each := faults.check(partial(named_task, text, flag)))]
        for flag, texts in (("--source", given.sources), ("--target", given.targets))
    }
    names = [each.name for several in named.values() for each in several]
    faults.messages += [
        f"Two tasks are called {name}. Give each a name of its own, as in NAME=TASK:DATA."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    opened: dict[str, dict[str, TaskInputs]] = {flag: {} for flag in named}
    if chain:
        for flag, several in named.items():
            for each in several:
                if inputs := faults.check(partial(_open, given, each, flag, out)):
                    opened[flag][each.name] = inputs
    sources, targets = opened.values()
    faults.messages += [
        # Its own labels would be no transfer.
        f"--target {target} has the labelled texts of --source {source}. A source transfers to other tasks: leave one of them out."
        for target, theirs in targets.items()
        for source, ours in sources.items()
        if theirs.splits.fingerprint == ours.splits.fingerprint and theirs.settings.task == ours.settings.task
    ]
    faults.raise_if_any()
    assert chain
    assert shape
    # All tasks have one tokenizer, so that a student can go from one to the other: that with markers of relations, if one has them.
    every = [*sources.values(), *targets.values()]
    first = next((inputs for inputs in every if inputs.opened.added), every[0])
    sources, targets = (
        {name: replace(inputs, opened=first.opened, tokenizer=first.tokenizer) for name, inputs in several.items()}
        for several in (sources, targets)
    )
    apart = {name: _without_texts_of(inputs, targets.values()) for name, inputs in sources.items()}
    left_out = {name: len(sources[name].splits.train) - len(inputs.splits.train) for name, inputs in apart.items()}
    faults.messages += [
        f"--source {name}: all texts of its train are in validation or test of a target. Leave it out."
        for name, inputs in apart.items()
        if not inputs.splits.train
    ]
    faults.raise_if_any()
    return Tasks(apart, targets, left_out, shape, tuple(stage for stage in chain.stages[-1] if stage.text == "source"))


def _open(given: Transferring, named: Named, flag: str, out: Path) -> TaskInputs:
    """The data of one task, and the teacher for it."""
    settings = TaskSettings(
        **shared(given, FineTunedTeacher), task=named.task, data=named.data, student=given.student, new_head=True,
        student_learning_rate=given.target_learning_rate,
    )  # fmt: skip
    try:
        return open_task(settings, out, notify=show)
    except BadInput as fault:
        raise BadInput(f"{flag} {named.name}: {COLUMN_FLAGS.sub('', fault.message)}") from None


def _without_texts_of(source: TaskInputs, targets: Iterable[TaskInputs]) -> TaskInputs:
    """`source` whose train lacks every text on which one of the `targets` is scored."""
    train = source.splits.train
    for target in targets:
        train = unseen(train, target.splits)
    apart = replace(
        source.splits, train=train, fingerprint=fingerprint(source.splits.fingerprint, examples_fingerprint(train))
    )
    return replace(source, splits=apart)
