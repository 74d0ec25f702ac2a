"""Which of the trained students ships."""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.runs.lineage import LINEAGE, read_lineage
from compress.runs.resumable_stages import METRICS, STATE, TENSORBOARD, TRAINING
from compress.runs.task_inputs import TaskInputs
from serve.bundle.manifest import canonical_json


def method_name(inputs: TaskInputs) -> str:
    """The method as reports name it: with what follows it on the task."""
    chain = inputs.chain
    return chain.method if chain.ends_on_task else f"{chain.method}, then {inputs.settings.then}"


@dataclass(frozen=True)
class Choice:
    """Which of the trained students ships, and the best validation scores that decided it; None for what was not trained."""

    method: str
    why: str
    teacher: float | None
    distilled: float | None
    undistilled: float | None
    soft_labels: dict[str, Any] | None = None  # see `SoftLabels.lineage`; None where none were learned


def best_on_validation(folder: Path) -> float:
    """The best validation score of the training in `folder`."""
    return max(float(value) for _, value in read_lineage(folder)["validation"])


def teacher_score(inputs: TaskInputs, folder: Path | None) -> float | None:
    """The validation score of the teacher in `folder`, or without one of the answers of `inputs`, if they are to all of its texts."""
    if folder:
        return float(read_lineage(folder)["on_validation"])
    answered = inputs.answered
    return (
        float(answered.on_validation.value)
        if answered and answered.whole_validation and answered.on_validation
        else None
    )


def make_choice(
    folder: Path, inputs: TaskInputs, teacher: Path | None, distilled: Path | None, undistilled: Path | None
) -> None:
    """Copy the student that ships: of those that were trained, the best on validation.

    Labels alone ship only where they are better: a student that learned as much from its teacher may carry more of it. `teacher` is
    None where the teacher is a file of answers.
    """
    learned = best_on_validation(distilled) if distilled else None
    control = best_on_validation(undistilled) if undistilled else None
    labels = control is not None and (learned is None or control > learned)
    source = undistilled if labels else distilled
    assert source
    soft = read_lineage(distilled).get("soft_labels") if distilled else None
    choice = Choice(
        "labels" if labels else method_name(inputs), "", teacher_score(inputs, teacher), learned, control, soft
    )
    choice = replace(choice, why=_why(inputs, choice, labels=labels))
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATE, METRICS, TENSORBOARD, TRAINING)
    )
    lineage = read_lineage(source) | {
        "role": "student",
        "method": choice.method,
        "choice": asdict(choice),
        "metric": inputs.metric,
        "validation_texts": len(inputs.splits.validation),
    }
    (folder / LINEAGE).write_bytes(canonical_json(lineage))


def _why(inputs: TaskInputs, choice: Choice, *, labels: bool) -> str:
    """Why that student ships, as one or two sentences."""
    method, metric = method_name(inputs), inputs.metric
    if choice.undistilled is None:
        return f"No student was trained on labels alone (--no-undistilled), so nothing shows what {method} is worth."
    if choice.method == "labels" and choice.distilled is None and method != "labels":
        return (
            f"Labels alone ship: on validation they reached {metric} {choice.undistilled:.4f} and the teacher {choice.teacher:.4f}, so "
            f"the student was not distilled by {method}."
        )
    if choice.distilled is None:
        return f"The student was trained on labels alone, as --method labels asks: {metric} {choice.undistilled:.4f} on validation."
    both = f"On validation {method} reached {metric} {choice.distilled:.4f} and labels alone {choice.undistilled:.4f}"
    return f"{both}: {'labels alone ship' if labels else f'the student of {method} ships'}."
