"""One ONNX graph in the runtime that a bundle names: token ids in, logits out."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.bundle.cpu_quota import available_cores
from serve.bundle.runtimes import INSTALL_OPENVINO, Runtime
from serve.errors import BundleError, InternalError

Feeds = Mapping[str, npt.NDArray[np.int64]]

# OpenVINO's float32 kernels end a row that is no whole number of vectors in another order of additions, so that an answer
# would depend on how far its text was padded. 16 floats fill the widest vector there is.
WHOLE_VECTOR = 16

OUTPUT = "logits"
KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


class Row(Protocol):
    """The token ids of one text, as a tokenizer's `Encoding` has them."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""

    @property
    def attention_mask(self) -> list[int]:
        """1 at each."""

    @property
    def type_ids(self) -> list[int]:
        """Which of a pair each belongs to."""

    def __len__(self) -> int: ...


class Opened(NamedTuple):
    """A graph in its runtime: its inputs, its outputs, and the function from feeds and an output's name to that output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Feeds, str], Any]


class Session:
    """An open graph; `run` may be called from several threads.

    `threads` is the number of the runtime's own threads for one call; None takes every core that this process may use.
    `max_length` is the most tokens that the graph has positions for, where the caller knows: padding stops there.
    BundleError when the file does not open, or its inputs and outputs are not those of a classifier.
    """

    def __init__(
        self,
        onnx_file: Path,
        threads: int | None = None,
        runtime: Runtime = "onnxruntime",
        max_length: int | None = None,
    ) -> None:
        self.threads = threads or available_cores()
        self.runtime = runtime
        self._max_length = max_length
        graph = open_graph(onnx_file, self.threads, runtime)
        self.inputs = graph.inputs
        self._run = graph.run
        if unknown := set(self.inputs) - KNOWN_INPUTS:
            raise BundleError(f"{onnx_file} wants the inputs {sorted(unknown)}; known are {sorted(KNOWN_INPUTS)}")
        if OUTPUT not in graph.outputs:
            raise BundleError(f"{onnx_file} has the outputs {list(graph.outputs)}; one must be called {OUTPUT}")

    def run(self, encodings: Sequence[Row]) -> list[np.ndarray]:
        """The logits of each text, float32: (tokens, labels) when tokens are classified, (labels,) when texts are.

        Texts are padded on the right to the longest of the call, and the padding is cut off again.
        InternalError when the model gives NaN or an infinity.
        """
        if not encodings:
            return []
        length = padded_length(max(map(len, encodings)), self.runtime, self._max_length)
        logits = np.asarray(self._run(padded(encodings, self.inputs, length), OUTPUT), dtype=np.float32)
        rows = [row[: len(encoding)] if row.ndim > 1 else row for row, encoding in zip(logits, encodings, strict=True)]
        if not all(np.isfinite(row).all() for row in rows):
            raise InternalError("the model gave logits that are not finite numbers")
        return rows


def open_graph(onnx_file: Path, threads: int, runtime: Runtime) -> Opened:
    """The graph in `onnx_file` with `threads` threads a call. BundleError when it does not open."""
    return (_in_openvino if runtime == "openvino" else _in_onnxruntime)(onnx_file, threads)


def _in_onnxruntime(onnx_file: Path, threads: int) -> Opened:
    session = onnxruntime_session(onnx_file, onnxruntime_options(threads))
    return Opened(
        tuple(node.name for node in session.get_inputs()),
        tuple(node.name for node in session.get_outputs()),
        lambda feeds, output: session.run([output], feeds)[0],
    )


def onnxruntime_options(threads: int) -> ort.SessionOptions:
    """How onnxruntime is set where models are served: `threads` threads a call, and none that spins."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Idle threads that spin take the core from the tokeniser, the web server and other sessions.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def onnxruntime_session(onnx_file: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """The graph in `onnx_file` on the processor. BundleError when it does not open."""
    try:
        return ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class of their own
        raise BundleError(f"{onnx_file} does not open in onnxruntime {ort.__version__}: {error}") from error


def _in_openvino(onnx_file: Path, threads: int) -> Opened:
    try:
        import openvino
    except ImportError:
        raise BundleError(f"{onnx_file} is to run in OpenVINO, which is not installed: {INSTALL_OPENVINO}") from None
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # several processes would pin themselves to the same core
        # It would compute in bfloat16 where the processor has it, and logits would move by 0.1.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    try:
        compiled = openvino_core().compile_model(str(onnx_file), "CPU", settings)
    except Exception as error:  # its errors are plain RuntimeErrors
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(
            f"{onnx_file} does not open in OpenVINO {openvino.__version__}: {' '.join(reason)}"
        ) from error
    here = threading.local()  # a request holds the tensors of one call

    def run(feeds: Feeds, output: str) -> Any:
        if not hasattr(here, "request"):
            here.request = compiled.create_infer_request()
        return here.request.infer(dict(feeds))[compiled.output(output)]

    return Opened(
        tuple(port.any_name for port in compiled.inputs), tuple(port.any_name for port in compiled.outputs), run
    )


def openvino_core() -> Any:
    """OpenVINO's core, one for the process and for good. ImportError where it is not installed.

    Each core that compiles (2026.4) gives the thread a stack for its signal handlers and, when it ends, back the one that it found. Where
    several end in another order, that one is gone, and the next Ctrl+C is a segmentation fault.
    """
    with _making_the_core:  # or two threads that come first would have one each
        return _openvino_core()


_making_the_core = threading.Lock()


@cache
def _openvino_core() -> Any:
    import openvino

    return openvino.Core()


def padded_length(longest: int, runtime: Runtime, max_length: int | None) -> int:
    """What texts of up to `longest` tokens are padded to in `runtime`: at least one token, and in OpenVINO whole vectors.

    It never goes beyond `max_length`, which may be unknown.
    Texts of nearly `max_length` tokens, where that is no multiple, are the exception to equal bits in any company.
    """
    longest = max(1, longest)
    multiple = WHOLE_VECTOR if runtime == "openvino" else 1
    rounded = -(-longest // multiple) * multiple
    return rounded if max_length is None else max(longest, min(rounded, max_length))


def padded(encodings: Sequence[Row], inputs: Sequence[str], length: int) -> dict[str, npt.NDArray[np.int64]]:
    """The graph's inputs by name, each (texts, length) int64, zero where there is padding."""
    # Padding is masked out, so its id does not matter; 0 is in every vocabulary.
    columns = {
        "input_ids": [encoding.ids for encoding in encodings],
        "attention_mask": [encoding.attention_mask for encoding in encodings],
        "token_type_ids": [encoding.type_ids for encoding in encodings],
    }
    feeds = {}
    for name in inputs:
        feeds[name] = np.zeros((len(encodings), length), dtype=np.int64)
        for row, values in zip(feeds[name], columns[name], strict=True):
            row[: len(values)] = values
    return feeds
