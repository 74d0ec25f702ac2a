"""Finds the student that learns best within a latency budget on this machine: predicted times, short trainings, a measured choice."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from compress.models.shapes import STUDENTS, Shape
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.runs.soft_labels import make_soft_labels
from compress.runs.stages import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.runs.task_inputs import TaskInputs
from latency.analysis.costs import Point, pareto_front
from serve.bundle.cpu import available_cores
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.wording import counted
from stillroom.console import say
from stillroom.inputs.preflight import LEAST_TOKENS
from stillroom.student_search.machine_latency import Call, MachineLatency, machine_latency, parameters, time_students
from stillroom.student_search.space import Space, encoder_weights, space_of
from stillroom.student_search.trials import Limits, ShortTraining, Trial, trials

FOUND = "found.json"
CHECK_SECONDS = 8.0  # of timing a chosen student


def search_students(
    inputs: TaskInputs, teacher: Callable[[], tuple[Path, str]], work: Workdir, limits: Limits, machine: dict[str, Any]
) -> dict[str, Any]:
    """The students that were considered and the chosen one, as the document that `stillroom search --json` prints.

    `teacher` gives the folder of the teacher with a head for the task, and the fingerprint of what made it; it is called once a
    student is known to meet the budget. Short trainings are kept in `work`, and the document too once a student is chosen. Raises
    BadInput: no student meets the budget; it says the least possible time, with fewer tokens or more cores too.
    """
    space = space_of(inputs.opened)
    task, threads = inputs.task, inputs.settings.threads
    call = Call(inputs.opened, task, len(inputs.labels), limits.tokens, threads)
    latency = machine_latency(call, space, machine)

    def predicted_ms(shape: Shape) -> float:
        return latency.model.percentile_ms(shape, limits.percentile)

    fitting = [shape for shape in space.shapes() if predicted_ms(shape) <= limits.budget_ms] or [
        _smallest(limits, latency, space, call)
    ]
    say(
        f"{len(fitting)} of {len(space.shapes())} students are predicted to meet p{limits.percentile} of {limits.budget_ms:g} ms "
        f"on {limits.tokens} tokens"
    )
    training = _training(inputs, *teacher(), work, limits)
    decides = [
        training.fingerprint,
        asdict(limits),
        inputs.settings.seed,
        latency.measured_at,
        [str(each) for each in fitting],
    ]
    found_fingerprint = fingerprint("found", *decides)

    def finish(folder: Path, document: dict[str, Any]) -> None:
        (folder / FOUND).write_bytes(canonical_json(document))

    if not work.finished("found", found_fingerprint):
        say(f"short trainings: {limits.trial_steps} steps each")
        made = trials(
            training, space, fitting, predicted_ms,
            lambda trial, count: say(
                f"  {count}/{min(limits.trials, len(fitting))}  {trial.shape}: {inputs.metric} {trial.validation}, "
                f"{predicted_ms(trial.shape):.3g} ms"
            ),
        )  # fmt: skip
        chosen, checked = _chosen(made, limits, call)
        document = _document(inputs, limits, latency, space, made, chosen, checked, training.teacher, fitting)
        if not chosen:  # not kept: on a quieter machine one may meet it
            return document
        # Kept, since the measured times would differ the next time, and with them perhaps the choice.
        work.stage("found", found_fingerprint, partial(finish, document=document))
    found: dict[str, Any] = json.loads((work.root / "found" / FOUND).read_text(encoding="utf-8"))
    return found


def make_teacher(inputs: TaskInputs, work: Workdir, name: str = "teacher") -> tuple[Path, str]:
    """The folder `name` of the teacher with a head for the task, fine-tuned in `work` where it has none, and its fingerprint."""
    given = inputs.settings
    decides = fingerprint(
        "teacher", given.task, inputs.splits.fingerprint, given.seed, given.threads, given.precision, given.batch, inputs.max_length,
        list(inputs.labels), trained_with(given.device), folder_fingerprint(inputs.opened.folder), inputs.teacher_has_head,
        given.teacher_epochs, given.teacher_learning_rate, *inputs.opened.added,
    )  # fmt: skip
    steps = inputs.teacher_steps
    say(f"{name}: {steps} steps at most" if steps else f"{name}: it has a head for this task")
    return work.stage(name, decides, lambda folder: task_stages.make_teacher(folder, inputs, steps)), decides


def _training(
    inputs: TaskInputs, teacher: Path, teacher_fingerprint: str, work: Workdir, limits: Limits
) -> ShortTraining:
    """How each student is trained on the soft labels of `teacher`, which are made or found in `work`."""
    given = inputs.settings
    of_labels = fingerprint("soft-labels", teacher_fingerprint, texts_fingerprint(inputs.unlabelled), given.augment)
    soft = work.stage("soft-labels", of_labels, lambda folder: make_soft_labels(folder, inputs, teacher))
    decides = [
        limits.trial_steps, limits.soft_weight, given.student_learning_rate, given.temperature, given.start, given.accumulate,
        given.language_temperature,
    ]  # fmt: skip
    return ShortTraining(inputs, work, limits, teacher, soft, fingerprint("trials", of_labels, *decides))


def _chosen(made: Sequence[Trial], limits: Limits, call: Call) -> tuple[Shape | None, dict[Shape, float]]:
    """The best trial whose measured time meets the budget, and all measured times in milliseconds; None if none does."""
    checked: dict[Shape, float] = {}
    for trial in _best_first(made):
        checked[trial.shape] = measured_ms = _measured_ms(trial.shape, call, limits)
        met = measured_ms <= limits.budget_ms
        say(f"{trial.shape}: p{limits.percentile} of {measured_ms:.3g} ms measured{'' if met else ', too slow'}")
        if met:
            return trial.shape, checked
    return None, checked


def _measured_ms(shape: Shape, call: Call, limits: Limits) -> float:
    (timed,) = time_students([shape], call, seconds=CHECK_SECONDS)
    return timed.percentile_ms(limits.percentile)


def _best_first(made: Sequence[Trial]) -> list[Trial]:
    """Of equal scores the smaller student first."""
    return sorted(made, key=lambda each: (-each.validation.value, encoder_weights(each.shape)))


def _smallest(limits: Limits, latency: MachineLatency, space: Space, call: Call) -> Shape:
    """The student that is predicted to be the fastest, if it meets the budget when it is measured.

    Raises BadInput: it does not. The message has its time, and what makes it faster here.
    """
    least = min(space.shapes(), key=latency.model.p50_ms)
    least_ms, cores = _measured_ms(least, call, limits), available_cores()
    if least_ms <= limits.budget_ms:
        return least
    others = {}
    if call.tokens // 2 >= LEAST_TOKENS:
        others[f"with {call.tokens // 2} tokens"] = replace(call, tokens=call.tokens // 2)
    if call.threads < cores:
        others[f"on {cores} threads"] = replace(call, threads=cores)
    faster = {how: ms for how, given in others.items() if (ms := _measured_ms(least, given, limits)) < least_ms}
    threads = counted(call.threads, "thread")
    raise BadInput(
        f"--budget-ms {limits.budget_ms:g} cannot be met here: the smallest student, {least}, takes {least_ms:.3g} ms at "
        f"p{limits.percentile} on {call.tokens} tokens and {threads}{''.join(f', {how} {ms:.3g} ms' for how, ms in faster.items())}. "
        f"Give a larger --budget-ms{', or one of these' if faster else ''}."
    )


def _document(
    inputs: TaskInputs,
    limits: Limits,
    latency: MachineLatency,
    space: Space,
    made: Sequence[Trial],
    chosen: Shape | None,
    checked: dict[Shape, float],
    teacher: Path,
    fitting: Sequence[Shape],
) -> dict[str, Any]:
    """Everything that was considered."""
    at = {each.shape: latency.model.percentile_ms(each.shape, limits.percentile) for each in made}
    front = pareto_front([Point(str(each.shape), at[each.shape], each.validation.value) for each in made])
    best = next((each for each in made if each.shape == chosen), None)
    rows = []
    for each in _best_first(made):
        difference = each.less(best) if best and each is not best else None
        rows.append({
            "student": str(each.shape),
            **vars(each.shape),
            "parameters": parameters(inputs.opened, each.shape),
            "predicted_ms": round(at[each.shape], 4),
            "measured_ms": round(checked[each.shape], 4) if each.shape in checked else None,
            "validation": vars(each.validation),
            "minus_chosen": vars(difference) if difference else None,
            "on_front": str(each.shape) in front,
            "seconds": round(each.seconds, 1),
        })  # fmt: skip
    papers = [
        {"student": name, "predicted_ms": round(latency.model.percentile_ms(shape, limits.percentile), 4), "meets": shape in fitting}
        for name, shape in STUDENTS.items()
        if shape in space.shapes()
    ]  # fmt: skip
    return {
        "chosen": str(chosen) if chosen else None,
        "budget_ms": limits.budget_ms,
        "percentile": limits.percentile,
        "tokens": limits.tokens,
        "threads": inputs.settings.threads,
        "metric": inputs.metric,
        "teacher": {"name": inputs.opened.public_name, "validation": task_stages.teacher_score(inputs, teacher)},
        "considered": len(space.shapes()),
        "fitting": len(fitting),
        "trial_steps": limits.trial_steps,
        "sampler": limits.sampler,
        "trials": rows,
        "papers": papers,
        "latency_model": {
            "measured_at": latency.measured_at,
            "students": len(latency.timed),
            "errors": latency.errors._asdict(),
            "ms_by_operator": dict(latency.model.ms_by_operator),
            "p99_over_p50": latency.model.p99_over_p50,
        },
    }
