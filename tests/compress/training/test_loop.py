"""The loop, checkpoints, narrowed embeddings: on tiny models, compared bit for bit."""

import json
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from compress.data.batches import Batch
from compress.data.sampler import Sampler
from compress.distributed import ProcessShare
from compress.methods.presets import Schedule
from compress.models.precision import check_precision
from compress.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from compress.training.loop import StageSettings, Validation, train
from compress.training.metrics import Prefetcher
from compress.training.stage import rows_in_use
from serve.errors import BadInput

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 3,
}


def classifier(seed: int, **changes: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**(CONFIG | changes)))


def train_on(model: nn.Module, folder: Path, steps: int, rate: float = 1e-3, *, seed: int = 0, **more: Any) -> Progress:
    """Trains `model` on IDS and LABELS; what is no argument of `train` is one of its settings."""
    own = {name: more.pop(name) for name in ("validation", "report", "batches") if name in more}
    loss_at = more.pop("loss_at", losses_of(model, IDS, LABELS))
    return train(model, loss_at, Schedule(steps, rate), StageSettings(seed=seed, **more), folder=folder, **own)


def losses_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor):
    order = Sampler(np.full(len(ids), ids.shape[1]), 8, seed=0)

    def loss_at(step: int, share: ProcessShare) -> dict[str, torch.Tensor]:
        chosen = order.at(step)
        return {"labels": model(input_ids=ids[chosen], labels=labels[chosen]).loss}

    return loss_at


