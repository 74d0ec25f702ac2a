"""Before a model is quantised: outliers move into weights, and sums over tokens become the same bits in any company."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from small_checkpoints import FAMILIES, Exported, farthest, with_constants

from export.graph.nodes import Wiring
from export.precision.calibration import ChannelRange, channel_ranges
from export.precision.int8_preparation import smoothed, with_exact_sums
from serve.model.session import Session


def ranges_of(model: onnx.ModelProto, exported: Exported, texts: list[str]) -> dict[str, ChannelRange]:
    """Of everything that enters a product."""
    names = [product.activation for product in Wiring(model).products()]
    return channel_ranges(model, names, exported.encodings(texts), threads=1)


def multiplications(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Mul" for node in model.graph.node)


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_outliers_move_and_the_function_stays(
    exported: Callable[..., Exported], texts: list[str], tmp_path: Path, family: str, head: str
) -> None:
    made = exported(family, head)
    model = onnx.load(made.onnx_file)
    easier = smoothed(model, ranges_of(model, made, texts[:20]))
    before, after = Wiring(model), Wiring(easier)
    for old, new in zip(before.products(), after.products(), strict=True):
        assert not np.allclose(before.constants[old.weight], after.constants[new.weight], rtol=0.01)
    onnx.save(easier, tmp_path / "smoothed.onnx")
    encodings = made.encodings(texts)
    expected = Session(made.onnx_file, threads=1).run(encodings)
    assert farthest(expected, Session(tmp_path / "smoothed.onnx", threads=1).run(encodings)) < 1e-4


def test_the_factors_of_a_mixture_of_values_cost_no_multiplication(bert: Exported, texts: list[str]) -> None:
    model = onnx.load(bert.onnx_file)
    easier = smoothed(model, ranges_of(model, bert, texts))
    before, after = Wiring(model), Wiring(easier)
    found = {product.name: product for product in after.products()}
    given = {product.name: product for product in before.products()}
    # In each of two layers: queries, keys and values together, and both halves of the feed-forward part.
    assert multiplications(easier) - multiplications(model) == 2 * 3
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}.attention"
        mixture, value = f"{name}.output.dense", f"{name}.self.value"
        assert found[mixture].activation == given[mixture].activation
        assert found[value].activation == f"{given[value].activation}_smoothed"
        old, new = (wiring.bias_after(named[value].node) for wiring, named in ((before, given), (after, found)))
        assert old is not None
        assert new is not None
        assert not np.allclose(before.constants[old[1]], after.constants[new[1]], rtol=0.01)


def test_a_mixture_that_something_else_reads_is_left_as_it_was(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    model = onnx.load(bert.onnx_file)
    (mixture,) = [
        product.activation
        for product in Wiring(model).products()
        if product.name == "bert.encoder.layer.1.attention.output.dense"
    ]
    model.graph.node.append(helper.make_node("Identity", [mixture], ["seen"], name="seen"))
    model.graph.output.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, None))
    easier = smoothed(model, ranges_of(model, bert, texts))
    assert multiplications(easier) - multiplications(model) == 2 * 3 + 1
    before, after = (
        channel_ranges(each, ["seen", "logits"], bert.encodings(texts), threads=1) for each in (model, easier)
    )
    for name in ("seen", "logits"):
        np.testing.assert_allclose(after[name].high, before[name].high, atol=1e-4)


def test_an_outlier_channel_comes_nearer_to_the_others(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    model = onnx.load(bert.onnx_file)
    wiring = Wiring(model)
    (scales,) = [name for name in wiring.constants if name.endswith("embeddings.LayerNorm.weight")]
    planted = wiring.constants[scales].copy()
    planted[3] *= 60
    model = onnx.load(with_constants(model, {scales: planted}, tmp_path / "planted.onnx"))
    ranges = ranges_of(model, bert, texts)
    easier = smoothed(model, ranges)
    entering = Wiring(model).products()[0].activation

    def apart(found: ChannelRange) -> float:
        largest = np.maximum(-found.low, found.high)
        return float(largest[3] / np.median(largest))

    now = ranges_of(easier, bert, texts)[f"{entering}_smoothed"]
    assert apart(ranges[entering]) > 20
    assert apart(now) < apart(ranges[entering]) / 5


def masked_sum(axis: int = 1, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """sum of x (batch, tokens, 32) over `axis`."""
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], name="sum", keepdims=0)],
        "sum",
        [helper.make_tensor_value_info("x", kind, ["batch", "tokens", 32])],
        [helper.make_tensor_value_info("y", kind, ["batch", "tokens" if axis == 2 else 32])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [axis])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def summed(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(found)


def test_sums_of_a_text_are_the_same_bits_alone_and_beside_longer_ones() -> None:
    chance = np.random.default_rng(0)
    plain, exact = masked_sum(), with_exact_sums(masked_sum())
    moved = {"plain": 0, "exact": 0}
    for _ in range(100):
        tokens, batch = int(chance.integers(1, 60)), int(chance.integers(1, 9))
        text = (10 * chance.standard_normal((1, tokens, 32))).astype(np.float32)
        padded = chance.standard_normal((batch, int(chance.integers(tokens, 512)), 32)).astype(np.float32)
        row = int(chance.integers(batch))
        padded[row] = 0
        padded[row, :tokens] = text
        for name, model in (("plain", plain), ("exact", exact)):
            moved[name] += summed(model, text)[0].tobytes() != summed(model, padded)[row].tobytes()
        np.testing.assert_allclose(
            summed(exact, text)[0], text[0].astype(np.float64).sum(axis=0), atol=tokens * 2**-23 + 1e-4
        )
    assert moved["exact"] == 0
    assert moved["plain"] > 50  # else there would be nothing to mend


def test_an_exact_sum_is_as_near_as_float32s_own() -> None:
    x = np.random.default_rng(1).standard_normal((4, 512, 32)).astype(np.float32)
    truth = x.astype(np.float64).sum(axis=1)
    errors = [np.abs(summed(model, x) - truth).max() for model in (masked_sum(), with_exact_sums(masked_sum()))]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize("other", [masked_sum(axis=2), masked_sum(kind=TensorProto.INT64)])
def test_sums_over_other_axes_and_of_whole_numbers_stay(other: onnx.ModelProto) -> None:
    assert with_exact_sums(other) == other
