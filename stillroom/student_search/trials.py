"""Short trainings of students that fit the budget: which shapes are tried, and what each reached on validation."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from compress.evaluation.metrics import Metric, Score
from compress.models.shapes import STUDENTS, Shape
from compress.progress import message
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.soft_labels import read_soft_labels
from compress.runs.stages import fingerprint
from compress.runs.task_inputs import TaskInputs, scored_rows
from serve.bundle.manifest import canonical_json
from serve.files import replacing_folder
from stillroom.settings import Sampler
from stillroom.student_search.controller import Places, controlled, reward
from stillroom.student_search.space import Space, encoder_weights

COUNTS, TRIAL, START = "counts.npy", "trial.json", "start"
STARTUP = 8  # trials before the sampler models them
MOST_ASKED = 100  # suggestions in a row that bring nothing new; then a shape is drawn by chance


@dataclass(frozen=True)
class Trial:
    """A student that was trained for a few steps."""

    shape: Shape
    validation: Score
    counts: np.ndarray
    """Per text of validation the numbers of `metric.counts`."""
    metric: Metric
    seconds: float

    def less(self, other: "Trial") -> Score:
        """This score minus that of `other`, both on the same resampled texts."""
        return self.metric.mean_score([self.counts], less=[other.counts])


@dataclass(frozen=True)
class ShortTraining:
    """How each student is trained, and what it learns from."""

    inputs: TaskInputs
    teacher: Path
    soft_labels: Path
    soft_weight: float
    steps: int
    fingerprint: str
    """Of everything but the shape."""

    def trial(self, work: Workdir, shape: Shape) -> Trial:
        """The trial of `shape`, made or found in `work`."""
        folder = work.stage(
            f"trial-{shape}", fingerprint("trial", self.fingerprint, str(shape)), partial(self._make, shape=shape)
        )
        found = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
        counts = np.load(folder / COUNTS, allow_pickle=False)
        return Trial(shape, Score(**found), counts, self.inputs.task.metric, work.seconds[folder.name])

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
            model, folder, inputs, self.steps, settings.student_learning_rate, f"trial of {shape}", soft=soft,
            soft_weight=self.soft_weight,
        )  # fmt: skip
        counted = scored_rows(inputs, model, "validation")
        reached = inputs.task.metric.mean_score([counted])
        np.save(folder / COUNTS, counted, allow_pickle=False)
        (folder / TRIAL).write_bytes(canonical_json(vars(reached)))
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
    work: Workdir,
    space: Space,
    fitting: list[Shape],
    *,
    most: int,
    minutes: float,
    seed: int,
    sampler: Sampler,
    predicted_ms: Callable[[Shape], float],
    budget_ms: float,
    told: Callable[[Trial, int], None],
) -> list[Trial]:
    """Trains at most `most` of the students `fitting`; none begins after `minutes` of them.

    Half of them at most are the `first_shapes`; the others are suggested by the sampler. The same call makes the same trials, so that a
    stopped search goes on: finished ones are found in `work`, and the sampler learns them again. `told` is called with each trial and
    how many were made.
    """
    found: dict[Shape, Trial] = {}
    suggestions = suggested(
        sampler, space, fitting, found, seed=seed, first=first_shapes(space, fitting)[: -(-most // 2)], predicted_ms=predicted_ms,
        budget_ms=budget_ms,
    )  # fmt: skip
    while len(found) < min(most, len(fitting)):
        spent_s = sum(trial.seconds for trial in found.values())
        if spent_s >= minutes * 60:
            message(training.inputs.notify, f"  {minutes:g} minutes are over after {len(found)} of {most} trainings")
            break
        shape = next(suggestions)
        found[shape] = training.trial(work, shape)
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
    if sampler == "tpe":

        def beyond(shape: Shape) -> float:
            """By how much of the budget it exceeds it."""
            return predicted_ms(shape) / budget_ms - 1

        yield from _by_tpe(space, fitting, found, seed, first, beyond)
        return
    places = {shape: tuple(space.parameters_of(shape).values()) for shape in fitting}
    shapes = {each: shape for shape, each in places.items()}

    def worth(each: Places) -> float | None:
        trial = found.get(shapes[each])
        if trial is None:
            return None
        return reward(1 - trial.validation.value, predicted_ms(trial.shape), predicted_ms(space.teacher))

    for each in controlled([*shapes], [places[shape] for shape in first], worth, seed):
        yield shapes[each]


def _by_tpe(
    space: Space,
    fitting: list[Shape],
    found: Mapping[Shape, Trial],
    seed: int,
    first: list[Shape],
    beyond: Callable[[Shape], float],
) -> Iterator[Shape]:
    """As optuna's tree of Parzen estimators suggests them."""
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
            study.tell(asked, found[shape].validation.value if shape in found else -beyond(shape))
        else:
            left = [shape for shape in fitting if shape not in found]
            shape = left[int(chance.integers(len(left)))]
            study.enqueue_trial(space.parameters_of(shape))
            asked = study.ask()
            assert space.suggested(asked) == shape
        yield shape
        study.tell(asked, found[shape].validation.value)
