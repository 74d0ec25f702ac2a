"""The roofline: a machine's peaks, and the operations and bytes of one call of a model.

    python -m latency.analysis.roofline THREADS SECONDS
        -> the peaks as one line of JSON, the last on stdout

A call can be no faster than its operations at the peak of products, nor than its bytes at the peak bandwidth
(Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009; the bandwidth as in McCalpin's STREAM, 1995).
"""

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from latency.measure.interleave import timing_environment
from latency.measure.machine import free_memory_bytes, last_level_cache_bytes
from latency.measure.worker import THREAD_VARIABLES
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput, BundleError, InternalError
from serve.model.session import open_graph

START_TIMEOUT_S = 120.0  # to import the runtimes and fill the arrays
LEAST_CALLS = 3
# Such a call is made once: a processor without instructions for bfloat16 takes seconds for one product.
SLOW_CALL_S = 1.0

# The supported families: those of compress.models.families, a module that would import torch.
KINDS = ("bert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta")
DISTILBERT_NAMES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"}


def measured_peaks(threads: int, seconds: float = 6.0) -> dict[str, Any]:
    """The peaks of this machine: products of large matrices and copies of large arrays with `threads` threads.

    A separate process makes calls for about `seconds`. The best call counts, so other work on the machine has little effect
    unless a core is never free. Products run in every installed runtime: torch and onnxruntime (numpy without torch) in
    float32, torch in bfloat16, onnxruntime and OpenVINO in 8 bits. A precision that no installed runtime computes is absent,
    and so is the bandwidth without memory for arrays larger than the cache. Raises BadInput when `threads` is below 1 or
    `seconds` is not above 0, InternalError when the process fails.
    """
    if threads < 1 or not seconds > 0:
        raise BadInput(f"{threads} threads and {seconds:g} seconds were given; give at least 1 thread and some time")
    environment = timing_environment() | dict.fromkeys(THREAD_VARIABLES, str(threads))
    command = [sys.executable, "-P", "-m", "latency.analysis.roofline", str(threads), str(seconds)]
    lifeline, ours = os.pipe()  # it ends when this process does, and with it the one that is started
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=lifeline,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=START_TIMEOUT_S + 10 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InternalError(
            f"measuring this machine's peaks took over {error.timeout:.0f} s and was stopped"
        ) from error
    finally:
        os.close(lifeline)
        os.close(ours)
    if ended.returncode != 0 or not ended.stdout.strip():
        last_words = "\n".join(ended.stderr.strip().splitlines()[-12:]) or "(nothing)"
        raise InternalError(
            f"the process that measures peaks ended with status {ended.returncode}. Its last output:\n{last_words}"
        )
    # Native libraries may print to stdout too, but the JSON is the last line.
    peaks: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return peaks


def flops_per_text(config: Mapping[str, object], tokens: int, *, labels: int) -> float:
    """Operations on one text of `tokens` tokens by the model of a `config.json`; a multiply and its add count as 2.

    It counts products of matrices: projections, attention's scores and mixing (over all pairs of tokens, since a window is
    only a mask), the feed-forward, and the head in `architectures`, with `labels` outputs. It leaves out lookups, norms,
    softmax, activations (together about 1 %) and rotary angles. Raises BadInput for an unknown model family, or a size
    that the configuration lacks.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise BadInput(f"the operations of a {kind!r} model are not known, only those of {', '.join(KINDS)}")
    width = _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    # ModernBERT's feed-forward has a third matrix, whose output gates that of the first (GeGLU).
    feed_forward = (3 if kind == "modernbert" else 2) * width * _size(config, "intermediate_size")
    weights = layers * (4 * width * width + feed_forward)
    if kind == "electra" and (narrow := _size(config, "embedding_size")) != width:
        weights += narrow * width  # from the embeddings to the layers
    flops = 2 * tokens * weights + layers * 4 * tokens * tokens * width
    architecture = str(config.get("architectures"))
    if "ForTokenClassification" in architecture:
        flops += 2 * tokens * width * (labels + (width if kind == "modernbert" else 0))
    elif "ForQuestionAnswering" in architecture:
        flops += 2 * tokens * width * 2  # a start and an end
    elif "ForSequenceClassification" in architecture:
        flops += 2 * width * (width + labels)  # for one token: a dense layer and the classifier
    return float(flops)


def _size(config: Mapping[str, object], name: str) -> int:
    """A size by BERT's name for it; DistilBERT has its own names."""
    own_name = DISTILBERT_NAMES.get(name, name) if config["model_type"] == "distilbert" else name
    size = config.get(own_name)
    if not isinstance(size, int):
        raise BadInput(f"config.json has no whole number under {own_name}; save the model again with save_pretrained")
    return size


