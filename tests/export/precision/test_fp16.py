from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_checkpoints import FAMILIES, MAX_LENGTH, WORDS, Exported, farthest, with_constants

from export.graph.exporter import joined
from export.graph.nodes import Wiring
from export.precision.fp16 import write_fp16
from export.validation.parity import TOLERANCES, variant_parity
from serve.errors import GateMissed
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer

PLAIN_AND_JOINED = pytest.mark.parametrize("fuse", [False, True], ids=["plain", "joined"])


def halved(graph: Path, out: Path, exported: Exported, texts: list[str], *, fuse: bool = False) -> tuple[str, ...]:
    model = onnx.load(graph)
    kernels = joined(model, exported.info.shapes)[0] if fuse else None
    return write_fp16(model, out, exported.encodings(texts), joined=kernels, threads=1)


def weight_bytes(file: Path) -> int:
    return sum(numpy_helper.to_array(constant).nbytes for constant in onnx.load(file).graph.initializer)


@PLAIN_AND_JOINED
@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_float16_answers_like_float32_at_half_the_size(
    exported: Callable[..., Exported], texts: list[str], tmp_path: Path, family: str, head: str, fuse: bool
) -> None:
    made = exported(family, head)
    halved(made.onnx_file, tmp_path / "half.onnx", made, texts[:20], fuse=fuse)
    half = tmp_path / "half.onnx"
    parity = variant_parity("fp16", made.checkpoint, made.onnx_file, half, texts, MAX_LENGTH, threads=1)
    assert parity.passed, parity
    assert 0 < parity.largest < TOLERANCES["fp16"][0]
    assert 0.5 < weight_bytes(half) / weight_bytes(made.onnx_file) < 0.56
    session = ort.InferenceSession(half, providers=["CPUExecutionProvider"])
    assert {node.type for node in session.get_inputs()} == {"tensor(int64)"}
    assert [node.type for node in session.get_outputs()] == ["tensor(float)"]


