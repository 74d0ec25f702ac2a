"""What the tests of several nodes run in a process of each: main([JOB, FOLDER, ...]). Each node has folders of its own."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patience import PATIENCE_S

from compress import distributed, peers
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import check_same_inputs
from serve.errors import BadInput

if TYPE_CHECKING:
    from compress.runs.task_inputs import TaskInputs
    from compress.training.teacher_cache import TeacherCache


@dataclasses.dataclass(frozen=True)
class Settings:
    batch: int
    out: str


def stages(folder: Path) -> None:
    """Two stages; the second one copies what the first left, in each process from its own node."""

    def first(made: Path) -> None:
        (made / "deep").mkdir()
        (made / "deep" / "weights.txt").write_text(
            "of the main process" if distributed.main() else "of another process"
        )
        (made / "large.bin").write_bytes(bytes(range(256)) * 200_000)  # several chunks

    work = Workdir(folder / "work")
    with work.locked():
        before = work.stage("first", "mark", first)
        read = (before / "deep" / "weights.txt").read_text(), (before / "large.bin").stat().st_size, str(before)
        work.stage("second", "mark", lambda made: (made / "read.txt").write_text(read[0]) and None)
        (folder / "read.txt").write_text(repr(read))
        third = work.stage("third", "mark", lambda made: None)
        work.publish(third, folder / "out")


def differ(folder: Path) -> None:
    """Each process meets the fault itself, though the main one ends first."""
    distributed.meet(say)
    settings = Settings(16 if distributed.main() else 32, str(folder))
    check_same_inputs(settings, {"--data": "one" if distributed.main() else "another", "--teacher": "the same"})


def killed(folder: Path, *, main: bool) -> None:
    """One process is killed while the other waits for it in a collective operation."""
    peers.SUSPECT_S = 2.0  # a connection that breaks is that of the one that was killed
    distributed.meet(say)
    distributed.join("cpu")
    distributed.wait()
    if distributed.main() == main:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.broadcast(None) if main else distributed.gather(None)


def stopped(folder: Path) -> None:
    """One process stands still, as on a node that is cut off, and no connection breaks."""
    distributed.meet(say)
    distributed.join("cpu")
    distributed.wait()
    if not distributed.main():
        os.kill(os.getpid(), signal.SIGSTOP)
    peers.SILENT_S = 3.0
    time.sleep(PATIENCE_S)


def failed(folder: Path) -> None:
    """One process cannot go on, while the main one works alone."""
    peers.OWN_FAULT_S = 0.5
    distributed.meet(say)
    if not distributed.main():
        raise BadInput("the disk of this node is full.")
    time.sleep(PATIENCE_S)


def teacher_answers(folder: Path) -> None:
    """The soft labels of a teacher and the cache of another one, of which each process computes its share."""
    from compress.runs.soft_labels import make_soft_labels  # it loads much that the other jobs do not need

    (folder / "soft").mkdir()
    make_soft_labels(folder / "soft", task_inputs(folder), folder.parent / "tuned")
    (folder / "about.json").write_text(json.dumps(cached(folder).about))


def task_inputs(folder: Path) -> "TaskInputs":
    from compress.runs.open_task import open_task
    from compress.settings import TaskSettings

    shared, shape = folder.parent, "layers=2,hidden=32,heads=4,ffn=32"
    more: dict[str, Any] = {"threads": 1, "augment": 1, "folds": 2, "device": "cpu"}
    teacher, data = str(shared / "teacher"), str(shared / "data")
    settings = TaskSettings(task="text-classification", student=shape, teacher=teacher, data=data, **more)
    return open_task(settings, folder / "out")


def cached(folder: Path) -> "TeacherCache":
    """A cache of thirty pieces, in rounds and batches of a few."""
    from encoders import encoder
    from every_stage import thirty_pieces

    from compress.models.activations import Part
    from compress.training import teacher_cache as caches

    caches.ROUND, caches.POSITIONS = 50, 30
    parts, more = [Part("hidden", 4), Part("keys", 3)], {"pad_id": 0, "precision": "fp32", "device": "cpu"}
    pieces = thirty_pieces(folder / "corpus")
    return caches.teacher_cache(folder / "cache", lambda: encoder("bert"), pieces, parts, identity={}, **more)


def say(message: str) -> None:
    sys.stderr.write(f"lost: {message}\n")


JOBS = {
    "teacher-answers": teacher_answers,
    "stages": stages,
    "differ": differ,
    "killed": lambda folder: killed(folder, main=False),
    "killed-main": lambda folder: killed(folder, main=True),
    "stopped": stopped,
    "failed": failed,
}


def main(arguments: Sequence[str]) -> int:
    try:
        for job, folder in zip(arguments[::2], arguments[1::2], strict=True):
            JOBS[job](Path(folder))
    except BadInput as error:
        distributed.failed(error.message)
        sys.stderr.write(f"bad input: {error.message}\n")
        return 2
    return 0
