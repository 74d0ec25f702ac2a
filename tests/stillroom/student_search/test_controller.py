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


def test_the_reward_is_the_papers() -> None:
    assert reward(0.25, 3.0, 5.0) == pytest.approx(0.75), "at 0.6 of the teacher's latency it is 1 - loss"
    assert reward(0.2, 5.0, 5.0) == pytest.approx(0.8 * (1 / 0.6) ** -0.06)
    assert reward(0.2, 1.0, 5.0) == pytest.approx(0.8 * (1 / 3) ** -0.06)
    # By the exponent a tenth of the latency is worth about 15 % of the score.
    assert reward(0.0, 0.1, 1.0) / reward(0.0, 1.0, 1.0) == pytest.approx(10**0.06)
    assert reward(1.0, 1.0, 5.0) == 0


def test_probabilities_of_all_allowed_shapes_sum_to_one_and_are_even_at_first() -> None:
    allowed = [shape for shape in GRID if sum(shape) % 3]
    controller = Controller(allowed, seed=0)
    logs = [float(controller.log_probability(shape).detach()) for shape in allowed]
    assert sum(map(math.exp, logs)) == pytest.approx(1)
    whole = Controller(GRID, seed=0)
    for shape in GRID[::37]:
        assert float(whole.log_probability(shape).detach()) == pytest.approx(-math.log(len(GRID)))


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


@pytest.mark.parametrize("seed", range(2))
def test_it_learns_a_known_best(seed: int) -> None:
    controller = Controller(GRID, seed)
    for _ in range(400):
        shape = controller.draw()
        controller.learn(shape, closeness(shape))
    assert math.exp(float(controller.log_probability((3, 0, 2, 4)).detach())) > 0.9, "at first it is 1 in 180"


def test_a_reward_above_the_mean_makes_a_shape_likelier_and_one_below_less_likely() -> None:
    for value, sign in ((0.9, 1), (0.1, -1)):
        controller = Controller(GRID, seed=0)
        for i in range(10):
            controller.learn(GRID[7 * i], 0.5 + 0.01 * (i % 2))
        shape = GRID[101]
        before = float(controller.log_probability(shape).detach())
        controller.learn(shape, value)
        assert sign * (float(controller.log_probability(shape).detach()) - before) > 0


def test_a_later_choice_depends_on_an_earlier_one() -> None:
    """The best of the second number is another one for each of the first, which choices that know nothing of each other cannot learn."""
    every = [*product(range(2), range(2))]
    controller = Controller(every, seed=0)
    for i in range(200):
        shape = every[i % 4]
        controller.learn(shape, float(shape[0] == shape[1]))
    chance = {shape: math.exp(float(controller.log_probability(shape).detach())) for shape in every}
    for i in range(2):
        assert chance[i, i] / (chance[i, 0] + chance[i, 1]) > 0.8


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


def test_what_was_given_first_comes_first_and_is_not_given_again() -> None:
    first = tuple(shape for shape in GRID if shape[0] == 3)[:10]
    shapes = taken(0, 20, first)
    assert shapes[:10] == list(first)
    assert not set(shapes[10:]) & set(first)


def test_every_shape_is_given_in_the_end_and_none_twice() -> None:
    assert sorted(taken(0, 13, allowed=GRID[:12])) == GRID[:12]
