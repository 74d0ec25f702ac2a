"""How many steps each training takes, and an estimate of minutes and memory from a few timed ones."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from compress.data.batches import TaskText
from compress.data.corpus import CorpusText, masking_of
from compress.data.sampler import rows_a_step
from compress.evaluation.predictions import row_logits
from compress.labelling.label import ask_model
from compress.losses.outputs import total
from compress.methods.catalogue import HEAD_STAGE, LABELS, Stage
from compress.methods.objectives import Projections
from compress.models.answering import load_answering, on_device
from compress.models.initialise import student_of
from compress.models.precision import computing, weights_in
from compress.models.pretrained import has_vocabulary_head, load, load_encoder
from compress.runs.hardware import device_here
from compress.runs.method_chain import asks_words
from compress.runs.method_trainings import HEAD_SHARE
from compress.runs.stages import RunStage, seconds_of
from compress.training.stage import rows_narrowed, step_losses
from latency.measure.machine import resident_bytes
from serve.errors import BadInput
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import Recipe

TIMED_STEPS, TIMED_TEXTS = 6, 32
# Export, parity and packing; start and warm-up of the timed models. Both hardly depend on the recipe. Measured on two cores.
EXPORT_SECONDS, STARTING_SECONDS = 45.0, 60.0
# Least share of the time for training that students get, however long the teacher takes.
STUDENTS_SHARE = 0.3
# Least share of each training's steps.
LEAST_SHARE = 0.1
# What an estimate lists.
TEACHER, SHARES, PLAIN_TEXT, UNDISTILLED, STUDENT, REST = LISTED = (
    "teacher", "shares of soft labels", "plain text", "undistilled", "student", "the rest",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Steps and tokens of each training, and the seconds that they are expected to take."""

    teacher_steps: int
    distill_tokens: float  # of plain text
    student_steps: int
    seconds: dict[str, float]
    memory_bytes: int = 0
    understood: dict[str, Any] = field(default_factory=dict)  # see `compress.runs.input_summary`
    warnings: tuple[str, ...] = ()
    """Of trainings that were cut; in the document of a dry run also those about its inputs."""

    @property
    def minutes(self) -> float:
        """Of all stages together."""
        return sum(self.seconds.values()) / 60


def full_plan(inputs: RunInputs) -> Plan:
    """The steps that the recipe asks for, not timed."""
    return Plan(inputs.teacher_steps, inputs.distill_tokens, inputs.student_steps, seconds={})


def timed_plan(inputs: RunInputs, stages: Sequence[RunStage]) -> Plan:
    """The recipe's steps with an estimate of seconds and memory, from a few steps of each training.

    Raises:
        BadInput: less than a tenth of the training fits into the recipe's `max_minutes`.
    """
    plan = fitted(full_plan(inputs), stages, timed_rates(inputs), inputs.recipe)
    memory = resident_bytes()
    return dataclasses.replace(plan, memory_bytes=memory.peak_bytes if memory else 0)


def fitted(plan: Plan, stages: Sequence[RunStage], rates: Mapping[str, float], recipe: Recipe) -> Plan:
    """`plan` with the seconds of `stages` at `rates`, see `timed_rates`; with `max_minutes` shortened to them.

    The teacher comes first, because no student learns more than its teacher knows: it keeps all of its steps as long as
    `STUDENTS_SHARE` of the time is left to the students, whose trainings share the rest alike.

    Raises:
        BadInput: less than a tenth of the training fits.
    """
    whole = _priced(plan, stages, rates)
    if not recipe.max_minutes or whole.minutes <= recipe.max_minutes:
        return whole
    fixed, teacher, students = whole.seconds[REST], whole.seconds[TEACHER], _students_seconds(whole)
    budget = 60 * recipe.max_minutes - fixed
    least = (fixed + LEAST_SHARE * (teacher + students)) / 60
    if recipe.max_minutes < least:
        raise BadInput(
            f"--max-minutes is {recipe.max_minutes:g}; this recipe takes about {whole.minutes:.0f} minutes here, and {least:.1f} minutes "
            "for a tenth of its training, the least allowed. Give more minutes, less data or a smaller student."
        )
    of_students = min(1.0, max(budget - teacher, STUDENTS_SHARE * budget) / students)
    of_teacher = min(1.0, (budget - of_students * students) / teacher) if teacher else 1.0
    short = _priced(plan, stages, rates, of_teacher, of_students)
    return dataclasses.replace(short, warnings=tuple(_short(whole, short, recipe)))


