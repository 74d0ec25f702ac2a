"""The inputs of training on a task, opened and checked: settings, teacher and texts. Nothing here trains or writes."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from tokenizers import Tokenizer

from compress.data.augment import augmented
from compress.data.columns import Columns, columns_of
from compress.data.corpus import Piece, chunks
from compress.data.encoded import Encoded, encode
from compress.data.examples import Example, Splits, Task, check_task
from compress.data.out_of_scope import refuse_in_scope, set_apart
from compress.data.splits import read_splits
from compress.data.teacher_labels import TeacherLabels, read_teacher_labels
from compress.data.texts import read_texts
from compress.engine.answered import Answered, with_answers
from compress.engine.answering_teacher import answering_teacher, labels_of, with_body
from compress.engine.data_checks import keeps_head, labels_for, warnings_of
from compress.engine.fingerprints import folder_fingerprint
from compress.engine.hardware import device_here, on_this_machine
from compress.engine.method_chain import (
    ON_TASK,
    Chain,
    check_method_name,
    check_whole_batches,
    method_chain,
    student_shape,
    teacher_pooling,
)
from compress.engine.method_runner import RANDOM, is_checkpoint
from compress.evaluation.metrics import metric_name
from compress.input_errors import Faults
from compress.models.answering import AnsweringTeacher
from compress.models.initialise import layers_fit, open_start
from compress.models.packed_inputs import row_tokens_for
from compress.models.precision import check_precision
from compress.models.pretrained import Opened, open_model, open_tokenizer, with_markers
from compress.models.shapes import USUAL_STUDENT, Shape, shape_of
from compress.progress import Notify, silent
from compress.settings import AUTO, LEAST_STEPS, LEAST_TUNING_STEPS, MOST_DISTILL_TOKENS, TaskSettings
from compress.training.task_training import validation_interval
from compress.training.trackers import check_trackers
from serve.errors import BadInput
from serve.text.entity_markers import MARKERS, has_markers
from serve.wording import counted

# Most float32 copies of the teacher's weights that a run keeps: checkpoints with two moments each, stages, graphs.
DISK_COPIES = 12
PIECE_TOKENS = 128  # most tokens of a piece of plain text


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
    answered: Answered | None = None
    """The soft labels that `answers` make."""
    tokens_of: Opened | None = None
    """The checkpoint whose tokenizer the student has, where its vocabulary was trimmed before training."""
    labelled_as: Encoded | None = None
    """The texts that the teacher labels as it reads them, where the student's vocabulary was trimmed before training."""

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
        return encode(
            examples, self.tokenizer, check_task(self.settings.task), self.labels, multi_label=self.splits.multi_label
        )

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        return metric_name(check_task(self.settings.task), multi_label=self.splits.multi_label)

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
        asks = self.settings.task == "question-answering"
        texts = [*own] if asks else [example.text_alone for example in self.splits.train]
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
    def data_fingerprint(self) -> str:
        """The SHA-256 of the examples, whatever their file format."""
        return self.splits.fingerprint


def open_task(
    settings: TaskSettings,
    writes_to: Path,
    *,
    role: str = "--teacher",
    more_checks: Sequence[Callable[[], object]] = (),
    notify: Notify = silent,
    may_ask: bool = False,
) -> TaskInputs:
    """Open and check everything that `settings` name; nothing is written.

    Args:
        settings: the teacher, the task, its data, and how to train.
        writes_to: the folder that will hold the results; its disk must have room for them.
        role: the flag that names the teacher.
        more_checks: further checks of the caller; their faults are listed in the same message.
        notify: called with each event of progress.
        may_ask: whether the teacher may be a model that can be asked, but not opened; see `TaskInputs.answering`.

    Raises:
        BadInput: every fault found, in one message.
    """
    faults = Faults()
    asked = faults.check(partial(answering_teacher, settings)) if may_ask else None
    if not faults.messages and (asked or (settings.teacher_labels and role == "--teacher")):
        settings, role = faults.check(partial(with_body, settings, asked)) or settings, "--start"
    opened = None if faults.messages else _model(settings, role, faults)
    here = faults.check(partial(on_this_machine, settings))
    task = faults.check(lambda: check_task(settings.task))
    shape = faults.check(lambda: shape_of(settings.student or USUAL_STUDENT))
    named = AUTO if settings.method == AUTO else faults.check(lambda: check_method_name(settings.method))
    for check in more_checks:
        faults.check(check)
    if here:
        faults.check(lambda: check_precision(here.precision, device_here(here.device)))
    faults.check(lambda: check_trackers(settings.trackers))
    columns = columns_of(settings)
    splits, outside, answers = _data(settings, task, columns, faults) if task else (None, None, None)
    corpus = _texts(faults, settings.corpus, columns)
    unlabelled = [] if task == "question-answering" else _texts(faults, settings.unlabelled, columns)
    labelled = tokenizer = None
    if opened and splits and splits.relations:
        opened = faults.check(partial(with_markers, opened))
        faults.check(partial(check_marked, unlabelled))
    if opened and splits and task:
        labelled = faults.check(partial(_labels, settings, opened, asked, splits, task, shape))
    if labelled:
        whose = f"{asked.role} {asked.name}" if asked else f"{role} {settings.teacher}"
        faults.check(partial(refuse_in_scope, settings.out_of_scope, labelled[0], whose))
    readers: list[Opened] = []
    if opened:
        faults.check(lambda: check_disk(writes_to, opened))
        readers.append(opened)
        if shape and is_checkpoint(settings.start):
            shape = faults.check(lambda: student_shape(settings.student, settings.start, opened))
            readers += [open_start(settings.start, opened)] if shape else []
        chain = faults.check(lambda: chain_in(settings, opened, shape)) if shape and named else None
        if chain and splits and labelled:
            faults.check(partial(check_folds, settings, chain, splits, teacher_has_head=labelled[1]))
        for reader in readers:
            faults.check(partial(usable_length, settings.max_length, reader))
        tokenizer = faults.check(lambda: open_tokenizer(opened))
    faults.raise_if_any()
    assert here and task and shape and opened and splits and labelled and tokenizer  # noqa: PT018 - no test
    max_length = min(usable_length(settings.max_length, reader) for reader in readers)
    tokenizer.enable_truncation(max_length=max_length)
    warnings = warnings_of(splits, tokenizer, task, max_length)
    corpus = _unseen_texts(corpus, splits, "corpus", warnings)
    unlabelled = _unseen_texts(unlabelled, splits, "unlabelled", warnings)
    warnings += _warnings(settings, opened, shape, corpus=bool(corpus))
    inputs = TaskInputs(
        replace(here, student=str(shape)),
        opened,
        splits,
        outside,
        shape,
        *labelled,
        tokenizer,
        max_length,
        corpus,
        unlabelled,
        warnings,
        folder_fingerprint(opened.folder),
        folder_fingerprint(readers[1].folder) if is_checkpoint(settings.start) else "",
        notify,
        asked,
    )
    return with_answers(inputs, answers) if answers else inputs


