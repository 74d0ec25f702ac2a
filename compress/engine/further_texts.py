"""Labelled texts beside the splits, which nothing is trained, chosen or scored on."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compress.data.columns import Columns
from compress.data.examples import Example, Splits, Task, labels_in
from compress.data.labelled_files import read_examples
from compress.engine.data_checks import counted
from compress.engine.label_checks import some
from serve.errors import BadInput
from serve.text.labels import entity_labels


class FurtherTexts(NamedTuple):
    """Labelled texts of a file, without those of the splits."""

    examples: list[Example]
    outside: list[Example]
    """Those that are out of scope."""
    left_out: int
    """Texts that a split has too."""

    def warnings(self, flag: str) -> list[str]:
        """What to know of the file that `flag` names."""
        one, several = (
            f"text of {flag} is in train, validation or test and was",
            f"texts of {flag} are in train, validation or test and were",
        )
        return [f"{counted(self.left_out, one, several)} left out."] if self.left_out else []


def read_further(
    flag: str, file: Path, task: Task, columns: Columns, splits: Splits, labels: Sequence[str], out_of_scope: str = ""
) -> FurtherTexts:
    """The texts in `file`, which `flag` names, for a model of `labels` (classes or tags); those labelled `out_of_scope` are apart.

    Raises:
        BadInput: the file cannot be read, has labels that the model lacks, or only texts that `splits` have.
    """
    every = read_examples(file, task, columns)
    known = {example.text_or_pair for name in ("train", "validation", "test") for example in getattr(splits, name)}
    new = [example for example in every if example.text_or_pair not in known]
    outside = [example for example in new if out_of_scope and example.label == out_of_scope]
    examples = [example for example in new if not (out_of_scope and example.label == out_of_scope)]
    if not examples:
        raise BadInput(
            f"{flag} {file}: each of its {len(every):,} texts is in train, validation or test. Give a file of other labelled texts."
        )
    possible = set(entity_labels(labels)) if task == "token-classification" else set(labels)
    if unknown := sorted(set(labels_in(examples, task)) - possible):
        raise BadInput(
            f"{flag} {file} has labels that the model lacks: {some(unknown)}. It has {some(sorted(possible))}. Rename or remove them."
        )
    return FurtherTexts(examples, outside, len(every) - len(new))
