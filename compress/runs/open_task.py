"""Opens and checks the inputs of training on a task: settings, teacher and texts. Nothing here trains or writes."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from compress.data.columns import Columns, columns_of
from compress.data.encoded import unknown_id_of, unknown_warning
from compress.data.examples import Example, Splits
from compress.data.sampler import subset
from compress.data.splits import read_splits, set_apart
from compress.data.task import Task
from compress.data.teacher_labels import TeacherLabels, read_teacher_labels
from compress.data.texts import read_texts
from compress.input_errors import Faults
from compress.models.answering import AnsweringTeacher
from compress.models.initialise import is_checkpoint, layers_fit, open_start
from compress.models.pretrained import Opened, check_length, open_model, open_tokenizer, with_markers
from compress.models.shapes import USUAL_STUDENT, Shape, shape_of
from compress.progress import Notify, silent
from compress.runs.answering_teacher import answering_teacher, labels_of, with_answers, with_encoder_settings
from compress.runs.data_checks import hold_out_label, keeps_head, labels_for, refuse_in_scope, warnings_of
from compress.runs.hardware import on_this_machine
from compress.runs.method_chain import (
    Chain,
    check_method_name,
    student_shape,
)
from compress.runs.stages import folder_fingerprint
from compress.runs.task_inputs import TaskInputs, asks_soft_labels, chain_in, unseen
from compress.settings import AUTO, TaskSettings
from compress.tasks import task_named
from compress.training.metrics import check_trackers
from serve.errors import BadInput
from serve.text.entity_markers import MARKERS, has_markers
from serve.wording import counted

SAMPLE = 1_000  # plain texts that are read for warnings
# Most float32 copies of the teacher's weights that a run keeps: checkpoints with two moments each, stages, graphs.
DISK_COPIES = 12


def open_task(
    settings: TaskSettings,
    writes_to: Path,
    *,
    role: str = "--teacher",
    more_checks: Sequence[Callable[[], object]] = (),
    notify: Notify = silent,
    may_ask: bool = False,
    sets_apart: bool = False,
) -> TaskInputs:
    """Open and check everything that `settings` name; nothing is written.

    Args:
        settings: the teacher, the task, its data, and how to train.
        writes_to: the folder that will hold the results; its disk must have room for them.
        role: the flag that names the teacher.
        more_checks: further checks of the caller; their faults are listed in the same message.
        notify: called with each event of progress.
        may_ask: whether the teacher may be a model that can be asked, but not opened; see `TaskInputs.answering`.
        sets_apart: whether texts of validation are set apart, see `compress.data.splits.set_apart`.

    Raises:
        BadInput: every fault found, in one message.
    """
    faults = Faults()
    asked = faults.check(partial(answering_teacher, settings)) if may_ask else None
    if not faults.messages and (asked or (settings.teacher_labels and role == "--teacher")):
        settings, role = faults.check(partial(with_encoder_settings, settings, asked)) or settings, "--start"
    opened = None if faults.messages else _model(settings, role, faults)
    here = faults.check(partial(on_this_machine, settings))
    task = faults.check(lambda: task_named(settings.task))
    shape = faults.check(lambda: shape_of(settings.student or USUAL_STUDENT))
    named = AUTO if settings.method == AUTO else faults.check(lambda: check_method_name(settings.method))
    for check in more_checks:
        faults.check(check)
    faults.check(lambda: check_trackers(settings.trackers))
    columns = columns_of(settings)
    splits, outside, answers = _data(settings, task, columns, faults, sets_apart) if task else (None, None, None)
    corpus = _texts(faults, settings.corpus, columns)
    unlabelled = [] if task and task.has_contexts else _texts(faults, settings.unlabelled, columns)
    labelled = tokenizer = chain = None
    task = faults.check(partial(_of_data, settings, task, splits)) if task and splits else task
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
    assert here and task and shape and opened and splits and labelled and tokenizer and chain  # noqa: PT018 - no test
    max_length = min(usable_length(settings.max_length, reader) for reader in readers)
    tokenizer.enable_truncation(max_length=max_length)
    warnings = warnings_of(splits, tokenizer, task, max_length)
    corpus, unlabelled = (
        _unseen_texts(texts, splits, what, tokenizer, warnings)
        for texts, what in ((corpus, "corpus"), (unlabelled, "unlabelled"))
    )
    warnings += chain.warnings
    if corpus and settings.method != AUTO and "corpus" not in chain.texts:
        warnings.append(f"--corpus is not read: --method {chain.method} learns from no plain text.")
    if not layers_fit(opened.config, shape) and not is_checkpoint(settings.start):
        warnings.append(
            f"The student's layers start at random: {shape} has another width or number of heads than {opened.role} "
            f"({opened.config.hidden_size}, {opened.config.num_attention_heads}), or more layers. It needs far more training than a "
            "student that starts from its layers."
        )
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
    return check_batch(with_answers(inputs, answers) if answers else inputs)


def check_batch(inputs: TaskInputs) -> TaskInputs:
    """`inputs`, once it is checked that a batch has room for labelled texts beside those that only the teacher labels.

    Raises BadInput: it has not.
    """
    if inputs.settings.batch == 1 and inputs.asks_soft_labels and inputs.in_domain_texts:
        raise BadInput(
            f"--batch 1 has no room for a labelled text beside one of the {counted(len(inputs.in_domain_texts), 'text')} that only the "
            "teacher labels. Give 2 or more."
        )
    return inputs


def _of_data(settings: TaskSettings, task: Task, splits: Splits) -> Task:
    """`task` of the data's kind. BadInput if the settings weigh classes, and it has none or several a text."""
    task = task.with_multi_label(splits.multi_label)
    if settings.class_weights and (not task.has_kinds or task.multi_label):
        given = "text-classification with any number of labels a text" if task.multi_label else task.name
        raise BadInput(
            f"--class-weights weighs the classes of texts that have one each, and this is {given}. Leave it out."
        )
    return task


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
    settings: TaskSettings, task: Task, columns: Columns, faults: Faults, sets_apart: bool
) -> tuple[Splits | None, Splits | None, TeacherLabels | None]:
    """The texts of the splits, those of them that are out of scope, and a teacher's answers; None for what is not there or faulty."""
    if task.has_contexts:
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
    splits = set_apart(splits, settings.seed) if splits and sets_apart else splits
    if splits and settings.out_of_scope:
        return *(faults.check(partial(hold_out_label, splits, settings.out_of_scope)) or (None, None)), answers
    return splits, None, answers


