"""A teacher's activations on a corpus, kept on disk: the teacher runs once for many epochs or many students.

The cache holds the hidden states, queries, keys or values that objectives read, in int8: each group of numbers, as wide as an
attention head, is divided by its own scale, 1/127 of its largest magnitude, in float16. The rounding error is measured while
the cache is written. A cache records its teacher, text, parts and precision, and is refused for any other.
"""

import dataclasses
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compress import distributed
from compress.data.batches import Batch, batches_by_length, inputs_for, padded
from compress.data.corpus import CorpusFile, CorpusText
from compress.data.sampler import Sampler
from compress.models.activations import Part, read
from compress.models.precision import autocast, weights_in
from compress.training.loop import device_of_process
from serve.bundle.manifest import canonical_json, sha256_file
from serve.errors import BadInput
from serve.files import disk_errors_reported, locked, replacing

NUMBERS, ABOUT, FORMAT = "numbers.bin", "cache.json", 1
ROUND = 1 << 16  # tokens held in memory and written at once: the most work that a kill loses
POSITIONS = 4_096  # tokens of one batch of the teacher, padding included


@dataclass(frozen=True)
class Layout:
    """The bytes of one token: its numbers in int8, part by part, then the scale of each group in float16."""

    parts: tuple[Part, ...]
    width: int  # of a part
    group: int

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return len(self.parts) * self.width

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token on disk."""
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
        """Float32 (tokens, numbers), rounded, from the result of `packed`."""
        whole = raw[:, : self.numbers].view(np.int8).reshape(len(raw), -1, self.group)
        scales = np.ascontiguousarray(raw[:, self.numbers :]).view(np.float16)
        return (whole * scales.astype(np.float32)[..., None]).reshape(len(raw), -1)


class TeacherCache:
    """A finished cache in `folder`; `lengths` are the tokens of each piece, `about` is its description, `cache.json`."""

    def __init__(self, folder: Path, about: dict[str, Any], lengths: np.ndarray) -> None:
        self.folder, self.about, self.lengths = folder, about, lengths
        parts = tuple(Part(of, layer) for of, layer in about["parts"])
        self.layout = Layout(parts, about["width"], about["group"])
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum(dtype=np.int64)])
        # Held open for the life of this object, so that removing the folder does not stop this run.
        self.numbers = os.open(folder / NUMBERS, os.O_RDONLY)
        weakref.finalize(self, os.close, self.numbers)

    def at(self, rows: Sequence[Sequence[int]], width: int) -> dict[tuple[str, int], Tensor]:
        """Each part of rows of pieces, (rows, width, numbers); padding up to `width` tokens is 0."""
        found = np.zeros((len(rows), width, self.layout.numbers), dtype=np.float32)
        size = self.layout.bytes_per_token
        for row, pieces in enumerate(rows):
            first = 0
            for piece in pieces:
                count = int(self.lengths[piece])
                raw = os.pread(self.numbers, count * size, int(self.starts[piece]) * size)
                part = self.layout.unpacked(np.frombuffer(raw, np.uint8).reshape(count, size))
                found[row, first : first + count] = part
                first += count
        parts = torch.from_numpy(found).chunk(len(self.layout.parts), dim=-1)
        return dict(zip(map(tuple, self.layout.parts), parts, strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True)
class CachedTeacherText:
    """The batches of `text`, each with the teacher's activations."""

    text: CorpusText
    cache: TeacherCache

    @property
    def pad_id(self) -> int:
        """The id that fills padding."""
        return self.text.pad_id

    @property
    def sampler(self) -> Sampler:
        """Chooses the rows of each step."""
        return self.text.sampler

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
        activations = self.cache.at(self.text.pieces_at(step), batch.inputs["input_ids"].shape[1])
        return dataclasses.replace(batch, teacher_activations=activations)


