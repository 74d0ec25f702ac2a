"""The rows of a comparison: which method trains which student with which seed, by which stages and at which rate."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from compress.methods.catalogue import LABELS
from compress.runs.method_chain import Link
from compress.runs.stages import fingerprint
from compress.runs.task_inputs import TaskInputs
from stillroom.verbs.compare import Comparison
from stillroom.verbs.compare.choices import CONTROLS, OF_ONE_START, Choice, chain_with, choices_of

# Of the rate of a stage: what is tried unless rates were given.
SHARES = (0.5, 1.5)


class Row(NamedTuple):
    """One training: a method, a student, one value of each choice, a seed."""

    method: str
    student: str
    choice: Choice
    seed: int

    @property
    def first(self) -> "Row":
        """The training whose scores on validation choose the rate for all seeds."""
        return self._replace(seed=0)

    @property
    def name(self) -> str:
        """The folder in OUT/work. It names every choice that the method reads, so that more values can be added later."""
        start, layer, tokens = self.choice
        chosen = [start, f"layer{layer}" if layer else "", f"{tokens}tokens" if tokens else ""]
        parts = [self.method, self.student, *(part for part in chosen if part), str(self.seed)]
        return "-".join(parts).replace(",", "-").replace("=", "")

    def __str__(self) -> str:
        start, layer, tokens = self.choice
        chosen = [start, f"teacher layer {layer}" if layer else "", f"{tokens:,} tokens" if tokens else ""]
        return ", ".join([self.method, self.student, *(part for part in chosen if part), f"seed {self.seed}"])


def rows_of(given: Comparison, inputs_of: dict[str, TaskInputs]) -> list[Row]:
    """Every training: by student, by method with the controls first, by choice, by seed."""
    methods = dict.fromkeys((*CONTROLS, *given.methods))
    return [
        Row(method, student, choice, seed)
        for student in given.students
        for method in methods
        for choice in choices_of(given, method, inputs_of[student])
        for seed in range(given.seeds)
    ]


def links_of(given: Comparison, inputs: TaskInputs, row: Row) -> list[Link]:
    """What trains the student of `row`, its assistants first.

    Every row reads as many tokens of the task's text, so that methods are compared at equal numbers of label steps. Plain text
    comes on top, and its cost stands in the table.
    """
    if row.method in OF_ONE_START:
        return [Link(inputs.shape, (LABELS,), (given.task_tokens,))]
    chain = chain_with(row.method, row.choice, inputs)
    return chain.links(row.choice.distill_tokens or 0, given.task_tokens, (LABELS,))


def reads_source(links: Sequence[Link]) -> bool:
    """Whether a stage reads the task from which a method transfers."""
    return any(stage.text == "source" for link in links for stage in link.stages)


def rates_of(given: Comparison, links: Sequence[Link]) -> tuple[float, ...]:
    """The peak learning rates among which the last stage's is chosen: those given, or `SHARES` of the stage's own."""
    own = links[-1].stages[-1].learning_rate
    return given.label_learning_rates or tuple(float(f"{share * own:.6g}") for share in SHARES)


def at_rate(links: Sequence[Link], rate: float) -> list[Link]:
    """`links` whose last stage has the peak learning rate `rate`, which its name states.

    So the stages before it have the same folders at every rate, and are trained once.
    """
    *before, last = links
    *stages, end = last.stages
    ending = replace(end, name=f"{end.name}-{rate}", learning_rate=rate)
    return [*before, replace(last, stages=(*stages, ending))]


def row_fingerprint(
    teacher: str, text: str, source: str, row: Row, links: Sequence[Link], rates: Sequence[float]
) -> str:
    """All that decides the student of `row`; the first three are fingerprints of what it reads, or empty."""
    described = [asdict(link) for link in links]
    return fingerprint("row", teacher, text, source, row.method, row.choice.start, row.seed, described, list(rates))