class Weight(NamedTuple):
    """One constant of a model, from its file's header."""

    shape: tuple[int, ...]
    size_bytes: int
    trained: bool  # a real or quantised weight, not an index or a shape
    looked_up: bool  # an embedding table: a call reads one row for each token


def parameters(path: Path) -> int | None:
    """The number of parameters of the checkpoint folder or the ONNX file `path`, from its headers.

    Scales and zero points of a quantised file count too; they are less than 1 %. None for a checkpoint without safetensors,
    and for an ONNX file if the package `onnx` is not installed. Raises BadInput when `path` does not exist.
    """
    weights = _weights(path)
    return None if weights is None else sum(math.prod(weight.shape) for weight in weights if weight.trained)


def weights_read_bytes(path: Path, tokens: int) -> int | None:
    """The least bytes that one call on `tokens` tokens reads: every weight once, and one row a token of embedding tables.

    Sizes are those in the file; None where `parameters` gives None. Activations are left out, and so is a change of width
    at run time (torch in another precision than the checkpoint's). Weights that fit into a cache are not read from memory,
    so the result for a small model can exceed the memory's bandwidth.
    """
    weights = _weights(path)
    if weights is None:
        return None
    return sum(
        weight.size_bytes * min(tokens, weight.shape[0]) // weight.shape[0] if weight.looked_up else weight.size_bytes
        for weight in weights
    )


def _weights(path: Path) -> list[Weight] | None:
    weights = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else []:
        # 8 bytes of length, then the header: https://huggingface.co/docs/safetensors/index#format
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                shape = tuple(tensor["shape"])
                # word_embeddings, position_embeddings, token_type_embeddings, tok_embeddings
                table = name.endswith("_embeddings.weight") and len(shape) == 2
                trained = tensor["dtype"] not in ("I16", "I32", "I64", "BOOL")
                weights.append(Weight(shape, end - begin, trained, table))
    if path.is_dir():
        return weights or None
    if not path.is_file():
        raise BadInput(f"{path} does not exist; give a checkpoint folder or an ONNX file")
    try:
        import onnx
    except ImportError:
        return None
    graph = onnx.load(path, load_external_data=False).graph
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    indices = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
    for tensor in graph.initializer:
        shape = tuple(tensor.dims)
        size_bytes = math.prod(shape) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        table = tensor.name in tables and len(shape) == 2
        weights.append(Weight(shape, size_bytes, tensor.data_type not in indices, table))
    return weights


# The rest runs in a separate process. Each runtime is loaded, timed and dropped in turn, since idle threads of another spin.

Products = Iterator[Callable[[], object]]


def _peaks(threads: int, seconds: float) -> dict[str, Any]:
    # A product of 1,024 x 1,024 keeps two cores busy for milliseconds and fits into their caches; many cores need a larger one.
    side = 1024 if threads <= 4 else 2048
    gflop = 2 * side**3 / 1e9
    slice_s = seconds / 8  # an equal share for each of up to 8 calls
    found = {
        "fp32_gflop_per_s": [_rate(call, gflop, slice_s) for call in _float32_products(side, threads)],
        "bf16_gflop_per_s": [_rate(call, gflop, slice_s) for call in _bfloat16_products(side, threads)],
        "int8_gflop_per_s": [_rate(call, gflop, slice_s) for call in _int8_products(side, threads)],
        "bandwidth_gb_per_s": [_rate(call, gigabytes, slice_s) for call, gigabytes in _streams(threads)],
    }
    return {"threads": threads} | {name: round(max(rates), 1) for name, rates in found.items() if rates}


