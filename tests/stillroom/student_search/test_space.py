"""The shapes that a search chooses from: none larger than the teacher, the papers' among them, each of which a sampler can suggest."""

from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from compress.models.pretrained import open_model
from compress.models.shapes import STUDENTS, Shape
from stillroom.student_search.space import Space, encoder_weights, space_of
from stillroom.student_search.trials import first_shapes

BERT, MINILM = Shape(12, 768, 12, 3072), Shape(6, 384, 12, 1536)


@pytest.mark.parametrize("others", [(), ("relu",)])
@pytest.mark.parametrize("teacher", [BERT, MINILM, Shape(4, 32, 4, 64), Shape(1, 128, 2, 512)])
def test_every_shape_is_suggested_for_what_the_sampler_is_told_of_it(teacher: Shape, others: tuple[str, ...]) -> None:
    space = Space(teacher, others)
    every = space.shapes()
    assert teacher in every
    assert len(set(every)) == len(every)
    for shape in every:
        assert space.suggested(optuna.trial.FixedTrial(space.parameters_of(shape))) == shape
        assert shape.layers <= teacher.layers
        assert shape.hidden <= teacher.hidden
        assert shape.ffn <= teacher.ffn
        assert shape.hidden % shape.heads == 0
        assert shape.hidden < teacher.hidden or shape.heads == teacher.heads, "only its own heads let layers be copied"


def test_the_students_of_the_papers_are_in_the_space_of_their_teacher() -> None:
    assert set(STUDENTS.values()) <= set(Space(BERT).shapes())
    small = {shape for shape in STUDENTS.values() if shape.layers <= 6 and shape.hidden <= 384}
    assert small <= set(Space(MINILM).shapes())


def test_the_largest_of_each_depth_at_the_teachers_width_is_tried_first_then_those_of_the_papers() -> None:
    space = Space(MINILM)
    fitting = [shape for shape in space.shapes() if encoder_weights(shape) <= encoder_weights(STUDENTS["3x384"])]
    papers = [shape for shape in STUDENTS.values() if shape in fitting]
    assert papers == [STUDENTS["3x384"]]
    assert first_shapes(space, fitting) == [
        STUDENTS["3x384"], Shape(4, 384, 12, 512), Shape(2, 384, 12, 1536), Shape(1, 384, 12, 1536),
    ]  # fmt: skip
    assert first_shapes(space, [Shape(2, 128, 2, 128)]) == []
    both = [replace(shape, activation=activation) for shape in fitting for activation in ("", "relu")]
    assert first_shapes(Space(MINILM, ("relu",)), both) == first_shapes(space, fitting)
    deep = Shape(6, 384, 12, 384, "relu")  # no other of six layers fits
    assert first_shapes(Space(MINILM, ("relu",)), [*fitting, deep]) == [deep, *first_shapes(space, fitting)]


def test_relu_is_tried_beside_the_activation_of_a_teacher_that_has_another(tiny_teacher: Path) -> None:
    opened = open_model(str(tiny_teacher))
    assert space_of(opened).activations == ("", "relu")
    opened.config.hidden_act = "relu"
    assert space_of(opened).activations == ("",)
