"""A run as a list of stages: each has a folder, and a fingerprint of everything that decides the folder's content.

A stage works in `NAME.partial`, which is renamed to `NAME` when the stage is finished: a folder without `.partial` is whole.

With several processes (`compress.distributed`) the main process owns the folder. The others run the same stages in temporary
folders, whose results are discarded, and end after the last stage. Before a stage, each other node gets a copy of the folder of the
stage before it; no node reads the main process's disk.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from compress import distributed
from compress.models.configurations import CONFIG
from compress.progress import Notify, message, silent
from compress.training.metrics import METRICS, TENSORBOARD
from serve.bundle.manifest import canonical_json
from serve.errors import BadInput
from serve.files import disk_errors_reported, fill, lock_at, output, replacing, vacant
from serve.wording import counted

STATE = "stage.json"
TRAINING = "training"  # checkpoints of a stage under way; its METRICS and TENSORBOARD are kept when it is removed
OURS = "made-by-stillroom"  # an empty file that marks a folder of stages
LOCK = "lock"
SCRATCH = "scratch"
CORPUS = "corpus"  # plain text, tokenised; each node makes its own
PROCESSES = "processes.json"  # how many processes the run began with
CHECKPOINT = "checkpoint.safetensors"  # of a training, in its folder


def free_target(out: Path) -> Path:
    """The absolute path of `out`, where a checkpoint will be written.

    Raises BadInput: it cannot be written there, or is a folder that is not empty.
    """
    target = output(out)
    if not vacant(target, CONFIG):
        raise BadInput(f"--out {out} already exists; it was not changed. Give another folder.")
    return target


class Workdir:
    """The folder of a run's stages, and which of them are finished."""

    def __init__(self, root: Path, notify: Notify = silent) -> None:
        self.root, self.notify = root, notify
        self.seconds: dict[str, float] = {}
        self._whole: set[str] = set()  # finished stages whose files were checked
        # In other processes: whether the next stage is finished; None once the main process continues alone.
        self.next_is_finished: bool | None = None
        self._before: Path | None = None  # the stage before the next one

    def finished(self, name: str, fingerprint: str) -> bool:
        """Whether stage `name` is finished, from the inputs of `fingerprint`. Raises BadInput: it is, but its files are damaged."""
        done = self.root / name
        if _read_json(done / STATE).get("fingerprint") != fingerprint:
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

        An unfinished folder is removed if its inputs were others, and passed to `make` if they were the same. Raises BadInput:
        the disk is full, or the finished folder is damaged.
        """
        from compress.training.checkpoint import progress_in

        done, partial = self.root / name, self.root / f"{name}.partial"
        if not distributed.main():
            if not self.next_is_finished:
                # What a kill leaves there is removed by the next start; the main process's folder is its own.
                with tempfile.TemporaryDirectory(dir=self.root if distributed.node() else None) as scratch:
                    make(Path(scratch))
            self._before = done
            self._follow()
            return done
        finished = distributed.broadcast(self.finished(name, fingerprint))
        if self._before:
            distributed.copy_folder(self._before)
        self._before = done
        if finished:
            self.seconds[name] = float(_read_json(done / STATE)["seconds"])
            return done
        if _read_json(partial / STATE).get("fingerprint") != fingerprint:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_json(partial / STATE, {"fingerprint": fingerprint, "seconds": 0.0})
        if (partial / TRAINING / CHECKPOINT).is_file():
            step = progress_in(partial / TRAINING / CHECKPOINT).step
            message(self.notify, f"  {name} goes on from step {step}, its last checkpoint")
        before = float(_read_json(partial / STATE)["seconds"])
        started = time.monotonic()
        try:
            with disk_errors_reported(partial):
                make(partial)
        finally:
            self.seconds[name] = before + time.monotonic() - started
            if partial.is_dir():
                with suppress(OSError):  # a failure to save the seconds must not hide the stage's own error
                    _write_json(partial / STATE, {"fingerprint": fingerprint, "seconds": self.seconds[name]})
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
        """Move `folder`, of the last stage, to `target`, and remove the other stages."""
        if target.is_dir():
            fill(target, folder, CONFIG)
        else:
            folder.replace(target)
        (target / STATE).unlink()
        self._remove()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Context with an empty folder; at its end the whole work folder is removed. Only the main process enters.

        The remains of a killed call are removed first. Raises BadInput: another run uses this folder.
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
            distributed.only_main()

    def _follow(self) -> None:
        """Wait for the main process's next stage, and for a copy of the one before it; end if it continues alone."""
        self.next_is_finished = distributed.broadcast(None)
        if self.next_is_finished is None:
            distributed.only_main()
        if self._before:
            distributed.copy_folder(self._before)

    def refuse_foreign(self) -> None:
        """Check that the folder is absent, or was made by stillroom.

        Raises BadInput: it holds other files, which a stage might remove.
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
    def locked(self, made_of: str = "") -> Iterator[None]:
        """Context in which no other run uses this folder. With several processes, only the main one continues after it.

        On other nodes than the main process's, `root` is a folder beside this one, for copies of finished stages; it is removed
        at the end. Raises BadInput: another run uses it, or another node has it while the main process's has not.
        """
        folders = distributed.gather(_stages_in(self.root))  # all have looked before the first stage changes it
        with ExitStack() as stack:
            stack.callback(distributed.begin_with, 1)
            try:
                distributed.by_main(lambda: self._take(stack, folders))
                distributed.begin_with(distributed.by_main(lambda: self._began_with(made_of)))
                if distributed.node():
                    self.root = self.root.with_name(f"{self.root.name}.node-{distributed.node()}")
                    if distributed.first_here():
                        stack.enter_context(self._copies())
                    self.root.mkdir(parents=True, exist_ok=True)
                distributed.wait()
                if not distributed.main():
                    self._follow()
                yield
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    stopped = isinstance(error, KeyboardInterrupt)
                    distributed.failed("it was stopped" if stopped else str(error) or type(error).__name__)
                raise
            self.alone()

    def _take(self, stack: ExitStack, folders: list[list[str]]) -> None:
        """Lock the folder in the main process, unless another node has stages that this one lacks."""
        if not folders[0] and any(folders):
            others = [f"process {rank}" for rank, found in enumerate(folders) if found]
            raise BadInput(
                f"The node of the main process has no {self.root}, and the node of {others[0]} has it: the run began there. Start with "
                "that node as node 0 (--node-rank 0), or copy the folder to this one. To begin anew, remove it."
            )
        stack.enter_context(self._lock())

    def _began_with(self, made_of: str) -> int:
        """The number of processes that the run of `made_of` counts as begun with; what follows from it is told."""
        here, begun, kept = distributed.count(), _stages_in(self.root), _read_json(self.root / PROCESSES)
        if kept and kept.get("of") != made_of:  # of a run with other settings, none of whose stages is used
            begun, kept = [], {}
        before = int(kept.get("processes") or (1 if begun else here))
        first = f"This run began with {counted(before, 'process', 'processes')} and goes on with {here}: "
        if before > here:
            message(
                self.notify,
                f"{first}each batch stays cut into as many parts, of which a process computes several one after the other.",
            )
        if before < here:
            message(
                self.notify,
                f"{first}from here on each batch is cut into more parts. The weights will be those of an unbroken run but for rounding, "
                "and for dropout, which each part draws on its own.",
            )
        if max(before, here) > 1:
            _write_json(self.root / PROCESSES, {"processes": max(before, here), "of": made_of})
        return before

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Context in which `root` is this node's folder for copies of finished stages, without those of an earlier call; it is removed at
        the end.
        """
        with self._lock():
            for path in self.root.iterdir():
                if path.is_dir() and path.name != CORPUS:
                    shutil.rmtree(path)
            try:
                yield
            except SystemExit:
                self._remove()
                raise

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.refuse_foreign()
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                file = stack.enter_context((self.root / LOCK).open("w"))
            except FileNotFoundError:  # the run that held it has just removed the folder
                file = None
            if not (file and lock_at(self.root / LOCK, file.fileno())):
                raise BadInput(f"Another run uses {self.root}. Wait until it ends, or give another --out.")
            (self.root / OURS).touch()
            yield


def _damage_in(folder: Path) -> str:
    """What is wrong with the files of a finished stage; empty if they are whole."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    from compress.models.pretrained import check_checkpoint

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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(file: Path, content: dict[str, object]) -> None:
    with replacing(file, alone=True) as beside:
        beside.write_bytes(canonical_json(content))


def _stages_in(root: Path) -> list[str]:
    """The names of the folders of stages in `root`, finished or not."""
    return sorted(path.name for path in root.iterdir() if (path / STATE).is_file()) if root.is_dir() else []
