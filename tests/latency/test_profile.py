import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from latency.candidates import Candidate, size_bytes
from latency.machine import busy_core_seconds, machine_facts
from latency.profile import profile
from serve.errors import BadInput

TEXTS = ["book a table for two", "play jazz in Oslo tomorrow"]


def test_the_profile_document_has_every_candidate_and_workload_with_its_samples(
    onnx_candidate: Candidate, tokenizer: Tokenizer
) -> None:
    document = profile(
        [replace(onnx_candidate, name="teacher"), onnx_candidate],
        TEXTS,
        tokenizer,
        batches=(1, 3),
        lengths=(5,),
        seconds=0.0,
        turns=2,
        min_samples=4,
        metrics={"student": 0.91},
    )
    assert json.loads(json.dumps(document)) == document
    rows = document["candidates"]
    assert [(row["name"], row["batch"], row["tokens"]) for row in rows] == [
        ("teacher", 1, 5),
        ("student", 1, 5),
        ("teacher", 3, 5),
        ("student", 3, 5),
    ]
    assert all(len(row["samples_ms"]) == 4 and row["turn_sizes"] == [2, 2] for row in rows)
    assert all(row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] for row in rows)
    assert [row.get("metric") for row in rows] == [None, 0.91, None, 0.91]
    assert rows[1]["size_bytes"] == size_bytes(onnx_candidate)
    assert any("p99 rests on 4 samples" in doubt for doubt in rows[0]["doubts"])
    ratios = document["ratios"]
    assert [(r["a"], r["b"], r["batch"], r["tokens"]) for r in ratios] == [
        ("teacher", "student", 1, 5),
        ("teacher", "student", 3, 5),
    ]
    assert ratios[0]["ratio"] == pytest.approx(rows[0]["p50_ms"] / rows[1]["p50_ms"], rel=0.01)
    assert all(r["low"] <= r["high"] for r in ratios)


def test_a_metric_of_nobody_and_a_single_turn_are_refused(onnx_candidate: Candidate, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="metrics were given for studnet; the candidates are student"):
        profile([onnx_candidate], TEXTS, tokenizer, metrics={"studnet": 0.9})
    with pytest.raises(BadInput, match="1 turns were asked for"):
        profile([onnx_candidate], TEXTS, tokenizer, turns=1)


def test_machine_facts_explain_a_number_and_identify_nobody() -> None:
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert "onnxruntime" in facts["versions"]
    told = json.dumps(facts)
    assert platform.node() not in told.split()
    assert f'"{getpass.getuser()}"' not in told
    assert str(Path.home()) not in told


@pytest.mark.skipif(busy_core_seconds() is None, reason="this system does not tell how busy its cores are")
def test_busy_core_seconds_grow_with_work() -> None:
    import time

    before_s = busy_core_seconds()
    began_s = time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    after_s = busy_core_seconds()
    assert before_s is not None
    assert after_s is not None
    assert after_s - before_s >= 0.15
