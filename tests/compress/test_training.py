"""The loop, checkpoints, narrowed embeddings, relation distillation: on tiny models, compared bit for bit."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from compress.distill import RelationDistillation, distil_relations, projections, reading_layer, usual_relation_heads
from compress.families import FAMILIES
from compress.loop import Order, Schedule, Watch, train
from compress.vocabulary import rows_in_use
from serve.errors import BadInput

FAMILY = FAMILIES["bert"]
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
    order = Order(np.full(len(ids), ids.shape[1]), 8, seed=0)

    def loss_at(step: int) -> dict[str, torch.Tensor]:
        chosen = order.at(step)
        return {"labels": model(input_ids=ids[chosen], labels=labels[chosen]).loss}

    return loss_at


IDS = torch.randint(5, 50, (32, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS[:, 0] % 3


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 7, 13, 29])
def test_a_run_killed_and_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, killed_at: int) -> None:
    whole, broken = classifier(1), classifier(1)

    def watch(model: nn.Module) -> Watch:
        return Watch(5, lambda: -float(model(input_ids=IDS, labels=LABELS).loss.detach()))

    unbroken = train(
        whole, losses_of(whole, IDS, LABELS), Schedule(30, 1e-3), folder=tmp_path / "a", seed=3, watch=watch(whole)
    )
    calls = 0

    def dying(step: int) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > killed_at:
            raise Killed
        return losses_of(broken, IDS, LABELS)(step)

    with pytest.raises(Killed):
        train(
            broken, dying, Schedule(30, 1e-3), folder=tmp_path / "b", seed=3, watch=watch(broken), checkpoint_every_s=0
        )
    resumed = classifier(99)  # what a new process starts from must not matter
    torch.manual_seed(12345)
    progress = train(
        resumed,
        losses_of(resumed, IDS, LABELS),
        Schedule(30, 1e-3),
        folder=tmp_path / "b",
        seed=3,
        watch=watch(resumed),
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
        model, losses_of(model, IDS, LABELS), Schedule(120, 3e-3), folder=tmp_path, seed=0, watch=Watch(20, accuracy)
    )
    assert progress.best_value == max(seen) > 0.9
    assert accuracy() == progress.best_value


def test_it_stops_when_validation_has_stopped_improving(tmp_path: Path) -> None:
    model = classifier(2)
    values = iter([0.5, 0.6, 0.6, 0.1, 0.9])
    progress = train(
        model,
        losses_of(model, IDS, LABELS),
        Schedule(50, 1e-3),
        folder=tmp_path,
        seed=0,
        watch=Watch(5, lambda: next(values), patience=2),
    )
    assert (progress.step, progress.best_step, progress.stopped) == (20, 10, True)


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_its_terms(tmp_path: Path) -> None:
    model = classifier(2)
    with pytest.raises(FloatingPointError, match=r"the loss became nan at step 1 .*labels nan"):
        train(
            model,
            lambda _: {"labels": model(IDS).logits.sum() * float("nan")},
            Schedule(5, 1e-3),
            folder=tmp_path,
            seed=0,
        )


def test_every_text_is_seen_once_an_epoch_in_batches_of_like_length() -> None:
    lengths = np.array([3, 90, 4, 80, 5, 70, 6, 60])
    order = Order(lengths, 2, seed=5)
    first, second = ([order.at(e * 4 + s) for s in range(4)] for e in range(2))
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(8))
    assert all(np.ptp(lengths[batch]) <= 10 for batch in first)
    assert [list(b) for b in first] != [list(b) for b in second]
    assert list(Order(lengths, 2, seed=5).at(6)) == list(second[2])


def test_the_rate_warms_up_then_falls_to_nothing() -> None:
    schedule = Schedule(100, 1.0, warmup=0.1)
    rates = [schedule.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[100] == 0
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_training_only_the_rows_in_use_ends_where_training_all_of_them_does(tmp_path: Path) -> None:
    whole, narrow = classifier(4), classifier(4)
    train(whole, losses_of(whole, IDS, LABELS), Schedule(12, 1e-3), folder=tmp_path / "a", seed=0)
    used = [np.array([9]), *IDS.numpy()]
    with rows_in_use(narrow, used, pad_id=0) as remap:
        assert narrow.get_input_embeddings().num_embeddings < 50
        small = torch.from_numpy(remap)[IDS]
        train(narrow, losses_of(narrow, small, LABELS), Schedule(12, 1e-3), folder=tmp_path / "b", seed=0)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(narrow.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    unused = sorted(set(range(1, 50)) - set(IDS.flatten().tolist()))
    start = classifier(4).get_input_embeddings().weight
    assert torch.equal(narrow.get_input_embeddings().weight[unused], start[unused])


PIECES = [np.random.default_rng(i).integers(5, 50, 4 + i % 9) for i in range(40)]


def test_relations_come_to_agree(tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = BertForTokenClassification(BertConfig(**CONFIG))
    before = copy.deepcopy(teacher.state_dict())
    student = BertForTokenClassification(
        BertConfig(**(CONFIG | {"num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 24}))
    )
    kept = copy.deepcopy(student.bert.encoder.layer[-1].output.state_dict())
    settings = RelationDistillation(60, learning_rate=5e-3, batch=8, relation_heads=4, teacher_layer=2)
    progress = distil_relations(teacher, student, FAMILY, PIECES, 0, settings, folder=tmp_path)
    assert progress.loss[-1][1] < 0.5 * progress.loss[0][1]
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert len(student.bert.encoder.layer) == 2
    # Nothing that the loss does not read has moved.
    assert all(torch.equal(kept[n], v) for n, v in student.bert.encoder.layer[-1].output.state_dict().items())


def test_what_is_read_is_what_the_layer_computes_with() -> None:
    model = classifier(6).eval()
    mask = torch.ones_like(IDS)
    layer = model.bert.encoder.layer[1]
    seen: dict[str, torch.Tensor] = {}
    names = {
        "queries": layer.attention.self.query,
        "keys": layer.attention.self.key,
        "values": layer.attention.self.value,
    }
    for name, module in names.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out))
    with torch.no_grad():
        model(input_ids=IDS, attention_mask=mask)
        whole = dict(seen)
        with reading_layer(model, FAMILY, 2) as read:
            ours = projections(model, read, FAMILY, IDS, mask)
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], value)


def test_a_layer_that_is_not_there_and_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    teacher, student = classifier(0), classifier(1)
    with pytest.raises(BadInput, match="layers 1 to 3; layer 4"):
        distil_relations(
            teacher,
            student,
            FAMILY,
            PIECES,
            0,
            RelationDistillation(1, relation_heads=4, teacher_layer=4),
            folder=tmp_path,
        )
    with pytest.raises(BadInput, match="5 relation heads do not divide the widths 24 and 24"):
        distil_relations(
            teacher, student, FAMILY, PIECES, 0, RelationDistillation(1, relation_heads=5), folder=tmp_path
        )
    assert usual_relation_heads(768, 384) == 48
    assert usual_relation_heads(768, 320) == 32
