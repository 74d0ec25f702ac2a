"""The simulated server against queueing theory, and what must hold of any queue."""

from typing import Any, cast

import numpy as np
import pytest
from timed_report import timed_report

from latency.analysis.service_times import ServiceTimes, service_times
from latency.analysis.simulated_server import Machine, simulate
from latency.measure.result_document import ProfileDocument

S = 0.002
ALWAYS = ServiceTimes("always the same", "onnxruntime", S, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, (64,))
FREE: Any = {"front_s": 0.0, "front_wake_s": 0.0, "message_s": 0.0, "wake_s": 0.0, "served": 1.0, "added_s": 0.0}


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_process_and_one_text_a_batch_wait_as_in_a_queue_of_fixed_service(load: float) -> None:
    # M/D/1: the mean wait is load S / (2 (1 - load)), by Pollaczek and Khinchine.
    one = Machine(1, 1, batch_tokens=64, max_queue_s=60, **FREE)
    found = simulate(ALWAYS, [64], one, load / S, 30_000)
    expected_ms = 1e3 * S * (1 + load / (2 * (1 - load)))
    assert found.latencies_ms.mean() == pytest.approx(expected_ms, rel=0.08)
    assert found.latencies_ms.min() == pytest.approx(1e3 * S)
    assert found.busy == pytest.approx(load, rel=0.03)
    assert found.refused == 0


def test_where_the_front_is_the_limit_requests_wait_for_it() -> None:
    # Each request is two services of half a front's time, so the front is a queue too; the model takes no time here.
    nothing = ServiceTimes("no time", "onnxruntime", 1e-9, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, (8,))
    machine = Machine(4, 8, **{**FREE, "front_s": 0.001})
    quiet, full = (simulate(nothing, [8], machine, rate, 8000) for rate in (50, 900))
    assert quiet.percentile_ms(50) == pytest.approx(1.0, rel=0.05)
    assert quiet.front_busy == pytest.approx(0.05, rel=0.1)
    assert full.percentile_ms(50) > 2
    assert full.front_busy == pytest.approx(0.9, rel=0.05)


def test_processes_wait_for_a_core() -> None:
    both = Machine(2, 1, batch_tokens=64, **FREE)  # two processes on one core are one process
    one = Machine(1, 1, batch_tokens=64, **FREE)
    shared, alone = (simulate(ALWAYS, [64], machine, 350, 6000).latencies_ms.mean() for machine in (both, one))
    assert shared == pytest.approx(alone, rel=0.1)


def test_a_process_that_slept_takes_longer() -> None:
    cold = Machine(1, 1, batch_tokens=64, **{**FREE, "wake_s": S})
    assert simulate(ALWAYS, [64], cold, 1, 500).percentile_ms(50) == pytest.approx(2e3 * S)
    often = simulate(ALWAYS, [64], cold, 0.95 / S, 6000)  # hardly ever asleep
    assert often.busy < 0.999


def test_a_queue_that_grows_is_refused_as_the_server_does() -> None:
    one = Machine(1, 1, batch_tokens=64, **FREE)
    found = simulate(ALWAYS, [64], one, 5 / S, 20_000)
    assert found.refused > 0.7 * 20_000
    assert found.answered_per_s == pytest.approx(1 / S, rel=0.15)
    # A wait of at most half a second is accepted, and it is about that long.
    assert 400 < found.percentile_ms(50) < 650


def test_what_a_machine_has_more_of_never_makes_it_slower() -> None:
    times = service_times(cast(ProfileDocument, timed_report()))

    def p99_ms(processes: int, rate: float, **changes: Any) -> float:
        machine = Machine(**{"processes": processes, "cores": 8, **FREE, **changes})
        return simulate(times, times.tokens, machine, rate, 6000).percentile_ms(99)

    for rate in (500.0, 1500.0):
        by_processes = [p99_ms(processes, rate) for processes in (1, 2, 4)]
        assert by_processes == sorted(by_processes, reverse=True)
        by_cores = [p99_ms(4, rate, cores=cores) for cores in (1, 2, 4)]
        assert by_cores == sorted(by_cores, reverse=True)
    by_rate = [p99_ms(2, rate) for rate in (300.0, 1500.0, 2500.0)]
    assert by_rate == sorted(by_rate)
    assert p99_ms(2, 1000.0) < p99_ms(2, 1000.0, front_s=2e-4, message_s=1e-4) < p99_ms(2, 1000.0, added_s=0.1)


def test_cores_that_are_slower_together_are_so_only_while_others_compute() -> None:
    slow = ServiceTimes("slower together", "onnxruntime", S, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, (64,))
    two = Machine(2, 2, batch_tokens=64, **FREE)
    rare = simulate(slow, [64], two, 5, 3000)
    assert rare.percentile_ms(50) == pytest.approx(1e3 * S)
    often = simulate(slow, [64], two, 900, 6000)
    assert often.percentile_ms(50) > 1.5 * simulate(ALWAYS, [64], two, 900, 6000).percentile_ms(50)


def test_the_same_seed_gives_the_same_latencies() -> None:
    times = service_times(cast(ProfileDocument, timed_report()))
    first, again, other = (simulate(times, times.tokens, Machine(2, 2), 1500, 4000, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.latencies_ms, again.latencies_ms)
    assert not np.array_equal(first.latencies_ms, other.latencies_ms)
