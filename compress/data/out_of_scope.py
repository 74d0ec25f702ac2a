"""Separates texts that are labelled as out of scope: that label is not a class to learn."""

from collections.abc import Sequence
from dataclasses import replace

from compress.data.examples import SPLITS, Example, Splits
from serve.errors import BadInput


def set_apart(splits: Splits, label: str) -> tuple[Splits, Splits]:
    """`splits` without the texts labelled `label`, which are out of scope; and those texts.

    Raises:
        BadInput: labels are not single strings, validation has no text of that label, or a split has no other texts.
    """
    if not all(isinstance(example.label, str) for example in splits.train):
        raise BadInput(f"--out-of-scope {label} needs data with one label a text. Leave the flag out.")
    scope, outside = (_part(splits, label, outside=outside) for outside in (False, True))
    if not outside.validation:
        raise BadInput(
            f"--out-of-scope {label}: no text of validation has that label, but the threshold is chosen on such texts. Add "
            "some to the validation file, or leave the flag out."
        )
    if empty := [name for name in SPLITS if not getattr(scope, name)]:
        raise BadInput(f"--out-of-scope {label}: every text of {' and '.join(empty)} has that label; add others.")
    return scope, outside


def refuse_in_scope(label: str, labels: Sequence[str], model: str) -> None:
    """BadInput if `label`, of texts out of scope, is one of the `labels` of `model`. An empty `label` passes."""
    if label and label in labels:
        raise BadInput(
            f"--out-of-scope {label}: {model} was trained with that label as a class. Leave the flag out, or give a model that was "
            "trained without those texts."
        )


def _part(splits: Splits, label: str, *, outside: bool) -> Splits:
    def chosen(examples: list[Example]) -> list[Example]:
        return [example for example in examples if (example.label == label) is outside]

    return replace(splits, train=chosen(splits.train), validation=chosen(splits.validation), test=chosen(splits.test))
