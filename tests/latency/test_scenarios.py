"""Real text in the three scenarios, by workers that run tiny models: what was compared with what, not how fast it was."""

from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from lookup_bundles import INTENTS, intent_table, write_bundle

from latency.candidates.candidate import Candidate, Reads
from latency.load.driver import late_allowed
from latency.measure import interleave
from latency.measure.interleave import StoppingRule, Worker, start_workers
from latency.measure.machine import EnergyCounter
from latency.scenarios import (
    BATCH_TOKENS,
    OFFLINE_LEAST_TEXTS,
    SERVER_QUERIES,
    TEXTS_PER_TURN,
    offline,
    server,
    single_stream,
    trial_queries,
)
from serve.model.pipeline import Pipeline

# 1 to 24 words, so that its tokens tell which text was timed; then more of them, for throughput.
LENGTHS = [*range(1, 25), *[20] * 56]
TEXTS = [" ".join(["fly"] * words) for words in LENGTHS]
TOKENS = [words + 2 for words in LENGTHS]
BRIEF = StoppingRule(seconds=0.05, turn_seconds=0.005)
LAYERS = {"shallow": 1, "deep": 48}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """Two models of the same answers; one has 48 times the layers."""
    folder = tmp_path_factory.mktemp("scenarios")
    candidates = []
    for name, layers in LAYERS.items():
        bundle = write_bundle(folder / name, intent_table(), layers=layers, task="text-classification", labels=INTENTS)
        reads = Reads(bundle, "text-classification", tuple(INTENTS))
        model = bundle / "onnx" / "model.onnx"
        candidates.append(Candidate(name, "onnxruntime", "fp32", model, 1, "cpu", 32, reads=reads))
    with start_workers(candidates, [], TEXTS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def streams(workers: dict[str, Worker]) -> dict[str, dict[str, Any]]:
    return single_stream(workers, 24, patience=BRIEF)


def turns(row: dict[str, Any]) -> list[list[list[float]]]:
    """The samples of each turn, [tokens, tokenise_ms, run_ms, decode_ms] each."""
    ends = np.cumsum([0, *row["turn_sizes"]])
    assert ends[-1] == len(row["samples"])
    return [row["samples"][start:end] for start, end in pairwise(ends)]


def test_a_turn_gives_every_candidate_the_same_texts_in_whole_passes(streams: dict[str, dict[str, Any]]) -> None:
    shallow, deep = (turns(row) for row in streams.values())
    assert len(shallow) == len(deep) >= 6
    for turn in zip(shallow, deep, strict=True):
        passes = []
        for samples in turn:
            tokens = [sample[0] for sample in samples]
            assert len(tokens) % TEXTS_PER_TURN == 0
            passes.append(tokens[:TEXTS_PER_TURN])
            assert tokens == passes[-1] * (len(tokens) // TEXTS_PER_TURN)
        assert passes[0] == passes[1]


def test_turn_by_turn_all_texts_are_gone_through_in_an_order_of_the_seed(
    workers: dict[str, Worker], streams: dict[str, dict[str, Any]]
) -> None:
    def seen(row: dict[str, Any]) -> list[float]:
        return [sample[0] for turn in turns(row)[:6] for sample in turn[:TEXTS_PER_TURN]]

    first = seen(streams["deep"])
    assert sorted(first[:24]) == sorted(first[24:]) == TOKENS[:24]
    assert first[:24] == first[24:] != TOKENS[:24]
    again, other = (single_stream({"deep": workers["deep"]}, 24, patience=BRIEF, seed=seed) for seed in (0, 1))
    assert seen(again["deep"]) == first != seen(other["deep"])


def test_fewer_texts_than_a_turn_takes_are_each_timed_once_a_pass(workers: dict[str, Worker]) -> None:
    row = single_stream({"deep": workers["deep"]}, 3, patience=BRIEF)["deep"]
    for turn in turns(row):
        tokens = [sample[0] for sample in turn]
        assert {tokens.count(each) for each in TOKENS[:3]} == {len(tokens) // 3}


def test_a_row_tells_of_its_samples(streams: dict[str, dict[str, Any]]) -> None:
    for row in streams.values():
        parts_ms = np.array(row["samples"])[:, 1:]
        assert (parts_ms >= 0).all()
        assert list(row["parts_ms"]) == ["tokenise", "run", "decode"]
        assert list(row["parts_ms"].values()) == pytest.approx(np.median(parts_ms, axis=0), abs=1e-4)
        # The clock of the whole call runs a little longer than those of its parts.
        assert row["p50_ms"] >= np.percentile(parts_ms.sum(axis=1), 50) - 1e-3
        assert row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert set(row["intervals_ms"]) == {"p50", "p90", "p95", "p99"}
        assert row["conditions"]["turns"] == len(row["turn_sizes"])


def test_a_worker_gives_the_answers_of_its_bundle_and_tells_where_its_time_goes(workers: dict[str, Worker]) -> None:
    pipeline = Pipeline(workers["deep"].candidate.path.parents[1])
    assert [worker.answers() for worker in workers.values()] == [pipeline(TEXTS)] * 2
    found = workers["deep"].ask("operators", input_ids=[[2, 3, 3]])
    assert found["tokens"] == 3
    assert found["by_kind"]["MatMul"] > 0


def test_the_model_with_more_work_is_the_slower_one_in_either_order(
    workers: dict[str, Worker], streams: dict[str, dict[str, Any]]
) -> None:
    assert "over_first" not in streams["shallow"]
    ratio, low, high = streams["deep"]["over_first"]
    assert low <= ratio <= high
    assert ratio < 1
    turned = single_stream({name: workers[name] for name in ("deep", "shallow")}, 24, patience=BRIEF)
    assert "over_first" not in turned["deep"]
    assert turned["shallow"]["over_first"][0] > 1
    assert streams["deep"]["parts_ms"]["run"] > streams["shallow"]["parts_ms"]["run"]


def test_offline_all_candidates_answer_the_same_texts_in_batches_that_suit_each(workers: dict[str, Worker]) -> None:
    rows = offline(workers, len(TEXTS), 1.0, patience=StoppingRule(seconds=0.05))
    for row in rows.values():
        assert row["texts"] == OFFLINE_LEAST_TEXTS  # what a slow one answers in some seconds, but never fewer
        assert row["batch_tokens"] in BATCH_TOKENS
        assert len(row["passes_s"]) >= 6
        rates = row["texts"] / np.array(row["passes_s"])
        assert min(rates) * 0.999 <= row["texts_per_s"] <= max(rates) * 1.001
        assert row["interval"][0] <= row["texts_per_s"] <= row["interval"][1]
        tokens_each = row["tokens_per_s"] / row["texts_per_s"]
        assert tokens_each == pytest.approx(np.mean(TOKENS[:OFFLINE_LEAST_TEXTS]), rel=1e-3)
        assert 0 <= row["padding_share"] < 1
    assert rows["deep"]["texts_per_s"] < rows["shallow"]["texts_per_s"]
    assert len({len(row["passes_s"]) for row in rows.values()}) == 1  # they took turns


def test_offline_a_fast_candidate_answers_all_texts_and_tells_the_energy_that_the_machine_tells(
    workers: dict[str, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow, brief = {"shallow": workers["shallow"]}, StoppingRule(seconds=0.05)
    spent_uj = count(0, 3_000_000)  # 3 J in each pass
    monkeypatch.setattr(interleave, "energy_counters", lambda: {"package": EnergyCounter(next(spent_uj), 10**12)})
    row = offline(shallow, 70, 1e6, patience=brief)["shallow"]
    assert row["texts"] == 70
    assert row["joules_per_text"] == pytest.approx(3 / 70, rel=1e-4)
    monkeypatch.setattr(interleave, "energy_counters", lambda: None)
    assert "joules_per_text" not in offline(shallow, 60, 1.0, patience=brief)["shallow"]


def test_server_rates_rise_only_while_they_are_held(workers: dict[str, Worker]) -> None:
    found = server(workers["deep"], len(TEXTS), 2000.0, 50.0, seconds=0.5)
    trials = found["trials"]
    assert trials[0]["rate_per_s"] == 200.0
    for trial in trials:
        assert trial["queries"] <= SERVER_QUERIES[1]
        assert trial["queries"] >= SERVER_QUERIES[0] or not trial["held"]  # it ends once its bound is missed
        assert trial["held"] is (trial["p99_ms"] <= found["bound_ms"])
        assert trial["p50_ms"] <= trial["p99_ms"]
        assert 200.0 <= trial["rate_per_s"] <= 2400.0
    for one, following in pairwise(trials):
        assert (following["rate_per_s"] > one["rate_per_s"]) is one["held"]
    held = [trial["rate_per_s"] for trial in trials if trial["held"]]
    assert found["rate_per_s"] == max(held, default=0.0)


def test_server_a_trial_ends_as_soon_as_its_bound_is_missed(workers: dict[str, Worker]) -> None:
    # A hundred thousand texts a second, which no worker here answers.
    found = server(workers["deep"], len(TEXTS), 1e6, 5.0, seconds=1.0)
    assert found["rate_per_s"] == 0.0
    for trial in found["trials"]:
        assert trial["queries"] == len(trial["latencies_ms"]) < SERVER_QUERIES[1] / 2
        assert sum(latency_ms > 5.0 for latency_ms in trial["latencies_ms"]) > late_allowed(SERVER_QUERIES[1])
        assert trial["p99_ms"] > found["bound_ms"]
        assert not trial["held"]


def test_a_worker_that_waits_for_texts_still_to_come_is_not_taken_for_one_that_hangs(
    workers: dict[str, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = workers["shallow"].candidate
    with start_workers([candidate], [], TEXTS) as loaded:
        monkeypatch.setattr(interleave, "REPLY_TIMEOUT_S", 1.0)
        turn = loaded["shallow"].serve([0.0, 2.5], [0, 1], most=8, bound_s=60.0, late_allowed=0)
    assert len(turn["latencies_ms"]) == 2


def test_a_slow_models_trials_have_fewer_queries_but_enough_for_a_tail() -> None:
    assert trial_queries(0.01, 2.0) == 20
    assert trial_queries(2.0, 2.0) == 60
    assert trial_queries(10.0, 2.0) == SERVER_QUERIES[0]
    assert trial_queries(1000.0, 2.0) == 2000
    assert trial_queries(1e6, 2.0) == SERVER_QUERIES[1]
