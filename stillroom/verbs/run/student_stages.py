"""The stages of `run` from the teacher to the student that ships."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from compress.data.batches import TaskText
from compress.runs import task_stages
from compress.runs.lineage import read_lineage
from compress.runs.method_chain import Link
from compress.runs.method_trainings import MethodInputs, method_inputs, method_stages
from compress.runs.resumable_stages import STATE
from compress.runs.soft_labels import SoftLabels, chosen_share, make_soft_labels, save_answers
from compress.runs.stages import Cost, Of, RunStage, texts_fingerprint
from compress.runs.task_stages import SOFT_WEIGHTS, WITH_UNLABELLED, trial_steps
from export.graph.vocabulary_trimming import trim_vocabulary
from serve.bundle.manifest import canonical_json
from stillroom.console import say
from stillroom.inputs.preflight import TRIMMED, RunInputs
from stillroom.verbs.run.report import DISTIL
from stillroom.verbs.run.teacher_stages import TeacherStages
from stillroom.verbs.run.time_budget import PLAIN_TEXT, REST, SHARES, STUDENT, TEACHER, UNDISTILLED

AGAINST_TEACHER = "labels-against-teacher"


class StudentStages(TeacherStages):
    """The first stages of a run, and those that train its students."""

    def __init__(self, inputs: RunInputs) -> None:
        super().__init__(inputs)
        # As the run begins: a teacher's answers to generated texts may come later.
        self._has_unlabelled = inputs.has_unlabelled
        self.stages += self._student_stages()

    def _student_stages(self) -> list[RunStage]:
        inputs, r, chain = self.inputs, self.inputs.recipe, self.inputs.chain
        labels_only = chain.method == "labels"
        kept = [r.vocabulary_size, texts_fingerprint(inputs.kept_texts)] if r.vocabulary_size else []
        own_stages = not inputs.begins_on_labels  # before training on the task
        on_task = [r.augment, r.student_epochs] if "task" in chain.texts else []
        compared = Of("undistilled") if r.undistilled else ""
        ending = [r.then, r.temperature, r.soft_weight]
        steps = Cost(STUDENT, "student step", lambda plan: plan.student_steps)
        undistilled = RunStage(
            "undistilled",
            ("undistilled", Of("start"), *self._student),
            lambda folder: self._trained(folder, task_stages.make_undistilled, self.folders["start"]),
            lambda: f"the student on labels alone: {self.plan.student_steps} steps",
            costs=(dataclasses.replace(steps, listed_as=UNDISTILLED), self._validations(inputs.student_steps)),
        )
        compared_labels = RunStage(
            AGAINST_TEACHER,
            (AGAINST_TEACHER, Of("undistilled"), Of("teacher")),
            lambda folder: task_stages.compare_with_teacher(
                folder, self.inputs, self.folders.get("teacher"), self.folders["undistilled"],
                self.inputs.read_by(self.folders["undistilled"]),
            ),
            "labels alone against the teacher, on validation",
            needed=lambda: self._teacher_score is not None,
            costs=(Cost(REST, "text", lambda _: 2 * len(inputs.validation)),),
        )  # fmt: skip
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
            *([undistilled] if r.undistilled or labels_only else []),
            *([compared_labels] if r.undistilled and self._has_unlabelled and not labels_only else []),
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
            stages += self._distilling(method_stages(links, self._method, (Of("method"),), self.folders, DISTIL))
        stages += self._soft_label_stages()
        trained_last = not (labels_only or (own_stages and chain.ends_on_task))
        stages.append(
            RunStage(
                "distilled",
                ("distilled", Of("method"), Of("soft-labels"), *self._student, *ending, *kept),
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
                    self._make_trimmed,
                    "the vocabulary of the student that ships",
                    then=lambda folder: self.folders.update(student=folder),
                )
            )
        return stages

    def _make_trimmed(self, folder: Path) -> None:
        """The student that ships, with a vocabulary trimmed to the texts that the run keeps.

        Training changes no row of the word table whose token is in no text of it, so trimming it before would give the same student.
        """
        shutil.copytree(self.folders["student"], folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATE))
        _trim(folder, self.inputs)

    def _make_start(self, folder: Path) -> None:
        task_stages.make_start(folder, self.inputs, self.folders.get("teacher"))
        if self.inputs.recipe.vocabulary_size:
            _trim(folder, self.inputs)

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
        """Whether the student learns from the teacher: not where labels alone beat that teacher on validation.

        With unlabelled texts, which labels alone leave unread, they must be shown to be better.
        """
        if self.inputs.chain.method == "labels":
            return False
        undistilled, theirs = self.folders.get("undistilled"), self._teacher_score
        if not undistilled or theirs is None:
            return True
        if compared := self.folders.get(AGAINST_TEACHER):
            return not task_stages.shown_better(compared)
        return task_stages.best_on_validation(undistilled) <= theirs

    @property
    def _teacher_score(self) -> float | None:
        return task_stages.teacher_score(self.inputs, self.folders.get("teacher"))

    @cached_property
    def _given(self) -> MethodInputs | None:
        """What the method's own stages read; None if it has none before training on the task."""
        if self.inputs.begins_on_labels:
            return None
        return method_inputs(self.inputs, self.folders["teacher"], self.plan.distill_tokens)

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
        if not inputs.asks_soft_labels:
            return [RunStage("soft-labels", self._made_of_soft_labels)]

        def of_fold(fold: int) -> RunStage:
            name = f"teacher-fold-{fold + 1}"
            return RunStage(
                name,
                (name, Of("teacher"), r.folds),
                lambda folder: task_stages.make_fold_teacher(folder, self.inputs, self.plan.teacher_steps, fold),
                lambda: f"teacher without fold {fold + 1} of {r.folds}: {self.plan.teacher_steps} steps at most",
                needed=self._distils,
                costs=(
                    Cost(TEACHER, "teacher step", lambda plan: plan.teacher_steps),
                    self._validations(inputs.teacher_steps),
                ),
            )

        def make_all(folder: Path) -> None:
            if teacher := self.folders.get("teacher"):
                folds = [self.folders[f"teacher-fold-{fold + 1}"] for fold in range(r.folds)]
                make_soft_labels(folder, self.inputs, teacher, folds)
            else:
                save_answers(folder, self.inputs)

        def of_share(weight: float) -> RunStage:
            def make(folder: Path) -> None:
                read, soft = self.inputs.read_by(self.folders["start"]), SoftLabels(self.folders["soft-labels"], weight)
                task_stages.make_trial(folder, read, self._begun, soft, self.plan.student_steps, self._given)

            return RunStage(
                f"share-{weight:g}",
                (f"share-{weight:g}", Of("distilled")),
                make,
                lambda: f"a share of {weight:g} for the soft labels: {trial_steps(self.plan.student_steps)} steps",
                needed=self._distils,
                costs=(Cost(SHARES, "student step", lambda plan: trial_steps(plan.student_steps)),),
            )

        texts = Cost(REST, "text", lambda _: len(inputs.train) + len(inputs.in_domain or ()))
        soft_labels = RunStage(
            "soft-labels",
            self._made_of_soft_labels,
            make_all,
            "the teacher's answers to all texts" if inputs.gives_answers_alone else "the teacher labels all texts",
            needed=self._distils,
            costs=() if inputs.gives_answers_alone else (texts,),
        )
        tried = SOFT_WEIGHTS if r.soft_weight is None and not self._has_unlabelled else ()
        return [*map(of_fold, range(r.folds)), soft_labels, *map(of_share, tried)]

    @property
    def _made_of_soft_labels(self) -> tuple[object, ...]:
        folds = self.inputs.recipe.folds
        return ("soft-labels", Of("teacher"), *self._in_domain, *([folds] if folds else []))

    @property
    def _soft_labels(self) -> SoftLabels | None:
        """The teacher's soft labels with their share: the given one, `WITH_UNLABELLED`, or the best of those that were tried."""
        weight = self.inputs.recipe.soft_weight
        if not self.inputs.asks_soft_labels:
            return None
        if weight is None and self._has_unlabelled:
            weight = WITH_UNLABELLED
        if weight is not None:
            return SoftLabels(self.folders["soft-labels"], weight)
        trials = {weight: self.folders[f"share-{weight:g}"] for weight in SOFT_WEIGHTS}
        return chosen_share(self.folders["soft-labels"], trials)


def _trim(folder: Path, inputs: RunInputs) -> None:
    """Trim the vocabulary of the student in `folder`, in place, to the texts that the run keeps and to the size that it asks for."""
    pairs = [(example.text_read, example.text_pair) for example in inputs.splits.validation]
    held_out = [text for pair in pairs for text in pair if text]
    trimmed = trim_vocabulary(folder, inputs.kept_texts, held_out, inputs.recipe.vocabulary_size)
    say(f"  {trimmed.told()}")
    (folder / TRIMMED).write_bytes(canonical_json(trimmed.counts()))
