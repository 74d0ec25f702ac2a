"""`label`: opens and checks what answers and the texts, then asks about those that have no answer yet.

torch is loaded only where a model of transformers answers.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from compress.data.answer_rows import answer_in, named_in, read_asked
from compress.data.columns import columns_of
from compress.data.examples import Example
from compress.data.label_checks import outside_warning
from compress.data.task import Task
from compress.input_errors import Faults
from compress.labelling.by_command import ask_command, files_of
from compress.labelling.by_endpoint import Endpoint, RequestCounts, ask_endpoint
from compress.labelling.journal import COMMAND_FILES, ERROR, TOKENS, Journal, fields_of
from compress.labelling.prompts import system_prompt
from compress.progress import Notify, advancing, message, silent
from compress.settings import LABELLED_TASKS, Labelling
from compress.tasks import task_named, task_of
from serve.bundle.cpu import available_cores
from serve.errors import BadInput
from serve.files import JSON_LINES, output
from serve.options import rule_faults
from serve.text.labels import OUTSIDE
from serve.wording import all_of, counted, one_of

if TYPE_CHECKING:
    from compress.models.answering import AnsweringModel

ANSWERING = ("checkpoint", "command", "url")
SHARD_TEXTS = 1_024  # of a model: the most work that a kill loses

Answers = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True)
class _Teacher:
    """What answers: exactly one of these."""

    name: str
    task: Task
    labels: tuple[str, ...]
    lineage: dict[str, Any]
    model: "AnsweringModel | None" = None
    endpoint: Endpoint | None = None


def label(settings: Labelling, notify: Notify = silent) -> dict[str, Any]:
    """Write a teacher's answers to the texts of files, one row a text, in their order.

    Returns `out`, `teacher`, `task`, `texts` (rows in the file), `texts_before` (those that were there at the start), `unanswered`; and
    of an endpoint `requests` (of this call), `retries` (those of them that repeat one), `prompt_tokens` and `completion_tokens` (of all
    answers in the file) and their `cost` at the given prices.

    Raises:
        BadInput: the teacher, a file or the output cannot be used. Answers that are there are kept.
    """
    faults, out = Faults(), Path(settings.out)
    teacher = faults.check(partial(_opened, settings))
    faults.check(partial(output, out, endings=JSON_LINES, inputs=settings.input))
    columns = columns_of(settings)
    found: list[Example] = []
    for path in settings.input if teacher else ():
        assert teacher
        found += faults.check(partial(read_asked, Path(path), teacher.task, columns, "--input")) or []
    faults.raise_if_any()
    assert teacher
    texts = list(dict.fromkeys(found))
    if len(texts) < len(found):
        message(notify, f"{len(found) - len(texts):,} of {len(found):,} texts are repetitions, and asked about once.")
    lineage = teacher.lineage | {"task": teacher.task.name}
    asked = RequestCounts()
    with Journal(out, texts, lineage) as journal:
        missing = journal.missing
        before = len(texts) - len(missing)
        if before:
            line = f"{before:,} of {len(texts):,} texts were answered before"
            if journal.changed:
                line = (
                    f"warning: {line} {all_of(journal.changed)} changed; these answers stay; remove {out} to ask anew"
                )
            elif settings.command:
                line += f", and are not asked about again; if its rules changed, remove {out} to ask anew"
            message(notify, f"{line}.")
        if missing:
            with advancing(notify, "label") as shown:
                for answers in _asked(teacher, settings, texts, missing, asked, notify, fresh=not before):
                    journal.add(answers)
                    shown(len(journal.rows), len(texts))
        if settings.command and missing:  # a file that changed meanwhile is one that the command writes, such as a log
            journal.lineage[COMMAND_FILES] = dict(
                teacher.lineage[COMMAND_FILES].items() & files_of(settings.command).items()
            )
        told = journal.finish()
    prices = settings.prompt_price * told["prompt_tokens"] + settings.completion_price * told["completion_tokens"]
    sent = {"requests": asked.requests, "retries": asked.retries}
    document = {
        "out": str(out),
        "teacher": teacher.name,
        "task": teacher.task.name,
        "texts": len(texts),
        "texts_before": before,
        "max_unanswered": settings.max_unanswered,
    }
    return document | told | sent | {"cost": round(prices / 1e6, 6)}


def _asked(
    teacher: _Teacher,
    settings: Labelling,
    texts: Sequence[Example],
    missing: Sequence[int],
    asked: RequestCounts,
    notify: Notify,
    *,
    fresh: bool,
) -> Iterator[Answers]:
    if teacher.model:
        from compress.models.answering import on_device
        from compress.runs.hardware import device_here, same_bits

        same_bits(settings.threads or available_cores())
        device = device_here(settings.device)
        yield from ask_model(
            teacher.model if device.type == "cpu" else on_device(teacher.model, device), texts, missing, notify
        )
    elif teacher.endpoint:
        yield from ask_endpoint(teacher.endpoint, texts, missing, asked, fresh=fresh)
    else:
        check = partial(_fault_of, task=teacher.task, labels=teacher.labels)
        yield from ask_command(settings.command, texts, missing, check, timeout_s=settings.timeout_s, fresh=fresh)


def ask_model(
    teacher: "AnsweringModel", texts: Sequence[Example], missing: Sequence[int], notify: Notify = silent
) -> Iterator[Answers]:
    """The answers to the `missing` of `texts`, a shard at a time: the probability of each label or of each word's tags, or a number.

    Several processes compute a share each, and the main one gets all answers; the others get empty shards. `notify` gets warnings about
    the model's tags, and about what of the texts it does not read.
    """
    import numpy as np

    from compress.data.encoded import describe_unknown
    from compress.evaluation.predictions import shared_row_logits

    truncated = unknown = tokens = 0
    if teacher.task.labels_words and OUTSIDE not in teacher.labels:
        message(notify, f"warning: {outside_warning('of the model', 'its id2label')[0]}")
    for start in range(0, len(missing), SHARD_TEXTS):
        shard = missing[start : start + SHARD_TEXTS]
        encoded = teacher.task.encode([texts[index] for index in shard], teacher.tokenizer, teacher.labels)
        truncated, tokens = truncated + encoded.truncated, tokens + sum(map(len, encoded.ids))
        unknown += sum(int(np.count_nonzero(ids == encoded.unknown_id)) for ids in encoded.ids)
        logits = shared_row_logits(teacher.model, encoded)
        rows = zip(shard, logits or (), strict=logits is not None)
        yield [
            (index, teacher.task.written_answer(encoded, i, of_text.astype(np.float64)))
            for i, (index, of_text) in enumerate(rows)
        ]
    longer = counted(truncated, "text is", "texts are")
    cut = (
        [f"{longer} longer than the {teacher.max_length} tokens that the model reads: its answers ignore the rest."]
        if truncated
        else []
    )
    for warning in (*cut, *describe_unknown(unknown / max(1, tokens), "--input")):
        message(notify, f"warning: {warning}")


def _fault_of(example: Example, fields: dict[str, Any], *, task: Task, labels: Sequence[str]) -> str:
    """Why the answer `fields` of a command to `example` cannot be used; empty if it can."""
    if ERROR in fields:
        return f"the command gives an error: {fields[ERROR]!r}"
    if TOKENS in fields:
        return f"it has the field {TOKENS}, which is kept for tokens that an endpoint counts"
    try:
        json.dumps(fields, ensure_ascii=False).encode()
        answer = answer_in(fields | fields_of(example), task)
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, which is not a character"
    except (ValueError, RecursionError) as reason:
        return "it is nested too deeply" if isinstance(reason, RecursionError) else str(reason)
    if answer is None:
        return f"it has none of the fields of an answer: {', '.join(fields) or 'it is empty'}"
    strange = sorted(named_in(answer) - set(labels)) if labels else []
    return f"{strange[0]!r} is not one of the labels: {', '.join(labels)}" if strange else ""


def _opened(settings: Labelling) -> _Teacher:
    """What answers, opened and checked. BadInput for all that is wrong with the settings."""
    given = [name for name in ANSWERING if getattr(settings, name)]
    if len(given) != 1:
        raise BadInput("Give one of --with, --with-command and --with-url: what answers.")
    if settings.checkpoint:
        if faults := rule_faults(settings):
            raise BadInput(" ".join(faults))
        return _opened_model(settings)
    if not settings.task:
        raise BadInput(f"--task is needed: what is answered, {one_of(LABELLED_TASKS)}.")
    task = task_named(settings.task, multi_label=settings.multi_label)
    if task.has_contexts:
        raise BadInput(
            f"--task {task.name} needs a context for each question, which is not labelled here. Give another task."
        )
    if not task.names_labels and settings.url:
        raise BadInput(f"--with-url asks for labels, and {task.name} has {task.gives}. Give --with or --with-command.")
    if settings.command:
        # The command may hold a password.
        hashed = hashlib.sha256(settings.command.encode()).hexdigest()
        files = files_of(settings.command)
        lineage = {"command_sha256": hashed, "labels": list(settings.label), COMMAND_FILES: files}
        return _Teacher(settings.command, task, settings.label, lineage)
    key = os.environ.get(settings.key_variable, "").strip()
    faults = [
        *(
            [f"The key in {settings.key_variable} has a character that no key has. Set it again"]
            if not (key.isascii() and (not key or key.isprintable()))
            else []
        ),
        *([] if settings.model else ["--model is needed: the name of a model that the endpoint serves"]),
        *([] if settings.label else ["--label is needed, once for each label"]),
        *_url_faults(settings.url),
    ]
    if faults:
        raise BadInput(". ".join(faults) + ".")
    prompt = Path(settings.prompt) if settings.prompt else None
    system = system_prompt(prompt, task, settings.label)
    endpoint = Endpoint(
        settings.url.rstrip("/"), settings.model, key, system, task, settings.label,
        settings.concurrency, settings.per_minute, settings.timeout_s, settings.retries,
    )  # fmt: skip
    return _Teacher(
        settings.model,
        task,
        settings.label,
        {"url": endpoint.url, "model": settings.model, "prompt": system, "multi_label": task.multi_label},
        endpoint=endpoint,
    )


def _url_faults(url: str) -> list[str]:
    import httpx

    try:
        parts = urlsplit(url)
        host = parts.port != 0 and httpx.URL(url).host
    except (ValueError, httpx.InvalidURL) as error:
        return [f"--with-url is no address ({error}). Give one such as http://localhost:8080/v1"]
    faults = {
        "--with-url needs http:// or https:// and a host": parts.scheme not in ("http", "https") or not host,
        "--with-url holds a user or a password; set the key in --key-variable": "@" in parts.netloc,
    }
    return [fault for fault, holds in faults.items() if holds]


def _opened_model(settings: Labelling) -> _Teacher:
    from compress.models.answering import open_answering
    from compress.models.pretrained import public_name_of
    from compress.runs.hardware import device_here
    from compress.runs.stages import folder_fingerprint

    device = device_here(settings.device)
    model = open_answering(settings.checkpoint, task_of, revision=settings.revision, max_length=settings.max_length)
    name = public_name_of(model.name, model.folder)
    lineage = {
        "model": name, "weights": folder_fingerprint(model.folder), "max_length": model.max_length, "device": device.type,
        "threads": settings.threads or available_cores(),
    }  # fmt: skip
    return _Teacher(name, model.task, model.labels, lineage, model=model)
