"""Every fault of the input, found before any training; and what a person would want to be told though it is no fault."""

from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from compress.data.encoded import encode
from compress.data.examples import Example, Splits, Task, check_kind
from compress.engine.label_checks import label_warnings, some
from compress.models.pretrained import Opened, with_markers
from serve.errors import BadInput
from serve.text.labels import bio_tags, entity_labels


def labels_for(opened: Opened, splits: Splits, task: Task, *, new_head: bool) -> tuple[tuple[str, ...], bool]:
    """The labels (classes, or tags) by index that teacher and student share, and whether the teacher's own head is used.

    Raises:
        BadInput: the teacher has a head for this task whose labels, by name, do not cover those of train, or one for one
            label a text where there may be any number, or the other way round.
    """
    names = splits.labels(task)
    if splits.multi_label and not names:
        raise BadInput("train has no label on any text; there is nothing to learn.")
    if task == "text-classification" and not splits.multi_label and len(names) < 2:
        raise BadInput(f"train has the one class {names[0]!r}; two or more are needed to classify.")
    if task == "token-classification" and not names:
        raise BadInput("train has no entity in any text; there is nothing to learn.")
    ours = bio_tags(names) if task == "token-classification" else names
    theirs = None if new_head else opened.head_for(task)
    if theirs is None:
        return ours, False
    if task == "text-classification":
        markers = not (opened if splits.relations else with_markers(opened)).added
        check_kind(splits.train, f"{opened.role} {opened.name}", multi_label=opened.multi_label, markers=markers)
    known = set(entity_labels(theirs)) if task == "token-classification" else set(theirs)
    if task == "token-classification" and known >= set(names) and not set(ours) <= set(theirs):
        raise BadInput(
            f"{opened.role} {opened.name} has a head that tags in another scheme than BIO (it lacks "
            f"{some(sorted(set(ours) - set(theirs)))}). `run` and `finetune` make a new one with --new-head."
        )
    if missing := [name for name in names if name not in known]:
        raise BadInput(
            f"{opened.role} {opened.name} has a head for {task} whose labels ({some(sorted(known))}) lack {some(missing)} "
            "of train: label maps are matched by name. Rename the labels in the data, or make a new head: `run`"
            " and `finetune` do with --new-head."
        )
    return theirs, True


def warnings_of(splits: Splits, tokenizer: Tokenizer, task: Task, max_length: int) -> list[str]:
    """What does not stop a run, and should be known: one sentence each."""
    found: list[str] = []
    if splits.held_out:
        found.append(
            f"There is no validation file: {counted(len(splits.validation), 'text of train was', 'texts of train were')} held out for it."
        )
    found += label_warnings(splits, task)
    found += _in_two_splits(splits)
    for split in ("train", "validation", "test"):
        encoded = encode(getattr(splits, split), tokenizer, task, ("O",) if task == "token-classification" else ())
        if encoded.truncated:
            found.append(
                f"{encoded.truncated} of {len(encoded)} texts in {split} are longer than {max_length} tokens: "
                "what lies past that is not read, in training or in scoring."
            )
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
        f"{counted(count, 'text stands', 'texts stand')} in more than one split ({names}): scores there are too high for every model."
        for names, count in sorted(shared.items())
    ]


def _inside_words(examples: Sequence[Example], texts: Sequence[str], encodings: Sequence, split: str) -> list[str]:  # type: ignore[type-arg]
    """Entities that begin or end inside a word can never be found exactly."""
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


def counted(count: int, one: str, several: str) -> str:
    """`1 text stands`, `2 texts stand`."""
    return f"{count} {one if count == 1 else several}"