def refuse_for_questions(settings: TaskSettings) -> None:
    """Check that nothing is asked that needs one row a text. Raises BadInput: a setting has no meaning for questions."""
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


def check_folds(settings: TaskSettings, chain: Chain, splits: Splits, *, teacher_has_head: bool) -> None:
    """Check that the teacher can be fine-tuned on all but each of the folds, and that its soft labels are learned.

    Raises BadInput: it is fine-tuned already, nothing learns soft labels, or there are too few texts.
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

    Raises BadInput: a text lacks them.
    """
    bare = [text for text in unlabelled if not has_markers(text)]
    if bare:
        raise BadInput(
            f"{len(bare)} of {counted(len(unlabelled), 'text')} of --unlabelled {'lacks' if len(bare) == 1 else 'lack'} the "
            f"markers {', '.join(MARKERS)} around head and tail, which relations need; the first is {bare[0][:80]!r}. Add the markers."
        )


def _unseen_texts(texts: list[str], splits: Splits, what: str, tokenizer: Tokenizer, warnings: list[str]) -> list[str]:
    """The `unseen` texts of --`what`; warnings count the others, and tell of words that the model cannot read."""
    kept = [example.text for example in unseen([Example(text) for text in texts], splits)]
    if len(kept) < len(texts):
        where = "in validation or test and"
        one, several = f"text of --{what} is {where} was", f"texts of --{what} are {where} were"
        warnings.append(f"{counted(len(texts) - len(kept), one, several)} left out.")
    ids = [np.array(each.ids) for each in tokenizer.encode_batch(subset(kept, SAMPLE))]
    warnings += unknown_warning(ids, unknown_id_of(tokenizer), f"--{what}")
    return kept


def _texts(faults: Faults, paths: Sequence[str], columns: Columns) -> list[str]:
    found: list[str] = []
    for path in paths:
        found += faults.check(partial(read_texts, Path(path), columns)) or []
    return found


def check_disk(out: Path, opened: Opened) -> None:
    """Check that the disk has room for the files of a run. Raises BadInput: it has not."""
    needed = DISK_COPIES * sum(file.stat().st_size for file in opened.folder.glob("*.safetensors"))
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise BadInput(
            f"--out {out} needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there. Free some space, or give another path."
        )


def usable_length(asked: int, opened: Opened) -> int:
    """The longest text in tokens: `asked`, or what the teacher reads by default if that is 0.

    Raises BadInput: `asked` is below 8 or above what the teacher can read.
    """
    check_length(asked, opened.most_tokens, opened.name)
    return asked or opened.max_length