def _rate(call: Callable[[], object], work: float, seconds: float) -> float:
    """`work` per second of the fastest call within `seconds`."""
    first_s = time.perf_counter()
    call()
    first_s = time.perf_counter() - first_s
    if first_s > SLOW_CALL_S:
        return work / first_s
    best_s, calls, end_s = math.inf, 0, time.perf_counter() + seconds
    while calls < LEAST_CALLS or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - start_s)
        calls += 1
    return work / best_s


def _float32_products(side: int, threads: int) -> Products:
    matrix = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    try:
        import torch
    except ImportError:
        out = np.empty_like(matrix)
        yield lambda: np.matmul(matrix, matrix, out=out)
    else:
        torch.set_num_threads(threads)
        tensor = torch.from_numpy(matrix)
        yield lambda: torch.mm(tensor, tensor)
    yield from _graph_products("MatMul", matrix, matrix, threads, "onnxruntime")


def _bfloat16_products(side: int, threads: int) -> Products:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(threads)
    tensor = torch.randn(side, side, dtype=torch.bfloat16)
    yield lambda: torch.mm(tensor, tensor)


def _int8_products(side: int, threads: int) -> Products:
    rng = np.random.default_rng(0)
    activations = rng.integers(0, 255, (side, side), dtype=np.uint8)
    weights = rng.integers(-127, 127, (side, side), dtype=np.int8)
    yield from _graph_products("MatMulInteger", activations, weights, threads, "onnxruntime")
    yield from _graph_products("QLinearMatMul", activations, weights, threads, "onnxruntime")
    yield from _graph_products("QLinearMatMul", activations, weights, threads, "openvino")


def _graph_products(
    kind: str, activations: npt.NDArray[Any], weights: npt.NDArray[Any], threads: int, runtime: Runtime
) -> Products:
    """Yields the product as a graph of one node; nothing if `onnx` or the runtime is missing or cannot run it."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return
    scales = {"scale": np.float32(0.1), "low": np.uint8(0), "middle": np.int8(0)}
    inputs = ["x", "scale", "low", "w", "scale", "middle", "scale", "low"] if kind == "QLinearMatMul" else ["x", "w"]
    constants = {"w": weights, **(scales if kind == "QLinearMatMul" else {})}
    output = TensorProto.INT32 if kind == "MatMulInteger" else helper.np_dtype_to_tensor_dtype(activations.dtype)
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, ["y"])],
        "product",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(activations.dtype), activations.shape)],
        [helper.make_tensor_value_info("y", output, activations.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "product.onnx"
        # The oldest supported onnxruntime reads this opset and IR version.
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
        try:
            run = open_graph(file, threads, runtime).run
        except BundleError:
            return
        yield lambda: run({"x": activations}, "y")


def _streams(threads: int) -> Iterator[tuple[Callable[[], object], float]]:
    """Calls that stream large arrays, with the gigabytes that each reads and writes; none without enough memory."""
    cache_bytes = last_level_cache_bytes() or 32 * 2**20
    free_bytes = free_memory_bytes()
    array_bytes = max(2 * cache_bytes, 64 * 2**20)  # two arrays: at least four times the cache
    if free_bytes is not None:
        array_bytes = min(array_bytes, free_bytes // 8)
    if array_bytes < cache_bytes:
        return
    length = array_bytes // 8 // threads
    with ThreadPoolExecutor(threads) as pool:  # numpy releases the GIL while it copies
        # A thread of the pool touches each part first, so that its memory is near to a core in use.
        parts = list(pool.map(lambda _: (np.ones(length), np.ones(length)), range(threads)))
        gigabytes = 8 * length * threads / 1e9  # of one array
        # Reads one array and writes the other. As in STREAM, the read of a cache line before it is overwritten does not
        # count.
        yield lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)), 2 * gigabytes
        # Reads both and writes one.
        yield lambda: list(pool.map(lambda part: np.add(part[0], part[1], out=part[1]), parts)), 3 * gigabytes


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.write(json.dumps(_peaks(int(sys.argv[1]), float(sys.argv[2]))) + "\n")
