import pytest

from compress.models.shapes import STUDENTS, Shape, shape_of
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
        pytest.param("3x385", "Did you mean 3x384", id="a-typo-suggests-the-nearest"),
        pytest.param(
            "layers=5,hidden=320,heads=12,ffn=1280",
            "320 cannot be divided by 12 heads.*10",
            id="heads-that-do-not-divide",
        ),
        pytest.param("layers=5,hidden=320", "lacks heads, ffn", id="numbers-missing"),
        pytest.param(
            "layers=5,activation=tanh", "'activation=tanh' is not understood.*activation=relu", id="an-activation"
        ),
        pytest.param("layers=0,hidden=320,heads=10,ffn=1", "'layers=0' is not understood", id="no-layers"),
        pytest.param(
            "layers=5,layers=6,hidden=320,heads=10,ffn=1", "'layers=6' is not understood", id="a-number-twice"
        ),
    ],
)
def test_what_is_no_shape_is_refused_with_the_way_out(student: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shape_of(student)
