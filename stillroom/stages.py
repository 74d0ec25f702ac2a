"""A run as a list of stages: each has a folder, and a fingerprint of everything that decides what ends up in it.

A stage works in `NAME.partial` and is renamed to `NAME` when it is finished, so a folder without `.partial` is whole.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.bundle import canonical_json
from serve.errors import BadInput

MARK = "stage.json"
METRICS = "metrics.jsonl"  # of a training, as `compress.loop` writes it; kept when its checkpoints go
TRAINING = "training"  # checkpoints of a stage under way
OURS = "made-by-stillroom"  # an empty file that says whose folder this is
# Raised when a change of code makes stages of an older version unfit to be taken over.
STAGE_FORMAT = 3


def fingerprint(*parts: object) -> str:
    """One name for all that `parts` (anything that JSON carries) say."""
    return hashlib.sha256(canonical_json([STAGE_FORMAT, *parts])).hexdigest()


class Work:
    """The folder `OUT.work`, and which stages in it are finished."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}

    def finished(self, name: str, mark: str) -> bool:
        """Whether stage `name` stands there, made from the inputs that `mark` fingerprints."""
        return _read_mark(self.root / name).get("fingerprint") == mark

    def stage(self, name: str, mark: str, make: Callable[[Path], None]) -> Path:
        """The folder of stage `name`, made by `make(folder)` unless it is there already.

        What a stage of other inputs left is removed; what an unfinished one of the same inputs left is handed to `make`.
        """
        done, partial = self.root / name, self.root / f"{name}.partial"
        if self.finished(name, mark):
            self.seconds[name] = float(_read_mark(done)["seconds"])
            return done
        if _read_mark(partial).get("fingerprint") != mark:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_mark(partial, {"fingerprint": mark, "seconds": 0.0})
        before = float(_read_mark(partial)["seconds"])
        started = time.monotonic()
        try:
            make(partial)
        finally:
            self.seconds[name] = before + time.monotonic() - started
            if partial.is_dir():
                _write_mark(partial, {"fingerprint": mark, "seconds": self.seconds[name]})
        metrics = partial / TRAINING / METRICS
        if metrics.is_file() and (metrics.stat().st_size or not (partial / METRICS).is_file()):
            metrics.replace(partial / METRICS)
        shutil.rmtree(done, ignore_errors=True)
        partial.replace(done)
        # Only now: a kill before the rename goes on from the checkpoint in it.
        shutil.rmtree(done / TRAINING, ignore_errors=True)
        return done

    def clear(self, *, but: str) -> None:
        """Remove every stage, finished or not, other than `but`."""
        for folder in self.root.iterdir():
            if folder.is_dir() and folder.name.removesuffix(".partial") != but:
                shutil.rmtree(folder)

    def refuse_foreign(self) -> None:
        """Nothing, when the folder is free or ours.

        Raises:
            BadInput: something else stands there, which a stage might remove.
        """
        if not self.root.exists() or (
            self.root.is_dir() and ((self.root / OURS).exists() or not any(self.root.iterdir()))
        ):
            return
        raise BadInput(f"{self.root}, where stages would live, is there already and is not ours. Give another --out.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other run works in this folder.

        Raises:
            BadInput: another one does.
        """
        self.refuse_foreign()
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / OURS).touch()
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(f"Another run is at work in {self.root}. Wait for it, or give another --out.") from None
            yield


def _read_mark(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_mark(folder: Path, mark: dict[str, object]) -> None:
    beside = folder / (MARK + ".partial")
    beside.write_bytes(canonical_json(mark))
    os.replace(beside, folder / MARK)
