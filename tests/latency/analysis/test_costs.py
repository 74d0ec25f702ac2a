"""What follows from speed and size, against figures worked out by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from latency.analysis.costs import add_costs
from latency.candidates.candidate import Candidate, Reads

CONFIG = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 8, "num_hidden_layers": 1,
    "intermediate_size": 16,
}  # fmt: skip
WORK = {"source": "test.jsonl", "texts": 5, "tokens_mean": 10.2, "tokens_percentiles": {}}
PEAKS = {
    "threads": 2,
    "fp32_gflop_per_s": 100.0,
    "bf16_gflop_per_s": 400.0,
    "int8_gflop_per_s": 800.0,
    "bandwidth_gb_per_s": 10.0,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """864 numbers of 4 bytes, 800 of them in a table of 100 tokens."""
    tensors = {"word_embeddings.weight": np.ones((100, 8), np.float32), "dense.weight": np.ones((8, 8), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def costs(
    folder: Path, *, peaks: dict[str, Any] = PEAKS, price: float | None = None, timed: bool = True, **changes: Any
) -> dict[str, Any]:
    """The row of a candidate in `folder` that runs 0.5 ms and answers 250 texts a second; `changes` are the candidate's."""
    given = {"precision": "fp32", "threads": 2, "reads": Reads(folder, "text-classification", ("a", "b", "c"))}
    candidate = Candidate("student", "torch", path=folder, **{**given, **changes})
    row: Any = {"name": "student", "cost": {"size_bytes": 3456}, "notes": []}
    if timed:
        row |= {"single_stream": {"parts_ms": {"run": 0.5}}, "offline": {"texts_per_s": 250.0, "joules_per_text": 0.02}}
    add_costs({"student": row}, [candidate], WORK, peaks, price)
    found: dict[str, Any] = row
    return found


def test_operations_bytes_and_money_are_those_worked_out_by_hand(checkpoint: Path) -> None:
    flops = 2 * 10 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 10 * 10 * 8 + 2 * 8 * (8 + 3)  # products, attention, head: 13,616
    read_bytes = 8 * 8 * 4 + 10 * 8 * 4  # the layer, and of the table a row a token: 576
    assert costs(checkpoint, price=0.09)["cost"] == {
        "size_bytes": 3456,
        "parameters": 864,
        "flops_per_text": flops,
        "bytes_per_text": read_bytes,
        "bandwidth_share": pytest.approx(read_bytes / 0.0005 / 10e9, abs=5e-5),
        "texts_per_hour": 900_000,
        "price_per_million": 0.2,  # 10/9 of an hour of 2 cores at 0.09
        "joules_per_text": 0.02,
        "gflop_per_s": pytest.approx(13_616 * 250 / 1e9, abs=5e-4),
        "peak_share": pytest.approx(13_616 * 250 / 1e9 / 100, abs=5e-5),
    }


def test_a_share_is_of_the_peak_at_the_models_own_precision(checkpoint: Path) -> None:
    slow = {"threads": 2, "fp32_gflop_per_s": 0.01, "int8_gflop_per_s": 0.02}
    assert costs(checkpoint, peaks=slow)["cost"]["peak_share"] == pytest.approx(0.3404)
    assert costs(checkpoint, peaks=slow, precision="int8")["cost"]["peak_share"] == pytest.approx(0.1702)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"precision": "fp16"}, {"peak_share"}),
        ({"precision": "bf16", "peaks": {"threads": 2}}, {"peak_share", "bandwidth_share"}),
        ({"price": None}, {"price_per_million"}),
        ({"device": "cuda"}, {"price_per_million", "peak_share", "bandwidth_share"}),
        ({"reads": None}, {"flops_per_text", "gflop_per_s", "peak_share"}),
        (
            {"timed": False},
            {"bandwidth_share", "texts_per_hour", "price_per_million", "joules_per_text", "gflop_per_s", "peak_share"},
        ),
    ],
    ids=[
        "no peak of that precision",
        "no peaks",
        "no price",
        "on a GPU",
        "no text is read",
        "not timed from end to end",
    ],
)
def test_unknown_figures_are_absent_and_the_rest_is_not(
    checkpoint: Path, changes: dict[str, Any], absent: set[str]
) -> None:
    everything = set(costs(checkpoint, price=0.09)["cost"])
    assert set(costs(checkpoint, **{"price": 0.09, **changes})["cost"]) == everything - absent


def test_a_model_without_a_configuration_has_no_operations_and_all_else(checkpoint: Path) -> None:
    everything = set(costs(checkpoint)["cost"])
    (checkpoint / "config.json").unlink()
    row = costs(checkpoint)
    assert set(row["cost"]) == everything - {"flops_per_text", "gflop_per_s", "peak_share"}
    assert row["notes"] == []


def test_a_family_that_is_not_known_is_told_in_the_models_notes(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}), encoding="utf-8")
    row = costs(checkpoint)
    assert "flops_per_text" not in row["cost"]
    assert row["cost"]["texts_per_hour"] == 900_000
    assert "operations of a 'gpt2' model are not known" in row["notes"][0]


def test_a_checkpoint_of_no_safetensors_has_no_size_to_speak_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    row = costs(tmp_path)
    assert not {"parameters", "bytes_per_text", "bandwidth_share"} & set(row["cost"])
    assert row["cost"]["flops_per_text"] == 13_616
