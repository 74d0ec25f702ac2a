import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.graph import exporter
from latency.measure.operators import Node, depths_in, executed, layer_name, operators, summary
from serve.errors import BundleError


@pytest.fixture(scope="module")
def exported_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2x256 BERT that classifies tokens, as this project exports it: products of smaller ones take less than a microsecond."""
    import torch
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, max_position_embeddings=32,
        num_labels=5,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the exporter makes one constant of equal ones; trained ones differ
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder / "checkpoint")
    exporter.export_graph(folder / "checkpoint", folder / "model.onnx", 32)
    return folder / "model.onnx"


def saved(file: Path, nodes: list[onnx.NodeProto], constants: dict[str, tuple[int, ...]]) -> Path:
    """A graph from `input_ids` to `logits` by `nodes`, with constants of ones in these shapes."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, None)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    return file


def kinds_by_layer(onnx_file: Path, *kinds: str) -> dict[str, list[int]]:
    """How many nodes of each of `kinds` stand in each layer that has any."""
    depths = depths_in(onnx_file)
    counts: dict[str, list[int]] = {}
    for node in onnx.load(onnx_file).graph.node:
        if node.op_type in kinds:
            layer = counts.setdefault(layer_name(depths[node.name]), [0] * len(kinds))
            layer[kinds.index(node.op_type)] += 1
    return counts


def test_every_product_and_norm_of_an_exported_bert_is_found_in_its_layer(exported_bert: Path) -> None:
    # Four projections, scores, mixing and the feed-forward's two; an Add for each bias but the attention's, two residual
    # ones and the mask's.
    assert kinds_by_layer(exported_bert, "MatMul", "LayerNormalization", "Add", "Gather") == {
        "embeddings": [0, 1, 2, 3],
        "layer 0": [8, 2, 9, 0],
        "layer 1": [8, 2, 9, 0],
        "head": [1, 0, 1, 0],
    }


def test_layers_are_found_by_the_weights_where_no_node_has_a_telling_name(exported_bert: Path, tmp_path: Path) -> None:
    model = onnx.load(exported_bert)
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    onnx.save(model, tmp_path / "model.onnx")
    kinds = ("MatMul", "LayerNormalization", "Add", "Softmax", "Gelu", "Where")
    assert kinds_by_layer(tmp_path / "model.onnx", *kinds) == kinds_by_layer(exported_bert, *kinds)
    assert kinds_by_layer(tmp_path / "model.onnx", "Where") == {"other": [1]}  # the mask, which all layers share


def test_the_last_sum_of_a_layer_belongs_to_it_where_the_norm_that_reads_it_is_the_next_layers(tmp_path: Path) -> None:
    """As in ModernBERT."""
    file = saved(
        tmp_path / "m.onnx",
        [
            helper.make_node("Gather", ["embeddings.tok_embeddings.weight", "input_ids"], ["before"], "table"),
            helper.make_node("MatMul", ["before", "square"], ["added"], "layers.0.mlp.Wo"),
            helper.make_node("Add", ["before", "added"], ["between"], "sum"),
            helper.make_node("Mul", ["between", "layers.1.attn_norm.weight"], ["normed"], "norm"),
            helper.make_node("Neg", ["normed"], ["negative"], "turned"),
            helper.make_node("MatMul", ["negative", "square"], ["logits"], "layers.1.mlp.Wo"),
        ],
        {"embeddings.tok_embeddings.weight": (9, 4), "square": (4, 4), "layers.1.attn_norm.weight": (4,)},
    )
    found = {name: layer_name(depth) for name, depth in depths_in(file).items()}
    first = {"table": "embeddings", "layers.0.mlp.Wo": "layer 0", "sum": "layer 0"}
    assert found == first | dict.fromkeys(("norm", "turned", "layers.1.mlp.Wo"), "layer 1")


