"""Batches in parts: several processes, or one after the other. In float64, so that what is equal is equal to the last bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_stage import EVERY_STAGE, SIZES, models, silence_dropout, text_of
from joined import run_two
from torch import nn
from trained_together import READ, STEPS, main, summary, trained

from compress import distributed
from compress.data.batches import Batch, part_of
from compress.data.encoded import IGNORED
from compress.distributed import ProcessShare, shares
from compress.losses.outputs import total
from compress.methods.catalogue import stages_of
from compress.methods.objectives import Projections
from compress.models.activations import check_equal_shares
from compress.training.stage import step_losses
from serve.errors import BadInput


def losses_and_gradients(stage: Any, batches: list[Batch]) -> tuple[dict[str, float], list[torch.Tensor]]:
    teacher, student = (model.double() for model in models("bert", stage))
    silence_dropout(student.train())
    maps = Projections(stage.objective, teacher.config, student.config).double()
    found: dict[str, float] = {}
    for batch in batches:
        terms = step_losses(stage.objective, teacher, student, batch, maps, None)
        total(terms).backward()
        for name, term in terms.items():
            found[name] = found.get(name, 0.0) + term.item()
    both = nn.ModuleList([student, maps])
    return found, [parameter.grad for parameter in both.parameters() if parameter.grad is not None]


# One compares the texts of a batch with each other, and is refused in parts (`compress.runs.method_chain.check_whole_batches`).
IN_PARTS = [(name, number) for name, number in EVERY_STAGE if stages_of(name, SIZES)[number].objective.pooling is None]


@pytest.mark.parametrize(("method", "number"), IN_PARTS)
def test_the_parts_of_a_batch_add_up_to_it_for_every_objective(method: str, number: int) -> None:
    stage = stages_of(method, SIZES)[number]
    whole = text_of(stage).at(1)
    expected, gradients = losses_and_gradients(stage, [whole])
    for of in (3, 9):  # parts of unequal size, and more parts than there are texts
        found, ours = losses_and_gradients(stage, [part_of(whole, ProcessShare(i, of)) for i in range(of)])
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
        for theirs, gradient in zip(gradients, ours, strict=True):
            torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-13)


def test_a_part_has_the_rows_of_its_texts_and_knows_what_it_counts_for() -> None:
    inputs = {
        "input_ids": torch.arange(12).view(3, 4),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]),
    }
    targets = torch.tensor([1, IGNORED, 2, 3, 4])
    batch = Batch(inputs, torch.tensor([1, 2, 5, 8, 9]), targets, soft=torch.arange(5.0)[:, None])
    first, second = part_of(batch, ProcessShare(0, 2)), part_of(batch, ProcessShare(1, 2))
    assert first.inputs["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert first.row_index.tolist() == [1, 2]
    assert first.weights == (1 / 3, 1 / 3, 2 / 5, 1 / 4)
    assert second.row_index.tolist() == [1, 4, 5]
    assert second.targets.tolist() == [2, 3, 4]
    assert second.soft is not None
    assert second.soft.flatten().tolist() == [2, 3, 4]
    assert np.sum([first.weights, second.weights], axis=0) == pytest.approx([1, 1, 1, 1])
    assert part_of(batch, ProcessShare(0, 4)).weights == (0, 0, 0, 0)


def test_shares_cover_a_batch_whoever_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, accumulate in ((1, 1), (1, 3), (2, 1), (2, 3)):
        taken: list[int] = []
        for number in range(count):
            monkeypatch.setenv("WORLD_SIZE", str(count))
            monkeypatch.setenv("RANK", str(number))
            taken += [i for share in shares(accumulate) for i in range(*share.bounds(7))]
        assert taken == list(range(7))


class Killed(Exception):
    pass


JOBS = (
    "relations:minilmv2:0",
    "dropout:distilbert:0.1",
    "resumed:minilmv2:0",
    "cut-relations:minilmv2:0.1:shard",
    "cut-words:distilbert:0.1:shard",
)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes, joined by Gloo, did in one start. One of the jobs was begun, and killed, in one process."""
    folder = tmp_path_factory.mktemp("together")

    def dying(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        trained(folder / "resumed", "minilmv2", 0.0, report=dying)
    ended = run_two(main, lambda rank: (str(folder), *JOBS))
    assert [code for code, _ in ended] == [0, 0], ended
    return folder


def found_in(folder: Path, name: str) -> dict[str, Any]:
    """What the main process says of a job; the other one says the same."""
    main, other = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2))
    assert main == other
    return dict(main)


def test_two_processes_train_as_one_does_with_the_same_batches(together: Path, tmp_path: Path) -> None:
    """Without dropout as one with whole batches; with it as one that accumulates two parts, whose dropout is the same."""
    relations = summary(*trained(tmp_path / "a", "minilmv2", 0.0))
    dropout = summary(*trained(tmp_path / "b", "distilbert", 0.1, accumulate=2))
    for name, expected in (("relations", relations), ("resumed", relations), ("dropout", dropout)):
        found = found_in(together, name)
        assert (found["steps"], found["best_step"]) == (expected["steps"], expected["best_step"])
        assert found["curves"] == pytest.approx(expected["curves"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        lines = (together / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    whole = summary(*trained(tmp_path / "c", "distilbert", 0.1))
    assert whole["curves"] != pytest.approx(dropout["curves"], rel=1e-3)  # dropout was there to differ
    assert not (together / "nothing is written here").exists()


def test_a_sharded_teacher_teaches_as_a_whole_one(together: Path, tmp_path: Path) -> None:
    """Of relations in the middle of a layer, and of masked words with hidden states; with dropout in the student."""
    for name, method in (("cut-relations", "minilmv2"), ("cut-words", "distilbert")):
        found = found_in(together, name)
        assert len(found["held"]) == STEPS
        assert all(0.4 < share < 0.6 for share in found["held"])
        alone = summary(*trained(tmp_path / name, method, 0.1, accumulate=2))
        assert found["steps"] == alone["steps"]
        assert found["curves"] == pytest.approx(alone["curves"], rel=1e-6)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)


def test_a_sharded_teacher_computes_what_a_whole_one_does_and_each_process_holds_half(together: Path) -> None:
    for rank in range(2):
        readings = json.loads((together / f"readings-{rank}.json").read_text())
        assert len(readings) == len(READ)
        for name, of in readings.items():
            assert of["apart"] <= 1e-6, name
            assert 0.4 < of["held"] < 0.6, name


def test_a_launcher_that_starts_one_process_where_two_were_asked_for_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(BadInput, match=r"starts only one on CPUs. Run: torchrun"):
        distributed.check_launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.check_launch()


def test_processes_with_unequal_parts_of_a_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    check_equal_shares(1)
    distributed.begin_with(3)
    try:
        with pytest.raises(BadInput, match=r"began with 3 processes"):
            check_equal_shares(1)
        check_equal_shares(2)
    finally:
        distributed.begin_with(1)
