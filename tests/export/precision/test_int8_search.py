import random
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_checkpoints import MAX_LENGTH, TAGS, WORDS, Exported, with_constants

from compress.data.encoded import Encoded
from compress.data.examples import Entity, Example
from compress.evaluation.metrics import distance
from compress.evaluation.numbers import number_distance
from compress.tasks import TOKEN_CLASSIFICATION
from export.graph.nodes import Wiring
from export.precision.int8_preparation import Prepared
from export.precision.int8_search import Evaluator, find_int8, session_logits
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def logits() -> tuple[np.ndarray, np.ndarray]:
    """Two sets of logits that lie near each other, (200, 5) float32."""
    chance = np.random.default_rng(0)
    expected = chance.normal(0, 4, (200, 5))
    return expected.astype(np.float32), (expected + chance.normal(0, 1, (200, 5))).astype(np.float32)


@pytest.mark.parametrize("multi_label", [False, True], ids=["one label", "labels decided apart"])
def test_the_divergence_and_the_share_of_changes_are_torchs(
    logits: tuple[np.ndarray, np.ndarray], multi_label: bool
) -> None:
    kind = torch.distributions.Bernoulli if multi_label else torch.distributions.Categorical
    p, q = (kind(logits=torch.from_numpy(each).double()) for each in logits)
    expected = torch.distributions.kl_divergence(p, q)
    says = [each > 0 if multi_label else each.argmax(-1, keepdims=True) for each in logits]
    divergence, changed = distance(*logits, multi_label=multi_label)
    assert divergence == pytest.approx((expected.sum(-1) if multi_label else expected).mean().item())
    assert changed == (says[0] != says[1]).any(-1).mean()
    assert 0 < changed < 1


def test_nothing_moved_is_no_distance_and_a_shift_of_a_whole_row_is_none(logits: tuple[np.ndarray, np.ndarray]) -> None:
    expected, actual = logits
    assert distance(expected, expected, multi_label=False) == distance(expected, expected, multi_label=True) == (0, 0)
    shift = np.arange(200)[:, None] - 100.0
    moved, changed = distance(expected, actual + shift, multi_label=False)
    assert (moved, changed) == (pytest.approx(distance(expected, actual, multi_label=False)[0]), changed)
    # Labels that are decided apart are compared with zero, so that a shift turns them.
    assert distance(expected, expected + shift, multi_label=True)[1] > 0.9


def test_logits_far_from_zero_have_a_finite_distance() -> None:
    far, farther = np.array([[1e4, -1e4]]), np.array([[-1e4, 1e4]])
    assert distance(far, farther, multi_label=False) == (pytest.approx(2e4), 1.0)
    assert distance(far, farther, multi_label=True) == (pytest.approx(2e4), 1.0)


def labelled_by(graph: Path, bert: Exported) -> tuple[list[Example], Encoded]:
    """80 texts with the entities that `graph` itself finds, so that its own metric is 1."""
    chance = random.Random(0)
    texts = [" ".join(chance.choice(WORDS) for _ in range(chance.randint(3, 14))) for _ in range(80)]
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    unlabelled = TOKEN_CLASSIFICATION.encode([Example(text) for text in texts], tokenizer, TAGS)
    said = unlabelled.task.predictions(unlabelled, session_logits(Session(graph, threads=1), unlabelled))
    examples = [
        Example(text, entities=tuple(Entity(*found) for found in sorted(spans)))  # type: ignore[misc]
        for text, spans in zip(texts, said, strict=True)
    ]
    return examples, TOKEN_CLASSIFICATION.encode(examples, tokenizer, TAGS)


def with_loud_units(bert: Exported, layer: int, out: Path) -> Path:
    """The small BERT with two units in a feed-forward part that always say 500, and cancel out, but not in 8 bits.

    The first one adds 500 * 50 to every channel and the second one takes it away; what the other units add is lost
    beside that as soon as weights have steps.
    """
    model = onnx.load(bert.onnx_file)
    wiring = Wiring(model)
    products = {product.name: product for product in wiring.products()}
    into, out_of = (products[f"bert.encoder.layer.{layer}.{part}.dense"] for part in ("intermediate", "output"))
    bias = wiring.bias_after(into.node)
    assert bias is not None
    changes = {name: wiring.constants[name].copy() for name in (into.weight, bias[1], out_of.weight)}
    changes[into.weight][:, :2] = 0
    changes[bias[1]][..., :2] = 500
    changes[out_of.weight] *= 4  # that part decides more
    changes[out_of.weight][:2] = [[50], [-50]]
    return with_constants(model, changes, out)


