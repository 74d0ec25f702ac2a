"""Training on a GPU: run with `pytest -m gpu`."""

import copy
import json
import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import BertConfig, BertForTokenClassification

from compress.data.batches import part_of
from compress.data.corpus import CorpusText, Piece
from compress.distributed import ProcessShare
from compress.methods.catalogue import METHODS, Sizes
from compress.methods.objectives import Projections
from compress.methods.presets import Schedule
from compress.models.precision import computing, own_precision, weights_in
from compress.training import loop
from compress.training.loop import Diverged, StageSettings, Validation, train
from compress.training.stage import step_losses, train_stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
RELATIONS = METHODS["minilmv2"](Sizes(3, 3, 24, 24, relation_heads=4, teacher_layer=2))[0]
DEVICE = "cuda"
PIECES = [Piece(np.random.default_rng(i).integers(5, 50, 4 + i % 9), np.arange(4 + i % 9)) for i in range(40)]


def trained(folder: Path, report: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A student of its teacher's relations, and its progress."""
    torch.manual_seed(0)
    teacher = BertForTokenClassification(BertConfig(**CONFIG))
    student = BertForTokenClassification(BertConfig(**(CONFIG | {"num_hidden_layers": 2})))
    stage = METHODS["minilmv2"](Sizes(3, 2, 24, 24, relation_heads=4, teacher_layer=2))[0]
    text = CorpusText(PIECES, 0, 8, 0)
    given = StageSettings(60, learning_rate=5e-3, checkpoint_every_s=0, **settings)
    return student, train_stage(stage, teacher, student, text, given, folder=folder, report=report)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_relations_come_to_agree_on_a_gpu(tmp_path: Path, precision: str) -> None:
    student, progress = trained(tmp_path, precision=precision)
    assert progress.loss[-1][1] < 0.5 * progress.loss[0][1]
    assert next(student.parameters()).is_cuda


def test_in_float16_gradients_are_scaled_and_the_scale_is_gone_on_with(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def dying(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        if done == 30:
            raise Killed

    whole, progress = trained(tmp_path / "a", precision="fp16")
    with pytest.raises(Killed):
        trained(tmp_path / "b", dying, precision="fp16")
    with safe_open(tmp_path / "b" / "checkpoint.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["scaler"])["scale"] > 1
    resumed, again = trained(tmp_path / "b", precision="fp16")
    assert [value for _, value in again.loss] == pytest.approx([value for _, value in progress.loss], rel=1e-2)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-2, atol=1e-2)


def test_steps_whose_loss_is_looked_at_late_are_reported_validated_and_resumed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is read a step later, except before a validation or the last step. The kill comes while one has not been read."""

    class Killed(Exception):
        pass

    # A clock that counts its readings: a checkpoint comes every few steps, and not at each.
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=count().__next__))

    def run(folder: Path, dies_at: int = 0) -> tuple[list[tuple[int, float]], Any]:
        torch.manual_seed(0)
        teacher, student = (BertForTokenClassification(BertConfig(**CONFIG)) for _ in range(2))
        seen: list[tuple[int, float]] = []

        def report(done: int, _steps: int, loss: float, _speed: float | None) -> None:
            seen.append((done, loss))
            if done == dies_at:
                raise Killed

        progress = train_stage(
            RELATIONS, teacher, student, CorpusText(PIECES, 0, 8, 0),
            StageSettings(60, checkpoint_every_s=24), folder=folder, report=report,
            validation=lambda _remap: Validation(7, lambda: float(seen[-1][0] if seen else 0)),
        )  # fmt: skip
        return seen, (student, progress)

    seen, (student, progress) = run(tmp_path / "a")
    assert [done for done, _ in seen] == list(range(1, 61))
    assert [step for step, _ in progress.validation] == [*range(7, 60, 7), 60]
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == seen
    with pytest.raises(Killed):
        run(tmp_path / "b", dies_at=31)
    rest, (resumed, _) = run(tmp_path / "b")
    first = rest[0][0]
    assert 1 < first < 31  # from a checkpoint, and not from the step of the kill
    assert [done for done, _ in rest] == list(range(first, 61))
    assert [loss for _, loss in rest] == pytest.approx([loss for _, loss in seen[first - 1 :]], rel=1e-3)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-3, atol=1e-3)


def test_a_loss_that_is_not_finite_ends_the_training_by_the_number_of_its_step(tmp_path: Path) -> None:
    student = torch.nn.Linear(2, 1)

    def loss_at(step: int, _share: Any) -> dict[str, torch.Tensor]:
        loss = student(torch.ones(1, 2, device=DEVICE)).sum()
        return {"loss": loss * float("nan") if step == 4 else loss}

    with pytest.raises(Diverged, match="at step 5 "):
        train(student, loss_at, Schedule(9, 1e-3), StageSettings(seed=0), folder=tmp_path)


@pytest.mark.parametrize("row_tokens", [0, 16], ids=["padded texts", "packed rows"])
@pytest.mark.parametrize("share", [ProcessShare(0, 1), ProcessShare(1, 2)], ids=["whole batch", "part"])
def test_the_losses_of_a_step_are_those_of_the_cpu(share: ProcessShare, row_tokens: int) -> None:
    torch.manual_seed(0)
    # With small weights the relations of both models are nearly even, and their divergence is lost in float32.
    config = BertConfig(**CONFIG, initializer_range=0.5)
    teacher, student = (BertForTokenClassification(config).eval() for _ in range(2))
    maps = Projections(RELATIONS.objective, teacher.config, student.config)
    batch = part_of(CorpusText(PIECES, 0, 8, 0, row_tokens=row_tokens).at(3), share)

    def losses() -> dict[str, float]:
        found = step_losses(RELATIONS.objective, teacher, student, batch, maps, np.arange(50))
        return {name: value.item() for name, value in found.items()}

    expected = losses()
    teacher.to(DEVICE)
    student.to(DEVICE)
    assert losses() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("row_tokens", [0, 16], ids=["whole texts", "packed rows"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_step_does_not_wait_for_the_gpu(deterministic: bool, precision: str, row_tokens: int) -> None:
    """So the next can begin. Texts of one length have no padding; packed rows may have some."""
    pieces = PIECES if row_tokens else [Piece(np.arange(5, 17), np.arange(12)) for _ in range(16)]
    teacher, student = (BertForTokenClassification(BertConfig(**CONFIG)).cuda() for _ in range(2))
    objective = RELATIONS.objective
    maps = Projections(objective, teacher.config, student.config)
    text = CorpusText(pieces, 0, 8, 0, row_tokens=row_tokens)

    def step(number: int) -> None:
        with computing(torch.device("cuda"), precision):
            losses = step_losses(objective, teacher, student, text.at(number), maps, np.arange(50))
        torch.stack(list(losses.values())).sum().backward()

    before = torch.are_deterministic_algorithms_enabled()
    with weights_in(teacher, precision):
        torch.use_deterministic_algorithms(deterministic)
        step(0)  # compiles the kernels
        with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.use_deterministic_algorithms(before)


def test_a_teacher_held_in_bfloat16_computes_as_one_converted_and_gets_its_weights_back() -> None:
    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**CONFIG)).cuda().eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.arange(5, 45, device="cuda").view(4, 10)
    with torch.no_grad():
        exact = model(ids).logits
        with weights_in(model, "bf16"):
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
            with torch.autocast("cuda", torch.bfloat16), own_precision(model):
                held = model(ids).logits
        assert torch.equal(held, copy.deepcopy(model).bfloat16()(ids).logits)
    assert (held.float() - exact).norm() < 0.02 * exact.norm()
    after = model.state_dict()
    assert all(
        torch.equal(after[name], weight) and after[name].dtype == weight.dtype for name, weight in before.items()
    )