def _model(settings: TaskSettings, role: str, faults: Faults) -> Opened | None:
    if settings.teacher:
        return faults.check(lambda: open_model(settings.teacher, role=role, revision=settings.revision))
    if not settings.teacher_labels:
        faults.messages.append("--teacher is needed: a transformers folder or a name on the Hub.")
    return None


def _labels(
    settings: TaskSettings,
    opened: Opened,
    asked: AnsweringTeacher | None,
    splits: Splits,
    task: Task,
    shape: Shape | None,
) -> tuple[tuple[str, ...], bool]:
    """The labels by index, and whether the head of `opened` is used for them."""
    new_head = settings.new_head or (opened.role == "--start" and not keeps_head(opened, splits, task, shape))
    labels, has_head = labels_for(opened, splits, task, new_head=new_head)
    theirs = labels_of(asked, splits, task, labels) if asked else labels
    return theirs, has_head and theirs == labels


def _data(
    settings: TaskSettings, task: Task, columns: Columns, faults: Faults
) -> tuple[Splits | None, Splits | None, TeacherLabels | None]:
    """The texts of the splits, those of them that are out of scope, and a teacher's answers; None for what is not there or faulty."""
    if task == "question-answering":
        before = len(faults.messages)
        faults.check(partial(refuse_for_questions, settings))
        if len(faults.messages) > before:
            return None, None, None
    paths = [Path(path) for path in settings.teacher_labels]
    answers = faults.check(partial(read_teacher_labels, paths, task, columns)) if paths else None
    if paths and not answers:
        return None, None, None
    read = partial(read_splits, settings.data, task, columns, seed=settings.seed, train_from=answers)
    splits = faults.check(partial(read, revision=settings.data_revision))
    if splits and settings.out_of_scope:
        return *(faults.check(partial(set_apart, splits, settings.out_of_scope)) or (None, None)), answers
    return splits, None, answers


def _warnings(settings: TaskSettings, opened: Opened, shape: Shape, *, corpus: bool) -> list[str]:
    """What to know of this method with this teacher and student."""
    chain = chain_in(settings, opened, shape)
    warnings = list(chain.warnings)
    if corpus and settings.method != AUTO and "corpus" not in chain.texts:
        warnings.append(f"--corpus is not read: --method {chain.method} learns from no plain text.")
    if not layers_fit(opened.config, shape) and not is_checkpoint(settings.start):
        warnings.append(
            f"The student's layers start at random: {shape} has another width or number of heads than {opened.role} "
            f"({opened.config.hidden_size}, {opened.config.num_attention_heads}), or more layers. It needs far more training than a "
            "student that starts from its layers."
        )
    return warnings


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
    """The stages of the method of `settings`.

    Raises:
        BadInput: it does not fit the teacher, the student or the data.
    """
    method, _ = method_of(settings, opened, shape)
    chain = method_chain(
        method, shape, opened.config, start=settings.start, teacher_layer=settings.teacher_layer,
        pooling=teacher_pooling(method, opened), stages=settings.stages,
    )  # fmt: skip
    check_whole_batches(chain, settings.batch, settings.accumulate)
    refuse_classes(settings.task, chain)
    if "source" in chain.texts:
        raise BadInput(f"--method {method} learns another task first, which only `stillroom compare` can be given.")
    return chain


