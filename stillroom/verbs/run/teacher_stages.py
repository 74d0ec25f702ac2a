"""The stages of `run` up to the teacher: the plan that fits the minutes, the answers of a teacher that is asked, the teacher."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from compress import distributed
from compress.data.examples import examples_fingerprint
from compress.data.teacher_labels import read_teacher_labels
from compress.labelling.journal import Journal
from compress.labelling.label import ask_model
from compress.models.answering import load_answering, on_device
from compress.models.initialise import is_checkpoint
from compress.progress import advancing
from compress.runs import task_stages
from compress.runs.answering_teacher import with_answers
from compress.runs.hardware import device_here
from compress.runs.stages import Cost, Of, RunStage, folder_fingerprint, texts_fingerprint, trained_with
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from stillroom.console import say
from stillroom.inputs.preflight import RunInputs
from stillroom.verbs.run.report import read_json
from stillroom.verbs.run.time_budget import REST, TEACHER, Plan, full_plan, refitted, timed_plan, timed_rates

PLAN, STUDENTS_PLAN, ANSWERS = "plan", "students-plan", "teacher-answers"
PLAN_FILE, ANSWERS_FILE = "plan.json", "answers.jsonl"


class TeacherStages:
    """The inputs of a run and its plan, which stages change as they finish, and the first stages."""

    def __init__(self, inputs: RunInputs) -> None:
        self.inputs = inputs
        self.plan = full_plan(inputs)
        self.folders: dict[str, Path] = {}
        """Of finished stages."""
        self.stages = self._teacher_stages()

    def _teacher_stages(self) -> list[RunStage]:
        inputs, r = self.inputs, self.inputs.recipe
        common = [
            r.task, inputs.splits.fingerprint, r.seed, r.threads, r.precision, r.batch, r.accumulate, inputs.max_length,
            list(inputs.labels),
        ]  # fmt: skip
        if r.out_of_scope:
            common.append(r.out_of_scope)
        if r.language_temperature != 1:
            common += [r.language_temperature, [example.language for example in inputs.splits.train]]
        if r.class_weights:
            common.append("class weights")
        teacher = [
            inputs.teacher_fingerprint, inputs.teacher_has_head, r.teacher_epochs, r.teacher_patience, r.teacher_learning_rate,
            *(["answers"] if inputs.gives_answers_alone else []),
        ]  # fmt: skip
        budget: list[object] = []
        if r.max_minutes:  # how long one training may take depends on all the others
            budget = [
                r.max_minutes,
                r.latency_seconds,
                r.undistilled,
                *self._in_domain,
                *teacher,
                *self._student,
                *self._chain,
                r.then,
            ]
        stages = [
            self._plan_stage(
                PLAN,
                (trained_with(r.device), *common, *budget),
                f"timing a few steps to fit {r.max_minutes:g} minutes",
                lambda: timed_plan(self.inputs, self.stages),
                needed=lambda: bool(r.max_minutes),
                keeps=(PLAN, ANSWERS),
            )
        ]
        if inputs.answering:
            # Generated texts depend on the tokenizer of --start.
            stages.append(
                RunStage(
                    ANSWERS,
                    (
                        ANSWERS,
                        trained_with(r.device),
                        r.threads,
                        folder_fingerprint(inputs.answering.folder),
                        inputs.splits.fingerprint,
                        examples_fingerprint(inputs.in_domain_texts),
                    ),
                    self._ask_teacher,
                    f"{inputs.answering.public_name} answers all texts",
                    then=self._learn_answers,
                    costs=(Cost(REST, "all answers", lambda _: 1),),
                )
            )
        stages += [
            RunStage(
                "teacher",
                ("teacher", Of(PLAN), *teacher),
                lambda folder: task_stages.make_teacher(folder, self.inputs, self.plan.teacher_steps),
                lambda: (
                    f"teacher: {self.plan.teacher_steps} steps at most"
                    if self.plan.teacher_steps
                    else "teacher: it has a head for this task"
                ),
                needed=lambda: not inputs.gives_answers_alone,
                costs=(
                    Cost(TEACHER, "teacher step", lambda plan: plan.teacher_steps),
                    self._validations(inputs.teacher_steps),
                ),
            ),
            self._plan_stage(
                STUDENTS_PLAN,
                (Of("teacher"),),
                "timing a few steps to fit the students to the minutes that are left",
                self._fit_students,
                needed=lambda: bool(r.max_minutes and self.plan.teacher_steps),
                keeps=(PLAN, ANSWERS, "teacher", STUDENTS_PLAN),
            ),
        ]
        return stages

    def _plan_stage(
        self,
        name: str,
        made_of: tuple[object, ...],
        says: str,
        timed: Callable[[], Plan],
        *,
        needed: Callable[[], bool],
        keeps: Sequence[str],
    ) -> RunStage:
        """The steps of trainings from a few timed ones. A plan that is made anew removes all stages but those that it `keeps`."""

        def make(folder: Path) -> None:
            made = timed()  # raises BadInput, if the budget is too small, before anything is removed
            # A new timing may give other numbers of steps, and a training for other steps must not be resumed.
            self.inputs.workdir.clear(but=keeps)
            (folder / PLAN_FILE).write_bytes(canonical_json(dataclasses.asdict(made)))

        def use(folder: Path) -> None:
            before, self.plan = self.plan.warnings, Plan(**read_json(folder / PLAN_FILE))
            for warning in self.plan.warnings:
                if warning not in before:
                    say(f"warning: {warning}")
            if name == STUDENTS_PLAN or not self.plan.teacher_steps:
                self.inputs.warnings.extend(self.plan.warnings)  # for the report

        return RunStage(name, (name, *made_of), make, says, needed=needed, then=use)

    def _fit_students(self) -> Plan:
        """The plan with the students' steps fitted to the minutes that are left, from a few steps timed now."""
        spent_s = sum(self.inputs.workdir.seconds.values())
        after = [stage.name for stage in self.stages].index(STUDENTS_PLAN)
        full, rates, recipe = full_plan(self.inputs), timed_rates(self.inputs), self.inputs.recipe
        return refitted(self.plan, full, self.stages, self.stages[after:], rates, recipe, spent_s)

    def _ask_teacher(self, folder: Path) -> None:
        """Save the teacher's answers as the file that `label` would write; what is answered is kept if this is interrupted."""
        inputs, texts = self.inputs, self.inputs.asked_texts
        assert inputs.answering
        model = on_device(load_answering(inputs.answering), device_here(inputs.recipe.device))
        if not distributed.main():
            for _ in ask_model(model, texts, distributed.broadcast(None)):
                pass
            return
        with Journal(folder / ANSWERS_FILE, texts, {}) as journal:
            missing = distributed.broadcast(journal.missing)
            with advancing(inputs.notify, "teacher's answers") as shown:
                for answers in ask_model(model, texts, missing):
                    journal.add(answers)
                    shown(len(journal.rows), len(texts))
            journal.finish()

    def _learn_answers(self, folder: Path) -> None:
        """Let the student learn the answers in `folder`. BadInput where they are not shown to be better than chance, or none can be."""
        asked = self.inputs.answering
        assert asked
        try:
            answers = read_teacher_labels([folder / ANSWERS_FILE], self.inputs.task)
            found = with_answers(self.inputs, replace(answers, asked=(f"--teacher {asked.name}", asked.public_name)))
        except BadInput:
            self.inputs.workdir.alone()  # ends the other processes, which wait for the next stage
            raise
        assert isinstance(found, RunInputs)
        assert found.answers
        assert found.answered
        # Those of the texts that are learned are kept as soft labels alone.
        scored = found.answers.only([*found.splits.validation, *found.splits.test])
        self.inputs = replace(found, answers=scored)
        for line in found.answered.lines:
            say(f"  {line}")

    @cached_property
    def _in_domain(self) -> list[object]:
        inputs = self.inputs
        return [
            texts_fingerprint(inputs.unlabelled),
            inputs.recipe.augment,
            *([inputs.answers.fingerprint] if inputs.answers else []),
            *([folder_fingerprint(inputs.answering.folder)] if inputs.answering else []),
        ]

    @cached_property
    def _begin(self) -> str:
        return self.inputs.start_fingerprint if is_checkpoint(self.inputs.recipe.start) else self.inputs.recipe.start

    @cached_property
    def _student(self) -> list[object]:
        r = self.inputs.recipe
        return [str(self.inputs.shape), self._begin, r.student_epochs, r.student_learning_rate]

    @cached_property
    def _chain(self) -> list[object]:
        chain = self.inputs.chain
        # Tokens that the text decides need no counting here: its fingerprint is below.
        links = chain.links(self.inputs.recipe.distill_tokens or 1.0, 1.0)
        return [
            [dataclasses.asdict(link) for link in links],
            texts_fingerprint(self.inputs.corpus) if "corpus" in chain.texts else "",
        ]

    def _validations(self, steps: int) -> Cost:
        """Of a training of so many steps."""

        def texts(_plan: Plan) -> float:
            return steps // self.inputs.validate_every(steps) * len(self.inputs.validation) if steps else 0

        return Cost(REST, "text", texts)
