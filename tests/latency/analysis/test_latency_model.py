"""The latency model: it finds costs that add up to the times, predicts unseen students from them, and says how far it errs."""

import random
from dataclasses import replace

import numpy as np
import pytest

from compress.models.shapes import STUDENTS, Shape
from latency.analysis.latency_model import OPERATORS, LatencyModel, Timed, fit

# Milliseconds of one unit of each operator.
COSTS = dict(zip(OPERATORS, (0.05, 2e-5, 0.03, 2e-8, 3e-8, 1e-3, 4e-5, 1e-5, 4e-6), strict=True))


def time_ms(shape: Shape) -> float:
    """The time of a call by the text of the module, written out."""
    a_layer = (
        COSTS["layer"]
        + COSTS["attention projections"] * 4 * shape.hidden**2
        + COSTS["feed-forward"] * 2 * shape.hidden * shape.ffn
        + COSTS["attention"] * shape.heads
        + COSTS["attention values"] * shape.hidden
        + COSTS["relu" if shape.activation else "activation"] * shape.ffn
    )
    return COSTS["call"] + COSTS["embeddings"] * shape.hidden + shape.layers * a_layer


def shapes(count: int, seed: int = 0) -> list[Shape]:
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        hidden = 64 * drawn.randint(2, 12)
        ffn, activation = hidden * drawn.randint(1, 4), drawn.choice(("", "relu"))
        found.append(Shape(drawn.randint(1, 6), hidden, hidden // drawn.choice((32, 64)), ffn, activation))
    return found


def test_times_that_are_sums_of_costs_are_predicted_for_students_that_were_not_timed() -> None:
    model = fit([Timed(shape, time_ms(shape), 1.5 * time_ms(shape)) for shape in shapes(20)])
    for shape in (*STUDENTS.values(), *shapes(50, seed=1)):
        assert model.p50_ms(shape) == pytest.approx(time_ms(shape), rel=1e-6)
        assert model.percentile_ms(shape, 50) == model.p50_ms(shape)
        assert model.percentile_ms(shape, 99) == pytest.approx(1.5 * time_ms(shape), rel=1e-6)


def test_no_cost_is_negative_so_a_larger_student_is_never_predicted_to_be_faster() -> None:
    noise = np.random.default_rng(0)
    model = fit([Timed(shape, time_ms(shape) * noise.uniform(0.6, 1.6), 9.0) for shape in shapes(12)])
    assert min(model.ms_by_operator.values()) >= 0
    for shape in shapes(50, seed=2):
        larger = Shape(shape.layers + 1, shape.hidden + 64, shape.heads + 1, shape.ffn + 64, shape.activation)
        assert model.p50_ms(larger) >= model.p50_ms(shape) > 0


def test_an_activation_that_no_timed_student_has_costs_nothing_and_spoils_nothing() -> None:
    plain = [replace(shape, activation="") for shape in shapes(20)]
    model = fit([Timed(shape, time_ms(shape), 9.0) for shape in plain])
    assert model.ms_by_operator["relu"] == 0
    assert model.p50_ms(plain[0]) == pytest.approx(time_ms(plain[0]), rel=1e-6)


def test_errors_are_shares_of_the_measured_times() -> None:
    model = LatencyModel(COSTS, 1.0)
    timed = [Timed(shape, time_ms(shape) * by, 0.0) for shape, by in zip(shapes(3), (1.0, 1.25, 0.8), strict=True)]
    errors = model.errors_on(timed)
    assert errors.students == 3
    assert errors.median == pytest.approx(0.2)  # |1 / 1.25 - 1|
    assert errors.worst == pytest.approx(0.25)  # |1 / 0.8 - 1|


def test_a_percentile_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="p90"):
        LatencyModel(COSTS, 1.0).percentile_ms(Shape(1, 128, 2, 128), 90)
