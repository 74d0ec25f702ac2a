"""The rows of a comparison: which method trains which student with which seed, by which stages and at which rate.

A comparison varies the start, the teacher's layer and the tokens of plain text too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from compress.input_errors import Faults
from compress.methods.catalogue import LABELS
from compress.models.initialise import layers_fit
from compress.runs.method_chain import USED_BY, Chain, Link, check_whole_batches, method_chain, teacher_pooling
from compress.runs.task_inputs import TaskInputs, refuse_classes
from compress.tasks import task_named
from serve.errors import BadInput
from serve.wording import all_of
from stillroom.verbs.compare import Comparison

# What every method is compared with: the same student on labels alone, in as many steps on the task. It starts
# from new layers, from layers of the teacher as it was given, and from layers and head of the teacher fine-tuned on the task.
NEW_LAYERS, GENERAL_LAYERS, CONTROL = "labels-new-layers", "labels-general-layers", "labels"
CONTROLS = (NEW_LAYERS, GENERAL_LAYERS, CONTROL)
OF_ONE_START = (NEW_LAYERS, GENERAL_LAYERS)
# Of the rate of a stage: what is tried unless rates were given.
SHARES = (0.5, 1.5)


class Choice(NamedTuple):
    """One value of each choice; None where the method does not read it, or nothing was given."""

    start: str | None
    teacher_layer: int | None
    distill_tokens: int | None


AS_IT_IS = Choice(None, None, None)  # what the method takes without choices


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


def choices_of(given: Comparison, method: str, inputs: TaskInputs) -> list[Choice]:
    """Every combination of the given values that `method` reads; of a choice that it does not read there is one value, None.

    Raises BadInput: the method does not fit teacher and student.
    """
    if method in OF_ONE_START:
        return [AS_IT_IS]
    chain = chain_with(method, AS_IT_IS, inputs)
    layers = given.teacher_layers if _reads_layer(method) else ()
    tokens = given.distill_tokens if "corpus" in chain.texts else (None,)
    return [
        Choice(start, layer, n)
        for start in _starts(given, chain, inputs)
        for layer in layers or (None,)
        for n in tokens
    ]


def _reads_layer(method: str) -> bool:
    return method.split("@", maxsplit=1)[0] in USED_BY["teacher_layer"]


def _starts(given: Comparison, chain: Chain, inputs: TaskInputs) -> list[str]:
    """The given starts that differ: where no student fits the model before it, `spread` is new layers, as `random` is."""
    teachers = [inputs.opened.config, *(shape.as_config() for shape in chain.shapes)]
    fits = any(layers_fit(teacher, shape) for teacher, shape in zip(teachers, chain.shapes, strict=False))
    new = [start for start in given.starts if start in ("spread", "random")]
    return [start for start in given.starts if fits or start not in new[1:]]


def chain_with(method: str, choice: Choice, inputs: TaskInputs) -> Chain:
    """The stages of `method` with the values of `choice`, for this teacher and student. Raises BadInput: as `method_chain`."""
    return method_chain(
        method,
        inputs.shape,
        inputs.opened.config,
        start=choice.start or "spread",
        teacher_layer=choice.teacher_layer or 0,
        pooling=teacher_pooling(method, inputs.opened),
    )


def check_choices(given: Comparison, inputs_of: dict[str, TaskInputs]) -> list[str]:
    """Check that each method works with each student and each given value, and that a method reads what was given; the warnings.

    Raises BadInput: one message with all faults.
    """
    faults = Faults()
    warnings: list[str] = []
    if given.teacher_layers and not any(map(_reads_layer, given.methods)):
        faults.messages.append(
            f"--teacher-layer has no effect on --method {' or '.join(given.methods)}, only on {all_of(USED_BY['teacher_layer'])}. "
            "Leave it out."
        )
    texts: set[str] = set()
    for inputs in inputs_of.values():
        for method in dict.fromkeys((CONTROL, *given.methods)):
            read = faults.check(partial(_check_texts, method, inputs, given))
            if read is None:
                continue
            texts |= read
            for choice in choices_of(given, method, inputs):
                chain = faults.check(partial(chain_with, method, choice, inputs))
                warnings += chain.warnings if chain else ()
    if len(given.distill_tokens) > 1 and not faults.messages and "corpus" not in texts:
        faults.messages.append(
            f"--distill-tokens was given {len(given.distill_tokens)} times, and no --method learns from plain text. Leave it out."
        )
    faults.raise_if_any()
    return warnings


def _check_texts(method: str, inputs: TaskInputs, given: Comparison) -> set[str]:
    """The texts that `method` reads. BadInput where it does not fit teacher and student, or a text that it reads was not given."""
    chain = chain_with(method, AS_IT_IS, inputs)
    check_whole_batches(chain, inputs.settings.batch, inputs.settings.accumulate)
    refuse_classes(inputs.task, chain)
    texts = chain.texts
    if "source" in texts:
        refuse_classes(task_named(given.source_task or inputs.settings.task), chain)
    if "corpus" in texts and not inputs.corpus:
        raise BadInput(f"--method {method} learns from plain text, and no --corpus was given. Give --corpus too.")
    if "source" in texts and not given.source_data:
        raise BadInput(
            f"--method {method} learns another task first, and no --source-data was given. Give a folder of that task's "
            "examples (and --source-task, if it differs from --task)."
        )
    return texts


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
