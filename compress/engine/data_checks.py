"""Finds faults of labels and texts before any training, and collects warnings that do not stop a run."""

from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from compress.data.encoded import Encoded, encode
from compress.data.examples import Example, Splits, Task, check_kind
from compress.engine.label_checks import label_warnings, some
from compress.models.pretrained import Opened, check_labels, with_markers
from compress.models.shapes import Shape
from serve.errors import BadInput
from serve.text.labels import bio_tags, entity_labels
from serve.text.questions import MOST_ANSWER_TOKENS


def keeps_head(start: Opened, splits: Splits, task: Task, shape: Shape | None) -> bool:
    """Whether the checkpoint that a student of `shape` starts from is as wide and has a head for the data's labels and no others."""
    if shape and shape.hidden != start.config.hidden_size:
        return False
    theirs = start.head_for(task)
    names = splits.labels(task)
    if task in ("text-regression", "question-answering"):
        return theirs is not None
    ours = bio_tags(names) if task == "token-classification" else names
    if theirs is None or set(theirs) != set(ours):
        return False
    has_markers = not (start if splits.relations else with_markers(start)).added
    return task == "token-classification" or (start.multi_label, has_markers) == (splits.multi_label, splits.relations)


def labels_for(opened: Opened, splits: Splits, task: Task, *, new_head: bool) -> tuple[tuple[str, ...], bool]:
    """The labels (classes, or tags) by index that teacher and student share, and whether the teacher's own head is used.

    Raises:
        BadInput: train has too few labels, or one number throughout; or the labels of the teacher's head for this task lack some of
            train's by name; or the head gives one label a text and the data any number, or the reverse.
    """
    names = splits.labels(task)
    if task == "text-regression":
        if len({example.label for example in splits.train}) < 2:
            raise BadInput(
                f"Every text of train has the number {splits.train[0].label:g}; at least 2 numbers are needed. Add texts of other numbers."
            )
        theirs = None if new_head else opened.head_for(task)
        return theirs or names, theirs is not None
    if task == "question-answering":
        if not any(example.answers for example in splits.train):
            raise BadInput("No question of train has an answer; at least 1 is needed. Add questions with answers.")
        own = None if new_head else opened.head_for(task)
        return names, own is not None
    if splits.multi_label and not names:
        raise BadInput("No text of train has a label; at least 1 is needed. Label some texts.")
    if task == "text-classification" and not splits.multi_label and len(names) < 2:
        raise BadInput(f"train has only the class {names[0]!r}; at least 2 are needed. Add texts of another class.")
    if task == "token-classification" and not names:
        raise BadInput("No text of train has an entity; at least 1 is needed. Label entities in some texts.")
    ours = bio_tags(names) if task == "token-classification" else names
    theirs = None if new_head else opened.head_for(task)
    if theirs is None:
        return ours, False
    check_labels(theirs, task, f"{opened.role} {opened.name}")
    if task == "text-classification":
        markers = not (opened if splits.relations else with_markers(opened)).added
        check_kind(splits.train, f"{opened.role} {opened.name}", multi_label=opened.multi_label, markers=markers)
    known = set(entity_labels(theirs)) if task == "token-classification" else set(theirs)
    if task == "token-classification" and known >= set(names) and not set(ours) <= set(theirs):
        raise BadInput(
            f"{opened.role} {opened.name} has a head whose tags are not in BIO (it lacks "
            f"{some(sorted(set(ours) - set(theirs)))}). Use `run` or `finetune` with --new-head to make a new head."
        )
    if missing := [name for name in names if name not in known]:
        raise BadInput(
            f"{opened.role} {opened.name} has a head for {task} whose labels ({some(sorted(known))}) lack {some(missing)} "
            "of train; labels are matched by name. Rename the labels in the data, or use `run` or `finetune` with --new-head to make "
            "a new head."
        )
    return theirs, True