def refuse_classes(task: str, chain: Chain) -> None:
    """Check that no stage of `chain` learns classes where the task has numbers, or answers to questions.

    Raises:
        BadInput: one does.
    """
    has = {"text-regression": "numbers", "question-answering": "places of answers"}.get(task)
    if has and "task" in chain.texts and chain.method not in ON_TASK:
        raise BadInput(
            f"--method {chain.method} learns classes on the task, and {task} has {has}. Give soft-labels, labels, or a method that "
            "reads plain text alone, such as minilmv2."
        )


def refuse_for_questions(settings: TaskSettings) -> None:
    """Check that nothing is asked that needs one row a text.

    Raises:
        BadInput: a setting has no meaning for questions.
    """
    given = {
        "--unlabelled": settings.unlabelled,
        "--folds": settings.folds,
        "--teacher-labels": settings.teacher_labels,
    }
    if strange := [flag for flag, value in given.items() if value]:
        raise BadInput(
            f"{' and '.join(strange)} cannot be given with --task question-answering: texts there have no question, or each context has "
            "several rows. Leave it out; --corpus takes plain text."
        )


def asks_soft_labels(settings: TaskSettings, chain: Chain) -> bool:
    """Whether the last training of `chain` learns the teacher's logits, computed once."""
    if chain.method in ON_TASK:
        return chain.method == "soft-labels"
    return not chain.ends_on_task and settings.then == "soft-labels"


def check_folds(settings: TaskSettings, chain: Chain, splits: Splits, *, teacher_has_head: bool) -> None:
    """Check that the teacher can be fine-tuned on all but each of the folds, and that its soft labels are learned.

    Raises:
        BadInput: it is fine-tuned already, nothing learns soft labels, or there are too few texts.
    """
    folds = settings.folds
    if not folds:
        return
    if folds == 1 or folds > len(splits.train):
        raise BadInput(f"--folds is {folds}, and train has {counted(len(splits.train), 'text')}. Give 2 or a few more.")
    if not asks_soft_labels(settings, chain):
        raise BadInput(f"--folds has no effect on --method {chain.method}, which learns no soft labels. Leave it out.")
    if teacher_has_head:
        raise BadInput(
            f"--folds {folds} fine-tunes the teacher without parts of the labelled text, and --teacher {settings.teacher} was "
            "fine-tuned on the task before. Give the model that it was fine-tuned from, or leave --folds out."
        )


def check_marked(unlabelled: Sequence[str]) -> None:
    """Check that each unlabelled text has the markers of head and tail, which a teacher of relations needs.

    Raises:
        BadInput: a text lacks them.
    """
    bare = [text for text in unlabelled if not has_markers(text)]
    if bare:
        raise BadInput(
            f"{len(bare)} of {counted(len(unlabelled), 'text')} of --unlabelled {'lacks' if len(bare) == 1 else 'lack'} the "
            f"markers {', '.join(MARKERS)} around head and tail, which relations need; the first is {bare[0][:80]!r}. Add the markers."
        )


def unseen(examples: list[Example], splits: Splits) -> list[Example]:
    """`examples` without those whose text is in validation or test, which no training may read."""
    others = (*splits.validation, *splits.test)
    held = {text.strip() for example in others for text in (example.text, example.text_read, example.text_alone)}
    asked = {example.text_or_pair for example in others if example.answers is not None}
    if asked:  # a question may be asked about many contexts
        return [e for e in examples if (e.text_or_pair not in asked if e.text_pair else e.text.strip() not in held)]
    return [example for example in examples if example.text.strip() not in held]


def _unseen_texts(texts: list[str], splits: Splits, what: str, warnings: list[str]) -> list[str]:
    """The `unseen` texts of --`what`; a warning counts the others."""
    kept = [example.text for example in unseen([Example(text) for text in texts], splits)]
    if len(kept) < len(texts):
        where = "in validation or test and"
        one, several = f"text of --{what} is {where} was", f"texts of --{what} are {where} were"
        warnings.append(f"{counted(len(texts) - len(kept), one, several)} left out.")
    return kept


def _texts(faults: Faults, paths: Sequence[str], columns: Columns) -> list[str]:
    found: list[str] = []
    for path in paths:
        found += faults.check(partial(read_texts, Path(path), columns)) or []
    return found


def check_disk(out: Path, opened: Opened) -> None:
    """Check that the disk has room for the files of a run.

    Raises:
        BadInput: it has not.
    """
    needed = DISK_COPIES * sum(file.stat().st_size for file in opened.folder.glob("*.safetensors"))
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BadInput(
            f"--out {out} needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there. Free some space, or give another path."
        )


def usable_length(asked: int, opened: Opened) -> int:
    """The longest text in tokens: `asked`, or the teacher's maximum if that is 0.

    Raises:
        BadInput: `asked` is below 8 or above the teacher's maximum.
    """
    if asked and not 8 <= asked <= opened.max_length:
        raise BadInput(f"--max-length is {asked}; give 8 to {opened.max_length} tokens, which {opened.name} can read.")
    return asked or opened.max_length
