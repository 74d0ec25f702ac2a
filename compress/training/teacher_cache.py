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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.data.batches import Batch, batches_by_length, inputs_for, padded
from compress.data.corpus import CorpusFile, CorpusText
from compress.data.sampler import Sampler
from compress.models.activations import Part, read
from compress.models.families import Family
from compress.models.precision import autocast, matrices_in
from compress.training.checkpoint import full_disk_reported
from compress.training.loop import device_of_process
from serve.bundle.manifest import canonical_json, sha256_file
from serve.errors import BadInput

NUMBERS, ABOUT, FORMAT = "numbers.bin", "cache.json", 1
ROUND = 1 << 16  # tokens that are held and written at once: the work that a kill loses
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
    """A finished cache in `folder` of the pieces that `lengths` are the tokens of; `about` is what it says of itself."""

    def __init__(self, folder: Path, about: dict[str, Any], lengths: np.ndarray) -> None:
        self.folder, self.about, self.lengths = folder, about, lengths
        parts = tuple(Part(of, layer) for of, layer in about["parts"])
        self.layout = Layout(parts, about["width"], about["group"])
        self.starts = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum(dtype=np.int64)])
        # Held open as long as this is: who removes the folder for another run takes nothing from this one.
        self.numbers = os.open(folder / NUMBERS, os.O_RDONLY)
        weakref.finalize(self, os.close, self.numbers)

    def at(self, chosen: Sequence[int], width: int) -> dict[tuple[str, int], Tensor]:
        """Of the pieces `chosen` each part (pieces, width, numbers), 0 where they are padded to `width` tokens."""
        found = np.zeros((len(chosen), width, self.layout.numbers), dtype=np.float32)
        size = self.layout.bytes_per_token
        for row, piece in enumerate(chosen):
            count = int(self.lengths[piece])
            raw = os.pread(self.numbers, count * size, int(self.starts[piece]) * size)
            found[row, :count] = self.layout.unpacked(np.frombuffer(raw, np.uint8).reshape(count, size))
        parts = torch.from_numpy(found).chunk(len(self.layout.parts), dim=-1)
        return dict(zip(map(tuple, self.layout.parts), parts, strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True)
class CachedTeacherText:
    """The batches of `text`, each with what the teacher computes of it."""

    text: CorpusText
    cache: TeacherCache

    @property
    def pad_id(self) -> int:
        """That of the text."""
        return self.text.pad_id

    @property
    def sampler(self) -> Sampler:
        """Which pieces each step sees."""
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
        activations = self.cache.at(self.sampler.at(step).tolist(), batch.inputs["input_ids"].shape[1])
        return dataclasses.replace(batch, teacher_activations=activations)


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
    device: str = "auto",
    report: Callable[[int, int], None] | None = None,
) -> TeacherCache:
    """The cache in `folder`: the one that stands there, or a new one. A kill in the middle loses a moment's work.

    Several processes may ask for the same folder: one of them writes.

    Args:
        folder: made if absent.
        load: gives the teacher, an encoder of `family`; called if it has to be asked.
        family: where it keeps its parts.
        pieces: the text.
        parts: vectors that objectives read (`compress.models.activations.VECTORS`).
        pad_id: the id that fills batches.
        precision: in which the teacher computes.
        identity: what else the numbers depend on, by name: the teacher's weights, the text.
        device: where it computes: cpu, cuda, or auto: a GPU where there is one.
        report: told of tokens done and in all.

    Raises:
        BadInput: `folder` holds something else, a cache of other things, or one that was changed; or there is no room.
    """
    identity = identity_of(identity, parts, precision)
    place = device_of_process(device)  # by all, before one of them goes on alone
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_cache(folder, identity)
        if not (folder / ABOUT).is_file():
            partial = _partial(folder)
            done = _begun(partial, identity)
            model = load().eval().to(place)
            width = int(model.config.hidden_size)
            layout = Layout(tuple(parts), width, width // int(model.config.num_attention_heads))
            _check_room(partial, pieces, layout, done)
            with full_disk_reported(partial):
                _write(partial, done, model, family, pieces, layout, pad_id, precision, report)
                partial.replace(folder)  # an empty folder may stand there
        fcntl.flock(lock, fcntl.LOCK_SH)  # all may read it at once
        about = _about(folder)
        if about["sha256"] != sha256_file(folder / NUMBERS):
            raise BadInput(
                f"The cache {folder} is not as it was written: its SHA-256 has changed. Remove it, and it is made anew."
            )
        return TeacherCache(folder, about, pieces.lengths)


def identity_of(others: Mapping[str, str], parts: Sequence[Part], precision: str) -> dict[str, str]:
    """What the numbers of a cache depend on, by name."""
    named = ", ".join(f"{part.of} of layer {part.layer}" for part in parts)
    return {**others, "part of the teacher": named, "precision": precision}


def check_cache(folder: Path, identity: Mapping[str, str]) -> None:
    """Nothing, when a cache of what `identity` says stands in `folder` or can be written there.

    Raises:
        BadInput: something else stands there.
    """
    for place in (folder, _partial(folder)):
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            continue
        about = _about(place)
        if not about:
            raise BadInput(
                f"{place} is there already and holds no teacher's cache; nothing was written. Give another folder, or remove it."
            )
        theirs = about.get("identity", {})
        other = [name for name in identity if theirs.get(name) != identity[name]]
        if about.get("format") != FORMAT:
            other = ["version of stillroom"]
        if other:
            raise BadInput(
                f"The cache {place} is not of this {' and this '.join(other)}; what it holds would teach something else. "
                "Remove it, or give another folder."
            )


def _partial(folder: Path) -> Path:
    """Where a cache is written."""
    return folder.with_name(folder.name + ".partial")


def _about(folder: Path) -> dict[str, Any]:
    """What a cache, finished or not, says of itself; nothing where there is none that can be read."""
    try:
        said = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _begun(partial: Path, identity: Mapping[str, str]) -> dict[str, Any]:
    """How far the cache in `partial` is written; it is made if absent, and anew if numbers are missing."""
    done = _about(partial)
    size = (partial / NUMBERS).stat().st_size if (partial / NUMBERS).is_file() else 0
    if not done or size < done["tokens"] * done["bytes_per_token"]:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        done = {"format": FORMAT, "identity": dict(identity), "pieces": 0, "tokens": 0, "seconds": 0.0}
        done |= {"bytes_per_token": 0, "lost": 0.0, "squares": 0.0}
        _say(partial, done)
    return done


def _check_room(partial: Path, pieces: CorpusFile, layout: Layout, done: Mapping[str, Any]) -> None:
    """Nothing, when what is still to be written has room.

    Raises:
        BadInput: it has not.
    """
    left = int(pieces.lengths.sum(dtype=np.int64)) - done["tokens"]
    needed, free = left * layout.bytes_per_token, shutil.disk_usage(partial).free
    if needed > free:
        if not done["pieces"]:
            shutil.rmtree(partial)
        raise BadInput(
            f"{left:,} tokens are to be kept at {layout.bytes_per_token:,} bytes each, {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
            f"are free where {partial.name} is to stand. Make room, or give another folder, a smaller corpus, or no cache."
        )


def _write(
    partial: Path,
    done: dict[str, Any],
    teacher: Any,
    family: Family,
    pieces: CorpusFile,
    layout: Layout,
    pad_id: int,
    precision: str,
    report: Callable[[int, int], None] | None,
) -> None:
    """All numbers into `partial`, from where `done` says that they end."""
    whole = int(pieces.lengths.sum(dtype=np.int64))
    done["bytes_per_token"] = layout.bytes_per_token
    with (partial / NUMBERS).open("ab") as file, _asked(teacher, precision):
        file.truncate(done["tokens"] * layout.bytes_per_token)
        for some in _rounds(pieces.lengths, done["pieces"]):
            began = time.monotonic()
            for raw in _answers(teacher, family, pieces, some, layout, pad_id, done):
                file.write(raw.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done["pieces"] = some.stop
            done["tokens"] += int(pieces.lengths[some.start : some.stop].sum(dtype=np.int64))
            done["seconds"] += time.monotonic() - began
            _say(partial, done)
            if report:
                report(done["tokens"], whole)
    about = done | {
        "parts": [list(part) for part in layout.parts],
        "width": layout.width,
        "group": layout.group,
        # Root of the mean square of what was lost, over that of the numbers.
        "relative_error": (done["lost"] / max(done["squares"], 1e-300)) ** 0.5,
        "sha256": sha256_file(partial / NUMBERS),
    }
    _say(partial, about)


def _say(folder: Path, about: Mapping[str, Any]) -> None:
    beside = folder / (ABOUT + ".partial")
    with beside.open("wb") as file:
        file.write(canonical_json(about))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / ABOUT)


@contextmanager
def _asked(teacher: Any, precision: str) -> Iterator[None]:
    """Within it `teacher` computes as it does for a student in training."""
    device = next(teacher.parameters()).device
    with torch.no_grad(), matrices_in(teacher, precision), autocast(device, precision):
        yield


def _rounds(lengths: np.ndarray, first: int) -> Iterator[range]:
    """The pieces from `first` on, about `ROUND` tokens at a time."""
    tokens = 0
    for i in range(first, len(lengths)):
        tokens += int(lengths[i])
        if tokens >= ROUND or i + 1 == len(lengths):
            yield range(first, i + 1)
            first, tokens = i + 1, 0


def _answers(
    teacher: Any,
    family: Family,
    pieces: CorpusFile,
    chosen: range,
    layout: Layout,
    pad_id: int,
    done: dict[str, Any],
) -> Iterator[np.ndarray]:
    """Of each piece in `chosen`, in order, what is kept of it as bytes; what is lost is added up in `done`.

    Raises:
        BadInput: the teacher's numbers are not finite.
    """
    found: dict[int, np.ndarray] = {}
    device = next(teacher.parameters()).device
    for batch in batches_by_length(pieces.lengths[chosen.start : chosen.stop], POSITIONS):
        given = [pieces[chosen[i]].ids for i in batch]
        ids, mask = padded(given, pad_id), padded([np.ones_like(ids) for ids in given], 0)
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        inside = read(teacher, family, inputs_for(teacher, inputs), layout.parts)
        vectors = torch.cat([inside[part] for part in layout.parts], dim=-1).float().cpu().numpy()
        for row, i in enumerate(batch):
            x = vectors[row, : len(given[row])]
            if not np.isfinite(x).all():
                raise BadInput(
                    "The teacher computes numbers that are not finite; fp16 may be too small for them. Take bf16 or fp32."
                )
            found[i] = layout.packed(x)
            done["lost"] += float(np.square(layout.unpacked(found[i]) - x, dtype=np.float64).sum())
            done["squares"] += float(np.square(x, dtype=np.float64).sum())
    yield from (found[i] for i in range(len(chosen)))
