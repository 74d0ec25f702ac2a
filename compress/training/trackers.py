"""Sends the metrics of a training to TensorBoard, Weights & Biases or MLflow, through accelerate's trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.errors import BadInput
from serve.wording import one_of

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


class Trackers:
    """The trackers `names`; they record `settings` (numbers and strings) and the metrics. Without names nothing is loaded."""

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        check_trackers(names)
        self.accelerator: Any = None
        if names:
            from accelerate import Accelerator

            self.accelerator = Accelerator(log_with=list(names), project_dir=folder / TENSORBOARD)
            self.accelerator.init_trackers(PROJECT, settings)

    def write(self, line: dict[str, Any]) -> None:
        """Log one step: `line` is a line of `metrics.jsonl`; values that are None are left out."""
        if self.accelerator:
            apart = {f"terms/{name}": value for name, value in line["terms"].items()}
            values = {
                name: value for name, value in line.items() if name not in ("step", "terms") and value is not None
            }
            self.accelerator.log(values | apart, step=line["step"])

    def close(self) -> None:
        """Flush the trackers. (`Accelerator.end_training` would also end the process group.)"""
        for tracker in self.accelerator.trackers if self.accelerator else []:
            tracker.finish()
