"""What a session really runs: its operators counted as loaded, and kernels that are joined on request.

onnxruntime rewrites a graph when it opens it, by exact patterns that any change of layout can break in silence. So the
optimised graph is read back and counted, and what was promised and is not there is an error.

By default nothing is joined beyond what the exporter wrote (LayerNormalization, Gelu): on CPUs onnxruntime 1.31's joined
kernels are slower than the plain ones (docs/export.md has the figures). `joined` is for runtimes where they are not,
GPUs above all; it writes operators of the `com.microsoft` domain, which onnxruntime reads everywhere and OpenVINO
mostly.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from export.graph.nodes import Wiring
from serve.errors import BadInput

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

Fusion = Literal["attention", "skip-layer-norm", "bias-gelu", "embedding"]

# What a promise is kept by, among the operators of a session.
KERNELS: Mapping[str, frozenset[str]] = {
    "layer-norm": frozenset({"LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"}),
    "gelu": frozenset({"Gelu", "BiasGelu", "FastGelu", "QuickGelu"}),
    "integer products": frozenset(
        {"MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "MatMulNBits"}
    ),
    "attention": frozenset({"Attention", "MultiHeadAttention", "QAttention"}),
    "skip-layer-norm": frozenset({"SkipLayerNormalization"}),
    "bias-gelu": frozenset({"BiasGelu"}),
    "embedding": frozenset({"EmbedLayerNormalization"}),
}


def check_fusions(names: Collection[str]) -> tuple[Fusion, ...]:
    """`names` as fusions. BadInput for one that is unknown."""
    known = get_args(Fusion)
    if unknown := sorted(set(names) - set(known)):
        raise BadInput(f"--fuse {', '.join(unknown)} is unknown; the fusions are {', '.join(known)}.")
    return tuple(name for name in known if name in names)


def session_operators(onnx_file: Path) -> dict[str, int]:
    """How many nodes of each kind onnxruntime runs for `onnx_file` on this processor, after its own optimisation."""
    import onnx
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # it warns that the optimised file is for this machine only
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
        return operators_of(onnx.load(options.optimized_model_filepath))


def operators_of(model: "ModelProto") -> dict[str, int]:
    """How many nodes of each kind `model` has."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def fused(operators: Mapping[str, int]) -> dict[str, int]:
    """The kernels of `KERNELS` among a session's operators."""
    return {name: sum(operators.get(kind, 0) for kind in kinds) for name, kinds in KERNELS.items()}


def missing(found: Mapping[str, int], promised: Mapping[str, int]) -> list[str]:
    """Promises that the counts `found` do not keep, in words."""
    return [
        f"{name}: {found.get(name, 0)} in the session as loaded, {count} were promised"
        for name, count in promised.items()
        if found.get(name, 0) < count
    ]


def joined(model: "ModelProto", fusions: Collection[Fusion], heads: int) -> tuple["ModelProto", dict[str, int]]:
    """A copy of `model` with the kernels of `fusions` joined, and how many of each; `heads` is the model's number.

    BadInput for a fusion that finds nothing to join.
    """
    import onnx
    from onnx import helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    made: dict[str, int] = {}
    joins: dict[Fusion, Callable[[], int]] = {
        "attention": lambda: _join_attention(copy, heads),
        "embedding": lambda: _join_embedding(copy),
        "skip-layer-norm": lambda: _join_skip_layer_norm(copy),
        "bias-gelu": lambda: _join_bias_gelu(copy),
    }
    for name, join in joins.items():
        if name in fusions:
            made[name] = join()
            if not made[name]:
                raise BadInput(f"--fuse {name}: this model's graph has nothing of that form; leave it out.")
    if made:
        copy.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return copy, made


