"""What a language model is told, and how its answer is read: strict JSON, label names of the task, and entities that the text has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.data.examples import Example, Task
from serve.errors import BadInput

LABELS = "{labels}"  # in a template: the names of the labels, one a line
SHOWN_CHARACTERS = 120

ONE_LABEL = f"""You label texts. The labels are:
{LABELS}

Answer with one JSON object and nothing else: {{"label": "..."}}, where the label is one of those above, written exactly so."""
SEVERAL_LABELS = f"""You label texts. Any number of these labels may apply to a text, also none:
{LABELS}

Answer with one JSON object and nothing else: {{"label": ["...", "..."]}}, with the labels that apply, written exactly so."""
ENTITIES = f"""You find entities in texts. Their labels are:
{LABELS}

Answer with one JSON object and nothing else: {{"entities": [{{"text": "...", "label": "..."}}]}}, with the entities in the order in which
they stand in the text, each copied from it exactly, letter by letter. If there is none, the list is empty."""


def system_prompt(template: Path | None, task: Task, labels: Sequence[str], *, multi_label: bool) -> str:
    """The instructions of `template`, or those of this module, with the names of the labels.

    Raises:
        BadInput: the template cannot be read, or has no place for the labels.
    """
    if template is None:
        text = ENTITIES if task == "token-classification" else SEVERAL_LABELS if multi_label else ONE_LABEL
    else:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--prompt {template} cannot be read ({error}). Give a file of text.") from error
        if LABELS not in text:
            raise BadInput(f"--prompt {template} has no {LABELS}, where the names of the labels are put. Add it.")
    return text.replace(LABELS, "\n".join(f"- {label}" for label in labels))


def user_prompt(example: Example) -> str:
    """The text that is asked about, or both of a pair."""
    if example.text_pair:
        return f"First text:\n{example.text}\n\nSecond text:\n{example.text_pair}"
    return example.text_read


def answer_of(said: str, example: Example, task: Task, labels: Sequence[str], *, multi_label: bool) -> dict[str, Any]:
    """The fields of the answer in `said`, what a model said of `example`.

    ValueError if it is no such answer; its message tells the model what is wrong.
    """
    try:
        found = json.loads(_unfenced(said))
    except ValueError:
        raise ValueError(f"the answer is not JSON: {said.strip()[:SHOWN_CHARACTERS]!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the answer is not a JSON object: {said.strip()[:SHOWN_CHARACTERS]!r}")
    if task == "token-classification":
        return {"entities": _entities(found.get("entities"), example.text, labels)}
    label = found.get("label")
    if multi_label:
        if not isinstance(label, list):
            raise ValueError("`label` is not a list of labels")
        return {"label": sorted({_known(each, labels) for each in label})}
    return {"label": _known(label, labels)}


def _unfenced(said: str) -> str:
    """`said` without a fence of Markdown around it, which models add although they are told not to."""
    text = said.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") + 1 : -3]
    return text


def _known(label: object, labels: Sequence[str]) -> str:
    if label not in labels:
        raise ValueError(f"{label!r} is not one of the labels: {', '.join(labels)}")
    return str(label)


def _entities(given: object, text: str, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The entities at their places: each is looked for behind the one before, and else anywhere where none is."""
    if not isinstance(given, list):
        raise ValueError("`entities` is not a list")
    found: list[dict[str, Any]] = []
    behind = 0
    for item in given:
        if not isinstance(item, dict) or not isinstance(item.get("text"), str) or not item["text"].strip():
            raise ValueError(f"{item!r} is not an object with `text` and `label`")
        label, words = _known(item.get("label"), labels), item["text"].strip()
        start = _free(text, words, behind, found)
        if start < 0:
            start = _free(text, words, 0, found)
        if start < 0:
            raise ValueError(f"{words[:SHOWN_CHARACTERS]!r} does not stand in the text; copy entities from it exactly")
        found.append({"start": start, "end": start + len(words), "label": label})
        behind = start + len(words)
    return sorted(found, key=lambda entity: entity["start"])


def _free(text: str, words: str, behind: int, taken: Sequence[dict[str, Any]]) -> int:
    """The first place of `words` from `behind` on that overlaps none of `taken`; -1 if there is none.

    Places where they are whole words come first: "Rome" is found in "Romeo" only if it stands nowhere else.
    """
    inside = -1
    start = text.find(words, behind)
    while start >= 0:
        end = start + len(words)
        if not any(start < each["end"] and each["start"] < end for each in taken):
            if not (_joined(text[start - 1 : start], words[0]) or _joined(words[-1], text[end : end + 1])):
                return start
            inside = start if inside < 0 else inside
        start = text.find(words, start + 1)
    return inside


def _joined(one: str, other: str) -> bool:
    """Whether both are characters of words."""
    return one.isalnum() and other.isalnum()
