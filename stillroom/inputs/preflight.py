"""Opens and checks the inputs of a run. Nothing here trains or writes to the bundle."""

import os
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import cast

from compress.engine.resumable_stages import Workdir, check_writable
from compress.engine.task_inputs import TaskInputs, open_task
from export.packing.writer import refuse_foreign
from serve.errors import BadInput
from stillroom.console import show
from stillroom.inputs.recipe import Recipe


@dataclass
class RunInputs(TaskInputs):
    """The opened inputs of one run: those of its training, and the folder of its stages."""

    @property
    def recipe(self) -> Recipe:
        """All settings of the run."""
        return cast(Recipe, self.settings)

    @cached_property
    def workdir(self) -> Workdir:
        """The folder of the run's stages."""
        return Workdir(work_of(Path(os.path.abspath(self.recipe.out))))


def work_of(out: Path) -> Path:
    """The working folder of a run with this `out`."""
    return out.with_name(f"{out.name}.work")


def prepare(recipe: Recipe) -> RunInputs:
    """Open and check everything that `recipe` names; nothing is written.

    Raises:
        BadInput: every fault found, in one message.
    """
    out = Path(os.path.abspath(recipe.out))
    work = work_of(out)
    checks = (
        lambda: check_out(out),
        Workdir(work).refuse_foreign,
        lambda: check_outside("--teacher", recipe.teacher, work) if recipe.teacher else None,
        lambda: check_outside("--start", recipe.start, work),
    )
    opened = open_task(recipe, out, more_checks=checks, notify=show)
    return RunInputs(**{field.name: getattr(opened, field.name) for field in fields(opened)})


def check_outside(role: str, model: str, work: Path) -> None:
    """Check that `model`, which the flag `role` names, is not inside the run's working folder.

    Raises:
        BadInput: it is inside, and the run would delete it.
    """
    if Path(model).resolve().is_relative_to(work.resolve()):
        raise BadInput(f"{role} {model} is in {work}, which this run would delete. Copy it elsewhere.")


def check_out(out: Path) -> None:
    """Check that `out` can be written: it is absent, an empty folder or a bundle.

    Raises:
        BadInput: it is a file, or a folder that holds something else, or cannot be written.
    """
    refuse_foreign(out)
    check_writable(out)
