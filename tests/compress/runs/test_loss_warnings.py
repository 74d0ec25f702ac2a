import pytest

from compress.runs.lineage import loss_warnings


def curve(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


def test_a_loss_that_falls_is_not_doubted_though_single_batches_rise() -> None:
    assert loss_warnings(curve(*(1 / step + 0.2 * (step % 2) for step in range(1, 50))), "relations") == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5] * 40, "the loss did not fall"),
        ([0.5 + 0.01 * i for i in range(40)], "the loss did not fall"),
        ([1.0] * 20 + [0.0] * 20, "nearly 0"),
        ([1.0] * 20 + [1e-7] * 20, "nearly 0"),
    ],
)
def test_one_that_does_not_or_falls_to_nothing_is(values: list[float], said: str) -> None:
    (told,) = loss_warnings(curve(*values), "relations")
    assert told.startswith("relations: ")
    assert said in told


def test_a_few_points_say_nothing() -> None:
    assert loss_warnings(curve(1.0, 1.0, 1.0), "relations") == []
