"""Time of an ONNX graph by layer and by kind of operator, from onnxruntime's profiler."""

import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WARM_UP_CALLS = 5
TOP = 10

# MatMul, FusedMatMul, MatMulIntegerToFloat, QLinearMatMul, DynamicQuantizeMatMul, MatMulNBits, QGemm, QAttention, ...
PRODUCT = re.compile("MatMul|Gemm|Attention|Einsum")

# These compute nothing, so the profiled time of the fastest of them is the profiler's overhead.
SHAPES_ONLY = frozenset({"Shape", "Squeeze", "Unsqueeze", "Reshape"})

# Patterns in torch's names of modules and weights, which exporters join with dots or slashes.
LAYER = re.compile(r"(?:^|[./])layers?[./](\d+)(?:[./#]|$)")
EMBEDDINGS = re.compile(r"(?:^|[./])(?:embeddings|embeddings_project|relative_attention_bias)(?:[./#]|$)")
HEAD = re.compile(r"(?:^|[./])(?:final_norm|pooler|head|pre_classifier|classifier)(?:[./#]|$)")

# The depth of a node in the model: N in layer N; these two are before and after all layers.
EMBEDDINGS_DEPTH = -1.0
HEAD_DEPTH = math.inf


class Node(NamedTuple):
    """An executed node."""

    name: str
    kind: str
    ms: float  # median over calls, without the profiler's overhead


def operators(
    onnx_file: Path, feeds: Mapping[str, npt.NDArray[np.int64]], threads: int, calls: int = 30
) -> dict[str, Any]:
    """Time of one call on `feeds`, each (batch, tokens), by operator; inputs that the graph does not take are ignored.

    The session has the server's options. A node's time is its median over `calls`; its kind is that after onnxruntime's
    fusions. Its layer is "embeddings", "layer 0", ..., "head", or "other": the mask and the shapes, which all layers share.
    Without the package `onnx`, the layer comes only from the node's name.

    The profiler takes 4 to 6 microseconds a node, which nearly doubled a call of 1 ms (int8 3x384, 16 tokens, 140 nodes).
    Without this overhead the nodes added up to 0.9 to 1.1 times an unprofiled call, or 1.3 times with two threads on busy
    cores. So rely on the shares, and time whole calls without the profiler. BundleError when the graph does not open.
    """
    from latency.candidates.candidate import feeds_of
    from serve.model.session import int32_of, onnxruntime_options, onnxruntime_session

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime_options(threads)
        options.log_severity_level = 3  # it warns that the optimised file is for this machine only
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime_session(onnx_file, options)
        taken = feeds_of(feeds, [node.name for node in session.get_inputs()], int32_of(session))
        for _ in range(WARM_UP_CALLS + calls):
            session.run(None, taken)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        depths = depths_in(Path(options.optimized_model_filepath))
    nodes = executed(events, calls)
    layers = {node.name: layer_name(depths.get(node.name, depth_in_name(node.name))) for node in nodes}
    return summary(nodes, layers, tokens=feeds["input_ids"].shape[1])


def summary(nodes: list[Node], layers: Mapping[str, str], tokens: int) -> dict[str, Any]:
    """`nodes` grouped by layer and kind; `layers` maps a node's name to its layer."""
    total_ms = sum(node.ms for node in nodes)
    if not total_ms:  # no node takes longer than the profiler's overhead
        return {"tokens": tokens, "top": [], "by_kind": {}, "by_layer": {}, "matrix_share": 0.0}
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_kind: dict[str, float] = defaultdict(float)
    by_layer: dict[str, float] = defaultdict(float)
    for node in nodes:
        groups[layers[node.name], node.kind].append(node.ms)
        by_kind[node.kind] += node.ms / total_ms
        by_layer[layers[node.name]] += node.ms / total_ms
    rows: list[dict[str, Any]] = [
        {"layer": layer, "kind": kind, "ms": round(sum(ms), 4), "share": sum(ms) / total_ms, "calls": len(ms)}
        for (layer, kind), ms in groups.items()
    ]
    return {
        "tokens": tokens,
        "top": sorted(rows, key=lambda row: -row["share"])[:TOP],
        "by_kind": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "by_layer": {layer: by_layer[layer] for layer in sorted(by_layer, key=_place)},
        "matrix_share": sum(share for kind, share in by_kind.items() if PRODUCT.search(kind)),
    }