def teacher_cache(
    folder: Path,
    load: Callable[[], Any],
    pieces: CorpusFile,
    parts: Sequence[Part],
    *,
    pad_id: int,
    precision: str,
    identity: Mapping[str, str],
    device: str = "auto",
    report: Callable[[int, int], None] | None = None,
) -> TeacherCache:
    """The cache in `folder`, written first if absent. After a kill, writing resumes; it loses `ROUND` tokens at most.

    Processes that train together compute a share of the numbers each, and the main one writes; every other node then gets a copy at
    `folder`, unless it has one. Of trainings that ask for the same folder one writes.

    Args:
        folder: made if absent.
        load: loads the teacher, an encoder; called only if the cache has to be written.
        pieces: the text.
        parts: the vectors that objectives read: hidden states, queries, keys or values.
        pad_id: the id that fills padding.
        precision: of the teacher's matrix products.
        identity: by name, what else the numbers depend on: the teacher's weights, the text.
        device: the teacher's: cpu, cuda, or auto: a GPU if there is one.
        report: called with the tokens done and the tokens in all.

    Raises:
        BadInput: `folder` holds something else, another cache, or a cache that was changed; or the disk is full.
    """
    identity = identity_of(identity, parts, precision)
    place = device_of_process(device)  # all processes join here, before one of them takes the lock
    partial = _partial(folder)
    with ExitStack() as stack:

        def missing() -> dict[str, Any] | None:
            """None if `folder` holds the cache, otherwise the progress of writing it, whose lock is held then."""
            stack.enter_context(locked(_lock_file(folder)))
            check_cache(folder, identity)
            return None if (folder / ABOUT).is_file() else _begun(partial, identity)

        done = distributed.by_main(missing)
        if done is not None:
            model = load().eval().to(place)
            width = int(model.config.hidden_size)
            layout = Layout(tuple(parts), width, width // int(model.config.num_attention_heads))
            distributed.by_main(lambda: _check_room(partial, pieces, layout, done))
            with disk_errors_reported(partial):
                _write(partial, done, model, pieces, layout, pad_id, precision, report)
                if distributed.main():
                    partial.replace(folder)  # `folder` may exist if it is empty
    whole = distributed.broadcast(_about(folder))
    if any(distributed.gather(_about(folder) != whole)):  # every node that lacks it gets a copy
        if distributed.node():
            check_cache(folder, identity)
        distributed.copy_folder(folder)
    # Several processes may read at once.
    with locked(_lock_file(folder), shared=True) if distributed.first_here() else nullcontext():
        about = _about(folder)
        if distributed.first_here() and about["sha256"] != sha256_file(folder / NUMBERS):
            raise BadInput(
                f"The cache {folder} was changed after it was written: its SHA-256 differs. Remove it; it is then made again."
            )
        return TeacherCache(folder, about, pieces.lengths)


def _lock_file(folder: Path) -> Path:
    """The file that a training locks while it writes `folder`, or reads it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(folder.name + ".lock")


def identity_of(others: Mapping[str, str], parts: Sequence[Part], precision: str) -> dict[str, str]:
    """By name, everything that the numbers of a cache depend on."""
    named = ", ".join(f"{part.of} of layer {part.layer}" for part in parts)
    return {**others, "part of the teacher": named, "precision": precision}


def check_cache(folder: Path, identity: Mapping[str, str]) -> None:
    """Check that `folder` holds a cache of this `identity`, or that one can be written there.

    Raises:
        BadInput: `folder` holds something else.
    """
    for place in (folder, _partial(folder)):
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            continue
        about = _about(place)
        if not about:
            raise BadInput(
                f"{place} exists and is not a teacher cache; nothing was written. Give another folder, or remove this one."
            )
        theirs = about.get("identity", {})
        other = [name for name in identity if theirs.get(name) != identity[name]]
        if about.get("format") != FORMAT:
            other = ["version of stillroom"]
        if other:
            raise BadInput(
                f"The cache {place} was written for another {' and another '.join(other)}. Remove it, or give another folder."
            )


def _partial(folder: Path) -> Path:
    """The folder in which a cache is written before it is renamed."""
    return folder.with_name(folder.name + ".partial")


def _about(folder: Path) -> dict[str, Any]:
    """The description of a cache, finished or not; empty if it is absent or cannot be read."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _begun(partial: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """The progress of the cache in `partial`, which is made if absent and remade if numbers are missing."""
    done = _about(partial)
    size = (partial / NUMBERS).stat().st_size if (partial / NUMBERS).is_file() else 0
    if not done or size < done["tokens"] * done["bytes_per_token"]:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        done = {"format": FORMAT, "identity": dict(identity), "pieces": 0, "tokens": 0, "seconds": 0.0}
        done |= {"bytes_per_token": 0, "lost": 0.0, "squares": 0.0}
        _write_about(partial, done)
    return done


def _check_room(partial: Path, pieces: CorpusFile, layout: Layout, done: Mapping[str, Any]) -> None:
    """Check that the disk has room for the rest of the cache.

    Raises:
        BadInput: it has not.
    """
    left = int(pieces.lengths.sum(dtype=np.int64)) - done["tokens"]
    needed, free = left * layout.bytes_per_token, shutil.disk_usage(partial).free
    if needed > free:
        if not done["pieces"]:
            shutil.rmtree(partial)
        raise BadInput(
            f"The teacher cache needs {needed / 1e9:.1f} GB for {left:,} tokens of {layout.bytes_per_token:,} bytes, and only "
            f"{free / 1e9:.1f} GB are free on the disk of {partial.name}. Free some space, or give another folder, a smaller corpus, or no "
            "cache."
        )


def _write(
    partial: Path,
    done: dict[str, Any],
    teacher: Any,
    pieces: CorpusFile,
    layout: Layout,
    pad_id: int,
    precision: str,
    report: Callable[[int, int], None] | None,
) -> None:
    """Write the numbers that `partial` lacks; `done` is its progress."""
    whole = int(pieces.lengths.sum(dtype=np.int64))
    done["bytes_per_token"] = layout.bytes_per_token
    device = next(teacher.parameters()).device
    with (
        open(partial / NUMBERS if distributed.main() else os.devnull, "ab") as file,
        torch.no_grad(),
        weights_in(teacher, precision),  # the teacher computes as it does while a student trains
        autocast(device, precision),
    ):
        if distributed.main():  # what a kill left half written
            file.truncate(done["tokens"] * done["bytes_per_token"])
        for some in _rounds(pieces.lengths, done["pieces"]):
            began = time.monotonic()
            parts = distributed.collect(_answers(teacher, pieces, some, layout, pad_id))
            if parts is None:
                continue
            found = {i: each for part in parts for i, each in part.items()}
            for batch in batches_by_length(pieces.lengths[some.start : some.stop], POSITIONS):
                for i in batch:
                    done["lost"] += found[i].lost
                    done["squares"] += found[i].squares
            for i in range(len(some)):
                file.write(found[i].raw.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done["pieces"] = some.stop
            done["tokens"] += int(pieces.lengths[some.start : some.stop].sum(dtype=np.int64))
            done["seconds"] += time.monotonic() - began
            _write_about(partial, done)
            if report:
                report(done["tokens"], whole)
    if not distributed.main():
        return
    about = done | {
        "parts": [list(part) for part in layout.parts],
        "width": layout.width,
        "group": layout.group,
        # Root mean square of the rounding error, divided by that of the numbers.
        "relative_error": (done["lost"] / max(done["squares"], 1e-300)) ** 0.5,
        "sha256": sha256_file(partial / NUMBERS),
    }
    _write_about(partial, about)


def _write_about(folder: Path, about: Mapping[str, Any]) -> None:
    with replacing(folder / ABOUT, alone=True, synced=True) as beside:
        beside.write_bytes(canonical_json(about))


def _rounds(lengths: np.ndarray, first: int) -> Iterator[range]:
    """Ranges of the pieces from `first` on, of about `ROUND` tokens each."""
    tokens = 0
    for i in range(first, len(lengths)):
        tokens += int(lengths[i])
        if tokens >= ROUND or i + 1 == len(lengths):
            yield range(first, i + 1)
            first, tokens = i + 1, 0


class _Answer(NamedTuple):
    """The packed bytes of one piece, and the sums of squares of their rounding error and of the numbers."""

    raw: np.ndarray
    lost: float
    squares: float


def _answers(teacher: Any, pieces: CorpusFile, chosen: range, layout: Layout, pad_id: int) -> dict[int, _Answer]:
    """The answers on this process's share of the pieces in `chosen`, by their place in it. What is in one batch is the same for all.

    Raises:
        BadInput: the teacher's numbers are not finite.
    """
    found: dict[int, _Answer] = {}
    device = next(teacher.parameters()).device
    for number, batch in enumerate(batches_by_length(pieces.lengths[chosen.start : chosen.stop], POSITIONS)):
        if number % distributed.count() != distributed.rank():
            continue
        given = [pieces[chosen[i]].ids for i in batch]
        ids, mask = padded(given, pad_id), padded([np.ones_like(ids) for ids in given], 0)
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        inside = read(teacher, inputs_for(teacher, inputs), layout.parts)
        vectors = torch.cat([inside[part] for part in layout.parts], dim=-1).float().cpu().numpy()
        for row, i in enumerate(batch):
            x = vectors[row, : len(given[row])]
            if not np.isfinite(x).all():
                raise BadInput(
                    "The teacher's activations are not finite; the range of fp16 may be too small. Give --precision bf16 or fp32."
                )
            raw = layout.packed(x)
            lost = float(np.square(layout.unpacked(raw) - x, dtype=np.float64).sum())
            found[i] = _Answer(raw, lost, float(np.square(x, dtype=np.float64).sum()))
    return found
