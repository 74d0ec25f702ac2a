"""The shapes of students, and the teacher layers that their layers learn from; layers are numbered from 1.

Shapes are the papers' by name (methods and figures in docs/choosing.md), or any other by its numbers.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from serve.errors import BadInput
from serve.wording import one_of


@dataclass(frozen=True)
class Shape:
    """An encoder's size: layers, width of the hidden state, attention heads, units of the feed-forward layer.

    `activation` is that of the feed-forward layer; empty is the teacher's.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    activation: str = ""

    def as_config(self) -> SimpleNamespace:
        """The same numbers under the names of a transformers configuration."""
        return SimpleNamespace(num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads)

    def __str__(self) -> str:
        for name, shape in STUDENTS.items():
            if shape == self:
                return name
        activation = f",activation={self.activation}" if self.activation else ""
        return f"layers={self.layers},hidden={self.hidden},heads={self.heads},ffn={self.ffn}{activation}"


STUDENTS = {
    # Comparative analysis of task-agnostic distillation (2023), Table 1.
    "6x768": Shape(6, 768, 12, 3072),
    "6x384": Shape(6, 384, 12, 1536),
    "4x576": Shape(4, 576, 12, 768),
    "3x384": Shape(3, 384, 12, 1024),
    # MiniLM (2020), Table 4.
    "12x384": Shape(12, 384, 12, 1536),
    "4x384": Shape(4, 384, 12, 1536),
    "3x384-ffn1536": Shape(3, 384, 12, 1536),
}
USUAL_STUDENT = "3x384"
ASSISTED_SHARE = 0.5  # most of the teacher's layers, and of its width, for an assistant by MiniLM's rule
BY_RULE = "auto"
NUMBERS, ACTIVATIONS = ("layers", "hidden", "heads", "ffn"), ("relu", "gelu")
FORM = "layers=5,hidden=320,heads=10,ffn=1280"


def shape_of(student: str) -> Shape:
    """The shape that `student` names: one of `STUDENTS`, or numbers in the form `layers=5,hidden=320,heads=10,ffn=1280`.

    `activation=relu` or `activation=gelu` may follow the numbers. Raises BadInput: an unknown name (the nearest is suggested), or
    a width that the heads do not divide.
    """
    if student in STUDENTS:
        return STUDENTS[student]
    if "=" not in student:
        near = difflib.get_close_matches(student.lower(), STUDENTS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise BadInput(
            f"--student {student!r} is not known. {hint}Give one of {', '.join(STUDENTS)}, or numbers as in {FORM}."
        )
    numbers: dict[str, int] = {}
    activation = ""
    for part in student.split(","):
        name, _, value = part.strip().partition("=")
        if name == "activation" and value in ACTIVATIONS and not activation:
            activation = value
            continue
        if name not in NUMBERS or not re.fullmatch(r"[1-9]\d{0,4}", value) or name in numbers:
            raise BadInput(
                f"--student {student!r}: {part!r} is not understood. Give numbers as in {FORM}, each from 1 to 99999 and once; "
                f"activation={' or activation='.join(ACTIVATIONS)} may follow."
            )
        numbers[name] = int(value)
    missing = [name for name in NUMBERS if name not in numbers]
    if missing:
        raise BadInput(f"--student {student!r} lacks {', '.join(missing)}. Give numbers as in {FORM}.")
    shape = Shape(**numbers, activation=activation)
    if shape.hidden % shape.heads:
        divisors = [n for n in range(1, min(shape.hidden, 64) + 1) if shape.hidden % n == 0]
        raise BadInput(
            f"--student {student!r}: a width of {shape.hidden} cannot be divided by {shape.heads} heads. "
            f"Give heads as one of {', '.join(map(str, divisors))}, or another width."
        )
    return shape


def assistants_of(names: Sequence[str], shape: Shape, teacher: Any) -> tuple[Shape, ...]:
    """The assistants `names`, in order, between a teacher of that configuration and a student of `shape`.

    `auto` alone is MiniLM's rule (section 3.3): one assistant, as deep as the teacher and as wide as the student, if the student
    has at most half of the teacher's layers and at most half of its width; otherwise none. Raises BadInput: a name that
    `shape_of` does not know.
    """
    if tuple(names) != (BY_RULE,):
        return tuple(shape_of(name) for name in names)
    layers, width = teacher.num_hidden_layers, teacher.hidden_size
    if shape.layers > ASSISTED_SHARE * layers or shape.hidden > ASSISTED_SHARE * width:
        return ()
    return (replace(shape, layers=layers),)


# `single` learns from the last teacher layer alone, `last` from the last ones, as many as the student has.
LAYER_MAPS = ("single", "last", "uniform", "uniform-consecutive", "uniform+last", "spread")


def layer_map(name: str, teacher_layers: int, student_layers: int) -> dict[int, tuple[int, ...]]:
    """The teacher layers of each student layer that learns from any (comparative analysis, section 3.1).

    With `L` teacher layers, `M` student layers and `k = ceil(L / M)`, student layer `i` learns by `single` from `L` if `i = M`
    and from none otherwise; by `last` from `L - M + i`; by `uniform` from `k i`; by `uniform-consecutive` from `k (i - 1) + 1`
    to `k i`; by `uniform+last` from the layers of both maps. Layers above `L` are left out, so where `M` does not divide `L` the
    uniform maps leave the last student layers without a teacher layer. `spread` (ours) is `spread_layers`, which fits any `L` and `M`.

    Raises:
        BadInput: an unknown map, or a student deeper than its teacher.

    >>> layer_map("uniform-consecutive", 12, 6)[2], layer_map("uniform+last", 6, 3)
    ((3, 4), {1: (2, 4), 2: (4, 5), 3: (6,)})
    """
    if name not in LAYER_MAPS:
        raise BadInput(f"--layer-map {name} is not known. Give {one_of(LAYER_MAPS)}.")
    if student_layers > teacher_layers:
        raise BadInput(
            f"A layer map needs a student no deeper than its teacher; the student has {student_layers} layers and the teacher "
            f"{teacher_layers}. Give a shallower student, or a method without a layer map (minilm, minilmv2 or directminilm)."
        )
    step = -(-teacher_layers // student_layers)
    found: dict[int, tuple[int, ...]] = {}
    for i in range(1, student_layers + 1):
        chosen = {
            "single": [teacher_layers] if i == student_layers else [],
            "last": [teacher_layers - student_layers + i],
            "uniform": [step * i],
            "spread": [spread_layers(teacher_layers, student_layers)[i - 1]],
            "uniform-consecutive": list(range(step * (i - 1) + 1, step * i + 1)),
            "uniform+last": sorted({step * i, teacher_layers - student_layers + i}),
        }[name]
        inside = tuple(layer for layer in chosen if 1 <= layer <= teacher_layers)
        if inside:
            found[i] = inside
    return found


def spread_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """One teacher layer for each student layer, evenly spread, ending with the last: `ceil(i L / M)`.

    >>> spread_layers(12, 3), spread_layers(6, 4)
    ((4, 8, 12), (2, 3, 5, 6))
    """
    return tuple(-(-(i * teacher_layers) // student_layers) for i in range(1, student_layers + 1))


def covering(name: str, teacher_layers: int, student_layers: int) -> str:
    """The map `name`, or `spread` where `name` leaves the student's last layer without a teacher layer.

    >>> covering("uniform", 12, 6), covering("uniform", 12, 5)
    ('uniform', 'spread')
    """
    return name if student_layers in layer_map(name, teacher_layers, student_layers) else "spread"
