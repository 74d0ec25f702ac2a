"""What a language model is told, and how its answer is read: strict JSON, label names of the task, and entities that the text has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.data.examples import Example
from compress.data.task import Task
from compress.tasks.replies import SHOWN_CHARACTERS
from serve.errors import BadInput

LABELS = "{labels}"  # in a template: the names of the labels, one a line


def system_prompt(template: Path | None, task: Task, labels: Sequence[str]) -> str:
    """The instructions of `template`, or those of `task`, with the names of the labels.

    Raises:
        BadInput: the template cannot be read, or has no place for the labels.
    """
    if template is None:
        text = task.instructions()
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


def answer_of(said: str, example: Example, task: Task, labels: Sequence[str]) -> dict[str, Any]:
    """The fields of the answer in `said`, what a model said of `example`.

    ValueError if it is no such answer; its message tells the model what is wrong.
    """
    try:
        found = json.loads(_unfenced(said))
    except ValueError:
        raise ValueError(f"the answer is not JSON: {said.strip()[:SHOWN_CHARACTERS]!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the answer is not a JSON object: {said.strip()[:SHOWN_CHARACTERS]!r}")
    return task.read_reply(found, example, labels)


def _unfenced(said: str) -> str:
    """`said` without a fence of Markdown around it, which models add although they are told not to."""
    text = said.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") + 1 : -3]
    return text
