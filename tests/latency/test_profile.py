import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lookup_bundles import INTENTS, intent_table, write_bundle
from tokenizers import Tokenizer

from latency.candidates.candidate import Candidate, Reads, size_bytes
from latency.measure.interleave import Workload, start_workers
from latency.profile import Plan, time_all, time_grid
from serve.errors import BadInput

TEXTS = ["book a table for two", "play jazz in Oslo tomorrow"]


def test_the_grid_has_every_candidate_and_workload_with_its_samples(
    onnx_candidate: Candidate, tokenizer: Tokenizer
) -> None:
    plan, known = Plan((1, 3), (5,), seconds=0.0), {"student": 0.91}
    document = time_grid(
        [replace(onnx_candidate, name="teacher"), onnx_candidate], TEXTS, tokenizer, plan, metrics=known
    )
    assert json.loads(json.dumps(document)) == document
    rows = document["candidates"]
    cells = [("teacher", 1, 5), ("student", 1, 5), ("teacher", 3, 5), ("student", 3, 5)]
    assert [(row["name"], row["batch"], row["tokens"]) for row in rows] == cells
    for row in rows:
        assert len(row["samples_ms"]) == sum(row["turn_sizes"])
        assert len(row["turn_sizes"]) == 6
        assert row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"]
        low_ms, high_ms = row["intervals_ms"]["p50"]
        assert low_ms <= row["p50_ms"] <= high_ms
    assert [row.get("metric") for row in rows] == [None, 0.91, None, 0.91]
    assert rows[1]["size_bytes"] == size_bytes(onnx_candidate)
    ratios = document["ratios"]
    compared = [("teacher", "student", 1, 5), ("teacher", "student", 3, 5)]
    assert [(r["a"], r["b"], r["batch"], r["tokens"]) for r in ratios] == compared
    assert all(r["low"] <= r["ratio"] <= r["high"] for r in ratios)


def test_a_metric_of_a_candidate_that_is_not_timed_is_refused(onnx_candidate: Candidate, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="studnet"):
        time_grid([onnx_candidate], TEXTS, tokenizer, metrics={"studnet": 0.9})


def test_the_scenario_by_chance_is_timed_when_a_bound_is_given(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "intents", intent_table(), task="text-classification", labels=INTENTS)
    model = bundle / "onnx" / "model.onnx"
    reads = Reads(bundle, "text-classification", tuple(INTENTS))
    readers = [Candidate(name, "onnxruntime", "fp32", model, 1, "cpu", 32, reads=reads) for name in ("first", "second")]
    kept: list[int] = []
    workload = Workload("batch 1 x 2 tokens", 1, 2, np.array([[2, 3]]))
    plan = Plan(seconds=0.1, bound_ms=60_000.0, server_seconds=0.1)
    with start_workers(readers, [workload], ["refund please", "i love it"]) as workers:
        timed = time_all(
            workers, [workload], 2, plan,
            keep=lambda known: kept.append(sum("server" in row for row in known.models.values())),
        )  # fmt: skip
    for row in timed.models.values():
        assert row["server"]["bound_ms"] == 60_000.0
        assert row["server"]["rate_per_s"] > 0
    assert kept[-2:] == [1, 2]  # a candidate that is done is kept before the next
