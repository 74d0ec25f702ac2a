"""Writes a checkpoint that `AutoModel` opens, with its lineage: what the weights were made from, and whether their loss fell."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.data.examples import GENERATION, GENERATOR
from compress.models.configurations import LINEAGE, LONGEST_TEXT, in_one_line, quiet
from compress.models.pretrained import Opened, save_tokenizer
from compress.progress import Notify, message, silent
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

FIFTH = 5
FEW = 10  # with fewer points a curve is not checked
# Share of the first losses. No smaller student gets this close: at or below it teacher and student are one model.
NOTHING_LEFT = 1e-5


def save_with_lineage(
    model: Any,
    opened: Opened,
    folder: Path,
    details: dict[str, Any],
    tokens_of: Opened | None = None,
    max_length: int = 0,
) -> None:
    """Write `model`, which was made from `opened`, with the tokenizer of `tokens_of` or else of `opened`.

    The lineage holds `details`, the versions of the libraries, and `max_length` if texts were longer than usual.
    """
    model.config.architectures = [type(model).__name__]
    if details.get("task") != GENERATION and hasattr(model.config, GENERATOR):  # of the model that it was made from
        delattr(model.config, GENERATOR)
    with quiet():
        model.to("cpu").save_pretrained(folder)
    save_tokenizer(tokens_of or opened, folder, max_length)
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    lineage: dict[str, Any] = {
        "teacher": opened.public_name,
        "teacher_revision": opened.revision,
        "base_model": base_model_of(opened),
    }
    lineage |= {"versions": versions} | details
    if max_length > LONGEST_TEXT:
        lineage["max_length"] = max_length
    (folder / LINEAGE).write_bytes(canonical_json(lineage))


def base_model_of(opened: Opened) -> str | None:
    """The Hub model that `opened` is, or that its lineage names as its origin; None if unknown."""
    try:
        return opened.hub_name or read_lineage(opened.folder).get("base_model")
    except BadInput:  # a damaged lineage must not stop the caller: the name is optional
        return None


def read_lineage(folder: Path) -> dict[str, Any]:
    """The lineage of the checkpoint in `folder`; empty if it has none. Raises BadInput: the lineage file is damaged."""
    file = folder / LINEAGE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except ValueError as error:
        raise BadInput(f"{file} cannot be read ({in_one_line(error)}). Remove it, or copy the folder again.") from None
    return found


def loss_warnings(curve: Sequence[tuple[int, float]], what: str, notify: Notify = silent) -> list[str]:
    """A warning, which is also reported, if the loss `curve` (step, loss) of `what` did not fall, or fell to nearly 0; otherwise none.

    A training that learned nothing still ends with a model. The means of the first and last fifth are compared, so that one batch does
    not decide.
    """
    if len(curve) < FEW:
        return []
    part = len(curve) // FIFTH
    values = [value for _, value in curve]
    first, last = sum(values[:part]) / part, sum(values[-part:]) / part
    found = []
    if last <= NOTHING_LEFT * first or last == 0:
        found.append(
            f"{what}: the loss fell from {first:.3g} to {last:.3g}, nearly 0. Check whether teacher and student are the same model, "
            "or nearly all text is padding."
        )
    elif last >= first:
        found.append(
            f"{what}: the loss did not fall ({first:.4g} over the first fifth, {last:.4g} over the last). A lower learning rate, "
            "more steps or another teacher layer may help."
        )
    for warning in found:
        message(notify, f"warning: {warning}")
    return found
