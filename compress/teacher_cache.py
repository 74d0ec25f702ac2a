"""What a teacher computes of a corpus, kept on disk: over many epochs, or for many students, it is asked once.

Kept are the hidden states, queries, keys or values that objectives read, a byte a number: each group of numbers, as wide as
an attention head, is divided by a scale of its own, a 127th of its largest number in float16. How much that loses is measured
while it is written. A cache says of which teacher, text, parts and precision it is, and is refused for any other.
"""

import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint import told_when_full
from compress.corpus import CorpusFile, CorpusText
from compress.families import Family
from compress.insides import Part, read
from compress.loop import device_of_process
from compress.order import Order
from compress.precision import autocast, matrices_in
from compress.tasks import Batch, inputs_for
from serve.bundle import canonical_json, sha256_file
from serve.errors import BadInput

NUMBERS, ABOUT, FORMAT = "numbers.bin", "cache.json", 1
PIECES = 1_024  # that are written at once: the work that a kill loses at most
POSITIONS = 4_096  # tokens that the teacher is asked about at once, padding included


@dataclass(frozen=True)
class Layout:
    """How the numbers of one token lie: a byte for each, part by part, then the scale of each group in float16."""

    parts: tuple[Part, ...]
    width: int  # of a part
    group: int

    @property
    def numbers(self) -> int:
        """Of one token."""
        return len(self.parts) * self.width

    @property
    def bytes_per_token(self) -> int:
        """On disk."""
        return self.numbers + 2 * self.numbers // self.group

    def packed(self, x: np.ndarray) -> np.ndarray:
        """`x` (tokens, numbers), float32, as bytes (tokens, bytes_per_token)."""
        groups = x.reshape(len(x), -1, self.group)
        largest = np.finfo(np.float16).max
        scales = np.minimum(np.abs(groups).max(axis=-1) / 127, largest).astype(np.float16)
        divisors = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
        whole = np.clip(np.rint(groups / divisors), -127, 127).astype(np.int8)
        return np.hstack([whole.view(np.uint8).reshape(len(x), -1), scales.view(np.uint8).reshape(len(x), -1)])

    def unpacked(self, raw: np.ndarray) -> np.ndarray:
        """About the numbers that `packed` was given."""
        whole = raw[:, : self.numbers].view(np.int8).reshape(len(raw), -1, self.group)
        scales = np.ascontiguousarray(raw[:, self.numbers :]).view(np.float16)
        return (whole * scales.astype(np.float32)[..., None]).reshape(len(raw), -1)


