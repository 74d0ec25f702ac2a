"""The trainings of a transfer, each a resumable stage: a student on a source, and that student on some labels of a target.

Every cell of the table is trained, by which the source is chosen, then the points of its curves.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from compress.data.batches import TaskText
from compress.evaluation.metrics import Metric
from compress.runs import task_stages
from compress.runs.method_chain import Link
from compress.runs.method_trainings import Labelled, MethodInputs, run_method
from compress.runs.resumable_stages import STATE, Workdir
from compress.runs.stages import fingerprint, trained_with
from compress.runs.task_inputs import scored_rows
from compress.training.loop import StageSettings
from serve.errors import BadInput
from serve.files import replacing_folder
from stillroom.console import say
from stillroom.student_search.search import make_teacher
from stillroom.verbs.transfer import Transferring
from stillroom.verbs.transfer.tasks import METHOD, Tasks

STAGES, STUDENT, START = "stages", "student", "start"
SCORED = ("validation", "test")
Counted = dict[str, np.ndarray]


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

    def counted(self, cell: Cell) -> Counted:
        """Per text of validation and test the numbers of `scored_rows` of the trained student."""
        start, of_start = self.student(cell.source, cell.seed) if cell.source else (None, "none")
        target, given = self.tasks.targets[cell.target], self.given
        settings = target.settings
        decides = fingerprint(
            "cell", target.teacher_fingerprint, list(target.opened.added), of_start, str(self.tasks.shape), settings.task,
            target.splits.fingerprint, cell.labels, cell.seed, given.target_steps, given.target_learning_rate, settings.batch,
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
                lineage={"data": inputs.splits.fingerprint, "method": METHOD}, notify=inputs.notify,
            )  # fmt: skip
            stages = self.tasks.stages  # each has its share of the steps
            a_step = TaskText(inputs.train, settings.batch, seed).tokens_per_step
            whole = sum(stage.share for stage in stages)
            tokens = tuple(stage.share / whole * self.given.source_steps * a_step for stage in stages)
            link = Link(self.tasks.shape, stages, tokens, starts_from="source")
            *_, last = run_method(Workdir(folder / STAGES), "source", [link], method)
            (last / STATE).unlink(missing_ok=True)
            last.replace(folder / STUDENT)
        shutil.rmtree(folder / STAGES, ignore_errors=True)

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


def train(given: Transferring, tasks: Tasks, work: Workdir) -> tuple[dict[Cell, Counted], str]:
    """What was trained before the minutes were over, the table first, and the source that was chosen by it.

    Raises:
        BadInput: not even one seed of the table was.
    """
    found = dict[Cell, Counted]()
    table = [
        Cell(source, target, seed)  # a whole table for each seed after the other
        for seed in range(given.seeds)
        for source in (None, *tasks.sources)
        for target in tasks.targets
    ]

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

    def train_cell(cell: Cell) -> bool:
        """Train `cell`, or say that the minutes are over."""
        if over():
            say(f"  {given.most_minutes:g} minutes are over after {len(found)} of {total} trainings")
            return False
        found[cell] = trainings.counted(cell)
        value = tasks.metrics[cell.target].value(found[cell]["validation"])
        say(f"  {len(found)}/{total}  {cell}: {tasks.targets[cell.target].metric} {value:.4f} on validation")
        return True

    whole = all(map(train_cell, table))
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
        all(map(train_cell, curve_cells(given, tasks, chosen, seeds)))
    return found, chosen


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
