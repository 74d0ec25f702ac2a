"""A summary of a task's inputs before anything trains on them, as data and as a few lines of text. No torch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from compress.data.examples import SPLITS
from serve.bundle.manifest import kinds_of
from serve.wording import counted

if TYPE_CHECKING:
    from compress.runs.task_inputs import TaskInputs

FEW = 20  # most labels that are all listed; of more, only the most and least frequent are
AT_EACH_END = 3


def input_summary(inputs: "TaskInputs", steps: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The task, its data and its models, as JSON; `steps` are those of each training by name, if known.

    `labels` counts the texts, or entities, of train that have each label; for numbers it is empty, and `numbers` has their `lowest`,
    `highest`, `mean` and `deviation`.
    """
    task, splits, opened = inputs.task, inputs.splits, inputs.opened
    own = opened.head_for(task)
    there = set(splits.labels(task, SPLITS))
    theirs = list(task.answer_labels(own)) if own else []
    found: dict[str, Any] = {
        "task": task.name,
        "kind": task.serving.answer_kind(inputs.labels, kinds_of(splits)),
        "metric": inputs.metric,
        "rows": {name: len(getattr(splits, name)) for name in SPLITS},
        "validation_held_out": splits.held_out,
        "labels": _counted(inputs),
        "head": {
            "model": opened.public_name,
            "role": opened.role.lstrip("-"),
            "own_is_used": inputs.teacher_has_head,
            "own_labels": theirs,
            "own_labels_in_data": [label for label in theirs if label in there],
        },
        "student": str(inputs.shape),
        "method": inputs.chain.method,
        "method_why": inputs.method_why,
        "max_length": inputs.max_length,
    } | task.summary(splits.train)
    if inputs.answering:
        found["asked"] = inputs.answering.public_name
    if inputs.outside:
        found["rows_out_of_scope"] = {name: len(getattr(inputs.outside, name)) for name in SPLITS}
    return found | ({"steps": dict(steps)} if steps else {})


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """The result of `input_summary` as text: a line each for task, texts, labels, head, student and steps."""
    rows, outside = found["rows"], found.get("rows_out_of_scope")
    lines = [
        f"task: {found['task']} ({found['kind']}), scored by {found['metric']}",
        f"texts: {_by_split(rows)}, read up to {found['max_length']} tokens",
        _numbers_line(found["numbers"]) if "numbers" in found else f"labels: {_labels_line(found['labels'])}",
        f"head: {_head_line(found['head'], len(found['labels']))}",
    ]
    if "asked" in found:
        lines.append(
            f"teacher: {found['asked']} is asked for its answers, as it is of another family or has other tokens than --start"
        )
    if outside:
        lines.insert(2, f"out of scope: {_by_split(outside)}")
    if found["head"]["role"] in ("teacher", "start"):
        lines.append(f"student: {found['student']}")
        why = f" (auto: {found['method_why']})" if found["method_why"] else ""
        lines.append(f"method: {found['method']}{why}")
    if steps := {name: count for name, count in found.get("steps", {}).items() if count}:
        lines.append("steps at most: " + ", ".join(f"{name} {count:,}" for name, count in steps.items()))
    return lines


def log_inputs(inputs: "TaskInputs", steps: Mapping[str, int], log: Callable[[str], object]) -> dict[str, Any]:
    """The `input_summary`, which `log` gets as text, then what was read of a teacher's answers, and the warnings."""
    found = input_summary(inputs, steps)
    answers = inputs.answered.lines if inputs.answered else []
    for line in (*summary_lines(found), *answers, *(f"warning: {warning}" for warning in inputs.warnings)):
        log(line)
    return found


def _by_split(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} in {name}" for name, count in rows.items())


def _counted(inputs: "TaskInputs") -> dict[str, int]:
    """How often each label occurs in train, the most frequent first."""
    counts = inputs.task.label_counts(inputs.splits.train)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _numbers_line(numbers: Mapping[str, float]) -> str:
    return (
        f"numbers: {numbers['lowest']:g} to {numbers['highest']:g} in train, mean {numbers['mean']:.4g}, standard deviation "
        f"{numbers['deviation']:.4g}"
    )


def _labels_line(labels: Mapping[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in labels.items()]
    if len(shown) <= FEW:
        return f"{len(shown)} in train: {', '.join(shown)}"
    most, least = ", ".join(shown[:AT_EACH_END]), ", ".join(shown[-AT_EACH_END:])
    return f"{len(shown)} in train; most frequent {most}; least frequent {least}"


def _head_line(head: Mapping[str, Any], labels: int) -> str:
    whose, own, there = f"the {head['role']}'s own head", head["own_labels"], head["own_labels_in_data"]
    if not head["own_is_used"]:
        left = f"; {whose}, of {_labels(len(own))}, is not used" if own else ""
        return f"{head['model']} gets a new head for {_labels(labels)}{left}"
    if len(there) == len(own):
        return f"{whose} is used: {_labels(len(own))}, all of which occur in the data"
    named = ", ".join(there[:FEW]) + (" ..." if len(there) > FEW else "")
    return f"{whose} is used: {_labels(len(own))}, of which {len(there)} occur in the data: {named}"


def _labels(count: int) -> str:
    return counted(count, "label")
