"""One ONNX graph in its runtime: token ids in, logits out."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.bundle.cpu import available_cores
from serve.bundle.runtimes import CUDA, INSTALL_ONNXRUNTIME_GPU, INSTALL_OPENVINO, Device, Runtime
from serve.errors import BundleError, InternalError

Feeds = Mapping[str, npt.NDArray[np.int64]]

# OpenVINO's float32 kernels add in another order at the end of a row whose length is not a multiple of the vector width. An
# answer would then depend on the padding of its text. The widest vectors hold 16 floats.
WHOLE_VECTOR = 16

CPU = "CPUExecutionProvider"
# TF32 keeps 10 bits of the mantissa, and onnxruntime uses it for float32 unless told otherwise.
CUDA_OPTIONS = {"use_tf32": "0"}

OUTPUT = "logits"
KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


class Row(Protocol):
    """The token ids of one text, with the attributes of a tokenizer's `Encoding`."""

    @property
    def ids(self) -> Sequence[int] | np.ndarray:
        """Token ids."""

    @property
    def attention_mask(self) -> Sequence[int] | np.ndarray:
        """1 for each token."""

    @property
    def type_ids(self) -> Sequence[int] | np.ndarray:
        """0 for each token of the first text of a pair, 1 for the second."""

    def __len__(self) -> int: ...


class Opened(NamedTuple):
    """A graph in its runtime: names of its inputs and outputs, and a function (inputs by name, name of an output) -> that output."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Feeds, str], Any]
    int32: frozenset[str] = frozenset()
    """The inputs of 32 bits, as some exporters write them; the others have 64."""


class Session:
    """An open graph; `run` may be called from several threads.

    `threads` is the number of the runtime's threads for one call; None means one for every core that this process may use.
    `max_length` is the number of positions of the graph, if the caller knows it: texts are not padded beyond it.
    `device` "cuda" is for onnxruntime alone. BundleError when the file does not open, or has other inputs and outputs than a classifier.
    """

    def __init__(
        self,
        onnx_file: Path,
        threads: int | None = None,
        runtime: Runtime = "onnxruntime",
        max_length: int | None = None,
        device: Device = "cpu",
    ) -> None:
        self.threads = threads or available_cores()
        self.runtime = runtime
        self.device = device
        self._max_length = max_length
        graph = open_graph(onnx_file, self.threads, runtime, device)
        self.inputs = graph.inputs
        self._run = graph.run
        if unknown := sorted(set(self.inputs) - KNOWN_INPUTS):
            raise BundleError(
                f"{onnx_file} has inputs other than {', '.join(sorted(KNOWN_INPUTS))}: {', '.join(unknown)}"
            )
        if OUTPUT not in graph.outputs:
            raise BundleError(f"{onnx_file} has the outputs {', '.join(graph.outputs)}; one must be called {OUTPUT}")

    def run(self, encodings: Sequence[Row]) -> list[np.ndarray]:
        """The logits of each text, float32: (tokens, labels) if the model classifies tokens, (labels,) if it classifies texts.

        Texts are padded on the right to the longest of the call, and the results are cut to the lengths of the texts.
        InternalError when the model gives NaN or an infinity.
        """
        if not encodings:
            return []
        length = padded_length(max(map(len, encodings)), self.runtime, self._max_length)
        logits = np.asarray(self._run(padded(encodings, self.inputs, length), OUTPUT), dtype=np.float32)
        rows = [row[: len(encoding)] if row.ndim > 1 else row for row, encoding in zip(logits, encodings, strict=True)]
        if not np.isfinite(logits).all() and not all(np.isfinite(row).all() for row in rows):  # padding may be anything
            raise InternalError("the model gave logits that are not finite numbers")
        return rows


def open_graph(onnx_file: Path, threads: int, runtime: Runtime, device: Device = "cpu") -> Opened:
    """The graph in `onnx_file`, with `threads` threads for one call. BundleError when it does not open."""
    if runtime == "openvino":
        return _in_openvino(onnx_file, threads)
    session = onnxruntime_session(onnx_file, onnxruntime_options(threads), CUDA if device == "cuda" else CPU)
    return Opened(
        tuple(node.name for node in session.get_inputs()),
        tuple(node.name for node in session.get_outputs()),
        lambda feeds, output: session.run([output], feeds)[0],
        int32_of(session),
    )


def int32_of(session: ort.InferenceSession) -> frozenset[str]:
    """The inputs of 32 bits."""
    return frozenset(node.name for node in session.get_inputs() if node.type == "tensor(int32)")


def onnxruntime_options(threads: int) -> ort.SessionOptions:
    """The settings of onnxruntime for serving: `threads` threads for one call, and no spinning."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Idle threads that spin take cores from the tokenizer, the web server and other sessions.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def onnxruntime_session(onnx_file: Path, options: ort.SessionOptions, provider: str = CPU) -> ort.InferenceSession:
    """The graph in `onnx_file`, run by an execution provider of onnxruntime. BundleError when it does not open there."""
    providers: list[tuple[str, dict[str, str]]] = [(CPU, {})]
    if provider != CPU:
        _load_cuda()
        providers.insert(0, (provider, CUDA_OPTIONS if provider == CUDA else {}))
    try:
        # Without enable_fallback=0 a run that fails on the GPU is repeated on the CPU, and so are all runs after it.
        session = ort.InferenceSession(str(onnx_file), options, providers, enable_fallback=0)
    except Exception as error:  # the errors of onnxruntime have no common base class
        raise BundleError(f"{onnx_file} does not open in onnxruntime {ort.__version__}: {error}") from error
    if provider not in session.get_providers():  # a provider whose libraries are missing is left out without an error
        remedy = f" If that names a library: {INSTALL_ONNXRUNTIME_GPU}" if provider == CUDA else ""
        raise BundleError(f"onnxruntime's {provider} did not start; its message is above.{remedy}")
    return session


