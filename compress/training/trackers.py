"""Where else the metrics of a training go: TensorBoard, Weights & Biases or MLflow, through accelerate's trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.errors import BadInput

# By the package that each needs; files of TensorBoard land in the folder of this name beside the checkpoints.
TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "mlflow")
PROJECT = "stillroom"


def check_trackers(names: Sequence[str]) -> None:
    """Nothing, when each of `names` is a tracker whose package is installed.

    Raises:
        BadInput: one is not; the message says what to install.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: no such tracker. Trackers are {', '.join(TRACKERS)}.")
    if names:
        from accelerate.tracking import get_available_trackers

        there = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
        missing = [name for name in names if name not in there]
        if missing:
            raise BadInput(
                f"Metrics were to go to {' and '.join(missing)}, which is not installed. Run: pip install {' '.join(missing)}"
            )


class Trackers:
    """The trackers `names`, told of a training that is described by the numbers and words of `settings`.

    Without names nothing is loaded and nothing is told.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        check_trackers(names)
        self.accelerator: Any = None
        if names:
            from accelerate import Accelerator

            self.accelerator = Accelerator(log_with=list(names), project_dir=folder / TENSORBOARD)
            self.accelerator.init_trackers(PROJECT, settings)

    def write(self, line: dict[str, Any]) -> None:
        """Tell of one step: `line` is one of `metrics.jsonl`; what is not known is left out."""
        if self.accelerator:
            apart = {f"terms/{name}": value for name, value in line["terms"].items()}
            values = {
                name: value for name, value in line.items() if name not in ("step", "terms") and value is not None
            }
            self.accelerator.log(values | apart, step=line["step"])

    def close(self) -> None:
        """Let them write what they hold back. (`Accelerator.end_training` would part the processes as well.)"""
        for tracker in self.accelerator.trackers if self.accelerator else []:
            tracker.finish()