def _join_attention(model: "ModelProto", heads: int) -> int:
    """Scores, scaling, bias, softmax and mixture as one MultiHeadAttention; the number of layers where that was done."""
    from onnx import helper

    wiring = Wiring(model)
    replaced: dict[int, NodeProto] = {}
    dead: set[int] = set()
    for softmax in model.graph.node:
        if softmax.op_type != "Softmax":
            continue
        found = _attention_around(wiring, softmax)
        if found is None:
            continue
        query, key, value, bias, scale, between, last = found
        node = helper.make_node(
            "MultiHeadAttention",
            [query, key, value, "", "", bias],
            [last.output[0]],
            name=f"{last.output[0]}_attention",
            domain="com.microsoft",
            num_heads=heads,
            scale=scale,
        )
        replaced[id(last)] = node
        dead |= {id(each) for each in between}
    _rewrite(model, replaced, dead)
    return len(replaced)


def _attention_around(
    wiring: Wiring, softmax: "NodeProto"
) -> tuple[str, str, str, str, float, "list[NodeProto]", "NodeProto"] | None:
    """Query, key and value as (batch, tokens, width), bias, scale, the nodes between, and the last one."""
    add = wiring.made_by.get(softmax.input[0])
    mixture = wiring.only_reader(softmax.output[0])
    if add is None or add.op_type != "Add" or mixture is None or mixture.op_type != "MatMul":
        return None
    scaled = {
        other: node
        for name, other in (add.input, reversed(add.input))
        if (node := wiring.made_by.get(name)) is not None
        and node.op_type in ("Mul", "Div")
        and node.input[1] in wiring.constants
    }
    if len(scaled) != 1:
        return None
    ((bias, scaling),) = scaled.items()
    factor = float(wiring.constants[scaling.input[1]].reshape(-1)[0])
    product = wiring.made_by.get(scaling.input[0])
    turned = wiring.only_reader(mixture.output[0])
    last = wiring.only_reader(turned.output[0]) if turned is not None else None
    if product is None or product.op_type != "MatMul" or turned is None or last is None or last.op_type != "Reshape":
        return None
    sources, between = [], [softmax, add, scaling, product, mixture, turned]
    for value in (*product.input, mixture.input[1]):
        transpose = wiring.made_by.get(value)
        reshape = wiring.made_by.get(transpose.input[0]) if transpose is not None else None
        if transpose is None or reshape is None or (transpose.op_type, reshape.op_type) != ("Transpose", "Reshape"):
            return None
        if wiring.only_reader(value) is None or wiring.only_reader(transpose.input[0]) is None:
            return None
        sources.append(reshape.input[0])
        between += [transpose, reshape]
    scale = factor if scaling.op_type == "Mul" else 1 / factor
    return sources[0], sources[1], sources[2], bias, scale, between, last


def _join_skip_layer_norm(model: "ModelProto") -> int:
    """Residual sums and the normalisation after them as SkipLayerNormalization."""
    from onnx import helper

    wiring = Wiring(model)
    replaced: dict[int, NodeProto] = {}
    dead: set[int] = set()
    for norm in model.graph.node:
        add = (
            wiring.made_by.get(norm.input[0]) if norm.op_type == "LayerNormalization" and len(norm.input) == 3 else None
        )
        if add is None or add.op_type != "Add" or wiring.only_reader(add.output[0]) is None:
            continue
        if any(name in wiring.initializers or name not in wiring.made_by for name in add.input):
            continue
        epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
        replaced[id(norm)] = helper.make_node(
            "SkipLayerNormalization",
            [*add.input, *norm.input[1:]],
            list(norm.output),
            name=norm.name,
            domain="com.microsoft",
            epsilon=epsilon,
        )
        dead.add(id(add))
    _rewrite(model, replaced, dead)
    return len(replaced)


