"""The trainings of a transfer, each a resumable stage: a student on a source, and that student on some labels of a target."""

import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from compress.data.batches import TaskText
from compress.runs import task_stages
from compress.runs.method_chain import Link
from compress.runs.method_stages import run_method
from compress.runs.method_trainings import Labelled, MethodInputs
from compress.runs.resumable_stages import STATE, Workdir
from compress.runs.stages import fingerprint, trained_with
from compress.runs.task_inputs import TaskInputs, scored_rows
from compress.training.stage import StageSettings
from serve.files import replacing_folder
from stillroom.verbs.transfer import Transferring
from stillroom.verbs.transfer.tasks import METHOD, Tasks

STAGES, STUDENT, START = "stages", "student", "start"
SCORED = ("validation", "test")


@dataclass(frozen=True)
class Cell:
    """One training on a target: of the student of a source or of none, on some labels or all, with a seed."""

    source: str | None
    target: str
    seed: int
    labels: int | None = None
    """How many labelled texts it learns from; None is all."""

    @property
    def name(self) -> str:
        """Its folder in OUT.work."""
        start = f"from={self.source}" if self.source else "alone"
        return f"target-{self.target},{start},labels={self.labels or 'all'},seed={self.seed}"

    def __str__(self) -> str:
        labels = "all labels" if self.labels is None else f"{self.labels} labels"
        return f"{self.source or 'no source'} -> {self.target}, {labels}, seed {self.seed}"


@dataclass(frozen=True)
class Trainings:
    """Makes each training in `work`, or finds it there."""

    given: Transferring
    tasks: Tasks
    work: Workdir
    teachers: dict[str, tuple[Path, str]]
    """By source, the folder of the teacher that was fine-tuned on it, and the fingerprint of what made it."""

    def counted(self, cell: Cell) -> dict[str, np.ndarray]:
        """Per text of validation and test the numbers of `scored_rows` of the trained student."""
        start, of_start = self.student(cell.source, cell.seed) if cell.source else (None, "none")
        target, given = self.tasks.targets[cell.target], self.given
        settings = target.settings
        decides = fingerprint(
            "cell", target.teacher_fingerprint, list(target.opened.added), of_start, str(self.tasks.shape), settings.task,
            target.data_fingerprint, cell.labels, cell.seed, given.target_steps, given.target_learning_rate, settings.batch,
            settings.threads, settings.precision, target.max_length, trained_with(settings.device),
        )  # fmt: skip
        folder = self.work.stage(cell.name, decides, partial(self._make_cell, cell=cell, start=start))
        return {split: np.load(folder / f"{split}.npy", allow_pickle=False) for split in SCORED}

    def student(self, source: str, seed: int) -> tuple[Path, str]:
        """The checkpoint of the student that is distilled on `source`, and the fingerprint of what made it."""
        teacher, of_teacher = self.teachers[source]
        stages = [asdict(stage) for stage in self.tasks.stages]
        decides = fingerprint(
            METHOD, of_teacher, list(self.tasks.sources[source].opened.added), str(self.tasks.shape), stages, self.given.source_steps, seed,
        )  # fmt: skip
        make = partial(self._make_student, source=source, seed=seed, teacher=teacher)
        return self.work.stage(f"source-{source}-seed-{seed}", decides, make) / STUDENT, decides

    def _make_student(self, folder: Path, source: str, seed: int, teacher: Path) -> None:
        """Distil a student on `source` in folder/student; its stages are removed when it is finished."""
        if not (folder / STUDENT).is_dir():
            inputs = self.tasks.sources[source]
            settings = inputs.settings
            labelled = Labelled(inputs.task, inputs.train, inputs.validation, inputs.splits.validation, teacher)
            method = MethodInputs(
                inputs.opened, inputs.tokenizer, (), {"source": labelled}, settings.batch,
                StageSettings(0, seed, settings.precision, device=settings.device),
                lineage={"data": inputs.data_fingerprint, "method": METHOD}, notify=inputs.notify,
            )  # fmt: skip
            *_, last = run_method(Workdir(folder / STAGES), "source", [self._link(inputs, seed)], method)
            (last / STATE).unlink(missing_ok=True)
            last.replace(folder / STUDENT)
        shutil.rmtree(folder / STAGES, ignore_errors=True)

    def _link(self, inputs: TaskInputs, seed: int) -> Link:
        """The stages on a source, of which each has its share of the steps."""
        stages = self.tasks.stages
        a_step = TaskText(inputs.train, inputs.settings.batch, seed).tokens_per_step
        whole = sum(stage.share for stage in stages)
        tokens = tuple(stage.share / whole * self.given.source_steps * a_step for stage in stages)
        return Link(self.tasks.shape, stages, tokens, starts_from="source")

    def _make_cell(self, folder: Path, cell: Cell, start: Path | None) -> None:
        """Train the student `start`, or one of the teacher's own parts, on the target, and score it.

        The weights of the last step count: validation chooses the source and none of the weights, so that a student with ten labels
        learns from ten alone.
        """
        target = self.tasks.targets[cell.target]
        settings = replace(target.settings, seed=cell.seed, start=str(start) if start else target.settings.start)
        inputs = replace(target, settings=settings)
        begun = folder / START
        if not begun.is_dir():
            with replacing_folder(begun, alone=True) as beside:
                task_stages.make_start(beside, inputs, None)
        model = task_stages.load_stage(begun, inputs)
        steps = self.given.target_steps
        task_stages.on_task(
            model, folder, inputs, steps, settings.student_learning_rate, str(cell),
            chosen=chosen_texts(len(inputs.splits.train), cell.labels, cell.seed), validate_every=steps,
        )  # fmt: skip
        for split in SCORED:
            np.save(folder / f"{split}.npy", scored_rows(inputs, model, split), allow_pickle=False)
        shutil.rmtree(begun)


def chosen_texts(texts: int, count: int | None, seed: int) -> list[int] | None:
    """The places of `count` of `texts`, drawn with `seed`, ascending: fewer are among more. None where all are wanted."""
    if count is None:
        return None
    return sorted(np.random.default_rng(seed).permutation(texts)[:count].tolist())
