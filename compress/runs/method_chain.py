"""A method as `--method` names it: the student, its assistants, the stages of each, and what each stage may read."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from compress import distributed
from compress.losses.vectors import Pooling
from compress.methods.catalogue import METHODS, Stage, chain_of
from compress.models.initialise import RANDOM, is_checkpoint, layers_fit, open_start, shape_in, starting_layers
from compress.models.pretrained import Opened
from compress.models.sentence_pooling import pooling_in
from compress.models.shapes import ACTIVATIONS, BY_RULE, USUAL_STUDENT, Shape, assistants_of, shape_of
from serve.errors import BadInput
from serve.wording import one_of

LEAST_TEXTS = 3  # of a batch whose texts are compared with each other
# Methods without a stage before training on the task.
ON_TASK = ("soft-labels", "labels")
# Choices that only some methods read.
USED_BY = {
    "relation_heads": ("minilmv2",),
    "teacher_layer": ("minilmv2", "directminilm", "directminilm-orthogonal", "directminilm-products"),
    "layer_map": ("hidden-states", "output-distribution"),
}
# Settings of one stage in a recipe.
LAYER_SETTINGS = ("teacher_layer", "relation_heads")
STAGE_SETTINGS = ("tokens", "learning_rate", "batch", "pack", *LAYER_SETTINGS)


@dataclass(frozen=True)
class Link:
    """A student to train and its stages: the last link is the student asked for, those before it are assistants."""

    shape: Shape
    stages: tuple[Stage, ...]
    tokens: tuple[float, ...]  # that each stage reads
    # The teacher that the first link starts from: `corpus` is the given one, otherwise the one fine-tuned on that text.
    starts_from: str = "corpus"

    @property
    def masks(self) -> bool:
        """Whether a stage needs the student to have a masked-language-model head."""
        return any(stage.objective.masks_tokens for stage in self.stages)


@dataclass(frozen=True)
class Chain:
    """The stages of a method by student: assistants first, the student last."""

    method: str
    shapes: tuple[Shape, ...]
    stages: tuple[tuple[Stage, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def texts(self) -> set[str]:
        """The texts that its stages read: `corpus`, `task`, `source`."""
        return {stage.text for stages in self.stages for stage in stages}

    @property
    def ends_on_task(self) -> bool:
        """Whether it ends with a head for the task."""
        return self.stages[-1][-1].text == "task"

    def links(
        self, distill_tokens: float, task_tokens: float, ending: Sequence[Stage] = (), *, cut: float = 1.0
    ) -> list[Link]:
        """What `run_method` runs: stages on plain text share `distill_tokens`, those on labelled text `task_tokens`.

        So methods compare at equal numbers of steps on the task, whatever they read before. A method that does not end on the
        task gets the stages `ending`. Stages with tokens of their own keep them. `cut` is the share of the plain text that is read.
        """
        *assistants, last = self.stages
        last = last if self.ends_on_task else (*last, *ending)
        budgets = {"corpus": distill_tokens, "task": task_tokens, "source": task_tokens}
        whole = {
            text: sum(stage.share for stages in (*assistants, last) for stage in stages if stage.text == text)
            for text in budgets
        }

        def tokens_of(stage: Stage) -> float:
            tokens = stage.tokens or stage.share / whole[stage.text] * budgets[stage.text]
            return tokens * cut if stage.text == "corpus" else tokens

        return [
            Link(
                shape,
                stages,
                tuple(tokens_of(stage) for stage in stages),
                starts_from=stages[0].text,
            )
            for shape, stages in zip(self.shapes, (*assistants, last), strict=True)
        ]


def asks_words(stages: Sequence[Stage]) -> bool:
    """Whether a stage needs the teacher's predictions of masked tokens."""
    return any(stage.objective.masks_tokens and stage.objective.asks_teacher for stage in stages)