@pytest.mark.parametrize(("feature", "bits_tried"), [("avx512_vnni", (7, 8)), ("avx2", (7,))])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_product_that_breaks_int8_is_found_and_put_back(
    bert: Exported, tmp_path: Path, layer: int, feature: str, bits_tried: tuple[int, ...]
) -> None:
    fp32 = with_loud_units(bert, layer, tmp_path / "fp32.onnx")
    evaluator = Evaluator(*labelled_by(fp32, bert), fp32, MAX_LENGTH, threads=1)
    assert evaluator.fp32.value == 1.0
    prepared = Prepared.of(fp32, evaluator.encoded.encodings[:20], threads=1)
    said: list[str] = []
    # Whatever runs this test: 8 bits fail here with sums that saturate and with sums that do not.
    quantised, search, _ = find_int8(prepared, evaluator, tmp_path / "int8.onnx", 0.9, said.append, features=[feature])

    culprit = f"bert.encoder.layer.{layer}.output.dense"
    assert [(attempt.weight_bits, attempt.clipped) for attempt in search.tried] == [
        (bits, clipped) for bits in bits_tried for clipped in (False, True)
    ]
    assert all(attempt.verdict.share < 0.9 for attempt in search.tried), search.tried
    assert [cost.product for cost in search.costs].index(culprit) == 0
    assert search.costs[0].divergence > 100 * search.costs[1].divergence
    assert len(search.costs) == len(prepared.products) == 12
    assert [step.product for step in search.repaired] == [culprit]
    assert quantised.kept == (culprit,)
    assert (quantised.products, quantised.weight_bits, quantised.cpu) == (11, 7, ())
    assert search.held
    assert search.reached is not None
    assert search.reached.share >= 0.9
    assert evaluator.judge(tmp_path / "int8.onnx").verdict == search.reached
    assert any(culprit in line for line in said)


def test_a_gate_that_nothing_keeps_is_not_held(bert: Exported, tmp_path: Path) -> None:
    evaluator = Evaluator(*labelled_by(bert.onnx_file, bert), bert.onnx_file, MAX_LENGTH, threads=1)
    prepared = Prepared.of(bert.onnx_file, evaluator.encoded.encodings[:20], threads=1)
    quantised, search, _ = find_int8(prepared, evaluator, tmp_path / "int8.onnx", 2.0)
    assert not search.held
    # Half of the products at most go back: the rest would hardly be int8.
    assert len(search.repaired) == len(quantised.kept) == 6
    assert [step.product for step in search.repaired] == [cost.product for cost in search.costs[:6]]
    assert evaluator.judge(tmp_path / "int8.onnx").verdict == search.reached


def test_seven_bits_are_enough_where_they_keep_the_gate_and_the_nearer_range_is_taken(
    bert: Exported, tmp_path: Path
) -> None:
    evaluator = Evaluator(*labelled_by(bert.onnx_file, bert), bert.onnx_file, MAX_LENGTH, threads=1)
    prepared = Prepared.of(bert.onnx_file, evaluator.encoded.encodings, threads=1)
    quantised, search, _ = find_int8(prepared, evaluator, tmp_path / "int8.onnx", 0.5)
    whole, clipped = search.tried
    assert (search.held, search.weight_bits, quantised.weight_bits, quantised.kept) == (True, 7, 7, ())
    assert search.clipped == (clipped.verdict.divergence < whole.verdict.divergence)
    assert (search.costs, search.repaired) == ([], [])
    assert evaluator.judge(tmp_path / "int8.onnx").verdict == search.reached


def test_a_verdict_counts_what_changed(bert: Exported, bert_int8: Path) -> None:
    evaluator = Evaluator(*labelled_by(bert.onnx_file, bert), bert.onnx_file, MAX_LENGTH, threads=1)
    same = evaluator.judge(bert.onnx_file).verdict
    assert (same.value, same.share, same.divergence) == (1.0, 1.0, 0.0)
    assert (same.labels_changed_per_10k, same.answers_changed, same.spans_changed) == (0.0, 0, 0)
    other = evaluator.judge(bert_int8).verdict
    said = evaluator.encoded.task.predictions(
        evaluator.encoded, session_logits(Session(bert_int8, threads=1), evaluator.encoded)
    )
    changed = [(ours, theirs) for ours, theirs in zip(said, evaluator.said, strict=True) if ours != theirs]
    assert other.answers_changed == len(changed) > 0
    assert other.spans_changed == sum(len(set(ours) ^ set(theirs)) for ours, theirs in changed)
    assert other.low <= other.value <= other.high < 1.0 + 1e-12
    assert other.share == pytest.approx(other.value / evaluator.fp32.value)
    assert other.labels_changed_per_10k > 0
    assert other.divergence > 0


def test_without_labels_the_share_is_that_of_rows_with_the_label_of_float32(bert: Exported, tmp_path: Path) -> None:
    examples, encoded = labelled_by(bert.onnx_file, bert)
    unlabelled = [Example(example.text) for example in examples]
    evaluator = Evaluator(unlabelled, encoded, bert.onnx_file, MAX_LENGTH, threads=1, labelled=False)
    model = onnx.load(bert.onnx_file)
    ((name, bias),) = ((n, b) for n, b in Wiring(model).constants.items() if n.endswith("classifier.bias"))
    other = with_constants(model, {name: bias + 3.0 * (np.arange(len(bias)) == 0)}, tmp_path / "other.onnx")
    said = [
        np.concatenate(session_logits(Session(file, threads=1), encoded)).argmax(-1) for file in (bert.onnx_file, other)
    ]
    share = evaluator.judge(other).verdict.share
    assert share == pytest.approx((said[0] == said[1]).mean())
    assert 0 < share < 1
    assert evaluator.judge(bert.onnx_file).verdict.share == 1


def test_the_distance_of_numbers_is_a_share_of_their_variance() -> None:
    expected = np.array([0.0, 10.0, 20.0, 30.0], dtype=np.float32)
    actual = expected + np.array([0.0, 0.5, -0.5, 5.0], dtype=np.float32)
    divergence, changed = number_distance(expected, actual)
    assert divergence == pytest.approx((0.25 + 0.25 + 25) / 4 / 125)
    assert changed == 0.25  # a tenth of the deviation, 11.2, is 1.12
    assert number_distance(expected, expected) == (0, 0)
