"""The opened inputs of training on a task, and what follows from them: the method, its steps, the texts that it reads."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.data.augment import augmented
from compress.data.corpus import Piece, chunks
from compress.data.encoded import Encoded
from compress.data.examples import Example, Splits, normalised, normalised_text
from compress.data.task import Task
from compress.data.teacher_labels import TeacherLabels
from compress.evaluation.metrics import Score
from compress.evaluation.predictions import row_logits
from compress.models.answering import AnsweringTeacher
from compress.models.families import row_tokens_for
from compress.models.initialise import RANDOM, is_checkpoint, layers_fit
from compress.models.pretrained import Opened
from compress.models.shapes import Shape
from compress.progress import Notify, silent
from compress.runs.method_chain import (
    ON_TASK,
    Chain,
    check_whole_batches,
    method_chain,
    teacher_pooling,
)
from compress.runs.stages import folder_fingerprint, texts_fingerprint
from compress.settings import AUTO, LEAST_STEPS, LEAST_TUNING_STEPS, MOST_DISTILL_TOKENS, TaskSettings
from compress.tasks import task_named
from compress.training.stage import validation_interval
from serve.errors import BadInput

PIECE_TOKENS = 128  # most tokens of a piece of plain text


@dataclass(frozen=True)
class TeacherOutputs:
    """What a student learns of a file of answers."""

    soft: list[np.ndarray]
    """Logits (rows, labels) of each text of `TaskInputs.soft_labelled`."""
    on_validation: Score | None
    """The score of the answers to texts of validation; None where there is none, or where they are its labels."""
    whole_validation: bool
    """Whether all of these texts have an answer, so that the score can be compared with a student's."""
    lines: list[str]
    """What was read, as sentences."""


