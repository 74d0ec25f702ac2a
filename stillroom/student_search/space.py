"""The shapes that a search chooses from."""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from compress.models.pretrained import Opened, open_model
from compress.models.shapes import Shape
from serve.errors import BadInput

if TYPE_CHECKING:
    from optuna.trial import Trial

WIDTH_STEP, LEAST_WIDTH = 64, 128
HEAD_WIDTHS = (32, 48, 64)  # BERT's is 64, MiniLM's 32, that of the papers' 4x576 is 48
# Units of the feed-forward layer for each of width. 4 is BERT's, 8/3 that of the papers' 3x384 and 4/3 that of their 4x576.
FFN_RATIOS = (Fraction(1), Fraction(4, 3), Fraction(2), Fraction(8, 3), Fraction(4))


@dataclass(frozen=True)
class Space:
    """Students no larger than their teacher in any of layers, width and feed-forward layer.

    At the teacher's width heads are the teacher's, so that layers can start from its own; a narrower student has new layers, with
    heads of one of `HEAD_WIDTHS`. The feed-forward layers of a student may have an activation of `others` in place of the teacher's.
    """

    teacher: Shape
    others: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """The activations, the teacher's first."""
        return ("", *self.others)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths, smallest first; the last is the teacher's."""
        return (*range(LEAST_WIDTH, self.teacher.hidden, WIDTH_STEP), self.teacher.hidden)

    def heads(self, hidden: int) -> tuple[int, ...]:
        """The numbers of heads at a width."""
        if hidden == self.teacher.hidden:
            return (self.teacher.heads,)
        return tuple(hidden // width for width in HEAD_WIDTHS if hidden % width == 0)

    def ffns(self, hidden: int) -> tuple[int, ...]:
        """The units of the feed-forward layer at a width."""
        found = {int(ratio * hidden) for ratio in FFN_RATIOS if (ratio * hidden).denominator == 1}
        own = {self.teacher.ffn} if hidden == self.teacher.hidden else set()
        return tuple(sorted(ffn for ffn in found | own if ffn <= self.teacher.ffn))

    def shapes(self) -> list[Shape]:
        """All of them, smallest first in each number."""
        return [
            Shape(layers, hidden, heads, ffn, activation)
            for layers in range(1, self.teacher.layers + 1)
            for hidden in self.widths
            for heads in self.heads(hidden)
            for ffn in self.ffns(hidden)
            for activation in self.activations
        ]

    def suggested(self, trial: "Trial") -> Shape:
        """The shape that a sampler of optuna suggests: each number by its place among those that are possible, smallest first."""
        layers = trial.suggest_int("layers", 1, self.teacher.layers)
        hidden = self.widths[trial.suggest_int("width", 0, len(self.widths) - 1)]
        heads, ffns = self.heads(hidden), self.ffns(hidden)
        head = trial.suggest_int("heads", 0, len(HEAD_WIDTHS) - 1)
        ffn = trial.suggest_int("feed-forward", 0, len(FFN_RATIOS))  # those, and the teacher's own
        activation = trial.suggest_int("activation", 0, len(self.others)) if self.others else 0
        return Shape(
            layers,
            hidden,
            heads[min(head, len(heads) - 1)],
            ffns[min(ffn, len(ffns) - 1)],
            self.activations[activation],
        )

    def parameters_of(self, shape: Shape) -> dict[str, int]:
        """What a sampler says to suggest `shape`."""
        return {
            "layers": shape.layers,
            "width": self.widths.index(shape.hidden),
            "heads": self.heads(shape.hidden).index(shape.heads),
            "feed-forward": self.ffns(shape.hidden).index(shape.ffn),
        } | ({"activation": self.activations.index(shape.activation)} if self.others else {})


def space_of(teacher: Opened) -> Space:
    """The space of students of `teacher`: with its activation, and with ReLU, which is faster."""
    own = getattr(teacher.config, teacher.family.activation)
    return Space(teacher_shape(teacher), () if own == "relu" else ("relu",))


def teacher_shape(teacher: Opened) -> Shape:
    """The shape of the teacher itself."""
    config = teacher.config
    ffn = getattr(config, teacher.family.ffn_size)
    return Shape(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, ffn)


def own_shape(teacher: str, revision: str) -> str:
    """The teacher's own shape, for checks and warnings that no student decides yet; empty if it cannot be opened, which others report."""
    try:
        return str(teacher_shape(open_model(teacher, revision=revision)))
    except BadInput:
        return ""


def encoder_weights(shape: Shape) -> int:
    """The weights of the products in a student's layers, to order students by size; of gated layers, two of three."""
    return shape.layers * (4 * shape.hidden**2 + 2 * shape.hidden * shape.ffn)