class TeacherCache:
    """A finished cache in `folder` of the pieces that `lengths` are the tokens of."""

    def __init__(self, folder: Path, lengths: np.ndarray) -> None:
        self.folder = folder
        self.about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        self.layout = _layout_in(self.about)
        self.lengths = lengths
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum(dtype=np.int64)])

    def at(self, chosen: Sequence[int], width: int) -> dict[tuple[str, int], Tensor]:
        """Of the pieces `chosen` each part (pieces, width, numbers), 0 where they are padded to `width` tokens."""
        found = np.zeros((len(chosen), width, self.layout.numbers), dtype=np.float32)
        size = self.layout.bytes_per_token
        with (self.folder / NUMBERS).open("rb") as file:
            for row, piece in enumerate(chosen):
                count = int(self.lengths[piece])
                raw = os.pread(file.fileno(), count * size, int(self.starts[piece]) * size)
                found[row, :count] = self.layout.unpacked(np.frombuffer(raw, np.uint8).reshape(count, size))
        parts = torch.from_numpy(found).chunk(len(self.layout.parts), dim=-1)
        return dict(zip(map(tuple, self.layout.parts), parts, strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TaughtText:
    """The batches of `text`, each with what the teacher computes of it."""

    text: CorpusText
    cache: TeacherCache

    @property
    def pad_id(self) -> int:
        """That of the text."""
        return self.text.pad_id

    @property
    def order(self) -> Order:
        """Which pieces each step sees."""
        return self.text.order

    @property
    def ids(self) -> list[np.ndarray]:
        """All token ids that occur."""
        return self.text.ids

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a step, on average."""
        return self.text.tokens_per_step

    def at(self, step: int) -> Batch:
        """See `CorpusText.at`."""
        batch = self.text.at(step)
        taught = self.cache.at(self.order.at(step).tolist(), batch.inputs["input_ids"].shape[1])
        return dataclasses.replace(batch, taught=taught)


def teacher_cache(
    folder: Path,
    load: Callable[[], Any],
    family: Family,
    pieces: CorpusFile,
    parts: Sequence[Part],
    *,
    pad_id: int,
    precision: str,
    identity: Mapping[str, str],
    report: Callable[[int, int], None] | None = None,
) -> TeacherCache:
    """The cache in `folder`: the one that stands there, or a new one. A kill in the middle loses a moment's work.

    Several processes may ask for the same folder: one of them writes.

    Args:
        folder: made if absent.
        load: gives the teacher, an encoder of `family`; called if it has to be asked.
        family: where it keeps its parts.
        pieces: the text.
        parts: vectors that objectives read (`compress.insides.VECTORS`).
        pad_id: the id that fills batches.
        precision: in which the teacher computes.
        identity: what else the numbers depend on, by name: the teacher's weights, the text.
        report: told of tokens done and in all.

    Raises:
        BadInput: `folder` holds something else, a cache of other things, or one that was changed; or there is no room.
    """
    identity = dict(identity) | {
        "part of the teacher": ", ".join(f"{p.of} of layer {p.layer}" for p in parts),
        "precision": precision,
    }
    device = device_of_process()  # by all, before one of them goes on alone
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return _checked(folder, identity, pieces)
        partial = folder.with_name(folder.name + ".partial")
        model = load().eval().to(device)
        heads = int(model.config.num_attention_heads)
        layout = Layout(tuple(parts), int(model.config.hidden_size), int(model.config.hidden_size) // heads)
        with told_when_full(partial):
            _write(partial, model, family, pieces, layout, pad_id, precision, identity, report)
            partial.replace(folder)
        return TeacherCache(folder, pieces.lengths)


def _checked(folder: Path, identity: Mapping[str, str], pieces: CorpusFile) -> TeacherCache:
    """The cache that stands in `folder`.

    Raises:
        BadInput: see `teacher_cache`.
    """
    if not (folder / ABOUT).is_file():
        raise BadInput(
            f"{folder} is there already and holds no teacher's cache; nothing was written. Give another folder."
        )
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if about.get("format") != FORMAT or about["identity"] != identity:
        theirs = about.get("identity", {})
        other = [name for name in identity if theirs.get(name) != identity[name]] or ["format"]
        raise BadInput(
            f"The cache {folder} is not of this {' and this '.join(other)}; what it holds would teach something else. "
            "Remove it, or give another folder."
        )
    if about["sha256"] != sha256_file(folder / NUMBERS):
        raise BadInput(
            f"The cache {folder} is not as it was written: its SHA-256 has changed. Remove it, and it is made anew."
        )
    return TeacherCache(folder, pieces.lengths)


def _write(
    partial: Path,
    teacher: Any,
    family: Family,
    pieces: CorpusFile,
    layout: Layout,
    pad_id: int,
    precision: str,
    identity: Mapping[str, str],
    report: Callable[[int, int], None] | None,
) -> None:
    """All numbers into `partial`, from where an unfinished one of the same things ends."""
    started = {
        "format": FORMAT,
        "identity": identity,
        "pieces": 0,
        "tokens": 0,
        "seconds": 0.0,
        "lost": 0.0,
        "squares": 0.0,
    }
    done: dict[str, Any] = started
    if (partial / ABOUT).is_file():
        left = json.loads((partial / ABOUT).read_text(encoding="utf-8"))
        done = left if left.get("format") == FORMAT and left["identity"] == identity else started
    if done is started:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    whole = int(pieces.lengths.sum(dtype=np.int64))
    needed = (whole - done["tokens"]) * layout.bytes_per_token
    if needed > (free := shutil.disk_usage(partial).free):
        raise BadInput(
            f"The cache of {whole:,} tokens takes {layout.bytes_per_token} bytes each, {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
            "are free there. Make room, or give another folder, a smaller corpus, or no cache."
        )
    with (partial / NUMBERS).open("ab") as file, _asked(teacher, precision):
        file.truncate(done["tokens"] * layout.bytes_per_token)
        for first in range(done["pieces"], len(pieces), PIECES):
            began = time.monotonic()
            last = min(first + PIECES, len(pieces))
            for x in _vectors(teacher, family, pieces, range(first, last), layout, pad_id):
                raw = layout.packed(x)
                done["lost"] += float(np.square(layout.unpacked(raw) - x, dtype=np.float64).sum())
                done["squares"] += float(np.square(x, dtype=np.float64).sum())
                done["tokens"] += len(x)
                file.write(raw.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done["pieces"] = last
            done["seconds"] += time.monotonic() - began
            _say(partial, done)
            if report:
                report(done["tokens"], whole)
    about = {name: done[name] for name in ("format", "identity", "pieces", "tokens", "seconds")} | {
        "parts": [list(part) for part in layout.parts],
        "width": layout.width,
        "group": layout.group,
        "bytes_per_token": layout.bytes_per_token,
        # Root of the mean square of what was lost, over that of the numbers.
        "relative_error": (done["lost"] / max(done["squares"], 1e-300)) ** 0.5,
        "sha256": sha256_file(partial / NUMBERS),
    }
    _say(partial, about)


def _say(folder: Path, about: Mapping[str, Any]) -> None:
    beside = folder / (ABOUT + ".partial")
    beside.write_bytes(canonical_json(about))
    beside.replace(folder / ABOUT)


@contextmanager
def _asked(teacher: Any, precision: str) -> Iterator[None]:
    """Within it `teacher` computes as it does for a student in training."""
    device = next(teacher.parameters()).device
    with torch.no_grad(), matrices_in(teacher, precision), autocast(device, precision):
        yield


def _vectors(
    teacher: Any, family: Family, pieces: CorpusFile, chosen: range, layout: Layout, pad_id: int
) -> Iterator[np.ndarray]:
    """Of each piece in `chosen`, in order, what is kept of it: (tokens, numbers), float32."""
    found: dict[int, np.ndarray] = {}
    device = next(teacher.parameters()).device
    for batch in _of_about_one_length(pieces.lengths, chosen):
        given = [pieces[i].ids for i in batch]
        ids = np.full((len(batch), max(map(len, given))), pad_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, of_piece in enumerate(given):
            ids[row, : len(of_piece)], mask[row, : len(of_piece)] = of_piece, 1
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        inside = read(teacher, family, inputs_for(teacher, inputs), layout.parts)
        vectors = torch.cat([inside[part] for part in layout.parts], dim=-1).float().cpu().numpy()
        found |= {i: vectors[row, : len(given[row])] for row, i in enumerate(batch)}
    yield from (found[i] for i in chosen)


def _of_about_one_length(lengths: np.ndarray, chosen: range) -> Iterator[list[int]]:
    """The pieces of `chosen` in batches of at most `POSITIONS` tokens, padding included."""
    batch: list[int] = []
    for i in sorted(chosen, key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > POSITIONS:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def _layout_in(about: Mapping[str, Any]) -> Layout:
    return Layout(tuple(Part(of, layer) for of, layer in about["parts"]), about["width"], about["group"])
