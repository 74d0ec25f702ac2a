"""What a batch takes, fitted to a report whose times follow a known formula."""

from typing import Any, cast

import numpy as np
import pytest
from timed_report import CALL_MS, NAME, SQUARE_MS, TEXT_MS, TEXT_TOKEN_MS, TOKEN_MS, run_ms, timed_report

from latency.analysis.service_times import service_times
from latency.measure.result_document import ProfileDocument
from serve.errors import BadInput


def times_of(report: dict[str, Any], name: str = "") -> Any:
    return service_times(cast(ProfileDocument, report), name)


def test_the_costs_behind_the_times_are_found() -> None:
    times = times_of(timed_report())
    costs = [1e3 * each for each in (times.call_s, times.token_s, times.square_s, times.text_s, times.text_token_s)]
    assert costs == pytest.approx([CALL_MS, TOKEN_MS, SQUARE_MS, TEXT_MS, TEXT_TOKEN_MS], rel=1e-6)
    assert (times.name, times.runtime, times.crowded) == (NAME, "onnxruntime", None)
    assert times.error < 1e-9
    assert 1e3 * times.run_s(5, 70) == pytest.approx(run_ms(5, 70))
    noisy = times_of(timed_report(noise=0.1, crowded=1.4))
    assert 1e3 * noisy.run_s(8, 64) == pytest.approx(run_ms(8, 64), rel=0.1)
    assert noisy.crowded == pytest.approx(1.4)


def test_a_batch_is_computed_in_the_runs_of_a_served_process() -> None:
    times = times_of(timed_report())
    lengths = [10, 300, 12, 11]
    parts = times.parts_s(lengths)
    assert sorted(place for part, _ in parts for place in part) == [0, 1, 2, 3]
    assert parts[-1][0] == [1]  # a long text alone, last
    (short, short_s), *_ = parts
    assert short == [0, 3, 2]
    assert 1e3 * short_s == pytest.approx(run_ms(3, 12) + 3 * TEXT_MS + 33 * TEXT_TOKEN_MS)
    in_openvino = timed_report()
    for row in [*in_openvino["candidates"], *in_openvino["models"]]:
        row["runtime"] = "openvino"
    assert times_of(in_openvino).run_s(1, 17) == times_of(in_openvino).run_s(1, 32)  # padded to whole vectors


def test_a_report_that_cannot_tell_says_what_to_do() -> None:
    for report, name, reason in (
        (timed_report(threads=2), "", "with one thread.*--threads 1"),
        (timed_report(), "teacher", f"--model 'teacher' is not in the report.*{NAME}"),
        ({**timed_report(), "candidates": []}, "", "too few times.*--batches 1,8"),
    ):
        with pytest.raises(BadInput, match=reason):
            times_of(report, name)


def test_of_several_models_the_fastest_is_taken() -> None:
    report = timed_report()
    slower = {**report["models"][0], "name": "slow", "single_stream": {**report["models"][0]["single_stream"]}}
    slower["single_stream"]["texts_per_s"] = 1.0
    report["models"].insert(0, slower)
    report["candidates"] += [{**row, "name": "slow", "p50_ms": 10 * row["p50_ms"]} for row in report["candidates"]]
    assert times_of(report).name == NAME
    assert times_of(report, "slow").name == "slow"
    assert np.isclose(times_of(report).token_s * 1e3, TOKEN_MS)
