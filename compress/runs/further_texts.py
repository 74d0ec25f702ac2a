"""Labelled texts beside the data, which nothing is trained, chosen or scored on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from compress.data.columns import Columns
from compress.data.examples import Example, Splits, are_relations, is_multi_label
from compress.data.label_checks import some
from compress.data.labelled_files import read_examples
from compress.data.task import Task
from serve.errors import BadInput
from serve.wording import counted


class FurtherTexts(NamedTuple):
    """Labelled texts of a file, each once, without those that are read otherwise."""

    examples: list[Example]
    outside: list[Example]
    """Those that are out of scope."""
    left_out: int
    """Texts that are repeated, or that the data has too."""
    notes: Sequence[str] = ()
    """What else was left out of the file."""

    def warnings(self, flag: str) -> list[str]:
        """What to know of the file that `flag` names."""
        one, several = (
            f"text of {flag} is repeated or in the data too and was",
            f"texts of {flag} are repeated or in the data too and were",
        )
        return [*self.notes, *([f"{counted(self.left_out, one, several)} left out."] if self.left_out else [])]


def read_further(
    flag: str,
    file: Path,
    task: Task,
    columns: Columns,
    splits: Sequence[Splits],
    labels: Sequence[str],
    *,
    out_of_scope: str = "",
    read_otherwise: Iterable[str] = (),
) -> FurtherTexts:
    """The texts in `file`, which `flag` names, for a model of `labels` (classes or tags).

    Args:
        flag: how messages name the file.
        file: labelled rows, in any format of the data.
        task: what the model answers.
        columns: the names of their columns.
        splits: the data, whose texts are left out; the first says of which kind the labels are.
        labels: classes or tags that the model has.
        out_of_scope: the label of texts out of scope, which are apart.
        read_otherwise: further texts to leave out, such as unlabelled ones that are learned from.

    Raises:
        BadInput: the file cannot be read, has labels of another kind or that the model lacks, or no text is left.
    """
    notes: list[str] = []
    every = read_examples(file, task, columns, notes)
    if (is_multi_label(every), are_relations(every)) != (splits[0].multi_label, splits[0].relations):
        raise BadInput(f"{flag} {file} has labels of another kind than the data. Give rows like those of --data.")
    known = {
        example.text_or_pair for each in splits for rows in (each.train, each.validation, each.test) for example in rows
    }
    known |= set(read_otherwise)
    new = list(
        {example.text_or_pair: example for example in reversed(every) if example.text_or_pair not in known}.values()
    )[::-1]
    outside = [example for example in new if out_of_scope and example.label == out_of_scope]
    examples = [example for example in new if not (out_of_scope and example.label == out_of_scope)]
    if not new:
        raise BadInput(
            f"{flag} {file}: the data has each of its {len(every):,} texts too. Give a file of other labelled texts."
        )
    if not examples:
        raise BadInput(f"{flag} {file}: each of its texts is out of scope. Give a file with texts of the task too.")
    possible = set(task.answer_labels(labels))
    if unknown := sorted(set(task.labels_in(examples)) - possible):
        raise BadInput(
            f"{flag} {file} has labels that the model lacks: {some(unknown)}. It has {some(sorted(possible))}. Rename or remove them."
        )
    return FurtherTexts(examples, outside, len(every) - len(new), notes)