def _join_bias_gelu(model: "ModelProto") -> int:
    """A bias and the GELU after it as BiasGelu."""
    from onnx import helper, numpy_helper

    wiring = Wiring(model)
    replaced: dict[int, NodeProto] = {}
    dead: set[int] = set()
    for gelu in model.graph.node:
        add = wiring.made_by.get(gelu.input[0]) if gelu.op_type == "Gelu" else None
        product = wiring.made_by.get(add.input[0]) if add is not None and add.op_type == "Add" else None
        found = wiring.bias_after(product) if product is not None else None
        if found is None or add is None or found[0] is not add or wiring.only_reader(gelu.input[0]) is None:
            continue
        bias = found[1]
        row = wiring.constants[bias].reshape(-1)
        wiring.initializers[bias].CopyFrom(numpy_helper.from_array(row, bias))
        replaced[id(gelu)] = helper.make_node(
            "BiasGelu", [add.input[0], bias], list(gelu.output), name=gelu.name, domain="com.microsoft"
        )
        dead.add(id(add))
    _rewrite(model, replaced, dead)
    return len(replaced)


def _join_embedding(model: "ModelProto") -> int:
    """BERT's three lookups, their sum and its normalisation as EmbedLayerNormalization; 1 where that was done."""
    from onnx import TensorProto, helper

    wiring = Wiring(model)
    for norm in model.graph.node:
        if norm.op_type != "LayerNormalization":
            continue
        total = wiring.made_by.get(norm.input[0])
        inner = (
            [wiring.made_by.get(name) for name in total.input] if total is not None and total.op_type == "Add" else []
        )
        lookups = [node for node in inner if node is not None and node.op_type == "Gather"]
        sums = [node for node in inner if node is not None and node.op_type == "Add"]
        if total is None or len(lookups) != 1 or len(sums) != 1:
            continue
        every = [wiring.made_by.get(name) for name in sums[0].input]
        lookups += [node for node in every if node is not None and node.op_type == "Gather"]
        tables = {node.input[1]: node for node in lookups}
        positions = [node for node in lookups if node.input[1] not in ("input_ids", "token_type_ids")]
        if len(lookups) != 3 or not {"input_ids", "token_type_ids"} <= set(tables) or len(positions) != 1:
            continue
        slice_ = wiring.made_by.get(positions[0].input[1])
        if slice_ is None or slice_.op_type != "Slice":
            continue  # positions that are not 0, 1, 2 ... (RoBERTa's)
        epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
        short = {name: f"{name}_int32" for name in ("input_ids", "token_type_ids")}
        casts = [
            helper.make_node("Cast", [name], [made], name=made, to=TensorProto.INT32) for name, made in short.items()
        ]
        words, segments = tables["input_ids"].input[0], tables["token_type_ids"].input[0]
        node = helper.make_node(
            "EmbedLayerNormalization",
            [*short.values(), words, positions[0].input[0], segments, *norm.input[1:]],
            [norm.output[0], f"{norm.output[0]}_mask_index"],
            name=norm.name,
            domain="com.microsoft",
            epsilon=epsilon,
        )
        _rewrite(model, {id(norm): node}, {id(each) for each in (total, *sums, *lookups)})
        nodes = [*casts, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        return 1
    return 0


def _rewrite(model: "ModelProto", replaced: "Mapping[int, NodeProto]", dead: Collection[int]) -> None:
    """Put `replaced` in the places of the nodes of those ids, and leave out `dead` ones and what then nobody reads."""
    nodes = [replaced.get(id(node), node) for node in model.graph.node if id(node) not in dead or id(node) in replaced]
    outputs = {output.name for output in model.graph.output}
    while True:
        read = {name for node in nodes for name in node.input} | outputs
        living = [node for node in nodes if set(node.output) & read]
        if len(living) == len(nodes):
            break
        nodes = living
    constants = [constant for constant in model.graph.initializer if constant.name in read]
    kept = [type(node)() for node in nodes]
    for copy, node in zip(kept, nodes, strict=True):
        copy.CopyFrom(node)
    constants_kept = [type(constant)() for constant in constants]
    for copy, constant in zip(constants_kept, constants, strict=True):
        copy.CopyFrom(constant)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend(constants_kept)