def refitted(
    plan: Plan,
    full: Plan,
    stages: Sequence[RunStage],
    left: Sequence[RunStage],
    rates: Mapping[str, float],
    recipe: Recipe,
    spent_s: float,
) -> Plan:
    """`plan` with the students' steps that fit what `max_minutes` leaves now that the teacher is trained, at `rates` as they are now.

    The teacher may have ended before its last step, or the machine be busier or less busy than at the first timing. `full` is the plan
    without a limit, `left` the stages that are to come, `spent_s` the seconds that are used up. Students get a tenth of their steps
    however little time is left.
    """
    whole = _priced(full, stages, rates)
    of_folds = seconds_of(left, plan, rates).get(TEACHER, 0.0)
    left_s = 60 * recipe.max_minutes - spent_s - whole.seconds[REST] - of_folds
    of_students = min(1.0, max(LEAST_SHARE, left_s / _students_seconds(whole)))
    short = dataclasses.replace(_priced(full, stages, rates, 1.0, of_students), teacher_steps=plan.teacher_steps)
    return dataclasses.replace(short, warnings=tuple(_short(whole, short, recipe)))


def _priced(
    plan: Plan,
    stages: Sequence[RunStage],
    rates: Mapping[str, float],
    of_teacher: float = 1.0,
    of_students: float = 1.0,
) -> Plan:
    """`plan` with these shares of its steps, and the seconds that they take."""
    cut = Plan(
        max(1, round(plan.teacher_steps * of_teacher)) if plan.teacher_steps else 0,
        plan.distill_tokens * of_students,
        max(1, round(plan.student_steps * of_students)),
        seconds={},
    )
    return dataclasses.replace(cut, seconds=dict.fromkeys(LISTED, 0.0) | seconds_of(stages, cut, rates))


def _students_seconds(plan: Plan) -> float:
    """Seconds of what is neither the teacher's training nor fixed."""
    return sum(seconds for of, seconds in plan.seconds.items() if of not in (TEACHER, REST))


def _short(whole: Plan, short: Plan, recipe: Recipe) -> list[str]:
    """What to know of trainings that `max_minutes` cut."""
    found = []
    if short.teacher_steps < whole.teacher_steps:
        found.append(
            f"--max-minutes {recipe.max_minutes:g} leaves the teacher {short.teacher_steps:,} of {whole.teacher_steps:,} steps, which may "
            f"be too few for it to stop improving. The whole recipe takes about {whole.minutes:.0f} minutes here."
        )
    if short.student_steps < whole.student_steps:
        found.append(
            f"--max-minutes {recipe.max_minutes:g} leaves each student {short.student_steps:,} of {whole.student_steps:,} steps. The whole "
            f"recipe takes about {whole.minutes:.0f} minutes here."
        )
    return found


def timed_rates(inputs: RunInputs) -> dict[str, float]:
    """The seconds of each unit in which stages state their costs, from a few steps of each training.

    Units are a `teacher step`, a `student step`, a `taught step` of a student whose teacher is asked meanwhile, a `token` of plain text,
    a `text` that the teacher reads, `all answers` of a teacher that can only be asked, and a `second`.
    """
    recipe = inputs.recipe
    torch.manual_seed(recipe.seed)
    teacher = load(inputs.opened, inputs.task, None if inputs.teacher_has_head else inputs.labels)
    student, _ = student_of(teacher, inputs.shape, seed=recipe.seed)
    text = TaskText(inputs.train, recipe.batch, recipe.seed, inputs.validation.ids)
    of_student, of_teacher = (_step(LABELS, None, model, text, inputs) for model in (student, teacher))
    started = time.perf_counter()
    row_logits(teacher, inputs.validation)
    a_text = (time.perf_counter() - started) / len(inputs.validation)
    return {
        "teacher step": of_teacher,
        "student step": of_student,
        "taught step": of_student + of_teacher / 3,  # its forward pass is a third of a step
        "token": _second_a_token(inputs) if inputs.distill_tokens else 0.0,
        "text": a_text,
        "all answers": _seconds_to_ask(inputs) if inputs.answering else 0.0,
        "second": 1.0,
    }


