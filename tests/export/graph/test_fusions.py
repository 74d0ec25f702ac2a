from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from small_checkpoints import MAX_LENGTH, Exported, farthest, needs_openvino

from export.graph.fusions import Fusion, check_fusions, fused, joined, missing, operators_of, session_operators
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput
from serve.model.session import Session

# Two layers, each with one attention, two residuals and one GELU; before them one normalisation of the embeddings, which
# is a residual's too unless the lookups take it.
ALONE: dict[Fusion, int] = {"attention": 2, "skip-layer-norm": 5, "bias-gelu": 2, "embedding": 1}
TOGETHER = ALONE | {"skip-layer-norm": 4}

CASES = [pytest.param((name,), {name: count}, id=name) for name, count in ALONE.items()] + [
    pytest.param(tuple(ALONE), TOGETHER, id="all")
]


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
@pytest.mark.parametrize(("fusions", "counts"), CASES)
def test_joined_kernels_give_the_same_logits(
    bert: Exported,
    texts: list[str],
    tmp_path: Path,
    fusions: tuple[Fusion, ...],
    counts: dict[Fusion, int],
    runtime: Runtime,
) -> None:
    graph, made = joined(onnx.load(bert.onnx_file), fusions, heads=4)
    assert made == counts
    onnx.save(graph, tmp_path / "joined.onnx")
    encodings = bert.encodings(texts)
    plain = Session(bert.onnx_file, threads=1)
    alone = [plain.run([encoding])[0] for encoding in encodings]
    session = Session(tmp_path / "joined.onnx", 1, runtime, MAX_LENGTH)
    assert farthest(alone, session.run(encodings)) < 1e-4


@pytest.mark.parametrize(("fusions", "counts"), CASES)
def test_onnxruntime_loads_every_joined_kernel(
    bert: Exported, tmp_path: Path, fusions: tuple[Fusion, ...], counts: dict[Fusion, int]
) -> None:
    graph, made = joined(onnx.load(bert.onnx_file), fusions, heads=4)
    onnx.save(graph, tmp_path / "joined.onnx")
    found = fused(session_operators(tmp_path / "joined.onnx"))
    for name in ALONE:
        assert found[name] == counts.get(name, 0)
    assert (found["layer-norm"], found["gelu"]) == (5, 2)
    assert missing(found, made) == []


def test_a_plain_graph_has_nothing_joined_and_an_int8_one_runs_on_integers(bert: Exported, bert_int8: Path) -> None:
    plain = fused(session_operators(bert.onnx_file))
    assert plain == dict.fromkeys(plain, 0) | {"layer-norm": 5, "gelu": 2}
    assert fused(session_operators(bert_int8)) == plain | {"integer products": 12}


def test_a_promise_that_was_not_kept_is_named(bert: Exported) -> None:
    found = fused(session_operators(bert.onnx_file))
    assert missing(found, {"attention": 2, "gelu": 2, "layer-norm": 6}) == [
        "attention: 0 in the session as loaded, 2 were promised",
        "layer-norm: 5 in the session as loaded, 6 were promised",
    ]


def test_the_number_of_heads_is_what_attention_is_split_by(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    onnx.save(joined(onnx.load(bert.onnx_file), ["attention"], heads=2)[0], tmp_path / "two.onnx")
    encodings = bert.encodings(texts)
    expected = Session(bert.onnx_file, threads=1).run(encodings)
    assert farthest(expected, Session(tmp_path / "two.onnx", threads=1).run(encodings)) > 0.01


def test_the_graph_that_was_given_is_left_alone(bert: Exported) -> None:
    model = onnx.load(bert.onnx_file)
    before = model.SerializeToString(deterministic=True)
    joined(model, tuple(ALONE), heads=4)
    assert model.SerializeToString(deterministic=True) == before
    same, made = joined(model, (), heads=4)
    assert made == {}
    assert same.SerializeToString(deterministic=True) == before


def test_positions_numbered_from_the_padding_are_not_looked_up_by_the_joined_kernel(
    exported: Callable[..., Exported],
) -> None:
    roberta = onnx.load(exported("roberta", "SequenceClassification").onnx_file)
    with pytest.raises(BadInput, match="--fuse embedding: this model's graph has nothing of that form; leave it out"):
        joined(roberta, ["embedding"], heads=4)
    assert joined(roberta, ["attention"], heads=4)[1] == {"attention": 2}


@pytest.mark.parametrize("name", ["attention", "skip-layer-norm", "bias-gelu", "embedding"])
def test_a_fusion_that_finds_nothing_is_refused(exported: Callable[..., Exported], name: Fusion) -> None:
    modernbert = onnx.load(exported("modernbert", "TokenClassification").onnx_file)
    with pytest.raises(BadInput, match=f"--fuse {name}: .* has nothing of that form"):
        joined(modernbert, [name], heads=4)


def test_unknown_fusions_are_named_and_known_ones_come_in_one_order() -> None:
    with pytest.raises(BadInput, match=r"--fuse flash, rope is unknown; the fusions are attention, skip-layer-norm, "):
        check_fusions(["rope", "attention", "flash"])
    assert check_fusions(["embedding", "attention"]) == ("attention", "embedding")
    assert check_fusions([]) == ()


def test_operators_are_counted(bert: Exported) -> None:
    assert operators_of(onnx.load(bert.onnx_file)) == bert.info.operators
