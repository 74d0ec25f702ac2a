"""What a language model is told of a task, and the answer in what it says."""

import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from compress.data.examples import Example
from compress.data.task import Task
from compress.tasks.labels import REPLY_CHARACTERS
from serve.errors import BadInput

# What begins and ends the thoughts of models that reason in the open; of some the beginning is not in the answer.
THOUGHTS = re.compile(r"(</?(?:think|thinking|thoughts?|reasoning)>|\[/?THINK\]|<\|message\|>)", re.IGNORECASE)
OBJECT = re.compile(r'\{\s*["}]')  # what begins an object of JSON
MOST_OBJECTS = 1_000  # that are looked for in an answer
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
    """The fields of the answer in `said`, what a model said of `example`: its one JSON object that can be used.

    Thoughts are left out, and words around the object. ValueError if there is no such answer, or if there are several that differ; its
    message tells the model what is wrong.
    """
    found: list[dict[str, Any]] = []
    fault = ""
    try:
        objects = _objects(said)
        for each in objects:
            try:
                fields = task.read_reply(each, example, labels)
            except ValueError as reason:
                fault = str(reason)
            else:
                found += [] if fields in found else [fields]
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None
    shown = f"{said.strip()[:REPLY_CHARACTERS]!r}"
    if len(found) > 1:
        raise ValueError(f"the answer has {len(found)} JSON objects that differ: {shown}")
    if not found:
        raise ValueError(fault or f"the answer is not JSON: {shown}")
    return found[0]


def _objects(said: str) -> list[dict[str, Any]]:
    """The JSON objects in `said`, or `said` itself if it is one. Those of thoughts, and of an object that was cut off, are left out.

    ValueError if it is JSON and has no object.
    """
    try:
        whole = json.loads(said)
    except ValueError:
        whole = None
    if isinstance(whole, dict):
        return [whole]
    text, thought = "", False
    for piece in THOUGHTS.split(said):
        if not THOUGHTS.fullmatch(piece):
            text += "" if thought else piece
            continue
        text = text if thought or piece[1] not in "/|" else ""
        thought = piece[1] not in "/|"
    found: list[dict[str, Any]] = []
    end = 0
    for begun in islice(OBJECT.finditer(text), MOST_OBJECTS):
        if begun.start() < end:
            continue
        try:
            each, end = json.JSONDecoder().raw_decode(text, begun.start())
            found.append(each)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
                break
    if whole is not None and not found:
        raise ValueError(f"the answer is not a JSON object: {said.strip()[:REPLY_CHARACTERS]!r}")
    return found