def method_chain(
    method: str,
    shape: Shape,
    teacher: Any,
    *,
    start: str = "spread",
    layer_map: str = "",
    teacher_layer: int = 0,
    relation_heads: int = 0,
    pack: bool = True,
    pooling: Pooling = "mean",
    stages: Mapping[str, Mapping[str, float]] | None = None,
) -> Chain:
    """The chain of `method`, which may name assistants (`minilm@12x384`), for a student of `shape`.

    Args:
        method: a name of the catalogue, with the shapes of assistants after `@`.
        shape: of the student.
        teacher: the teacher's configuration.
        start: the teacher layers that students start from, or what they start from instead.
        layer_map: in place of the method's own; empty leaves it.
        teacher_layer: the same for the layer whose relations are learned; 0 leaves it.
        relation_heads: the same for their heads.
        pooling: how the teacher makes the vector of a text.
        pack: whether stages for which the catalogue says so pack plain text; otherwise those alone that `stages` name.
        stages: settings by the name of a stage, see `STAGE_SETTINGS`.

    Raises:
        BadInput: an unknown method, stage or setting; heads, layers or widths that cannot be compared; assistants of a method
            that reads a task.
    """
    name, between = check_method_name(method), method.split("@")[1:]
    check_stage_settings(stages or {})
    if name in ON_TASK and stages:
        raise BadInput(
            f"[stages.{next(iter(stages))}]: --method {method} has no stage before the training on the task, which student_epochs, "
            "student_learning_rate and batch set."
        )
    given: dict[str, dict[str, Any]] = {stage: dict(values) for stage, values in (stages or {}).items()}
    choices: dict[str, Any] = {
        "layer_map": layer_map, "teacher_layer": teacher_layer, "relation_heads": relation_heads, "pooling": pooling,
    }  # fmt: skip
    for values in given.values():
        choices |= {key: values.pop(key) for key in LAYER_SETTINGS if key in values}
    check_used(name, choices, start)
    shapes = (*assistants_of(between, shape, teacher), shape)
    check_start(start, shapes, teacher, layer_map)
    layers = "" if start == RANDOM or is_checkpoint(start) else start
    chain = Chain(
        name if len(shapes) == 1 else method, shapes, chain_of(name, shapes, teacher, start=layers, **choices)
    )
    if len(shapes) > 1 and chain.texts != {"corpus"}:
        raise BadInput(
            f"--method {method}: only methods that learn from plain text alone, such as minilm, take assistants. Leave "
            f"@{'@'.join(between)} out."
        )
    names = dict.fromkeys(stage.name for each in chain.stages for stage in each)
    if unknown := [stage for stage in given if stage not in names]:
        raise BadInput(f"[stages.{unknown[0]}]: the stages of --method {method} are {', '.join(names)}.")
    for stage in (stage for each in chain.stages for stage in each):
        if "pack" in given.get(stage.name, {}) and stage.text != "corpus":
            raise BadInput(
                f"[stages.{stage.name}] pack: only plain text is packed, and this stage reads a task. Leave it out."
            )
    return replace(
        chain,
        stages=tuple(
            tuple(replace(stage, **{"pack": stage.pack and pack} | given.get(stage.name, {})) for stage in each)
            for each in chain.stages
        ),
        warnings=_other_layers(chain, teacher, layers, layer_map),
    )


def teacher_pooling(method: str, opened: Opened) -> Pooling:
    """How `opened` makes the vector of a text, if `method` learns it; `mean` where its folder does not say.

    Raises BadInput: in a way that is not known.
    """
    if check_method_name(method) != "sentence-vectors":
        return "mean"
    how = pooling_in(opened.folder, f"{opened.role} {opened.name}")
    return how.pooling if how else "mean"


def check_whole_batches(chain: Chain, batch: int, accumulate: int) -> None:
    """Check that a stage that compares the texts of a batch with each other gets whole batches of three or more.

    Raises BadInput: batches are computed in parts, by several processes or one after the other, or have fewer texts.
    """
    if not any(stage.objective.pooling for stages in chain.stages for stage in stages):
        return
    for parts, what in (
        (accumulate, f"--accumulate {accumulate}"),
        (distributed.count(), f"{distributed.count()} processes"),
    ):
        if parts > 1:
            raise BadInput(
                f"{what}: --method {chain.method} compares each text with all others of its batch, and parts of a batch are computed "
                "alone. Train in one process without --accumulate; a smaller --batch needs less memory."
            )
    if batch < LEAST_TEXTS:
        raise BadInput(
            f"--batch is {batch}; --method {chain.method} compares the texts of a batch, and needs {LEAST_TEXTS} or more of them."
        )


def check_used(method: str, choices: Mapping[str, Any], start: str) -> None:
    """Check that `method` reads each of `choices` (see `USED_BY`) that is given.

    Raises BadInput: it does not. A layer map may also be that of the start `layer-map`.
    """
    for name, users in USED_BY.items():
        if choices.get(name) and method not in users and not (name == "layer_map" and start == "layer-map"):
            raise BadInput(
                f"--{name.replace('_', '-')} has no effect on --method {method}, only on {' and '.join(users)}. Leave it out."
            )


