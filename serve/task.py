"""The tasks by name, and the facts of one that every floor may ask for. `serve.tasks` has what a bundle of each does."""

from dataclasses import dataclass
from typing import Literal

TaskName = Literal[
    "token-classification", "text-classification", "text-regression", "question-answering", "feature-extraction"
]


@dataclass(frozen=True, eq=False)
class Task:
    """What a model does."""

    name: TaskName
    per_token: bool
    """Whether the model gives numbers to each token; otherwise it gives them to each text."""
    reads_pairs: bool
    """Whether it may read two texts at once."""
    labelled: bool
    """Whether texts have labels for it, or targets."""
