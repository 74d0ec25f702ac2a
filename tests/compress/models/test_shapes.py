import pytest

from compress.models.shapes import LAYER_MAPS, STUDENTS, Shape, covering, layer_map, shape_of
from serve.errors import BadInput


def test_every_name_gives_its_shape_and_back() -> None:
    for name, shape in STUDENTS.items():
        assert shape_of(name) == shape
        assert str(shape) == name
        assert shape.hidden % shape.heads == 0


def test_numbers_give_any_shape() -> None:
    assert shape_of("layers=5, hidden=320,heads=10,ffn=1280") == Shape(5, 320, 10, 1280)
    relu = shape_of("layers=3,hidden=384,heads=12,ffn=1024,activation=relu")
    assert relu == Shape(3, 384, 12, 1024, "relu")
    assert shape_of(str(relu)) == relu


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ("3x385", "Did you mean 3x384"),
        ("layers=5,hidden=320,heads=12,ffn=1280", "320 cannot be divided by 12 heads"),
        ("layers=5,hidden=320", "lacks heads, ffn"),
        ("layers=5,activation=tanh", "'activation=tanh' is not understood.*activation=relu"),
        ("layers=0,hidden=320,heads=10,ffn=1", "'layers=0' is not understood"),
        ("layers=5,layers=6,hidden=320,heads=10,ffn=1", "'layers=6' is not understood"),
    ],
)
def test_bad_shapes_are_refused_with_a_hint(student: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shape_of(student)


# Student of 6 (and of 4) from a teacher of 12 (and of 6), worked out by hand from the table of the paper.
BY_HAND = [
    ("single", 12, 6, {6: (12,)}),
    ("last", 12, 6, {1: (7,), 2: (8,), 3: (9,), 4: (10,), 5: (11,), 6: (12,)}),
    ("uniform", 12, 6, {1: (2,), 2: (4,), 3: (6,), 4: (8,), 5: (10,), 6: (12,)}),
    ("uniform-consecutive", 12, 6, {1: (1, 2), 2: (3, 4), 3: (5, 6), 4: (7, 8), 5: (9, 10), 6: (11, 12)}),
    ("uniform+last", 12, 6, {1: (2, 7), 2: (4, 8), 3: (6, 9), 4: (8, 10), 5: (10, 11), 6: (12,)}),
    # ceil(6 / 4) = 2: the fourth layer of a uniform map would be the eighth.
    ("uniform", 6, 4, {1: (2,), 2: (4,), 3: (6,)}),
    ("uniform-consecutive", 6, 4, {1: (1, 2), 2: (3, 4), 3: (5, 6)}),
    ("uniform+last", 6, 4, {1: (2, 3), 2: (4,), 3: (5, 6), 4: (6,)}),
    ("spread", 6, 4, {1: (2,), 2: (3,), 3: (5,), 4: (6,)}),  # ours: no layer without a term
]


@pytest.mark.parametrize(("name", "teacher", "student", "expected"), BY_HAND)
def test_it_is_the_papers_map(name: str, teacher: int, student: int, expected: dict[int, tuple[int, ...]]) -> None:
    assert layer_map(name, teacher, student) == expected


@pytest.mark.parametrize("name", LAYER_MAPS)
def test_the_last_layer_of_equal_depths_learns_from_the_last(name: str) -> None:
    assert layer_map(name, 6, 6)[6] == (6,)


def test_impossible_layer_maps_are_refused() -> None:
    with pytest.raises(BadInput, match="no deeper than its teacher"):
        layer_map("last", 6, 8)
    with pytest.raises(BadInput, match="--layer-map first is not known"):
        layer_map("first", 6, 3)


@pytest.mark.parametrize(("teacher", "student"), [(12, 5), (12, 8), (6, 4), (6, 5)])
def test_a_map_that_leaves_the_last_layer_out_gives_way_to_one_that_does_not(teacher: int, student: int) -> None:
    assert student not in layer_map("uniform", teacher, student)
    assert covering("uniform", teacher, student) == "spread"
    assert layer_map("spread", teacher, student)[student] == (teacher,)
