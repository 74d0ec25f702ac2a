"""The loop, checkpoints, narrowed embeddings: on tiny models, compared bit for bit."""

import json
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
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
        return Batch(
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}, torch.zeros(0), torch.zeros(0)
        )

    return Prefetcher(make, steps)


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 7, 13, 29])
def test_a_run_killed_and_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, killed_at: int) -> None:
    whole, broken = classifier(1), classifier(1)

    def validation(model: nn.Module) -> Validation:
        return Validation(5, lambda: -float(model(input_ids=IDS, labels=LABELS).loss.detach()))

    unbroken = train(
        whole,
        losses_of(whole, IDS, LABELS),
        Schedule(30, 1e-3),
        StageSettings(seed=3),
        folder=tmp_path / "a",
        validation=validation(whole),
    )
    calls = 0

    def dying(step: int, share: ProcessShare) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > killed_at:
            raise Killed
        return losses_of(broken, IDS, LABELS)(step, share)

    with pytest.raises(Killed):
        train(
            broken,
            dying,
            Schedule(30, 1e-3),
            StageSettings(seed=3, checkpoint_every_s=0),
            folder=tmp_path / "b",
            validation=validation(broken),
        )
    resumed = classifier(99)  # what a new process starts from must not matter
    torch.manual_seed(12345)
    progress = train(
        resumed,
        losses_of(resumed, IDS, LABELS),
        Schedule(30, 1e-3),
        StageSettings(seed=3),
        folder=tmp_path / "b",
        validation=validation(resumed),
    )
    assert progress == unbroken
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_training_learns_and_ends_with_its_best_weights(tmp_path: Path) -> None:
    model = classifier(2)
    seen: list[float] = []

    def accuracy() -> float:
        with torch.no_grad():
            seen.append(float((model(IDS).logits.argmax(-1) == LABELS).float().mean()))
        return seen[-1]

    progress = train(
        model,
        losses_of(model, IDS, LABELS),
        Schedule(120, 3e-3),
        StageSettings(seed=0),
        folder=tmp_path,
        validation=Validation(20, accuracy),
    )
    assert progress.best_value == max(seen) > 0.9
    assert accuracy() == progress.best_value


def test_the_terms_of_a_loss_are_logged_apart_and_half_a_line_is_forgotten(tmp_path: Path) -> None:
    model, told = classifier(2), batches(4)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1}\n{"step": 9, "lo')

    def loss_at(step: int, share: ProcessShare) -> dict[str, torch.Tensor]:
        told.at(step)
        loss = model(input_ids=IDS, labels=LABELS).loss
        return {"first": 0.25 * loss, "second": 0.75 * loss}

    progress = train(model, loss_at, Schedule(4, 1e-3), StageSettings(seed=0), folder=tmp_path, batches=told)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == progress.loss
    for line in lines:
        assert line["terms"]["second"] == pytest.approx(3 * line["terms"]["first"])
        assert sum(line["terms"].values()) == pytest.approx(line["loss"])
        assert line["tokens_per_s"] > 0
        assert line["padded_share"] == pytest.approx(0.2)
        assert 0 < line["waiting_share"] < 1
    assert lines[0]["learning_rate"] == Schedule(4, 1e-3).rate(0)


def test_it_stops_when_validation_has_stopped_improving(tmp_path: Path) -> None:
    model = classifier(2)
    values = iter([0.5, 0.6, 0.6, 0.1, 0.9])
    progress = train(
        model,
        losses_of(model, IDS, LABELS),
        Schedule(50, 1e-3),
        StageSettings(seed=0),
        folder=tmp_path,
        validation=Validation(5, lambda: next(values), patience=2),
    )
    assert (progress.step, progress.best_step, progress.stopped) == (20, 10, True)


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_its_terms(tmp_path: Path) -> None:
    model = classifier(2)
    with pytest.raises(BadInput, match=r"The loss became nan at step 1 .*labels nan.* Give a lower learning rate"):
        train(
            model,
            lambda *_: {"labels": model(IDS).logits.sum() * float("nan")},
            Schedule(5, 1e-3),
            StageSettings(seed=0),
            folder=tmp_path,
        )


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
    train(whole, losses_of(whole, IDS, LABELS), Schedule(12, 1e-3), StageSettings(seed=0), folder=tmp_path / "a")
    used = [np.array([9]), *IDS.numpy()]
    with rows_in_use(narrow, used, pad_id=0) as remap:
        assert narrow.get_input_embeddings().num_embeddings < 50
        small = torch.from_numpy(remap)[IDS]
        train(
            narrow, losses_of(narrow, small, LABELS), Schedule(12, 1e-3), StageSettings(seed=0), folder=tmp_path / "b"
        )
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(narrow.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    unused = sorted(set(range(1, 50)) - set(IDS.flatten().tolist()))
    start = classifier(4).get_input_embeddings().weight
    assert torch.equal(narrow.get_input_embeddings().weight[unused], start[unused])


def test_a_disk_that_fills_leaves_the_checkpoint_before_it_and_training_goes_on_from_there(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    whole, cramped, resumed = classifier(1), classifier(1), classifier(99)
    unbroken = train(
        whole, losses_of(whole, IDS, LABELS), Schedule(20, 1e-3), StageSettings(seed=3), folder=tmp_path / "a"
    )
    folder = tmp_path / "b"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept: list[bytes] = []

    def filling(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
        if done == 8:
            kept.append((folder / "checkpoint.safetensors").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept[0]) // 2, before[1]))  # no file grows beyond this

    try:
        with pytest.raises(
            BadInput, match=r"checkpoint.safetensors could not be written: .* Make room, and give the same"
        ):
            train(
                cramped,
                losses_of(cramped, IDS, LABELS),
                Schedule(20, 1e-3),
                StageSettings(seed=3, checkpoint_every_s=0),
                folder=folder,
                report=filling,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(file.name for file in folder.iterdir()) == ["checkpoint.safetensors", "metrics.jsonl"]
    assert (folder / "checkpoint.safetensors").read_bytes() == kept[0]
    progress = train(resumed, losses_of(resumed, IDS, LABELS), Schedule(20, 1e-3), StageSettings(seed=3), folder=folder)
    assert progress == unbroken
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_float16_is_refused_on_a_cpu_and_the_message_says_what_to_take(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"--precision is fp16, which needs a CUDA GPU, and the device is cpu, .* Give bf16"
    ):
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
    ("names", "message"),
    [
        pytest.param(
            ["tensorbord"], "--tracker tensorbord is not known. Give tensorboard, wandb or mlflow", id="no-such"
        ),
        pytest.param(
            ["wandb", "mlflow"],
            "--tracker wandb and mlflow needs a package that is not installed. Run: pip install wandb",
            id="missing",
        ),
    ],
)
def test_a_tracker_that_cannot_be_told_is_refused_before_training(
    names: list[str], message: str, tmp_path: Path
) -> None:
    if names == ["wandb", "mlflow"] and any(map(find_spec, names)):
        pytest.skip("a tracker that should be missing is installed")
    model = classifier(2)
    with pytest.raises(BadInput, match=message):
        train(
            model,
            losses_of(model, IDS, LABELS),
            Schedule(4, 1e-3),
            StageSettings(seed=0, trackers=names),
            folder=tmp_path,
        )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_is_told_what_the_metrics_say(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = classifier(2)
    losses = losses_of(model, IDS, LABELS)
    train(
        model,
        losses,
        Schedule(4, 1e-3),
        StageSettings(seed=0, trackers=["tensorboard"]),
        folder=tmp_path,
        batches=batches(4),
    )
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