def warnings_of(splits: Splits, tokenizer: Tokenizer, task: Task, max_length: int) -> list[str]:
    """Warnings that do not stop a run, one sentence each."""
    found: list[str] = []
    if splits.answered:
        texts = counted(len(splits.train), "text of --teacher-labels is", "texts of --teacher-labels are")
        found.append(f"There is no train file: {texts} read as train, with their answers as labels.")
    if splits.held_out and splits.answered:
        found.append(
            f"There is no validation file: {counted(len(splits.validation), 'text of it is', 'texts of it are')} held out instead. "
            "Scores on them show how often a model agrees with the teacher, not how often it is right."
        )
    elif splits.held_out:
        found.append(
            f"There is no validation file: {counted(len(splits.validation), 'text of train was', 'texts of train were')} held out instead."
        )
    found += label_warnings(splits, task)
    found += _in_two_splits(splits)
    for split in ("train", "validation", "test"):
        encoded = encode(getattr(splits, split), tokenizer, task, ("O",) if task == "token-classification" else ())
        if encoded.truncated:
            found.append(
                f"{encoded.truncated} of {counted(len(encoded), 'text', 'texts')} in {split} {'is' if encoded.truncated == 1 else 'are'} "
                f"longer than {max_length} tokens: training and scoring ignore the rest."
            )
        if task == "question-answering":
            found += _lost_answers(encoded, getattr(splits, split), split)
        if task == "token-classification":
            found += _inside_words(getattr(splits, split), encoded.texts, encoded.encodings, split)
    return found


SPLIT_ORDER = ("train", "validation", "test")


def _in_two_splits(splits: Splits) -> list[str]:
    where: dict[str, set[str]] = {}
    for split in SPLIT_ORDER:
        for example in getattr(splits, split):
            where.setdefault(f"{example.text_read}\x00{example.text_pair or ''}", set()).add(split)
    shared = Counter(
        ", ".join(each for each in SPLIT_ORDER if each in names) for names in where.values() if len(names) > 1
    )
    return [
        f"{counted(count, 'text is', 'texts are')} in more than one split ({names}): scores on them are too high for every model."
        for names, count in sorted(shared.items())
    ]


def _inside_words(examples: Sequence[Example], texts: Sequence[str], encodings: Sequence, split: str) -> list[str]:  # type: ignore[type-arg]
    """A warning about entities that begin or end inside a word, which no model can match exactly."""
    from serve.text.spans import words

    lost = 0
    for example, text, encoding in zip(examples, texts, encodings, strict=True):
        found = words(text, encoding.offsets, encoding.word_ids)
        starts, ends = {word.start for word in found}, {word.end for word in found}
        reach = max(ends, default=0)
        lost += sum((e.start not in starts or e.end not in ends) and e.end <= reach for e in example.entities or ())
    if not lost:
        return []
    entities = counted(lost, f"entity in {split} begins or ends", f"entities in {split} begin or end")
    return [f"{entities} inside a word: models label whole words and cannot match them exactly."]


def _lost_answers(encoded: Encoded, examples: Sequence[Example], split: str) -> list[str]:
    """A warning about answers that no decoder can find: they are too long, or begin or end inside a word that a window cuts."""
    assert encoded.owners is not None
    held = {
        int(owner)
        for owner, rows in zip(encoded.owners, encoded.targets, strict=True)
        if rows[1:, 1].any() and rows[1:, 2].argmax() - rows[1:, 1].argmax() < MOST_ANSWER_TOKENS
    }
    lost = sum(bool(example.answers) and place not in held for place, example in enumerate(examples))
    if not lost:
        return []
    return [
        f"{counted(lost, f'answer in {split} is', f'answers in {split} are')} in no window whole, or longer than "
        f"{MOST_ANSWER_TOKENS} tokens, and cannot be found."
    ]


def counted(count: int, one: str, several: str) -> str:
    """The count with the form that fits it: `1 text is`, `2 texts are`."""
    return f"{count} {one if count == 1 else several}"