IDS = torch.randint(5, 50, (32, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS[:, 0] % 3


def batches(steps: int) -> Prefetcher:
    """What a training is told of its texts: a fifth of each batch is padding, and making one takes a while."""

    def make(_step: int) -> Batch:
        time.sleep(0.01)
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        return Batch({"attention_mask": mask}, torch.zeros(0), torch.zeros(0))

    return Prefetcher(make, steps)


class Killed(Exception):
    pass


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same weights, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def loss_validation(model: nn.Module) -> Validation:
    return Validation(5, lambda: -float(model(input_ids=IDS, labels=LABELS).loss.detach()))


def thirty_steps(model: nn.Module, folder: Path, loss_at: Any = None, **settings: Any) -> Progress:
    given = StageSettings(seed=3, **settings)
    loss_at = loss_at or losses_of(model, IDS, LABELS)
    return train(model, loss_at, Schedule(30, 1e-3), given, folder=folder, validation=loss_validation(model))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Progress]:
    model = classifier(1)
    return model, thirty_steps(model, tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("killed_at", [1, 7, 13, 29])
def test_a_run_killed_and_resumed_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, unbroken: tuple[nn.Module, Progress], killed_at: int
) -> None:
    broken, calls = classifier(1), 0

    def dying(step: int, share: ProcessShare) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > killed_at:
            raise Killed
        return losses_of(broken, IDS, LABELS)(step, share)

    with pytest.raises(Killed):
        thirty_steps(broken, tmp_path, dying, checkpoint_every_s=0)
    resumed = classifier(99)  # what a new process starts from must not matter
    torch.manual_seed(12345)
    assert thirty_steps(resumed, tmp_path) == unbroken[1]
    assert equal(resumed, unbroken[0])


def test_training_learns_and_ends_with_its_best_weights(tmp_path: Path) -> None:
    model = classifier(2)
    seen: list[float] = []

    def accuracy() -> float:
        with torch.no_grad():
            seen.append(float((model(IDS).logits.argmax(-1) == LABELS).float().mean()))
        return seen[-1]

    progress = train_on(model, tmp_path, 120, 3e-3, validation=Validation(20, accuracy))
    assert progress.best_value == max(seen) > 0.9
    assert accuracy() == progress.best_value


def test_the_terms_of_a_loss_are_logged_apart_and_half_a_line_is_forgotten(tmp_path: Path) -> None:
    model, told = classifier(2), batches(4)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1}\n{"step": 9, "lo')

    def loss_at(step: int, share: ProcessShare) -> dict[str, torch.Tensor]:
        told.at(step)
        loss = model(input_ids=IDS, labels=LABELS).loss
        return {"first": 0.25 * loss, "second": 0.75 * loss}

    progress = train_on(model, tmp_path, 4, loss_at=loss_at, batches=told)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == progress.loss
    for line in lines:
        assert line["terms"]["second"] == pytest.approx(3 * line["terms"]["first"])
        assert sum(line["terms"].values()) == pytest.approx(line["loss"])
        assert line["tokens_per_s"] > 0
        assert line["padded_share"] == pytest.approx(0.2)
        assert 0 < line["waiting_share"] < 1
    assert lines[0]["learning_rate"] == Schedule(4, 1e-3).rate(0)


def test_it_stops_when_validation_has_stopped_improving_late_in_training(tmp_path: Path) -> None:
    values = iter([0.5, 0.6, 0.6, 0.1, 0.3, 0.3, 0.4, 0.4, 0.9, 0.9])
    progress = train_on(classifier(2), tmp_path, 50, validation=Validation(5, lambda: next(values), patience=2))
    assert (progress.step, progress.best_step, progress.stopped) == (40, 10, True)  # of steps 35 and 40
    assert progress.ended == "after 40 of 50 steps, as validation had no new best"


def test_scores_that_waver_while_the_rate_is_high_do_not_stop_it(tmp_path: Path) -> None:
    values = iter([0.5, 0.6, 0.4, 0.5, 0.4, 0.5, 0.55, 0.7, 0.6, 0.65])
    progress = train_on(classifier(2), tmp_path, 50, validation=Validation(5, lambda: next(values), patience=2))
    assert (progress.step, progress.best_step) == (50, 40)
    assert progress.ended == "after all 50 steps"  # though the last two validations brought nothing
    values = iter([0.5, 0.6, 0.4, 0.5, 0.4, 0.5, 0.55, 0.7, 0.8, 0.65])
    progress = train_on(
        classifier(2), tmp_path / "whole", 50, validation=Validation(5, lambda: next(values), patience=2)
    )
    assert progress.ended == "after all 50 steps"


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_its_terms(tmp_path: Path) -> None:
    model = classifier(2)
    with pytest.raises(BadInput, match=r"nan at step 1 .*labels nan"):
        train_on(model, tmp_path, 5, loss_at=lambda *_: {"labels": model(IDS).logits.sum() * float("nan")})


def test_every_text_is_seen_once_an_epoch_in_batches_of_like_length() -> None:
    lengths = np.array([3, 90, 4, 80, 5, 70, 6, 60])
    order = Sampler(lengths, 2, seed=5)
    first, second = ([order.at(e * 4 + s) for s in range(4)] for e in range(2))
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(8))
    assert all(np.ptp(lengths[batch]) <= 10 for batch in first)
    assert [list(b) for b in first] != [list(b) for b in second]
    assert list(Sampler(lengths, 2, seed=5).at(6)) == list(second[2])


