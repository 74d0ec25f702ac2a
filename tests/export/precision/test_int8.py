from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_checkpoints import MAX_LENGTH, WORDS, Exported, needs_openvino

from export.graph.nodes import Wiring
from export.precision.calibration import tensor_ranges
from export.precision.int8 import NO_SATURATION, quantise_static, quantise_weight_only
from export.precision.int8_preparation import Prepared
from export.validation.parity import company_differences
from serve.model.session import Session


def relative_error(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """Root mean square of the differences over that of the expected values."""
    one, other = np.concatenate(expected), np.concatenate(actual)
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2)))


def answers(file: Path, bert: Exported, texts: list[str]) -> list[np.ndarray]:
    session = Session(file, threads=1)
    return [session.run([encoding])[0] for encoding in bert.encodings(texts)]


def test_texts_that_calibration_never_saw_get_nearly_the_same_logits(
    bert: Exported, bert_int8: Path, texts: list[str]
) -> None:
    expected = answers(bert.onnx_file, bert, texts[20:])
    assert relative_error(expected, answers(bert_int8, bert, texts[20:])) < 0.1


def test_eight_bits_are_nearer_and_ask_for_a_cpu_that_does_not_saturate(
    bert_prepared: Prepared, bert_int8: Path, tmp_path: Path
) -> None:
    eight = quantise_static(bert_prepared.model, tmp_path / "eight.onnx", bert_prepared.ranges, weight_bits=8)
    assert (eight.weight_bits, eight.cpu) == (8, NO_SATURATION)
    wiring = Wiring(bert_prepared.model)

    def rounding(file: Path) -> float:
        """Mean over the products' weights of what rounding did to them: this CPU may saturate when it multiplies."""
        constants = {constant.name: numpy_helper.to_array(constant) for constant in onnx.load(file).graph.initializer}
        names = [product.weight for product in wiring.products()]
        made = {name: constants[f"{name}_quantised"] * constants[f"{name}_scale"] for name in names}
        return float(np.mean([relative_error([wiring.constants[name]], [made[name]]) for name in names]))

    assert rounding(tmp_path / "eight.onnx") < 0.6 * rounding(bert_int8)


def test_seven_bit_codes_cannot_saturate_sixteen(bert_int8: Path) -> None:
    codes = {
        constant.name: numpy_helper.to_array(constant).astype(np.int32)
        for constant in onnx.load(bert_int8).graph.initializer
        if constant.data_type == TensorProto.INT8 and len(constant.dims) == 2
    }
    largest = {name: np.abs(code).max() for name, code in codes.items()}
    products = [value for name, value in largest.items() if "embedding" not in name]
    # x86 without VNNI adds two products of an activation, 255 at most, and a weight in saturating 16 bits: VPMADDUBSW.
    assert products == [63] * 12
    assert 2 * 255 * 63 < 2**15
    # One table, of words: 32 positions and 2 segments are too few rows to be worth it.
    assert [value for name, value in largest.items() if "embedding" in name] == [127]


