"""The controller that draws shapes: the paper's reward, what it learns, what it may draw, and that a seed decides it."""

import math
from itertools import product

import pytest
import torch

from stillroom.student_search.controller import Controller, Places, controlled, reward

GRID = [*product(range(4), range(3), range(3), range(5))]


def closeness(shape: Places, best: Places = (3, 0, 2, 4)) -> float:
    """A reward that is 1 at the `best` and falls with each step away from it."""
    return 1 - 0.08 * sum(abs(a - b) for a, b in zip(shape, best, strict=True))


def chance_of(controller: Controller, shape: Places) -> float:
    return math.exp(float(controller.log_probability(shape).detach()))


def test_the_reward_is_the_papers() -> None:
    assert reward(0.25, 3.0, 5.0) == pytest.approx(0.75), "at 0.6 of the teacher's latency it is 1 - loss"
    assert reward(0.2, 5.0, 5.0) == pytest.approx(0.8 * (1 / 0.6) ** -0.06)
    assert reward(0.2, 1.0, 5.0) == pytest.approx(0.8 * (1 / 3) ** -0.06)
    # By the exponent a tenth of the latency is worth about 15 % of the score.
    assert reward(0.0, 0.1, 1.0) / reward(0.0, 1.0, 1.0) == pytest.approx(10**0.06)
    assert reward(1.0, 1.0, 5.0) == 0


def test_probabilities_of_all_allowed_shapes_sum_to_one_and_are_even_at_first() -> None:
    allowed = [shape for shape in GRID if sum(shape) % 3]
    controller, whole = Controller(allowed, seed=0), Controller(GRID, seed=0)
    assert sum(chance_of(controller, shape) for shape in allowed) == pytest.approx(1)
    for shape in GRID[::37]:
        assert chance_of(whole, shape) == pytest.approx(1 / len(GRID))


def test_only_allowed_shapes_are_drawn() -> None:
    allowed = [shape for shape in GRID if shape[0] + shape[3] == 4]
    controller = Controller(allowed, seed=1)
    drawn = set()
    for _ in range(60):
        shape = controller.draw()
        drawn.add(shape)
        controller.learn(shape, closeness(shape))
    assert drawn <= set(allowed)
    assert len(drawn) > 10


def test_it_learns_a_known_best() -> None:
    controller = Controller(GRID, seed=0)
    for _ in range(400):
        shape = controller.draw()
        controller.learn(shape, closeness(shape))
    assert chance_of(controller, (3, 0, 2, 4)) > 0.9, "at first it is 1 in 180"


@pytest.mark.parametrize(("value", "sign"), [(0.9, 1), (0.1, -1)])
def test_a_reward_above_the_mean_makes_a_shape_likelier_and_one_below_less_likely(value: float, sign: int) -> None:
    controller = Controller(GRID, seed=0)
    for i in range(10):
        controller.learn(GRID[7 * i], 0.5 + 0.01 * (i % 2))
    before = chance_of(controller, GRID[101])
    controller.learn(GRID[101], value)
    assert sign * (chance_of(controller, GRID[101]) - before) > 0


def test_a_later_choice_depends_on_an_earlier_one() -> None:
    """The best of the second number is another one for each of the first, which choices that know nothing of each other cannot learn."""
    every = [*product(range(2), range(2))]
    controller = Controller(every, seed=0)
    for i in range(200):
        controller.learn(every[i % 4], float(every[i % 4][0] == every[i % 4][1]))
    for i in range(2):
        own, other = (chance_of(controller, (i, second)) for second in (i, 1 - i))
        assert own / (own + other) > 0.8


def taken(seed: int, count: int, first: tuple[Places, ...] = (), allowed: list[Places] = GRID) -> list[Places]:
    known: dict[Places, float] = {}
    shapes = []
    for shape in controlled(allowed, first, known.get, seed):
        assert shape not in known
        known[shape] = closeness(shape)
        shapes.append(shape)
        if len(shapes) == count:
            break
    return shapes


def test_a_seed_decides_the_shapes_and_another_decides_others() -> None:
    assert taken(0, 20) == taken(0, 20)
    assert len({taken(seed, 1)[0] for seed in range(8)}) > 4
    assert taken(0, 8) == taken(0, 20)[:8], "fewer trials are the first of more"


def test_random_numbers_of_others_change_nothing_and_are_not_changed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    once = taken(0, 10)
    assert torch.rand(1) == expected
    assert taken(0, 10) == once


def test_what_was_given_first_comes_first_and_every_shape_is_given_once() -> None:
    first = tuple(shape for shape in GRID if shape[0] == 3)[:10]
    assert taken(0, 20, first)[:10] == list(first)
    assert sorted(taken(0, 7, allowed=GRID[:6])) == GRID[:6]
