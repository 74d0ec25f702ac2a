"""A run as a list of stages: each has a folder, and a fingerprint of everything that decides what ends up in it.

A stage works in `NAME.partial` and is renamed to `NAME` when it is finished, so a folder without `.partial` is whole.

Of several processes (`compress.distributed`) the main one has the folder. The others follow it from stage to stage, make each
that it makes in a folder that is thrown away, and end with its last one: what is not training they do in vain.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compress import distributed
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput

STATE = "stage.json"
# Of a training, as `compress.training.loop` and `compress.training.trackers` write them; kept when its checkpoints go.
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRAINING = "training"  # checkpoints of a stage under way
OURS = "made-by-stillroom"  # an empty file that says whose folder this is
LOCK = "lock"
SCRATCH = "scratch"


def free_target(out: Path) -> Path:
    """The whole path of `out`, where a checkpoint is to stand.

    Raises:
        BadInput: something stands there.
    """
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} is there already; nothing in it was touched. Give another folder.")
    return target


def check_writable(out: Path) -> None:
    """Nothing, when `out` can be made where it is to stand.

    Raises:
        BadInput: what is there is no folder, or one that this user may not write in.
    """
    there = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    if not there.is_dir():
        raise BadInput(f"--out {out} cannot be made: {there} is not a folder. Give another place.")
    if not os.access(there, os.W_OK):
        raise BadInput(f"--out {out} cannot be made: this user may not write in {there}. Give another place.")


class Workdir:
    """The folder `OUT.work`, and which stages in it are finished."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self._whole: set[str] = set()  # finished stages whose files were looked at
        # What the main process said of the stage that comes next: whether it is finished. It says none when it goes on alone.
        self.next_is_finished: bool | None = None

    def finished(self, name: str, fingerprint: str) -> bool:
        """Whether stage `name` stands there, made from the inputs that `fingerprint` names.

        Raises:
            BadInput: it does, and its files are damaged.
        """
        done = self.root / name
        if _read_state(done).get("fingerprint") != fingerprint:
            return False
        if distributed.main() and name not in self._whole:
            if fault := _damage_in(done):
                self.alone()  # the others wait for what comes next, and end
                raise BadInput(
                    f"What an earlier call left in {done} is damaged: {fault}. Remove the folder {done} and give the command again: "
                    "this stage is made anew."
                )
            self._whole.add(name)
        return True

    def stage(self, name: str, fingerprint: str, make: Callable[[Path], None]) -> Path:
        """The folder of stage `name`, made by `make(folder)` unless it is there already.

        What a stage of other inputs left is removed; what an unfinished one of the same inputs left is handed to `make`.

        Raises:
            BadInput: there is no room for what it writes, or what is there is damaged.
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
                with suppress(OSError):  # seconds are not worth hiding why it stopped, nor worth stopping for
                    _write_state(partial, {"fingerprint": fingerprint, "seconds": self.seconds[name]})
        metrics = partial / TRAINING / METRICS
        if metrics.is_file() and (metrics.stat().st_size or not (partial / METRICS).is_file()):
            metrics.replace(partial / METRICS)
        if (partial / TRAINING / TENSORBOARD).is_dir() and not (partial / TENSORBOARD).is_dir():
            (partial / TRAINING / TENSORBOARD).replace(partial / TENSORBOARD)
        shutil.rmtree(done, ignore_errors=True)
        partial.replace(done)
        # Only now: a kill before the rename goes on from the checkpoint in it.
        shutil.rmtree(done / TRAINING, ignore_errors=True)
        return done

    def publish(self, folder: Path, target: Path) -> None:
        """Put what the last stage made at `target`, in one step, and remove the others."""
        folder.replace(target)
        (target / STATE).unlink()
        self._remove()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder that goes, and all of the work with it, when it is left; only the main process comes in.

        What a killed call left in it is removed first.

        Raises:
            BadInput: another run is at work here.
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
        """Remove the folder, whose lock this call holds. The lock goes last: what comes after it is the next run's."""
        for path in sorted(self.root.iterdir(), key=lambda path: (path.name == LOCK, path.name == OURS)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the next run is there already
            self.root.rmdir()

    def clear(self, *, but: str) -> None:
        """Remove every stage, finished or not, other than `but`."""
        for folder in self.root.iterdir() if distributed.main() else ():
            if folder.is_dir() and folder.name.removesuffix(".partial") != but:
                shutil.rmtree(folder)

    def alone(self) -> None:
        """Go on without the other processes, which end here: what follows is no training."""
        if distributed.count() > 1:
            distributed.broadcast(None)
            distributed.leave_group()

    def _follow(self) -> None:
        """Wait for what the main process does next; end when it goes on alone."""
        self.next_is_finished = distributed.broadcast(None)
        if self.next_is_finished is None:
            distributed.leave_group()
            raise SystemExit(0)

    def refuse_foreign(self) -> None:
        """Nothing, when the folder is free or ours.

        Raises:
            BadInput: something else stands there, which a stage might remove.
        """
        if not self.root.exists() or (
            self.root.is_dir()
            and ((self.root / OURS).exists() or {path.name for path in self.root.iterdir()} <= {LOCK})
        ):
            return
        raise BadInput(f"{self.root}, where stages would live, is there already and is not ours. Give another --out.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within it no other run works in this folder; of several processes only the main one gets beyond its end.

        Raises:
            BadInput: another one does.
        """
        distributed.wait()  # until all have seen what was there before the first stage
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
                # The run that held it may have removed it since it was opened.
                held = os.path.samestat(os.fstat(file.fileno()), (self.root / LOCK).stat())
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise BadInput(f"Another run is at work in {self.root}. Wait for it, or give another --out.")
            (self.root / OURS).touch()
            yield


def _damage_in(folder: Path) -> str:
    """What is wrong with the files of a finished stage; empty when nothing is."""
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
            return error.message.partition(". ")[0]  # what to do about it is said once
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
