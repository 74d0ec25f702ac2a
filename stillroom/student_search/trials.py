"""Short trainings of students that fit the budget: which shapes are tried, and what each reached on validation."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from compress.data.examples import clusters_of
from compress.evaluation.metrics import Metric, Score
from compress.models.shapes import STUDENTS, Shape
from compress.progress import message
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.soft_labels import read_soft_labels
from compress.runs.stages import fingerprint
from compress.runs.task_inputs import TaskInputs, scored_rows
from serve.files import replacing_folder
from stillroom.settings import Sampler
from stillroom.student_search.controller import Places, controlled, reward
from stillroom.student_search.space import Space, encoder_weights

COUNTS, START = "counts.npy", "start"
STARTUP = 8  # trials before the sampler models them
MOST_ASKED = 100  # suggestions in a row that bring nothing new; then a shape is drawn by chance


@dataclass(frozen=True)
class Limits:
    """What a student may take, and what the search may."""

    budget_ms: float
    percentile: int
    tokens: int
    trials: int
    trial_steps: int
    most_minutes: float
    soft_weight: float
    sampler: Sampler = "tpe"


@dataclass(frozen=True)
class Trial:
    """A student that was trained for a few steps."""

    shape: Shape
    validation: Score
    counts: np.ndarray
    """Per text of validation the numbers of `metric.counts`."""
    metric: Metric
    seconds: float
    clusters: np.ndarray | None = None
    """Of each text of validation the number of its cluster; see `compress.data.examples.clusters_of`."""

    def less(self, other: "Trial") -> Score:
        """This score minus that of `other`, both on the same resampled texts."""
        return self.metric.mean_score([self.counts], less=[other.counts], clusters=self.clusters)


@dataclass(frozen=True)
class ShortTraining:
    """How each student is trained, and what it learns from."""

    inputs: TaskInputs
    work: Workdir
    limits: Limits
    teacher: Path
    soft_labels: Path
    fingerprint: str
    """Of everything but the shape."""

    def trial(self, shape: Shape) -> Trial:
        """The trial of `shape`, made or found in `work`."""
        folder = self.work.stage(
            f"trial-{shape}", fingerprint("trial", self.fingerprint, str(shape)), partial(self._make, shape=shape)
        )
        counts = np.load(folder / COUNTS, allow_pickle=False)
        clusters, metric = clusters_of(self.inputs.splits.validation), self.inputs.task.metric
        # Intervals are made of the counts each time, so that those of an earlier version do not stand beside these.
        reached = metric.interval_of(counts, clusters=clusters)
        return Trial(shape, reached, counts, metric, self.work.seconds[folder.name], clusters)

    def _make(self, folder: Path, shape: Shape) -> None:
        inputs, settings, start = self.inputs, self.inputs.settings, folder / START
        if not start.is_dir():
            with replacing_folder(start, alone=True) as beside:
                task_stages.make_start(
                    beside, replace(inputs, settings=replace(settings, student=str(shape)), shape=shape), self.teacher
                )
        model = task_stages.load_stage(start, inputs)
        soft = read_soft_labels(self.soft_labels, inputs)
        task_stages.on_task(
            model, folder, inputs, self.limits.trial_steps, settings.student_learning_rate, f"trial of {shape}", soft=soft,
            soft_weight=self.limits.soft_weight,
        )  # fmt: skip
        np.save(folder / COUNTS, scored_rows(inputs, model, "validation"), allow_pickle=False)
        shutil.rmtree(start)


def first_shapes(space: Space, fitting: Iterable[Shape]) -> list[Shape]:
    """What is tried before a sampler is asked: for each number of layers the largest at the teacher's width, and the papers' shapes.

    One of a depth has the teacher's activation, if any of that depth fits with it.
    """
    fitting = list(fitting)
    wide = [shape for shape in fitting if shape.hidden == space.teacher.hidden]
    largest = {
        shape.layers: shape for shape in sorted(wide, key=lambda each: (not each.activation, encoder_weights(each)))
    }
    papers = [shape for shape in STUDENTS.values() if shape in fitting]
    return list(dict.fromkeys([*sorted(largest.values(), key=encoder_weights, reverse=True), *papers]))


def trials(
    training: ShortTraining,
    space: Space,
    fitting: list[Shape],
    predicted_ms: Callable[[Shape], float],
    told: Callable[[Trial, int], None],
) -> list[Trial]:
    """Trials of shapes of `fitting` within the limits of `training`, in the order in which they were made.

    Half of them at most are those of `first_shapes`, the others are suggested by the sampler. The same call makes the same trials, so
    that a stopped search goes on: finished ones are found in the working folder, and the sampler learns them again. `told` is called
    with each trial and how many were made.
    """
    limits, found = training.limits, dict[Shape, Trial]()
    suggestions = suggested(
        limits.sampler, space, fitting, found, seed=training.inputs.settings.seed, predicted_ms=predicted_ms,
        first=first_shapes(space, fitting)[: -(-limits.trials // 2)], budget_ms=limits.budget_ms,
    )  # fmt: skip
    while len(found) < min(limits.trials, len(fitting)):
        if sum(trial.seconds for trial in found.values()) >= limits.most_minutes * 60:
            over = f"  {limits.most_minutes:g} minutes are over after {len(found)} of {limits.trials} trainings"
            message(training.inputs.notify, over)
            break
        shape = next(suggestions)
        found[shape] = training.trial(shape)
        told(found[shape], len(found))
    return list(found.values())


def suggested(
    sampler: Sampler,
    space: Space,
    fitting: list[Shape],
    found: Mapping[Shape, Trial],
    *,
    seed: int,
    first: list[Shape],
    predicted_ms: Callable[[Shape], float],
    budget_ms: float,
) -> Iterator[Shape]:
    """Shapes of `fitting` that `found` lacks, the `first` before others. The caller puts each one's trial there before the next."""
    if sampler == "controller":
        places = {shape: tuple(space.parameters_of(shape).values()) for shape in fitting}
        shapes = {each: shape for shape, each in places.items()}

        def worth(each: Places) -> float | None:
            trial = found.get(shapes[each])
            if trial is None:
                return None
            return reward(1 - trial.validation.value, predicted_ms(trial.shape), predicted_ms(space.teacher))

        for each in controlled([*shapes], [places[shape] for shape in first], worth, seed):
            yield shapes[each]
        return
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    )
    for shape in first:
        study.enqueue_trial(space.parameters_of(shape))
    allowed, chance = set(fitting), np.random.default_rng(seed)
    while True:
        for _ in range(MOST_ASKED):
            asked = study.ask()
            shape = space.suggested(asked)
            if shape in allowed and shape not in found:
                break
            # What does not fit is worse than everything that does, the more so the slower it is.
            study.tell(asked, found[shape].validation.value if shape in found else 1 - predicted_ms(shape) / budget_ms)
        else:
            left = [shape for shape in fitting if shape not in found]
            shape = left[int(chance.integers(len(left)))]
            study.enqueue_trial(space.parameters_of(shape))
            asked = study.ask()
            assert space.suggested(asked) == shape
        yield shape
        study.tell(asked, found[shape].validation.value)