@dataclass
class TaskInputs:
    """The opened inputs of training on a task."""

    settings: TaskSettings
    opened: Opened
    splits: Splits
    outside: Splits | None
    """The texts out of scope, which `splits` lacks; None if no label of them is set."""
    shape: Shape
    labels: tuple[str, ...]
    teacher_has_head: bool
    """Whether the own head of the opened model is used: the teacher's, or that of --start."""
    tokenizer: Tokenizer
    max_length: int
    corpus: list[str]
    unlabelled: list[str]
    warnings: list[str]
    teacher_fingerprint: str
    start_fingerprint: str  # of the checkpoint that the student starts from; empty if it starts from none
    notify: Notify = silent
    answering: AnsweringTeacher | None = None
    """A teacher that is asked and not opened; its answers are in `answers` once it was."""
    answers: TeacherLabels | None = None
    """A teacher's answers from files."""
    further: list[Example] = field(default_factory=list)
    """Texts that `answers` has and no split has."""
    answered: TeacherOutputs | None = None
    """The soft labels that `answers` make."""
    tokens_of: Opened | None = None
    """The checkpoint whose tokenizer the student has, where its vocabulary was trimmed before training."""
    labelled_as: Encoded | None = None
    """The texts that the teacher labels as it reads them, where the student's vocabulary was trimmed before training."""

    @property
    def task(self) -> Task:
        """The task, for one label a text or any number as the data has."""
        return task_named(self.settings.task, multi_label=self.splits.multi_label)

    @cached_property
    def train(self) -> Encoded:
        """The train split, tokenised."""
        return self.encoded(self.splits.train)

    @cached_property
    def validation(self) -> Encoded:
        """The validation split, tokenised."""
        return self.encoded(self.splits.validation)

    @cached_property
    def test(self) -> Encoded:
        """The test split, tokenised."""
        return self.encoded(self.splits.test)

    @cached_property
    def in_domain(self) -> Encoded | None:
        """The texts that only the teacher labels, tokenised: given and generated ones; None if there are none."""
        return self.encoded(self.in_domain_texts) if self.in_domain_texts else None

    @cached_property
    def in_domain_texts(self) -> list[Example]:
        """The texts that only the teacher labels."""
        if (
            self.answers is not None or self.labelled_as is not None
        ):  # what a model was asked about is among its answers
            return self.further
        made = augmented(self.splits.train, self.tokenizer, self.settings.augment, self.settings.seed)
        return [Example(text) for text in self.unlabelled] + unseen(made, self.splits)

    @property
    def has_unlabelled(self) -> bool:
        """Whether there are texts of the task without labels, generated ones apart."""
        return bool(self.unlabelled or self.further)

    @property
    def gives_answers_alone(self) -> bool:
        """Whether there is no teacher to open: it is a file of answers, or a model that is asked."""
        return self.answers is not None or self.answering is not None

    @cached_property
    def soft_labelled(self) -> Encoded:
        """All texts that get the teacher's soft labels, in their order: train, then `in_domain`."""
        return self.train if self.in_domain is None else self.train + self.in_domain

    def out_of_scope(self, split: str) -> Encoded | None:
        """The texts of `split` that are out of scope, tokenised; None if there are none."""
        texts = getattr(self.outside, split) if self.outside else []
        return self.encoded(texts) if texts else None

    def encoded(self, examples: list[Example]) -> Encoded:
        """`examples`, tokenised; their labels are those of the task."""
        return self.task.encode(examples, self.tokenizer, self.labels)

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        return self.task.metric.name

    @cached_property
    def chain(self) -> Chain:
        """The stages of the method."""
        return chain_in(self.settings, self.opened, self.shape)

    @property
    def method_why(self) -> str:
        """Why it is that method; empty if it was named."""
        return method_of(self.settings, self.opened, self.shape)[1]

    @property
    def begins_on_labels(self) -> bool:
        """Whether the method is training on the task alone, from parts of the fine-tuned teacher."""
        return self.chain.method in ON_TASK

    @property
    def asks_soft_labels(self) -> bool:
        """Whether the student's last training learns the teacher's logits, computed once."""
        return asks_soft_labels(self.settings, self.chain)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The train, unlabelled and corpus texts, cut into pieces of at most `piece_tokens` tokens."""
        # Several questions may have one context.
        own = dict.fromkeys(example.text_alone for example in self.splits.train)
        texts = [*own] if self.task.has_contexts else [example.text_alone for example in self.splits.train]
        texts += self.unlabelled + self.corpus
        return chunks(texts, self.tokenizer, self.piece_tokens)

    @property
    def piece_tokens(self) -> int:
        """The most tokens of a piece of plain text."""
        return min(PIECE_TOKENS, self.max_length)

    @property
    def row_tokens(self) -> int:
        """The tokens of rows that pieces of plain text are packed into; 0 if the teacher cannot read packed rows."""
        return row_tokens_for(self.piece_tokens, self.opened.config)

    @property
    def distill_tokens(self) -> float:
        """Tokens of plain text that the method reads; 0 if it reads none."""
        if "corpus" not in self.chain.texts:
            return 0.0
        return self.settings.distill_tokens or min(sum(len(p.ids) for p in self.pieces), MOST_DISTILL_TOKENS)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which training reads the labelled texts once."""
        return -(-len(self.train) // self.settings.batch)

    @property
    def teacher_steps(self) -> int:
        """Most steps of fine-tuning the teacher; 0 if it has a head, or is a file of answers."""
        return (
            0
            if self.teacher_has_head or self.gives_answers_alone
            else steps_of(self.settings.teacher_epochs, 5, LEAST_TUNING_STEPS, self.steps_per_epoch)
        )

    @property
    def student_steps(self) -> int:
        """Steps of the student's training on the task."""
        return steps_of(self.settings.student_epochs, 10, LEAST_STEPS, self.steps_per_epoch)

    def validate_every(self, steps: int) -> int:
        """Steps between two validations of a training of `steps` on the task."""
        return validation_interval(steps, self.steps_per_epoch)

    @property
    def contents(self) -> dict[str, object]:
        """What was read, by the flag that names it, as `compress.runs.stages.check_same_inputs` takes it."""
        asked, role = self.answering, self.opened.role
        return {
            role: self.teacher_fingerprint,
            **({asked.role: folder_fingerprint(asked.folder)} if asked else {}),
            **({} if role == "--start" else {"--start": self.start_fingerprint or self.settings.start}),
            "--data": [self.splits.fingerprint, self.labels],
            "--teacher-labels": self.answers.fingerprint if self.answers else "",
            "--unlabelled": texts_fingerprint(self.unlabelled),
            "--corpus": texts_fingerprint(self.corpus),
        }


def scored_rows(inputs: TaskInputs, model: Any, split: str) -> np.ndarray:
    """Per text of a split what the metric sums of the answers of `model`, (texts, columns)."""
    task, encoded = inputs.task, getattr(inputs, split)
    gold = [task.gold_of(example) for example in getattr(inputs.splits, split)]
    return task.metric.counts(gold, task.predictions(encoded, row_logits(model, encoded)))


def steps_of(epochs: float | None, usual: int, least: int, per_epoch: int) -> int:
    """The steps of `epochs`, or if these are not given of the `usual` ones and at least the `least`."""
    return max(1, round(epochs * per_epoch)) if epochs else max(usual * per_epoch, least)


def method_of(settings: TaskSettings, opened: Opened, shape: Shape) -> tuple[str, str]:
    """The method that `settings` name, or for `auto` that of what was given; and why it is that one, empty if it was named.

    A student learns from labels and soft labels. One whose layers are new learns MiniLMv2's relations before, if there is a
    corpus. On the few tokens of in-domain text alone that did harm (docs/measurements/accuracy.md, "Where distillation pays").
    """
    if settings.method != AUTO:
        return settings.method, ""
    if is_checkpoint(settings.start):
        return "soft-labels", "the student starts from a checkpoint"
    if settings.teacher_labels or opened.role == "--start":
        return "soft-labels", "the teacher gives answers alone"
    if settings.start != RANDOM and layers_fit(opened.config, shape):
        return "soft-labels", "the student starts from the teacher's layers"
    if settings.corpus:
        return "minilmv2", "the student's layers are new, and there is a corpus to learn from"
    return "soft-labels", "the student's layers are new; with --corpus it would learn by minilmv2 first"


def chain_in(settings: TaskSettings, opened: Opened, shape: Shape) -> Chain:
    """The stages of the method of `settings`. Raises BadInput: it does not fit the teacher, the student or the data."""
    method, _ = method_of(settings, opened, shape)
    chain = method_chain(
        method, shape, opened.config, start=settings.start, teacher_layer=settings.teacher_layer,
        pooling=teacher_pooling(method, opened), stages=settings.stages,
    )  # fmt: skip
    check_whole_batches(chain, settings.batch, settings.accumulate)
    refuse_classes(task_named(settings.task), chain)
    if "source" in chain.texts:
        raise BadInput(f"--method {method} learns another task first, which only `stillroom compare` can be given.")
    return chain


def refuse_classes(task: Task, chain: Chain) -> None:
    """Check that no stage of `chain` learns classes where the task has numbers, or answers to questions. Raises BadInput: one does."""
    if not task.names_labels and "task" in chain.texts and chain.method not in ON_TASK:
        raise BadInput(
            f"--method {chain.method} learns classes on the task, and {task.name} has {task.gives}. Give soft-labels, labels, or a "
            "method that reads plain text alone, such as minilmv2."
        )


def asks_soft_labels(settings: TaskSettings, chain: Chain) -> bool:
    """Whether the last training of `chain` learns the teacher's logits, computed once."""
    if chain.method in ON_TASK:
        return chain.method == "soft-labels"
    return not chain.ends_on_task and settings.then == "soft-labels"


def unseen(examples: list[Example], splits: Splits) -> list[Example]:
    """`examples` without those whose text, normalised, is in validation or test or set apart, which no training may read."""
    others = (*splits.validation, *splits.test, *splits.apart)
    texts = {text for example in others for text in (example.text, example.text_read, example.text_alone)}
    held = {*map(normalised_text, texts)}
    asked = {normalised(example) for example in others if example.answers is not None}
    # A question may be asked about many contexts.
    return [
        e
        for e in examples
        if (normalised(e) not in asked if asked and e.text_pair else normalised_text(e.text) not in held)
    ]
