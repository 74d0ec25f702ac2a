"""The stages of `run`: what each is made of, what it costs, and what makes it."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import onnxruntime as ort

from compress.data.batches import TaskText
from compress.data.examples import examples_fingerprint
from compress.runs import task_stages
from compress.runs.lineage import read_lineage
from compress.runs.method_stages import Link, MethodInputs, is_checkpoint, method_stages
from compress.runs.soft_labels import make_soft_labels, save_answers
from compress.runs.stages import (
    Cost,
    Of,
    RunStage,
    fingerprints_of,
    folder_fingerprint,
    run_stages,
    texts_fingerprint,
    trained_with,
)
from export.packing.builder import ModelReport
from latency.measure.machine import MachineFacts
from latency.measure.result_document import ProfileDocument
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from stillroom.commands.run import export_and_scores
from stillroom.commands.run.teacher_answers import make_answers, with_teachers_answers
from stillroom.commands.run.time_budget import (
    EXPORT_SECONDS,
    PLAIN_TEXT,
    REST,
    SHARES,
    STARTING_SECONDS,
    STUDENT,
    TEACHER,
    UNDISTILLED,
    Plan,
    full_plan,
    students_plan,
    timed_plan,
)
from stillroom.commands.run.within_budget import BudgetMissed, check_met
from stillroom.console import say
from stillroom.inputs.preflight import TRIMMED, RunInputs
from stillroom.report.run_page import Report, write_report

PLAN, STUDENTS_PLAN, ANSWERS = "plan", "students-plan", "teacher-answers"
PLAN_FILE = "plan.json"


class Run:
    """One run to a bundle: its inputs and its plan, which stages change as they finish, and the stages."""

    def __init__(self, inputs: RunInputs, machine: MachineFacts | None = None) -> None:
        self.inputs, self.machine = inputs, machine
        self.plan = full_plan(inputs)
        self.folders: dict[str, Path] = {}
        self.model_report: ModelReport | None = None
        self.report: Report = {}
        self.stages = [*self._teacher_stages(), *self._student_stages(), *self._bundle_stages()]
        self.fingerprints = fingerprints_of(self.stages)

    def make(self, *names: str) -> dict[str, Path]:
        """Run the stages, or those that are named, and give the folders of all that were made so far."""
        return run_stages(self.inputs.workdir, self.stages, self.folders, only=names or None)

    # Up to the teacher.

    def _teacher_stages(self) -> list[RunStage]:
        inputs, r = self.inputs, self.inputs.recipe
        common = [
            r.task, inputs.data_fingerprint, r.seed, r.threads, r.precision, r.batch, r.accumulate, inputs.max_length,
            list(inputs.labels),
        ]  # fmt: skip
        if r.out_of_scope:
            common.append(r.out_of_scope)
        if r.language_temperature != 1:
            common += [r.language_temperature, [example.language for example in inputs.splits.train]]
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
                        inputs.data_fingerprint,
                        examples_fingerprint(inputs.in_domain_texts),
                    ),
                    lambda folder: make_answers(folder, self.inputs),
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
            before, self.plan = self.plan.warnings, Plan(**export_and_scores.read_json(folder / PLAN_FILE))
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
        return students_plan(self.plan, self.inputs, self.stages, self.stages[after:], spent_s)

    def _learn_answers(self, folder: Path) -> None:
        """Let the student learn the answers in `folder`."""
        try:
            self.inputs = with_teachers_answers(self.inputs, folder)
        except BadInput:
            self.inputs.workdir.alone()  # ends the other processes, which wait for the next stage
            raise
        assert self.inputs.answered
        for line in self.inputs.answered.lines:
            say(f"  {line}")

    # What several stages are made of.

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

    # The student.

    def _student_stages(self) -> list[RunStage]:
        inputs, r, chain = self.inputs, self.inputs.recipe, self.inputs.chain
        labels_only = chain.method == "labels"
        kept = [r.vocabulary_size, texts_fingerprint(inputs.kept_texts)] if r.vocabulary_size else []
        own_stages = not inputs.begins_on_labels  # before training on the task
        on_task = [r.augment, r.student_epochs] if "task" in chain.texts else []
        compared = Of("undistilled") if r.undistilled else ""
        steps = Cost(STUDENT, "student step", lambda plan: plan.student_steps)
        stages = [
            RunStage(
                "start",
                ("start", Of("teacher"), str(inputs.shape), self._begin, *kept),
                self._make_start,
                lambda: (
                    f"student {inputs.shape} from {'the teacher' if 'teacher' in self.folders else inputs.opened.public_name}"
                ),
                then=self._warn_of_cut_texts,
            ),
            RunStage(
                "undistilled",
                ("undistilled", Of("start"), *self._student),
                lambda folder: self._trained(folder, task_stages.make_undistilled, self.folders["start"]),
                lambda: f"the student on labels alone: {self.plan.student_steps} steps",
                needed=lambda: r.undistilled or labels_only,
                costs=()
                if not (r.undistilled or labels_only)
                else (dataclasses.replace(steps, listed_as=UNDISTILLED), self._validations(inputs.student_steps)),
            ),
            # Stages on the task ask the teacher as they train.
            RunStage(
                "method",
                ("method", Of("teacher"), str(inputs.shape), self._begin, self._in_domain[0], *on_task, *self._chain),
                costs=(
                    Cost(PLAIN_TEXT, "token", lambda plan: plan.distill_tokens),
                    *([dataclasses.replace(steps, unit="taught step")] if own_stages and chain.ends_on_task else []),
                ),
            ),
        ]
        if own_stages:
            links = chain.links(inputs.distill_tokens, 1.0)
            stages += self._distilling(
                method_stages(links, self._method, (Of("method"),), self.folders, export_and_scores.DISTIL)
            )
        stages += self._soft_label_stages()
        trained_last = not (labels_only or (own_stages and chain.ends_on_task))
        stages.append(
            RunStage(
                "distilled",
                (
                    "distilled",
                    Of("method"),
                    Of("soft-labels"),
                    *self._student,
                    r.then,
                    r.temperature,
                    r.soft_weight,
                    *kept,
                ),
                lambda folder: self._trained(
                    folder, task_stages.make_distilled, self._begun, self._soft_labels, given=self._given
                ),
                lambda: (
                    f"student on {'soft labels and labels' if inputs.asks_soft_labels else 'labels'}: {self.plan.student_steps} steps"
                ),
                needed=lambda: trained_last and self._distils(),
                costs=(steps, self._validations(inputs.student_steps)) if trained_last else (),
            )
        )
        stages.append(
            RunStage(
                "student",
                ("student", Of("distilled"), compared),
                lambda folder: task_stages.make_choice(
                    folder, self.inputs, *(self.folders.get(name) for name in ("teacher", "distilled", "undistilled"))
                ),
                "the student that ships, by validation",
                then=lambda folder: say(f"  {read_lineage(folder)['choice']['why']}"),
            )
        )
        if r.keep_words_of and not r.vocabulary_size:
            stages.append(
                RunStage(
                    "trimmed",
                    ("trimmed", Of("student"), texts_fingerprint(inputs.kept_texts)),
                    lambda folder: export_and_scores.make_trimmed(folder, self.inputs, self.folders["student"]),
                    "the vocabulary of the student that ships",
                    then=lambda folder: self.folders.update(student=folder),
                )
            )
        return stages

    def _validations(self, steps: int) -> Cost:
        """Of a training of so many steps."""

        def texts(_plan: Plan) -> float:
            return steps // self.inputs.validate_every(steps) * len(self.inputs.validation) if steps else 0

        return Cost(REST, "text", texts)

    def _make_start(self, folder: Path) -> None:
        task_stages.make_start(folder, self.inputs, self.folders.get("teacher"))
        if self.inputs.recipe.vocabulary_size:
            export_and_scores.trim(folder, self.inputs)

    def _warn_of_cut_texts(self, start: Path) -> None:
        """Tell how many more texts are cut by a vocabulary that was trimmed."""
        if cut := self.inputs.read_by(start).train.truncated - self.inputs.train.truncated:
            length = f"longer than {self.inputs.max_length} tokens with the trimmed vocabulary"
            warning = f"{cut:,} more texts of train are {length}; the rest of them is not read."
            say(f"warning: {warning}")
            self.inputs.warnings.append(warning)

    def _trained(self, folder: Path, make: Callable[..., None], *read: Any, **more: Any) -> None:
        """A student that was trained on the task, with what was trimmed of the vocabulary of its start."""
        start = self.folders["start"]
        make(folder, self.inputs.read_by(start), *read, steps=self.plan.student_steps, **more)
        if (start / TRIMMED).is_file():
            shutil.copyfile(start / TRIMMED, folder / TRIMMED)

    def _distils(self) -> bool:
        """Whether the student learns from the teacher: not where labels alone beat that teacher on validation."""
        if self.inputs.chain.method == "labels":
            return False
        undistilled = self.folders.get("undistilled")
        theirs = task_stages.teacher_score(self.inputs, self.folders.get("teacher"))
        return not undistilled or theirs is None or task_stages.best_on_validation(undistilled) <= theirs

    @cached_property
    def _given(self) -> MethodInputs | None:
        """What the method's own stages read; None if it has none before training on the task."""
        if self.inputs.begins_on_labels:
            return None
        return task_stages.method_inputs(self.inputs, self.folders["teacher"], self.plan.distill_tokens)

    def _method(self) -> tuple[Sequence[Link], MethodInputs]:
        """The method's own trainings with the tokens of the plan, and what they read."""
        inputs, given = self.inputs, self._given
        assert given
        cut = self.plan.distill_tokens / inputs.distill_tokens if inputs.distill_tokens else 1.0
        a_step = TaskText(inputs.train, inputs.recipe.batch, inputs.recipe.seed).tokens_per_step
        return inputs.chain.links(inputs.distill_tokens, self.plan.student_steps * a_step, cut=cut), given

    def _distilling(self, stages: list[RunStage]) -> list[RunStage]:
        """The `stages` of the method before training on the task, the last of which may be the distilled student."""

        def says() -> str:
            tokens = self.plan.distill_tokens
            return f"{self.inputs.chain.method}: " + (
                f"{tokens:,.0f} tokens of plain text" if tokens else f"{self.plan.student_steps} steps"
            )

        def last(folder: Path) -> None:
            self.folders["distilled" if self.inputs.chain.ends_on_task else "begin"] = folder

        stages[0] = dataclasses.replace(stages[0], says=says)
        found = [dataclasses.replace(stage, needed=self._distils) for stage in stages]
        return [*found[:-1], dataclasses.replace(found[-1], then=last)]

    @property
    def _begun(self) -> Path:
        """What the distilled student starts from."""
        return self.folders.get("begin", self.folders["start"])

    def _soft_label_stages(self) -> list[RunStage]:
        inputs, r = self.inputs, self.inputs.recipe

        def needed() -> bool:
            return inputs.asks_soft_labels and self._distils()

        steps = self._validations(inputs.teacher_steps)
        fold_stages = [
            RunStage(
                f"teacher-fold-{fold + 1}",
                (f"teacher-fold-{fold + 1}", Of("teacher"), r.folds),
                partial(self._make_fold_teacher, fold=fold),
                partial(self._of_fold, fold),
                needed=needed,
                costs=(Cost(TEACHER, "teacher step", lambda plan: plan.teacher_steps), steps),
            )
            for fold in range(r.folds)
        ]
        asked = inputs.asks_soft_labels and not inputs.gives_answers_alone
        soft_labels = RunStage(
            "soft-labels",
            ("soft-labels", Of("teacher"), *self._in_domain, *([r.folds] if r.folds else [])),
            self._make_soft_labels,
            "the teacher's answers to all texts" if inputs.gives_answers_alone else "the teacher labels all texts",
            needed=needed,
            costs=(Cost(REST, "text", lambda _: len(inputs.train) + len(inputs.in_domain or ())),) if asked else (),
        )
        tried = task_stages.SOFT_WEIGHTS if inputs.asks_soft_labels and r.soft_weight is None else ()
        trials = [
            RunStage(
                f"share-{weight:g}",
                (f"share-{weight:g}", Of("distilled")),
                partial(self._try_share, weight=weight),
                partial(self._of_share, weight),
                needed=needed,
                costs=(Cost(SHARES, "student step", lambda plan: task_stages.trial_steps(plan.student_steps)),),
            )
            for weight in tried
        ]
        return [*fold_stages, soft_labels, *trials]

    def _of_fold(self, fold: int) -> str:
        return f"teacher without fold {fold + 1} of {self.inputs.recipe.folds}: {self.plan.teacher_steps} steps at most"

    def _make_fold_teacher(self, folder: Path, fold: int) -> None:
        task_stages.make_fold_teacher(folder, self.inputs, self.plan.teacher_steps, fold)

    def _make_soft_labels(self, folder: Path) -> None:
        if teacher := self.folders.get("teacher"):
            folds = [self.folders[f"teacher-fold-{fold + 1}"] for fold in range(self.inputs.recipe.folds)]
            make_soft_labels(folder, self.inputs, teacher, folds)
        else:
            save_answers(folder, self.inputs)

    def _of_share(self, weight: float) -> str:
        steps = task_stages.trial_steps(self.plan.student_steps)
        return f"a share of {weight:g} for the soft labels: {steps} steps"

    def _try_share(self, folder: Path, weight: float) -> None:
        inputs = self.inputs.read_by(self.folders["start"])
        soft = task_stages.SoftLabels(self.folders["soft-labels"], weight)
        task_stages.make_trial(folder, inputs, self._begun, soft, self.plan.student_steps, self._given)

    @property
    def _soft_labels(self) -> task_stages.SoftLabels | None:
        """The teacher's soft labels with their share of the loss: the given one, or the best of those that were tried."""
        weight = self.inputs.recipe.soft_weight
        if not self.inputs.asks_soft_labels:
            return None
        if weight is not None:
            return task_stages.SoftLabels(self.folders["soft-labels"], weight)
        trials = {weight: self.folders[f"share-{weight:g}"] for weight in task_stages.SOFT_WEIGHTS}
        return task_stages.chosen_share(self.folders["soft-labels"], trials)

    # From the student to the bundle.

    def _bundle_stages(self) -> list[RunStage]:
        inputs, r = self.inputs, self.inputs.recipe
        # onnxruntime's module says its version itself: on a GPU its package has another name.
        runtimes = [version("onnx"), version("onnxscript"), ort.__version__]
        ships = "trimmed" if r.keep_words_of and not r.vocabulary_size else "student"
        promised: list[object] = [r.promises, r.promise_confidence] if r.promises else []
        if inputs.promised_on:
            promised.append(examples_fingerprint([*inputs.promised_on.examples, *inputs.promised_on.outside]))
        languages = [example.language for example in inputs.splits.test]
        return [
            RunStage(
                "export",
                ("export", Of(ships), runtimes, r.gate, r.keep_right, *promised),
                lambda folder: export_and_scores.make_export(
                    folder, self.inputs, self.folders["student"], self.folders.get("teacher")
                ),
                "export: fp32 and int8, checked against torch",
                alone=True,
                costs=(Cost(REST, "second", lambda _: EXPORT_SECONDS),),
            ),
            RunStage(
                "scores",
                (
                    "scores", Of("export"), Of("undistilled") if r.undistilled else "", r.gate, r.teacher_gate,
                    *([languages] if any(languages) else []),
                ),
                lambda folder: export_and_scores.make_scores(folder, self.inputs, self.folders),
                "scores: gates on validation, then test, once",
                then=self._check_gates,
                costs=(Cost(REST, "text", lambda _: 4 * len(inputs.test) + 5 * len(inputs.validation)),),
            ),
            RunStage(
                "latency",
                (
                    "latency", Of("scores"), r.latency_seconds, *([r.budget_ms, r.percentile, r.tokens] if r.budget_ms else []),
                ),
                self._time,
                lambda: f"timing {'teacher and student, in turns' if 'teacher' in self.folders else 'the student'}",
                then=self._check_budget,
                costs=(Cost(REST, "second", lambda _: STARTING_SECONDS + r.latency_seconds),),
            ),
            RunStage(
                "bundle",
                (
                    "bundle", Of("latency"), r.model_name, r.license, r.data_license, r.language,
                    *(["auto", r.search_minutes] if inputs.auto else []),
                ),
            ),
        ]  # fmt: skip

    @property
    def scores(self) -> dict[str, Any]:
        """The scores of every model."""
        return export_and_scores.read_json(self.folders["scores"] / "scores.json")

    def _check_gates(self, _folder: Path) -> None:
        """GateMissed, after the report is written, where a gate is missed."""
        self.model_report = export_and_scores.model_report_of(
            self.inputs, self.folders, self.scores, self.fingerprints["bundle"]
        )
        if self.model_report.missed:
            raise self.model_report.refusal(
                self._write_report(),
                " More --student-epochs, more --unlabelled text or a larger --student usually help; lower the gate only if a lower score "
                "is enough.",
            )

    def _time(self, folder: Path) -> None:
        assert self.model_report
        assert self.machine
        test = self.model_report.scores["test"]
        export_and_scores.make_latency(folder, self.inputs, self.folders, test, self.machine)

    def _check_budget(self, folder: Path) -> None:
        """BudgetMissed, after the report is written, where the student is too slow."""
        latency = cast(ProfileDocument, export_and_scores.read_json(folder / "latency.json"))
        try:
            check_met(self.inputs, latency, self._write_report(latency))
        except BudgetMissed:
            shutil.rmtree(folder)  # so that the same command times it again
            raise

    def _write_report(self, latency: ProfileDocument | None = None) -> Path:
        assert self.model_report
        assert self.machine
        self.report = export_and_scores.report_of(
            self.inputs, self.folders, self.scores, self.model_report, self.machine, latency
        )
        return write_report(self.inputs.workdir.root / export_and_scores.REPORT, self.report)
