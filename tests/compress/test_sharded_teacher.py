"""A teacher whose layers are cut over two processes, joined by Gloo."""

import json
from pathlib import Path

import pytest
from joined import run_two
from test_distributed import together
from trained_together import STEPS, summary, trained

from compress import distributed
from compress.models.families import FAMILIES
from compress.models.sharded_layers import check_equal_shares
from serve.errors import BadInput


def test_a_cut_teacher_says_what_a_whole_one_does_and_each_process_holds_half_of_its_layers(tmp_path: Path) -> None:
    ended = run_two("sharded_together.py", lambda rank: (str(tmp_path),))
    assert [code for code, _ in ended] == [0, 0], ended
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == {*(f"{kind} fp32" for kind in FAMILIES), "bert bf16", "modernbert bf16"}
        for name, of in found.items():
            assert of["apart"] <= 1e-6, name
            assert 0.4 < of["held"] < 0.6, name


def test_a_cut_teacher_teaches_as_a_whole_one_in_one_process(tmp_path: Path) -> None:
    """Of relations in the middle of a layer, and of masked words with hidden states; with dropout in the student."""
    jobs = ("relations:minilmv2:0.1:shard", "words:distilbert:0.1:shard")
    main, other = together(tmp_path, *jobs)
    assert main == other
    for job in jobs:
        name, method, dropout, _ = job.split(":")
        assert len(main[name]["held"]) == STEPS
        assert all(0.4 < share < 0.6 for share in main[name]["held"])
        alone = summary(*trained(tmp_path / f"alone-{name}", method, float(dropout), accumulate=2))
        assert main[name]["steps"] == alone["steps"]
        assert main[name]["curves"] == pytest.approx(alone["curves"], rel=1e-6)
        assert main[name]["norms"] == pytest.approx(alone["norms"], rel=1e-6)


def test_processes_with_unequal_parts_of_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    check_equal_shares(1)
    distributed.begin_with(3)
    try:
        with pytest.raises(
            BadInput, match=r"began with 3 processes, so its batches are cut into 3 parts, which 2 processes cannot"
        ):
            check_equal_shares(1)
        check_equal_shares(2)
    finally:
        distributed.begin_with(1)