def test_a_profile_of_an_exported_bert_tells_layers_and_kinds_as_executed(exported_bert: Path) -> None:
    ids = np.arange(5, 21, dtype=np.int64)[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    found = operators(exported_bert, {**feeds, "unknown": ids}, threads=1, calls=5)
    assert list(found["by_layer"]) == ["embeddings", "layer 0", "layer 1", "head", "other"]
    assert sum(found["by_layer"].values()) == pytest.approx(1)
    assert sum(found["by_kind"].values()) == pytest.approx(1)
    assert list(found["by_kind"].values()) == sorted(found["by_kind"].values(), reverse=True)
    # onnxruntime fuses the scores with their scale.
    assert found["matrix_share"] == pytest.approx(found["by_kind"]["MatMul"] + found["by_kind"]["FusedMatMul"])
    assert found["tokens"] == 16
    assert len(found["top"]) == 10
    row = next(row for row in found["top"] if (row["layer"], row["kind"]) == ("layer 0", "MatMul"))
    assert row["calls"] == 7


def test_a_graph_where_one_product_does_nearly_all_the_work_says_so(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "m.onnx",
        [
            helper.make_node("Cast", ["input_ids"], ["floats"], "embeddings.cast", to=TensorProto.FLOAT),
            helper.make_node("Neg", ["floats"], ["negative"], "encoder.layer.6.act"),
            helper.make_node("MatMul", ["negative", "wide"], ["logits"], "encoder.layer.7.output.dense"),
        ],
        {"wide": (1024, 4096)},
    )
    found = operators(file, {"input_ids": np.ones((64, 1024), np.int64)}, threads=1, calls=5)
    assert (found["top"][0]["layer"], found["top"][0]["kind"]) == ("layer 7", "MatMul")
    assert found["top"][0]["share"] > 0.95
    assert found["matrix_share"] == found["by_layer"]["layer 7"] == found["top"][0]["share"]
    assert list(found["by_layer"]) == ["embeddings", "layer 6", "layer 7"]


def event(name: str, kind: str, us: int) -> dict[str, object]:
    return {"cat": "Node", "name": f"{name}_kernel_time", "args": {"op_name": kind}, "dur": us}


def test_a_node_counts_with_the_median_of_its_last_calls_less_the_time_of_the_profiler_itself() -> None:
    events: list[dict[str, object]] = [{"cat": "Session", "name": "model_run", "args": {}, "dur": 900}]
    for us in (500, 105, 195, 106):  # the first was for warming up, the third was disturbed
        events += [event("dense", "MatMul", us), event("sizes", "Shape", 6), event("flag", "And", 4)]
    assert executed(events, calls=3) == [
        Node("dense", "MatMul", pytest.approx(0.100)),  # type: ignore[arg-type]
        Node("sizes", "Shape", 0.0),
        Node("flag", "And", 0.0),
    ]


def test_layers_stand_in_their_order_and_attention_counts_as_a_product() -> None:
    nodes = [Node("a", "MatMul", 1.0), Node("b", "MatMul", 2.0), Node("c", "Gelu", 3.0), Node("d", "QAttention", 4.0)]
    layers = {"a": "layer 10", "b": "layer 10", "c": "other", "d": "layer 9"}
    found = summary(nodes, layers, tokens=7)
    assert found["by_layer"] == pytest.approx({"layer 9": 0.4, "layer 10": 0.3, "other": 0.3})
    assert list(found["by_layer"]) == ["layer 9", "layer 10", "other"]
    assert found["matrix_share"] == pytest.approx(0.7)
    assert found["top"][1:] == [
        {"layer": "layer 10", "kind": "MatMul", "ms": 3.0, "share": 0.3, "calls": 2},
        {"layer": "other", "kind": "Gelu", "ms": 3.0, "share": 0.3, "calls": 1},
    ]
    nothing = summary([Node("first", "MatMul", 0.0)], {"first": "layer 0"}, tokens=7)
    assert nothing == {"tokens": 7, "top": [], "by_kind": {}, "by_layer": {}, "matrix_share": 0.0}


def test_without_onnx_the_products_of_a_bert_are_found_all_the_same(
    exported_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.array([[1, 2, 3]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    monkeypatch.setitem(sys.modules, "onnx", None)
    found = operators(exported_bert, feeds, 1)
    assert found["by_kind"]["MatMul"] > 0
    assert {"layer 0", "layer 1"} <= found["by_layer"].keys()


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"m\.onnx does not open in onnxruntime"):
        operators(tmp_path / "m.onnx", {"input_ids": np.ones((1, 4), np.int64)}, threads=1)