def check_start(start: str, shapes: Sequence[Shape], teacher: Any, layer_map: str = "") -> None:
    """Check that each of `shapes` can copy the layers that `start` names from the model before it.

    Raises BadInput: another width or number of heads, or too few layers; `spread` is new layers then, and asks for nothing.
    """
    if start in ("spread", RANDOM) or is_checkpoint(start):
        return
    for shape in shapes:
        if not layers_fit(teacher, shape):
            raise BadInput(
                f"--start {start} copies the teacher's layers, but {shape} does not fit them: the teacher has a width of "
                f"{teacher.hidden_size}, {teacher.num_attention_heads} heads and {teacher.num_hidden_layers} layers. Give a student of "
                "that width and these heads with no more layers, or another --start."
            )
        starting_layers(start, teacher.num_hidden_layers, shape.layers, map_name=layer_map)
        teacher = shape.as_config()


def layers_named(start: str, teacher: Any, shape: Shape, layer_map: str = "") -> tuple[int, ...]:
    """The layers, from 1, of a teacher of that configuration that `start` names; empty if `student_of` chooses them, or none is copied."""
    if start in ("spread", RANDOM) or is_checkpoint(start):
        return ()
    return starting_layers(start, teacher.num_hidden_layers, shape.layers, map_name=layer_map)


def student_shape(student: str, start: str, teacher: Opened) -> Shape:
    """The shape that `student` names, or where that is empty of the checkpoint `start`, or else `USUAL_STUDENT`.

    Raises:
        BadInput: an unknown shape, another one than the checkpoint's, or a checkpoint with another tokenizer than the teacher's.
    """
    if not is_checkpoint(start):
        return shape_of(student or USUAL_STUDENT)
    begun = open_start(start, teacher)
    theirs, ours = (getattr(opened.config, opened.family.activation) for opened in (teacher, begun))
    plain = shape_in(begun)
    own = replace(plain, activation=ours) if ours != theirs and ours in ACTIVATIONS else plain
    if student and shape_of(student) not in (own, replace(plain, activation=ours)):
        raise BadInput(f"--start {start} is {own}, and --student is {student}. Leave --student out.")
    return own


def check_method_name(method: str) -> str:
    """The name of `method` without its assistants; the catalogue has it, and their shapes can be read.

    Raises BadInput: an unknown method or shape; the nearest is suggested.
    """
    name, *between = method.split("@")
    if name not in METHODS:
        again = " Give --method again for each." if "," in name else ""
        near = [] if again else difflib.get_close_matches(name, METHODS, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        names = one_of(METHODS)
        raise BadInput(f"--method {name} is not known.{meant} Give {names}.{again}")
    for shape in between:
        if shape != BY_RULE:
            shape_of(shape)
    return name


def check_stage_settings(stages: Mapping[str, Mapping[str, float]]) -> None:
    """Check the tables `[stages.NAME]` of a recipe, whatever its method.

    Raises BadInput: one is no table, has a setting that stages have not, or a value that is no positive number.
    """
    for name, values in stages.items():
        if not isinstance(values, Mapping):
            raise BadInput(f"[stages.{name}] is {values!r}; give a table of {', '.join(STAGE_SETTINGS)}.")
        for key, value in values.items():
            if key not in STAGE_SETTINGS:
                raise BadInput(f"[stages.{name}] {key}: the settings of a stage are {', '.join(STAGE_SETTINGS)}.")
            if key == "pack":
                if not isinstance(value, bool):
                    raise BadInput(f"[stages.{name}] pack is {value!r}; give true or false.")
                continue
            whole = key not in ("tokens", "learning_rate")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < inf:
                kind = "a whole number" if whole else "a number"
                raise BadInput(f"[stages.{name}] {key} is {value!r}; give {kind} above 0.")


def _other_layers(chain: Chain, teacher: Any, start: str, layer_map: str) -> tuple[str, ...]:
    """A warning for each student whose last layer starts from one layer of its teacher and learns from a lower one."""
    found = []
    for shape, stages in zip(chain.shapes, chain.stages, strict=True):
        terms = [term for term in stages[0].objective.layers if term.student_layer == shape.layers]
        if start and terms and layers_fit(teacher, shape):
            copied = starting_layers(start, teacher.num_hidden_layers, shape.layers, map_name=layer_map)[-1]
            learned = max(term.teacher_layer for term in terms)
            if learned != copied:
                found.append(
                    f"The last layer of the student {shape} starts from the teacher's layer {copied} and learns from layer {learned}. "
                    "Without --teacher-layer and --start the two are the same layer."
                )
        teacher = shape.as_config()
    return tuple(found)