@cache
def _load_cuda() -> None:
    """Loads the libraries of CUDA and cuDNN from NVIDIA's packages, in which the linker does not look. From onnxruntime 1.21 on."""
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(sys.stderr):  # it prints what it cannot load, and the answers may be on stdout
            ort.preload_dlls(directory="")


def _in_openvino(onnx_file: Path, threads: int) -> Opened:
    try:
        import openvino
    except ImportError:
        raise BundleError(f"{onnx_file} needs OpenVINO, which is not installed: {INSTALL_OPENVINO}") from None
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # several processes would pin their threads to the same core
        # Otherwise OpenVINO computes in bfloat16 on processors that have it, and logits change by 0.1.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    try:
        compiled = openvino_core().compile_model(str(onnx_file), "CPU", settings)
    except Exception as error:  # OpenVINO raises plain RuntimeErrors
        reason = str(error).strip().splitlines()[-1:]
        raise BundleError(
            f"{onnx_file} does not open in OpenVINO {openvino.__version__}: {' '.join(reason)}"
        ) from error
    here = threading.local()  # an infer request holds the tensors of one call, so each thread has its own

    def run(feeds: Feeds, output: str) -> Any:
        if not hasattr(here, "request"):
            here.request = compiled.create_infer_request()
        # Shared, since otherwise every output is copied; the next call writes over them.
        return here.request.infer(dict(feeds), share_outputs=True)[compiled.output(output)].copy()

    return Opened(
        tuple(port.any_name for port in compiled.inputs),
        tuple(name for port in compiled.outputs for name in port.names),
        run,
        frozenset(port.any_name for port in compiled.inputs if port.get_element_type().get_type_name() == "i32"),
    )


def openvino_core() -> Any:
    """OpenVINO's core: one for the whole life of the process. ImportError if OpenVINO is not installed.

    A core that compiles (2026.4) sets the thread's stack for signal handlers, and restores the previous stack when it ends. If
    several cores end in another order, the restored stack no longer exists, and the next Ctrl+C causes a segmentation fault.
    """
    with _making_the_core:  # otherwise two threads that call at the same time would make two cores
        return _openvino_core()


_making_the_core = threading.Lock()


@cache
def _openvino_core() -> Any:
    import openvino

    return openvino.Core()


def padded_length(longest: int, runtime: Runtime, max_length: int | None) -> int:
    """The length to which texts of up to `longest` tokens are padded in `runtime`: at least 1, in OpenVINO a multiple of 16.

    It is at most `max_length`, if that is known. If `max_length` is no multiple of 16, a text of nearly that length is the one
    exception to the rule that an answer has the same bits in every batch.
    """
    longest = max(1, longest)
    multiple = WHOLE_VECTOR if runtime == "openvino" else 1
    rounded = -(-longest // multiple) * multiple
    return rounded if max_length is None else max(longest, min(rounded, max_length))


def padded(encodings: Sequence[Row], inputs: Sequence[str], length: int) -> dict[str, npt.NDArray[np.int64]]:
    """The graph's inputs by name, each (texts, length) int64, with zeros as padding."""
    # The attention mask hides padding, so its id does not matter; 0 is in every vocabulary.
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