def test_an_ordinary_model_keeps_only_what_loses_in_float16(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    assert halved(bert.onnx_file, tmp_path / "half.onnx", bert, texts) == ()
    model = onnx.load(tmp_path / "half.onnx")
    constants = {constant.name: constant.data_type for constant in model.graph.initializer}
    for node in model.graph.node:
        kinds = {constants[name] for name in node.input if name in constants}
        if node.op_type == "LayerNormalization" or "logits" in node.output:
            assert kinds == {TensorProto.FLOAT}
        elif node.op_type == "MatMul" and kinds and "classifier" not in str(node.input):
            reader = next(each for each in model.graph.node if node.output[0] in each.input)
            assert kinds == ({TensorProto.FLOAT} if "logits" in reader.output else {TensorProto.FLOAT16})


def with_a_value_of(size: float, bert: Exported, out: Path) -> tuple[Path, set[str]]:
    """The small BERT with one unit that says `size`, which the weights after it make 2; and the values it is in."""
    model = onnx.load(bert.onnx_file)
    wiring = Wiring(model)
    products = {product.name: product for product in wiring.products()}
    into, out_of = (products[f"bert.encoder.layer.1.{part}.dense"] for part in ("intermediate", "output"))
    bias = wiring.bias_after(into.node)
    assert bias is not None
    changes = {bias[1]: wiring.constants[bias[1]].copy(), out_of.weight: wiring.constants[out_of.weight].copy()}
    changes[bias[1]][..., 7] = size
    changes[out_of.weight][7] = 2 / size * np.sign(changes[out_of.weight][7])
    return with_constants(model, changes, out), {bias[0].output[0], out_of.activation}


@PLAIN_AND_JOINED
def test_values_beyond_float16_stay_float32_and_are_named(
    bert: Exported, texts: list[str], tmp_path: Path, fuse: bool
) -> None:
    graph, large = with_a_value_of(1e5, bert, tmp_path / "large.onnx")
    kept = halved(graph, tmp_path / "half.onnx", bert, texts, fuse=fuse)
    named = {name for node in onnx.load(tmp_path / "half.onnx").graph.node for name in node.output}
    assert kept
    # A joined kernel has the name of the last of what it joins.
    assert large & named <= set(kept) <= named
    encodings = bert.encodings(texts)
    expected = Session(graph, threads=1).run(encodings)
    assert farthest(expected, Session(tmp_path / "half.onnx", threads=1).run(encodings)) < TOLERANCES["fp16"][0]


def test_values_that_may_grow_beyond_float16_stay_too_and_smaller_ones_do_not(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    graph, large = with_a_value_of(20_000, bert, tmp_path / "large.onnx")
    assert large <= set(halved(graph, tmp_path / "half.onnx", bert, texts))
    graph, _ = with_a_value_of(5_000, bert, tmp_path / "less.onnx")
    assert halved(graph, tmp_path / "half.onnx", bert, texts) == ()


@PLAIN_AND_JOINED
def test_scores_of_attention_beyond_float16_stay_float32(
    bert: Exported, texts: list[str], tmp_path: Path, fuse: bool
) -> None:
    model = onnx.load(bert.onnx_file)
    wiring = Wiring(model)
    queries_and_keys = [
        product.weight
        for product in wiring.products()
        if product.name.endswith(("layer.1.attention.self.query", "layer.1.attention.self.key"))
    ]
    assert len(queries_and_keys) == 2
    graph = with_constants(
        model, {name: wiring.constants[name] * 80 for name in queries_and_keys}, tmp_path / "large.onnx"
    )
    kept = halved(graph, tmp_path / "half.onnx", bert, texts, fuse=fuse)
    kernels = {"MatMul", "Attention"}
    kinds = {node.op_type for node in onnx.load(tmp_path / "half.onnx").graph.node if node.output[0] in kept}
    assert kinds & kernels == ({"Attention"} if fuse else {"MatMul"})


def test_a_joined_kernel_stays_float32_with_what_it_was_wrapped_in(
    exported: Callable[..., Exported], texts: list[str], tmp_path: Path
) -> None:
    made = exported("modernbert", "TokenClassification")
    model = onnx.load(made.onnx_file)
    # Heads come apart here before the angles of positions enter: the joined kernel has a Reshape before and after it.
    (weight,) = [each.weight for each in Wiring(model).products() if each.name.endswith("layers.1.attn.Wqkv")]
    large = with_constants(model, {weight: Wiring(model).constants[weight] * 80}, tmp_path / "large.onnx")
    kept = halved(large, tmp_path / "half.onnx", made, texts, fuse=True)
    kinds = {node.op_type for node in onnx.load(tmp_path / "half.onnx").graph.node if node.output[0] in kept}
    assert "MultiHeadAttention" in kinds
    assert halved(made.onnx_file, tmp_path / "ordinary.onnx", made, texts, fuse=True) == ()
    halved(large, tmp_path / "plain.onnx", made, texts)
    apart, together = (
        Session(tmp_path / name, threads=1).run(made.encodings(texts)) for name in ("plain.onnx", "half.onnx")
    )
    assert farthest(apart, together) < TOLERANCES["fp16"][0]


def test_a_model_that_gives_no_numbers_is_refused_and_not_left_behind(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    model = onnx.load(bert.onnx_file)
    (scales,) = [name for name in Wiring(model).constants if name.endswith("layer.1.output.LayerNorm.weight")]
    broken = with_constants(model, {scales: np.full(32, np.nan)}, tmp_path / "broken.onnx")
    with pytest.raises(GateMissed, match=r"the fp16 graph does not run: .*; leave fp16 out of --variants"):
        halved(broken, tmp_path / "half.onnx", bert, texts)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.onnx"]


def test_angles_of_positions_are_as_exact_as_in_float32(bert: Exported, tmp_path: Path) -> None:
    # Rotary positions: at 0.7 radians a token, float16 is off by 0.1 radians after 400 tokens.
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["tokens"], name="tokens", start=1),
        helper.make_node("Squeeze", ["tokens"], ["count"], name="count"),
        helper.make_node("Range", ["zero", "count", "one"], ["positions"], name="positions"),
        helper.make_node("Cast", ["positions"], ["places"], name="places", to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["places", "last"], ["column"], name="column"),
        helper.make_node("Mul", ["column", "step"], ["angles"], name="angles"),
        helper.make_node("Cos", ["angles"], ["cosines"], name="cosines"),
        helper.make_node("Gather", ["table", "input_ids"], ["words"], name="words"),
        helper.make_node("Mul", ["words", "cosines"], ["turned"], name="turned"),
        helper.make_node("MatMul", ["turned", "head"], ["logits"], name="classify"),
    ]
    chance = np.random.default_rng(0)
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "last": np.array([1]),
        "step": np.float32(0.7) * np.ones(1, np.float32),
        "table": chance.normal(size=(128, 8)).astype(np.float32),
        "head": chance.normal(size=(8, 5)).astype(np.float32) / 3,
    }
    graph = helper.make_graph(
        nodes,
        "turned",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 5])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "fp32.onnx")
    encodings = load_tokenizer(bert.checkpoint, 512).encode_batch([" ".join(WORDS * 30)])
    assert len(encodings[0]) == 512
    write_fp16(model, tmp_path / "half.onnx", encodings, threads=1)
    expected = Session(tmp_path / "fp32.onnx", threads=1).run(encodings)
    assert farthest(expected, Session(tmp_path / "half.onnx", threads=1).run(encodings)) < 0.01
