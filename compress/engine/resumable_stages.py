"""A run as a list of stages: each has a folder, and a fingerprint of everything that decides the folder's content.

A stage works in `NAME.partial`, which is renamed to `NAME` when the stage is finished: a folder without `.partial` is whole.

With several processes (`compress.distributed`) the main process owns the folder. The others run the same stages in temporary
folders, whose results are discarded, and end after the last stage.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compress import distributed
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

STATE = "stage.json"
# Written by `compress.training.loop` and `compress.training.trackers`; kept when the training's checkpoints are removed.
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRAINING = "training"  # checkpoints of a stage under way
OURS = "made-by-stillroom"  # an empty file that marks a folder of stages
LOCK = "lock"
SCRATCH = "scratch"


def free_target(out: Path) -> Path:
    """The absolute path of `out`, where a checkpoint will be written.

    Raises:
        BadInput: `out` is a file, or a folder that is not empty.
    """
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} already exists; it was not changed. Give another folder.")
    return target


def check_writable(out: Path) -> None:
    """Check that `out` can be created.

    Raises:
        BadInput: its nearest existing parent is not a folder, or not writable by this user.
    """
    there = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not there.is_dir():
        raise BadInput(f"--out {out} cannot be created: {there} is not a folder. Give another path.")
    if not os.access(there, os.W_OK):
        raise BadInput(f"--out {out} cannot be created: this user may not write in {there}. Give another path.")


class Workdir:
    """The folder of a run's stages, and which of them are finished."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self._whole: set[str] = set()  # finished stages whose files were checked
        # In other processes: whether the next stage is finished; None once the main process continues alone.
        self.next_is_finished: bool | None = None

    def finished(self, name: str, fingerprint: str) -> bool:
        """Whether stage `name` is finished, from the inputs of `fingerprint`.

        Raises:
            BadInput: it is, but its files are damaged.
        """
        done = self.root / name
        if _read_state(done).get("fingerprint") != fingerprint:
            return False
        if distributed.main() and name not in self._whole:
            if fault := _damage_in(done):
                self.alone()  # ends the other processes, which wait for the next stage
                raise BadInput(
                    f"The folder {done} of an earlier call is damaged: {fault}. Remove it and run the command again, which repeats "
                    "this stage."
                )
            self._whole.add(name)
        return True

    def stage(self, name: str, fingerprint: str, make: Callable[[Path], None]) -> Path:
        """The folder of stage `name`; `make(folder)` fills it unless it is finished.

        An unfinished folder is removed if its inputs were others, and passed to `make` if they were the same.

        Raises:
            BadInput: the disk is full, or the finished folder is damaged.
        """
        from compress.training.checkpoint import full_disk_reported

        done, partial = self.root / name, self.root / f"{name}.partial"
        if not distributed.main():
            if not self.next_is_finished:
                with tempfile.TemporaryDirectory() as scratch:
                    make(Path(scratch))
            self._follow()
            return done
        if distributed.broadcast(self.finished(name, fingerprint)):
            self.seconds[name] = float(_read_state(done)["seconds"])
            return done
        if _read_state(partial).get("fingerprint") != fingerprint:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_state(partial, {"fingerprint": fingerprint, "seconds": 0.0})
        before = float(_read_state(partial)["seconds"])
        started = time.monotonic()
        try:
            with full_disk_reported(partial):
                make(partial)
        finally:
            self.seconds[name] = before + time.monotonic() - started
            if partial.is_dir():
                with suppress(OSError):  # a failure to save the seconds must not hide the stage's own error
                    _write_state(partial, {"fingerprint": fingerprint, "seconds": self.seconds[name]})
        metrics = partial / TRAINING / METRICS
        if metrics.is_file() and (metrics.stat().st_size or not (partial / METRICS).is_file()):
            metrics.replace(partial / METRICS)
        if (partial / TRAINING / TENSORBOARD).is_dir() and not (partial / TENSORBOARD).is_dir():
            (partial / TRAINING / TENSORBOARD).replace(partial / TENSORBOARD)
        shutil.rmtree(done, ignore_errors=True)
        partial.replace(done)
        # Removed last: after a kill before the rename, the stage resumes from the checkpoint in it.
        shutil.rmtree(done / TRAINING, ignore_errors=True)
        return done

    def publish(self, folder: Path, target: Path) -> None:
        """Rename `folder`, of the last stage, to `target`, and remove the other stages."""
        folder.replace(target)
        (target / STATE).unlink()
        self._remove()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Context with an empty folder; at its end the whole work folder is removed. Only the main process enters.

        The remains of a killed call are removed first.

        Raises:
            BadInput: another run uses this folder.
        """
        with self.locked():
            self.alone()
            folder = self.root / SCRATCH
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                self._remove()

    def _remove(self) -> None:
        """Remove the folder, whose lock this call holds. The lock is removed last, as the next run may then begin."""
        for path in sorted(self.root.iterdir(), key=lambda path: (path.name == LOCK, path.name == OURS)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the next run has begun
            self.root.rmdir()

    def clear(self, *, but: Collection[str]) -> None:
        """Remove every stage, finished or not, that is not in `but`."""
        for folder in self.root.iterdir() if distributed.main() else ():
            if folder.is_dir() and folder.name.removesuffix(".partial") not in but:
                shutil.rmtree(folder)

    def alone(self) -> None:
        """Continue in the main process only; the others end here, because no training follows."""
        if distributed.count() > 1:
            distributed.broadcast(None)
            distributed.leave_group()

    def _follow(self) -> None:
        """Wait for the main process's next stage; end if it continues alone."""
        self.next_is_finished = distributed.broadcast(None)
        if self.next_is_finished is None:
            distributed.leave_group()
            raise SystemExit(0)

    def refuse_foreign(self) -> None:
        """Check that the folder is absent, or was made by stillroom.

        Raises:
            BadInput: it holds other files, which a stage might remove.
        """
        if not self.root.exists() or (
            self.root.is_dir()
            and ((self.root / OURS).exists() or {path.name for path in self.root.iterdir()} <= {LOCK})
        ):
            return
        raise BadInput(
            f"{self.root}, the folder for stages, already exists and stillroom did not make it. Give another --out."
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which no other run uses this folder. With several processes, only the main one continues after it.

        Raises:
            BadInput: another run uses it.
        """
        distributed.wait()  # all processes must have checked the folder before the first stage changes it
        fault = ""
        with ExitStack() as stack:
            if distributed.main():
                try:
                    stack.enter_context(self._lock())
                except BadInput as error:
                    fault = error.message
            fault = distributed.broadcast(fault)
            if fault:
                raise BadInput(fault)
            if not distributed.main():
                self._follow()
            yield
            self.alone()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.refuse_foreign()
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                file = stack.enter_context((self.root / LOCK).open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The run that held the lock may have removed the file since it was opened.
                held = os.path.samestat(os.fstat(file.fileno()), (self.root / LOCK).stat())
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise BadInput(f"Another run uses {self.root}. Wait until it ends, or give another --out.")
            (self.root / OURS).touch()
            yield


def _damage_in(folder: Path) -> str:
    """What is wrong with the files of a finished stage; empty if they are whole."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    from compress.models.pretrained import CONFIG, check_checkpoint

    for file in sorted(folder.iterdir()):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".npy":
                np.load(file, mmap_mode="r", allow_pickle=False)
            elif file.suffix == ".safetensors":
                with safe_open(file, "np"):
                    pass
        except (OSError, ValueError, EOFError, SafetensorError) as error:
            return f"{file.name} cannot be read ({' '.join(str(error).split())})"
    if (folder / CONFIG).is_file():
        try:
            check_checkpoint(folder, "its checkpoint")
        except BadInput as error:
            return error.message.partition(". ")[0]  # without the remedy, which the caller states
    return ""


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_state(folder: Path, state: dict[str, object]) -> None:
    beside = folder / (STATE + ".partial")
    beside.write_bytes(canonical_json(state))
    os.replace(beside, folder / STATE)