def test_onnxruntime_runs_every_quantised_product_on_integers(bert_int8: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this machine only
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(bert_int8, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert kinds["MatMulIntegerToFloat"] == 12
    assert kinds["DequantizeLinear"] == 0
    # One scale serves queries, keys and values, so that a layer codes its activations four times.
    assert kinds["QuantizeLinear"] == 8


def test_the_same_calibration_gives_the_same_bytes(
    bert: Exported, bert_int8: Path, texts: list[str], tmp_path: Path
) -> None:
    prepared = Prepared.of(bert.onnx_file, bert.encodings(texts[:20]), threads=1)
    quantise_static(prepared.model, tmp_path / "again.onnx", prepared.ranges)
    assert (tmp_path / "again.onnx").read_bytes() == bert_int8.read_bytes()
    onnx.checker.check_model(onnx.load(bert_int8), full_check=True)


def test_products_that_are_kept_run_in_float32_with_their_own_weights(bert_prepared: Prepared, tmp_path: Path) -> None:
    kept = "bert.encoder.layer.1.output.dense"
    assert kept in bert_prepared.products
    made = quantise_static(bert_prepared.model, tmp_path / "int8.onnx", bert_prepared.ranges, kept=[kept])
    assert (made.products, made.kept) == (11, (kept,))
    (original,) = [product for product in Wiring(bert_prepared.model).products() if product.name == kept]
    wiring = Wiring(onnx.load(tmp_path / "int8.onnx"))
    (product,) = wiring.products()
    assert product.name == kept
    np.testing.assert_array_equal(
        wiring.constants[product.weight], Wiring(bert_prepared.model).constants[original.weight]
    )


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
def test_255_steps_span_the_range_of_an_activation_and_zero_is_one_of_them(
    bert_prepared: Prepared, tmp_path: Path, clipped: bool
) -> None:
    quantise_static(bert_prepared.model, tmp_path / "int8.onnx", bert_prepared.ranges, clipped=clipped)
    constants = {each.name: numpy_helper.to_array(each) for each in onnx.load(tmp_path / "int8.onnx").graph.initializer}
    for name, found in bert_prepared.ranges.items():
        low, high = (found.clipped_low, found.clipped_high) if clipped else (found.low, found.high)
        assert low < 0 < high
        assert constants[f"{name}_scale"] == pytest.approx((high - low) / 255)
        assert constants[f"{name}_zero_point"] == round(-low / (high - low) * 255)
    # Clipping is seen at both ends.
    assert any(found.clipped_low > found.low for found in bert_prepared.ranges.values())
    assert any(found.clipped_high < found.high for found in bert_prepared.ranges.values())


def test_weight_only_int8_is_near_float32_and_alone_as_in_company(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    made = quantise_weight_only(onnx.load(bert.onnx_file), tmp_path / "weights.onnx")
    assert (made.scheme, made.products, made.tables, made.cpu) == ("weight-only", 12, 1, ())
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "weights.onnx").graph.node)
    assert kinds["MatMulNBits"] == 12
    expected = answers(bert.onnx_file, bert, texts)
    assert relative_error(expected, answers(tmp_path / "weights.onnx", bert, texts)) < 0.03
    run = Session(tmp_path / "weights.onnx", threads=1).run
    assert company_differences(run, bert.encodings(texts * 3)) == (0, 0.0)


@needs_openvino
def test_static_int8_gives_the_same_bits_in_any_company_in_openvino_too(bert: Exported, bert_int8: Path) -> None:
    mixed = [" ".join((WORDS * 3)[start % 20 : start % 20 + 1 + start * 7 % 40]) for start in range(200)]
    encodings = bert.encodings(mixed)
    assert {len(encoding) for encoding in encodings} >= {3, 15, 16, 17, 31, 32}
    session = Session(bert_int8, threads=1, runtime="openvino", max_length=MAX_LENGTH)
    assert company_differences(session.run, encodings) == (0, 0.0)


def graph_of(table: np.ndarray, products: list[tuple[str, np.ndarray]], head: np.ndarray, out: Path) -> Path:
    """Token ids looked up in `table`, through `products` (weight name and value), then `head`; width stays the same."""
    constants = {"table": table, "head": head, **dict(products)}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["hidden_0"], name="lookup")]
    for index, (weight, _) in enumerate(products):
        nodes.append(helper.make_node("MatMul", [f"hidden_{index}", weight], [f"hidden_{index + 1}"], name=f"p{index}"))
    nodes.append(helper.make_node("MatMul", [f"hidden_{len(products)}", "head"], ["logits"], name="classify"))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", head.shape[1]])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), out)
    return out


def test_factors_save_the_small_channels_beside_an_outlier(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    spread, weight = np.eye(32), chance.normal(size=(32, 32))
    spread[3, 3], weight[3] = 100.0, weight[3] / 100.0
    products = [("spread", spread), ("weight", weight)]
    source = graph_of(chance.normal(size=(128, 32)), products, chance.normal(size=(32, 5)), tmp_path / "fp32.onnx")
    model, encodings = onnx.load(source), bert.encodings(texts)
    prepared = Prepared.of(source, encodings, threads=1)
    as_it_was = tensor_ranges(model, [product.activation for product in Wiring(model).products()], encodings, 1)
    errors = []
    for graph, ranges in ((model, as_it_was), (prepared.model, prepared.ranges)):
        quantise_static(graph, tmp_path / "int8.onnx", ranges)
        errors.append(relative_error(answers(source, bert, texts), answers(tmp_path / "int8.onnx", bert, texts)))
    plain, smoothed = errors
    assert smoothed < plain / 3


def test_a_weight_that_two_products_share_stays_one(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    weight = chance.normal(size=(32, 32)) / 6
    source = graph_of(
        chance.normal(size=(128, 32)), [("weight", weight)] * 2, chance.normal(size=(32, 5)), tmp_path / "fp32.onnx"
    )
    prepared = Prepared.of(source, bert.encodings(texts), threads=1)
    made = quantise_static(prepared.model, tmp_path / "int8.onnx", prepared.ranges)
    assert (made.products, made.tables) == (2, 1)
    names = [constant.name for constant in onnx.load(tmp_path / "int8.onnx").graph.initializer]
    kinds = ["weight_quantised", "weight_scale", "weight_zero_point"]
    assert sorted(name for name in names if name.startswith("weight")) == kinds
    assert relative_error(answers(source, bert, texts), answers(tmp_path / "int8.onnx", bert, texts)) < 0.05