def _seconds_to_ask(inputs: RunInputs) -> float:
    """The seconds that the answers of a teacher that can only be asked will take, from those of a few texts."""
    assert inputs.answering
    texts = inputs.asked_texts
    few = texts[:: max(1, len(texts) // TIMED_TEXTS)][:TIMED_TEXTS]
    model = on_device(load_answering(inputs.answering), device_here(inputs.recipe.device))
    for _ in ask_model(model, few[:1], [0]):  # the first answer takes longer
        pass
    started = time.perf_counter()
    for _ in ask_model(model, few, range(len(few))):
        pass
    return (time.perf_counter() - started) / len(few) * len(texts)


def _second_a_token(inputs: RunInputs) -> float:
    """Seconds of a token of the budget for plain text, over all stages that read it, assistants' included."""
    recipe, chain = inputs.recipe, inputs.chain
    links = chain.links(inputs.distill_tokens, 0.0)
    masks = any(link.masks for link in links)
    teacher = load_encoder(inputs.opened, seed=recipe.seed, vocabulary=masks)
    found = 0.0

    def seconds(stage: Stage, theirs: Any, ours: Any, tokens: float) -> float:
        masking = masking_of(inputs.tokenizer, inputs.opened.config.vocab_size, whole_words=False)
        row_tokens = inputs.row_tokens if stage.pack else 0
        batch = stage.batch or (rows_a_step(recipe.batch, tokens, row_tokens) if row_tokens else recipe.batch)
        text = CorpusText(
            inputs.pieces,
            inputs.train.pad_id,
            batch,
            recipe.seed,
            masking if stage.objective.masks_tokens else None,
            row_tokens,
        )
        return tokens / text.tokens_per_step * _step(stage, theirs, copy.deepcopy(ours), text, inputs)

    if any(asks_words(link.stages) for link in links) and not has_vocabulary_head(inputs.opened):
        tokens = HEAD_SHARE * inputs.distill_tokens
        found += seconds(HEAD_STAGE, teacher, teacher, tokens)
    for link in links:
        student, _ = student_of(teacher, link.shape, seed=recipe.seed)
        for stage, tokens in zip(link.stages, link.tokens, strict=True):
            if stage.text == "corpus":
                found += seconds(stage, teacher, student, tokens)
        teacher = student
    return found / inputs.distill_tokens


def _step(stage: Stage, teacher: Any, student: Any, text: TaskText | CorpusText, inputs: RunInputs) -> float:
    """Median seconds of a step, the first left out; the weights of `student` move and are of no further use."""
    recipe, device = inputs.recipe, device_here(inputs.recipe.device)
    student.to(device).train()
    maps = Projections(stage.objective, (student if teacher is None else teacher).config, student.config).to(device)
    with ExitStack() as stack:
        if teacher is not None:
            teacher.eval().to(device)
            stack.enter_context(weights_in(teacher, recipe.precision))
        remap = stack.enter_context(rows_narrowed(student, text, stage.objective))
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.0, fused=True)
        taken = []
        for i in range(TIMED_STEPS):
            started = _now(device)
            with computing(device, recipe.precision):
                loss = total(step_losses(stage.objective, teacher, student, text.at(i), maps, remap))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            taken.append(_now(device) - started)
    return statistics.median(taken[1:])


def _now(device: torch.device) -> float:
    """The time in seconds when `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