def depth_in_name(name: str) -> float | None:
    """The depth of the module in the name of a node or weight; None without a module."""
    if layer := LAYER.search(name):
        return float(layer[1])
    if EMBEDDINGS.search(name):
        return EMBEDDINGS_DEPTH
    return HEAD_DEPTH if HEAD.search(name) else None


def layer_name(depth: float | None) -> str:
    """The name of a layer by its depth."""
    if depth is None:
        return "other"
    return {EMBEDDINGS_DEPTH: "embeddings", HEAD_DEPTH: "head"}.get(depth) or f"layer {depth:.0f}"


def _place(layer: str) -> tuple[float, str]:
    """A sort key for layer names: in the order of the model, "other" last."""
    kind, _, number = layer.partition(" ")
    places = {"embeddings": EMBEDDINGS_DEPTH, "head": HEAD_DEPTH, "other": HEAD_DEPTH}
    return places[kind] if kind in places else float(number), kind


def executed(events: list[dict[str, Any]], calls: int) -> list[Node]:
    """The nodes in a profile, from its last `calls` calls, without the profiler's overhead at each node."""
    suffix = "_kernel_time"
    kinds: dict[str, str] = {}
    spent_us: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith(suffix):
            name = event["name"].removesuffix(suffix)
            kinds[name] = event["args"]["op_name"]
            spent_us[name].append(event["dur"])
    medians_us = {name: float(np.median(durations_us[-calls:])) for name, durations_us in spent_us.items()}
    profiler_us = min((us for name, us in medians_us.items() if kinds[name] in SHAPES_ONLY), default=0.0)
    return [Node(name, kinds[name], max(0.0, us - profiler_us) / 1000) for name, us in medians_us.items()]


def depths_in(onnx_file: Path) -> dict[str, float | None]:
    """The depth of each node in a graph, by its name; empty without the package `onnx`.

    For some nodes the depth is in their name or in a weight's name. Other nodes, named by fusions and exporters, get the
    depth of their readers: a product whose bias has a name, or a norm whose output is quantised for the next layer. A sum
    gets the depth of its inputs, since only the next layer reads the last sum of a layer.
    """
    try:
        import onnx
    except ImportError:
        return {}
    graph = onnx.load(onnx_file).graph
    weights = {weight.name for weight in graph.initializer}
    depths_named = []
    for node in graph.node:
        names = [node.name, *(name for name in node.input if name in weights)]
        depths_named.append(next((depth for depth in map(depth_in_name, names) if depth is not None), None))
    # Value -> the least depth of its readers; a reader without a depth in its names gets that of its own readers.
    read_at: dict[str, float] = {}
    for node, depth in zip(reversed(graph.node), reversed(depths_named), strict=True):
        found = [read_at[name] for name in node.output if name in read_at] if depth is None else [depth]
        for name in node.input if found else []:
            read_at[name] = min(*found, read_at.get(name, math.inf))
    made_at: dict[str, float] = {}
    depths: dict[str, float | None] = {}
    for node, named in zip(graph.node, depths_named, strict=True):  # in the order of execution
        makers = [made_at[name] for name in node.input if name in made_at]
        readers = [read_at[name] for name in node.output if name in read_at]
        if named is not None:
            depth = named
        elif makers:
            depth = max(makers) if node.op_type == "Add" or not readers else min(readers)
        else:  # from the graph's inputs only: positions for the embeddings, or the mask and the shapes for all layers
            depths[node.name] = EMBEDDINGS_DEPTH if EMBEDDINGS_DEPTH in readers else None
            continue
        depths[node.name] = depth
        made_at.update(dict.fromkeys(node.output, depth))
    return depths
