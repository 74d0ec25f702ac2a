"""The rows of a comparison: which method trains which student with which seed, by which stages."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from compress.engine.fingerprints import fingerprint
from compress.engine.method_runner import Link
from compress.engine.task_inputs import TaskInputs
from compress.methods.catalogue import LABELS
from stillroom.commands.compare.inputs import chain_of_method, corpus_fingerprint, teacher_fingerprint
from stillroom.settings.compare import Comparison

# What every method is compared with: the same student on labels alone, in as many steps on the task. It starts
# from new layers, from layers of the teacher as it was given, and from layers and head of the teacher fine-tuned on the task.
NEW_LAYERS, GENERAL_LAYERS, CONTROL = "labels-new-layers", "labels-general-layers", "labels"
CONTROLS = (NEW_LAYERS, GENERAL_LAYERS, CONTROL)


class Row(NamedTuple):
    """One training: a method, a student, a seed."""

    method: str
    student: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}, {self.student}, seed {self.seed}"


def methods_of(given: Comparison) -> list[str]:
    """The controls, then the methods asked for."""
    return [*CONTROLS, *(method for method in given.methods if method not in CONTROLS)]


def name_of(row: Row) -> str:
    """The folder of `row` in OUT/work."""
    return f"{row.method}-{row.student}-{row.seed}".replace(",", "-").replace("=", "")


def links_of(given: Comparison, inputs: TaskInputs, row: Row) -> list[Link]:
    """What trains the student of `row`, its assistants first.

    Every row reads as many tokens of the task's text, so that methods are compared at equal numbers of label steps. Plain text
    comes on top, and its cost stands in the table.
    """
    if row.method in (NEW_LAYERS, GENERAL_LAYERS):
        return [Link(inputs.shape, (LABELS,), (given.task_tokens,))]
    return chain_of_method(row.method, inputs).links(given.distill_tokens, given.task_tokens, (LABELS,))


def reads_source(links: Sequence[Link]) -> bool:
    """Whether a stage reads the task from which a method transfers."""
    return any(stage.text == "source" for link in links for stage in link.stages)


def row_fingerprint(
    given: Comparison, inputs: TaskInputs, source: TaskInputs | None, row: Row, links: Sequence[Link]
) -> str:
    """All that decides the student of `row`."""
    described = [dataclasses.asdict(link) for link in links]
    of_source = teacher_fingerprint(source) if source and reads_source(links) else ""
    return fingerprint("row", corpus_fingerprint(given, inputs), of_source, row.method, row.seed, described)
