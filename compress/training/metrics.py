"""What a training reports: `metrics.jsonl`, trackers, and the speed, padding and waiting of its batches. No torch.

Trackers are TensorBoard, Weights & Biases or MLflow, through accelerate.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import distributed
from serve.errors import BadInput
from serve.files import disk_errors_reported, replacing
from serve.wording import one_of

if TYPE_CHECKING:
    from torch import Tensor

    from compress.data.batches import Batch

METRICS = "metrics.jsonl"
# Each name is also that of the package it needs. TensorBoard's files go to a folder of its name beside the checkpoints.
TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "mlflow")
PROJECT = "stillroom"


def check_trackers(names: Sequence[str]) -> None:
    """Check that each of `names` is a tracker whose package is installed.

    Raises:
        BadInput: one is unknown or not installed; the message says what to install.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise BadInput(f"--tracker {', '.join(unknown)} is not known. Give {one_of(TRACKERS)}.")
    if names:
        from accelerate.tracking import get_available_trackers

        there = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
        missing = [name for name in names if name not in there]
        if missing:
            raise BadInput(
                f"--tracker {' and '.join(missing)} needs a package that is not installed. Run: pip install {' '.join(missing)}"
            )


class Metrics:
    """The metrics of a training: a file with a JSON line for each reported step, and the `trackers`, which record `settings` too.

    Lines of steps after `step` are removed from the file. With several processes only the main one writes. Without trackers nothing of
    accelerate is loaded.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        trackers: Sequence[str],
        settings: dict[str, Any],
        batches: "Prefetcher | None",
    ) -> None:
        self.file = folder / METRICS
        self.batches = batches
        self.started = time.monotonic()
        self._accelerator: Any = None
        if not distributed.main():
            return
        check_trackers(trackers)
        if trackers:
            from accelerate import Accelerator

            self._accelerator = Accelerator(log_with=list(trackers), project_dir=folder / TENSORBOARD)
            self._accelerator.init_trackers(PROJECT, settings)
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True) if self.file.is_file() else []
        # A kill may leave half a line, and lines of steps that are trained again.
        kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]
        with disk_errors_reported(self.file), replacing(self.file, alone=True) as beside:
            beside.write_text("".join(kept), encoding="utf-8")

    def speed(self) -> dict[str, float]:
        """Averages over all steps since training started or resumed; empty without `batches`.

        `tokens_per_s` counts real tokens, `padded_share` is padding's share of the tokens computed, `waiting_share` the share
        of time spent waiting for batches.
        """
        if self.batches is None:
            return {}
        seconds = time.monotonic() - self.started
        return {
            "tokens_per_s": self.batches.tokens / seconds,
            "padded_share": 1 - self.batches.tokens / max(1, self.batches.positions),
            "waiting_share": self.batches.waited_s / seconds,
        }

    def write(
        self, step: int, loss: float, terms: "dict[str, Tensor]", learning_rate: float, speed: dict[str, float]
    ) -> None:
        """Add the line of one step.

        Raises:
            BadInput: the disk is full.
        """
        if not distributed.main():
            return
        line: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "terms": {name: term.item() for name, term in terms.items()},
            "learning_rate": learning_rate,
            **speed,
        }
        with disk_errors_reported(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._accelerator:
            apart = {f"terms/{name}": value for name, value in line["terms"].items()}
            self._accelerator.log({"loss": loss, "learning_rate": learning_rate} | speed | apart, step=step)

    def close(self) -> None:
        """Let the trackers write what they have buffered. (`Accelerator.end_training` would also end the process group.)"""
        for tracker in self._accelerator.trackers if self._accelerator else []:
            tracker.finish()


class Prefetcher:
    """The batches of a training; a thread makes one batch ahead.

    Args:
        make: gives the batch of a step (from 0); its result depends on the step alone.
        steps: the number of steps; no batch is made beyond them.
    """

    def __init__(self, make: "Callable[[int], Batch]", steps: int) -> None:
        self.make, self.steps = make, steps
        self.waited_s = 0.0
        self.tokens = self.positions = 0  # of all batches so far: real tokens; with padding
        self._last = -1
        self._maker = ThreadPoolExecutor(1, "batches")
        self._made: dict[int, Future[Batch]] = {}

    def at(self, step: int) -> "Batch":
        """The batch of `step`; the batch of the next step is started."""
        for wanted in range(step, min(step + 2, self.steps)):
            if wanted not in self._made:
                self._made[wanted] = self._maker.submit(self.make, wanted)
        began = time.perf_counter()
        batch = self._made[step].result()
        self.waited_s += time.perf_counter() - began
        self._made = {wanted: made for wanted, made in self._made.items() if wanted >= step}
        if step != self._last:  # count a batch once, though each of its shares asks for it
            mask = batch.inputs["attention_mask"]
            self.tokens += int(mask.count_nonzero())
            self.positions += mask.numel()
            self._last = step
        return batch

    def close(self) -> None:
        """Stop making batches."""
        self._maker.shutdown(cancel_futures=True)
