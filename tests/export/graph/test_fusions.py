from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from small_checkpoints import MAX_LENGTH, Exported, farthest, needs_openvino

from export.graph.exporter import JOINED, fused, joined, missing, session_operators
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput
from serve.model.session import Session

# Two layers, each with one attention, two residuals and one GELU. The sum of the embeddings is a residual's too where
# positions are looked up for each text; ModernBERT's GELU has no bias, and MPNet's attention more than one.
BERT = {"attention": 2, "skip-layer-norm": 4, "bias-gelu": 2}
FAMILIES = {
    "bert": ("TokenClassification", BERT),
    "roberta": ("SequenceClassification", BERT | {"skip-layer-norm": 5}),
    "distilbert": ("TokenClassification", BERT),
    "electra": ("TokenClassification", BERT),
    "mpnet": ("SequenceClassification", {"skip-layer-norm": 5, "bias-gelu": 2}),
    "modernbert": ("TokenClassification", {"attention": 2}),
}


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "bert" else pytest.mark.slow) for name in FAMILIES]
)
def test_joined_kernels_give_the_same_logits(
    exported: Callable[..., Exported], texts: list[str], tmp_path: Path, family: str, runtime: Runtime
) -> None:
    head, counts = FAMILIES[family]
    made = exported(family, head)
    graph, found = joined(onnx.load(made.onnx_file), made.info.shapes)
    assert found == counts
    onnx.save(graph, tmp_path / "joined.onnx")
    encodings = made.encodings(texts)
    plain = Session(made.onnx_file, threads=1)
    alone = [plain.run([encoding])[0] for encoding in encodings]
    session = Session(tmp_path / "joined.onnx", 1, runtime, MAX_LENGTH)
    assert farthest(alone, session.run(encodings)) < 1e-4


def test_onnxruntime_loads_every_joined_kernel(bert: Exported, tmp_path: Path) -> None:
    graph, made = joined(onnx.load(bert.onnx_file), bert.info.shapes)
    onnx.save(graph, tmp_path / "joined.onnx")
    found = fused(session_operators(tmp_path / "joined.onnx"))
    assert {name: found[name] for name in JOINED} == BERT
    assert (found["layer-norm"], found["gelu"]) == (5, 2)
    assert missing(found, made) == []


def test_a_plain_graph_has_nothing_joined_and_an_int8_one_runs_on_integers(bert: Exported, bert_int8: Path) -> None:
    plain = fused(session_operators(bert.onnx_file))
    assert plain == dict.fromkeys(plain, 0) | {"layer-norm": 5, "gelu": 2}
    assert fused(session_operators(bert_int8)) == plain | {"integer products": 12}


def test_a_promise_that_was_not_kept_is_named(bert: Exported) -> None:
    found = fused(session_operators(bert.onnx_file))
    assert missing(found, {"attention": 2, "gelu": 2, "layer-norm": 6}) == [
        "attention: the loaded session has 0, expected 2",
        "layer-norm: the loaded session has 5, expected 6",
    ]


def test_joining_gives_the_same_bytes_again_without_a_trace_of_where_and_leaves_its_input_alone(bert: Exported) -> None:
    model = onnx.load(bert.onnx_file)
    before = model.SerializeToString(deterministic=True)
    first, second = (joined(model, bert.info.shapes)[0] for _ in range(2))
    assert model.SerializeToString(deterministic=True) == before
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    parts = [*first.graph.node, *first.graph.initializer, *first.graph.input, *first.graph.output]
    assert not [part for part in [first, first.graph, *parts] if part.doc_string or part.metadata_props]


def test_a_graph_with_nothing_to_join_is_refused(bert: Exported) -> None:
    model = onnx.load(bert.onnx_file)
    # The lookups alone: a graph that has neither layers nor a GELU.
    lookup = next(node for node in model.graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    nodes = [onnx.helper.make_node("Identity", [lookup.output[0]], [model.graph.output[0].name])]
    kept = [onnx.NodeProto.FromString(lookup.SerializeToString()), *nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(BadInput, match="--fuse"):
        joined(model, ())
