"""The shapes that a search chooses from."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from compress.models.families import Family
from compress.models.shapes import Shape

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
    heads of one of `HEAD_WIDTHS`.
    """

    teacher: Shape

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
            Shape(layers, hidden, heads, ffn)
            for layers in range(1, self.teacher.layers + 1)
            for hidden in self.widths
            for heads in self.heads(hidden)
            for ffn in self.ffns(hidden)
        ]

    def suggested(self, trial: "Trial") -> Shape:
        """The shape that a sampler of optuna suggests."""
        layers = trial.suggest_int("layers", 1, self.teacher.layers)
        hidden = trial.suggest_categorical("hidden", self.widths)
        heads = self._choice(trial, f"heads at {hidden}", self.heads(hidden))
        return Shape(layers, hidden, heads, self._choice(trial, f"ffn at {hidden}", self.ffns(hidden)))

    @staticmethod
    def _choice(trial: "Trial", name: str, choices: Sequence[int]) -> int:
        return choices[0] if len(choices) == 1 else int(trial.suggest_categorical(name, choices))

    def parameters_of(self, shape: Shape) -> dict[str, int]:
        """What `suggested` would have asked the sampler for `shape`."""
        asked = {"layers": shape.layers, "hidden": shape.hidden}
        for name, choices, value in (
            ("heads", self.heads(shape.hidden), shape.heads),
            ("ffn", self.ffns(shape.hidden), shape.ffn),
        ):
            if len(choices) > 1:
                asked[f"{name} at {shape.hidden}"] = value
        return asked


def space_of(config: Any, family: Family) -> Space:
    """The space of students of a teacher with that configuration."""
    return Space(
        Shape(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, getattr(config, family.ffn_size)
        )
    )


def encoder_weights(shape: Shape) -> int:
    """The weights of a student's layers, without biases and norms: what its size is compared by."""
    return shape.layers * (4 * shape.hidden**2 + 2 * shape.hidden * shape.ffn)