def test_the_rate_warms_up_then_falls_to_nothing() -> None:
    schedule = Schedule(100, 1.0, warmup=0.1)
    rates = [schedule.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[100] == 0
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_training_only_the_rows_in_use_ends_where_training_all_of_them_does(tmp_path: Path) -> None:
    whole, narrow = classifier(4), classifier(4)
    train_on(whole, tmp_path / "a", 12)
    used = [np.array([9]), *IDS.numpy()]
    with rows_in_use(narrow, used, pad_id=0) as remap:
        assert narrow.get_input_embeddings().num_embeddings < 50
        small = torch.from_numpy(remap)[IDS]
        train_on(narrow, tmp_path / "b", 12, loss_at=losses_of(narrow, small, LABELS))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(narrow.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    unused = sorted(set(range(1, 50)) - set(IDS.flatten().tolist()))
    start = classifier(4).get_input_embeddings().weight
    assert torch.equal(narrow.get_input_embeddings().weight[unused], start[unused])


def test_a_disk_that_fills_leaves_the_checkpoint_before_it_and_training_goes_on_from_there(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    whole, cramped, resumed = classifier(1), classifier(1), classifier(99)
    unbroken = train_on(whole, tmp_path / "a", 20, seed=3)
    folder = tmp_path / "b"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept: list[bytes] = []

    def filling(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        if done == 8:
            kept.append((folder / "checkpoint.safetensors").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept[0]) // 2, before[1]))  # no file grows beyond this

    try:
        with pytest.raises(BadInput, match=r"checkpoint.safetensors could not be written"):
            train_on(cramped, folder, 20, seed=3, checkpoint_every_s=0, report=filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.safetensors", "metrics.jsonl"]
    assert (folder / "checkpoint.safetensors").read_bytes() == kept[0]
    progress = train_on(resumed, folder, 20, seed=3)
    assert progress == unbroken
    assert equal(whole, resumed)


def test_float16_is_refused_on_a_cpu_and_the_message_says_what_to_take(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--precision is fp16.* Give bf16"):
        check_precision("fp16", torch.device("cpu"))
    for precision in ("fp32", "bf16"):
        check_precision(precision, torch.device("cpu"))


def test_the_scale_of_gradients_is_in_the_checkpoint(tmp_path: Path) -> None:
    model = classifier(0)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler, again = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu")
    scaler.scale(model(IDS).logits.sum()).backward()
    next(model.parameters()).grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()  # an overflow halves the scale
    save_checkpoint(tmp_path / "checkpoint.safetensors", model, optimizer, Progress(3), scaler)
    assert load_checkpoint(tmp_path / "checkpoint.safetensors", model, optimizer, again) == Progress(3)
    assert again.state_dict() == scaler.state_dict()
    assert again.get_scale() == 2.0


@pytest.mark.parametrize(
    ("names", "message"), [(["tensorbord"], "--tracker tensorbord"), (["wandb", "mlflow"], "pip install wandb")]
)
def test_an_unknown_or_missing_tracker_is_refused(names: list[str], message: str, tmp_path: Path) -> None:
    if names == ["wandb", "mlflow"] and any(map(find_spec, names)):
        pytest.skip("a tracker that should be missing is installed")
    with pytest.raises(BadInput, match=message):
        train_on(classifier(2), tmp_path, 4, trackers=names)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_is_told_what_the_metrics_say(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_on(classifier(2), tmp_path, 4, trackers=["tensorboard"], batches=batches(4))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "stillroom")).Reload()
    for tag, expected in (
        ("loss", [line["loss"] for line in lines]),
        ("terms/labels", [line["terms"]["labels"] for line in lines]),
        ("learning_rate", [line["learning_rate"] for line in lines]),
    ):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4]
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(expected)
    assert {"tokens_per_s", "padded_share", "waiting_share"} <= set(events.Tags()["scalars"])


def numbered(step: int) -> Batch:
    ids = torch.tensor([[step]])
    return Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.zeros(0), torch.zeros(0))


def test_the_next_batch_is_made_before_it_is_asked_for_and_none_beyond_the_last() -> None:
    made: list[int] = []
    second = threading.Event()

    def make(step: int) -> Batch:
        made.append(step)
        if step == 4:
            second.set()
        return numbered(step)

    batches = Prefetcher(make, 5)
    for step in (3, 3, 4, 4):  # as from a checkpoint, a batch in two parts
        assert batches.at(step).inputs["input_ids"].item() == step
        assert second.wait(timeout=PATIENCE_S)
    batches.close()
    assert made == [3, 4]
    assert batches.waited_s > 0


def test_an_error_of_the_prefetcher_is_raised_by_at() -> None:
    def make(step: int) -> Batch:
        if step == 1:
            raise OSError("the file is gone")
        return numbered(step)

    batches = Prefetcher(make, 3)
    batches.at(0)
    with pytest.raises(OSError, match="the file is gone"):
        batches.at(1)
    batches.close()


def test_padding_is_counted_once_a_step() -> None:
    def make(step: int) -> Batch:
        mask = torch.ones(2, 4 + step, dtype=torch.long)
        mask[1, 3:] = 0
        return Batch({"attention_mask": mask}, torch.zeros(0), torch.zeros(0))

    batches = Prefetcher(make, 2)
    for step in (0, 0, 1):
        batches.at(step)
    batches.close()
    assert (batches.tokens, batches.positions) == (4 + 3 + 5 + 3, 8 + 10)
