from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_checkpoints import Exported

from export.parity import company_differences
from export.quantise import quantise_dynamic, quantise_static
from serve.errors import BadInput
from serve.session import Session


def relative_error(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """Root mean square of the differences over that of the expected values."""
    one, other = np.concatenate(expected), np.concatenate(actual)
    return float(np.sqrt(np.mean((one - other) ** 2) / np.mean(one**2)))


def answers(file: Path, bert: Exported, texts: list[str]) -> list[np.ndarray]:
    session = Session(file, threads=1)
    return [session.run([encoding])[0] for encoding in bert.encodings(texts)]


def test_static_int8_gives_the_same_bits_in_any_company(bert: Exported, bert_int8: Path, texts: list[str]) -> None:
    moved, largest = company_differences(Session(bert_int8, threads=1).run, bert.encodings(texts * 3))
    assert (moved, largest) == (0, 0.0)


def test_dynamic_int8_does_not_and_the_check_sees_it(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    made = quantise_dynamic(bert.onnx_file, tmp_path / "dynamic.onnx")
    assert (made.scheme, made.products) == ("dynamic", 12)
    moved, largest = company_differences(Session(tmp_path / "dynamic.onnx", threads=1).run, bert.encodings(texts))
    assert moved > len(texts) // 2
    assert largest > 1e-4


def test_texts_that_calibration_never_saw_get_nearly_the_same_logits(
    bert: Exported, bert_int8: Path, texts: list[str]
) -> None:
    expected = answers(bert.onnx_file, bert, texts[20:])
    assert relative_error(expected, answers(bert_int8, bert, texts[20:])) < 0.1


def test_eight_bits_are_nearer_and_ask_for_vnni(
    bert: Exported, bert_int8: Path, texts: list[str], tmp_path: Path
) -> None:
    calibration = bert.encodings(texts[:20])
    eight = quantise_static(bert.onnx_file, tmp_path / "eight.onnx", calibration, weight_bits=8)
    assert eight.cpu == ("avx512_vnni",)
    expected = answers(bert.onnx_file, bert, texts)
    error_of = {
        file: relative_error(expected, answers(file, bert, texts)) for file in (tmp_path / "eight.onnx", bert_int8)
    }
    assert error_of[tmp_path / "eight.onnx"] < error_of[bert_int8]


def test_seven_bit_codes_cannot_saturate_sixteen(bert_int8: Path) -> None:
    codes = {
        constant.name: numpy_helper.to_array(constant).astype(np.int32)
        for constant in onnx.load(bert_int8).graph.initializer
        if constant.data_type == TensorProto.INT8 and len(constant.dims) == 2
    }
    products = [name for name in codes if "embedding" not in name]
    assert len(products) == 12
    for name in products:
        assert np.abs(codes[name]).max() == 63
        assert 2 * 255 * np.abs(codes[name]).max() < 2**15
    tables = [name for name in codes if "embedding" in name]
    assert len(tables) == 1  # of words; 32 positions and 2 segments are too few rows to be worth it
    assert np.abs(codes[tables[0]]).max() == 127


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
    quantise_static(bert.onnx_file, tmp_path / "again.onnx", bert.encodings(texts[:20]))
    assert (tmp_path / "again.onnx").read_bytes() == bert_int8.read_bytes()
    onnx.checker.check_model(onnx.load(bert_int8), full_check=True)


def test_calibration_without_texts_is_refused(bert: Exported, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no calibration texts were given"):
        quantise_static(bert.onnx_file, tmp_path / "int8.onnx", [])
    with pytest.raises(BadInput, match=r"smoothing 1\.5"):
        quantise_static(bert.onnx_file, tmp_path / "int8.onnx", bert.encodings(["rome"]), smoothing=1.5)
    assert list(tmp_path.iterdir()) == []


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
    errors = []
    for smoothing in (None, 0.8):
        quantise_static(source, tmp_path / "int8.onnx", bert.encodings(texts), smoothing=smoothing)
        errors.append(relative_error(answers(source, bert, texts), answers(tmp_path / "int8.onnx", bert, texts)))
    plain, smoothed = errors
    assert smoothed < plain / 3


def test_a_weight_that_two_products_share_stays_one(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    weight = chance.normal(size=(32, 32)) / 6
    source = graph_of(
        chance.normal(size=(128, 32)), [("weight", weight)] * 2, chance.normal(size=(32, 5)), tmp_path / "fp32.onnx"
    )
    made = quantise_static(source, tmp_path / "int8.onnx", bert.encodings(texts))
    assert (made.products, made.tables) == (2, 1)
    names = [constant.name for constant in onnx.load(tmp_path / "int8.onnx").graph.initializer]
    assert sorted(name for name in names if name.startswith("weight")) == [
        "weight_quantised",
        "weight_scale",
        "weight_zero_point",
    ]
    assert relative_error(answers(source, bert, texts), answers(tmp_path / "int8.onnx", bert, texts)) < 0.05


def test_a_file_whose_weights_are_mostly_words_shrinks_to_a_little_over_a_quarter(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    chance = np.random.default_rng(0)
    source = graph_of(
        chance.normal(size=(8000, 128)),
        [("weight", chance.normal(size=(128, 128)))],
        chance.normal(size=(128, 5)),
        tmp_path / "fp32.onnx",
    )
    made = quantise_static(source, tmp_path / "int8.onnx", bert.encodings(texts))
    assert 0.25 < made.size_bytes / source.stat().st_size < 0.27
