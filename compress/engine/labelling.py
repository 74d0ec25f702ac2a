"""Writes a model's answers to texts as the rows that `--teacher-labels` reads.

The rows of OUT are written to OUT.part, and renamed when all are there. OUT.lineage.json says what gave them. After a kill, the same
call goes on behind the last whole shard.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.columns import Columns, columns_of
from compress.data.encoded import Encoded, encode
from compress.data.examples import Example, Task, examples_fingerprint
from compress.data.file_formats import SUFFIXES, rows_in
from compress.data.labelled_files import check_there
from compress.data.row_faults import BadRows, Fault, UnreadableFrom, note
from compress.data.rows import unlabelled_example
from compress.data.tags import from_tags
from compress.data.texts import read_texts
from compress.engine.data_checks import counted
from compress.engine.fingerprints import folder_fingerprint
from compress.engine.hardware import device_here, same_bits
from compress.evaluation.predictions import row_logits, softmax
from compress.input_errors import Faults
from compress.models.answering import AnsweringModel, on_device, open_answering
from compress.progress import Notify, advancing, message, silent
from compress.settings import Labelling
from serve.bundle.cpu_quota import available_cores
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput, no_room
from serve.text.labels import OUTSIDE
from serve.text.spans import words

SHARD_TEXTS = 1_024  # the most work that a kill loses
LEAST_TOLD = 1e-5  # smaller probabilities are left out: a reader shares what is left to 1 among them
DIGITS = 6


def label(settings: Labelling, notify: Notify = silent) -> dict[str, Any]:
    """Write the answers of a model to the texts of files, one row a text.

    Returns `{out, model, task, texts, texts_before, labels}`: the file, the model, its task, the rows in the file, those that were
    there at the start, and its labels.

    Raises:
        BadInput: the model, a file or the output cannot be used. Nothing is written then.
    """
    faults, out = Faults(), Path(settings.out)
    part, lineage_file = out.with_name(f"{out.name}.part"), out.with_name(f"{out.name}.lineage.json")
    teacher = faults.check(
        partial(open_answering, settings.model, revision=settings.revision, max_length=settings.max_length)
    )
    device = faults.check(lambda: device_here(settings.device))
    faults.check(lambda: _check_out(out))
    columns = columns_of(settings)
    found: list[Example] = []
    for path in settings.input if teacher else ():
        found += faults.check(partial(_examples, Path(path), teacher.task, columns)) or [] if teacher else []
    faults.raise_if_any()
    assert teacher and device  # noqa: PT018 - no test
    texts = list(dict.fromkeys(found))
    threads = settings.threads or available_cores()
    lineage = {
        "model": teacher.folder.resolve().name if Path(teacher.name).exists() else teacher.name,
        "weights": folder_fingerprint(teacher.folder),
        "task": teacher.task,
        "max_length": teacher.max_length,
        "texts": examples_fingerprint(texts),
        "threads": threads,
        "device": device.type,
    }
    document = {
        "out": str(out), "model": lineage["model"], "task": teacher.task, "texts": len(texts), "texts_before": 0,
        "labels": list(teacher.labels),
    }  # fmt: skip
    if out.exists():
        if _read(lineage_file) != lineage:
            raise BadInput(f"--out {out} exists, and holds other answers than these. Remove it, or give another file.")
        message(notify, f"{out} holds the answers to all {len(texts):,} texts already.")
        return document | {"texts_before": len(texts)}
    if len(texts) < len(found):
        message(
            notify,
            f"{counted(len(found) - len(texts), 'text is', 'texts are')} given more than once and answered once.",
        )
    same_bits(threads)
    with part.open("a+b") as file:
        _lock(file, part)
        if _read(lineage_file) != lineage:
            file.truncate(0)
            _write(lineage_file, lineage)
        done = _whole_rows(file)
        if done:
            message(notify, f"{done:,} of {len(texts):,} texts were answered before.")
        _answer(file, teacher if device.type == "cpu" else on_device(teacher, device), texts, done, notify)
        os.replace(part, out)
    return document | {"texts_before": done}


def _answer(file: Any, teacher: AnsweringModel, texts: Sequence[Example], done: int, notify: Notify) -> None:
    with advancing(notify, "label") as shown:
        for start in range(done, len(texts), SHARD_TEXTS):
            shard = texts[start : start + SHARD_TEXTS]
            encoded = encode(shard, teacher.tokenizer, teacher.task, teacher.labels, multi_label=teacher.multi_label)
            logits = row_logits(teacher.model, encoded)
            lines = [
                _line(example, encoded, i, rows) for i, (example, rows) in enumerate(zip(shard, logits, strict=True))
            ]
            try:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                if no_room(error):
                    raise BadInput(
                        f"{file.name} could not be written: {error.strerror}. Make room, and give the same command again to resume."
                    ) from error
                raise
            shown(start + len(shard), len(texts))


def _line(example: Example, encoded: Encoded, index: int, logits: np.ndarray) -> bytes:
    """The row of one text as JSON: its fields, and the probabilities of its labels or of the tags of its words."""
    row: dict[str, Any] = {"text": example.text}
    if example.text_pair:
        row["text_pair"] = example.text_pair
    if example.head and example.tail:
        row |= {
            name: {"start": start, "end": end}
            for name, (start, end) in (("head", example.head), ("tail", example.tail))
        }
    wide = logits.astype(np.float64)
    if encoded.task == "text-classification":
        probabilities = 1 / (1 + np.exp(-wide[0])) if encoded.multi_label else softmax(wide)[0]
        row["labels"] = _told(probabilities, encoded.labels)
    else:
        encoding = encoded.encodings[index]
        places = words(encoded.texts[index], encoding.offsets, encoding.word_ids)
        row["words"] = [
            {"start": word.start, "end": word.end, "tags": _told(probabilities, encoded.labels)}
            for word, probabilities in zip(places, softmax(wide), strict=True)
        ]
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _told(probabilities: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """The probabilities by label, the largest first; those below `LEAST_TOLD` are left out, but never the largest."""
    order = np.argsort(-probabilities, kind="stable")
    return {
        labels[i]: float(f"{probabilities[i]:.{DIGITS}g}")
        for rank, i in enumerate(order.tolist())
        if not rank or probabilities[i] >= LEAST_TOLD
    }


def _examples(path: Path, task: Task, columns: Columns) -> list[Example]:
    """The texts of one file, without their labels; words with tags are read as the text that they make."""
    if path.suffix == ".txt":
        return [Example(text) for text in read_texts(path, columns)]
    check_there(path)
    if path.suffix not in SUFFIXES:
        raise BadInput(f"--input {path} does not end in {', '.join(SUFFIXES)} or .txt. Give its texts in one of them.")
    found: list[Example] = []
    faults: list[Fault] = []
    try:
        for line, row in rows_in(path, path.suffix, columns, None if path.suffix != ".conll" else task, faults):
            try:
                found.append(_example(row, task, columns))
            except ValueError as reason:
                note(faults, Fault(str(path), line, str(reason)))
    except UnreadableFrom as error:
        faults += error.faults
    if faults:
        raise BadRows(faults)
    if not found:
        raise BadInput(f"--input {path} holds no text. Give a file with one text a row.")
    return found


def _example(row: object, task: Task, columns: Columns) -> Example:
    if task == "token-classification" and isinstance(row, dict) and columns.text not in row and columns.tokens in row:
        tokens = row[columns.tokens]
        return Example(from_tags(tokens, [OUTSIDE] * len(tokens) if isinstance(tokens, list) else tokens).text)
    return unlabelled_example(row, columns, alone=task == "token-classification")


def _check_out(out: Path) -> None:
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a folder" if out.is_dir() else f"is in {out.absolute().parent}, which does not exist"
        raise BadInput(f"--out {out} {what}. Give a file in a folder that exists.")


def _lock(file: Any, part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"Another `label` is writing {part}. Wait until it ends, or give another --out.") from None


def _whole_rows(file: Any) -> int:
    """The rows that `file` holds; what a kill left behind the last whole one is cut off."""
    file.seek(0)
    count = size = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        count, size = count + 1, size + len(line)
    file.truncate(size)
    file.seek(size)
    return count


def _read(lineage_file: Path) -> Any:
    try:
        return json.loads(lineage_file.read_bytes())
    except (OSError, ValueError):
        return None


def _write(lineage_file: Path, lineage: dict[str, Any]) -> None:
    beside = lineage_file.with_name(f"{lineage_file.name}.partial")
    beside.write_bytes(canonical_json(lineage))
    os.replace(beside, lineage_file)
