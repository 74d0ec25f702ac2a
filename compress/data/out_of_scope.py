"""Texts that a model has no answer to: labelled as such in the data, and no class to learn."""

from collections.abc import Sequence
from dataclasses import replace

from compress.data.examples import SPLITS, Example, Splits
from serve.errors import BadInput


def set_apart(splits: Splits, label: str) -> tuple[Splits, Splits]:
    """`splits` without the texts labelled `label`, which says that they are out of scope; and those texts.

    Raises:
        BadInput: texts have another kind of label than one string, validation has none labelled so, or a split none labelled
            otherwise.
    """
    if not all(isinstance(example.label, str) for example in splits.train):
        raise BadInput(f"--out-of-scope {label}: the data has no one label a text. Leave the flag out.")
    scope, outside = (_part(splits, label, outside=outside) for outside in (False, True))
    if not outside.validation:
        raise BadInput(
            f"--out-of-scope {label}: no text of validation has that label, and the threshold is chosen on such texts. Add "
            "some to the validation file, or leave the flag out."
        )
    if empty := [name for name in SPLITS if not getattr(scope, name)]:
        raise BadInput(f"--out-of-scope {label}: every text of {' and '.join(empty)} has that label; add others.")
    return scope, outside


def refuse_in_scope(label: str, labels: Sequence[str], model: str) -> None:
    """BadInput when `label`, of texts out of scope, is among the `labels` that `model` answers with; there may be no such label."""
    if label and label in labels:
        raise BadInput(
            f"--out-of-scope {label}: {model} answers with that label itself, so there is nothing to withhold. Leave the flag "
            "out, or give a model that was trained without those texts."
        )


def _part(splits: Splits, label: str, *, outside: bool) -> Splits:
    def chosen(examples: list[Example]) -> list[Example]:
        return [example for example in examples if (example.label == label) is outside]

    return replace(splits, train=chosen(splits.train), validation=chosen(splits.validation), test=chosen(splits.test))
