"""Ranges of activations over real texts, from which static int8 scales are computed.

Each text runs alone, so no padding is counted. Only extreme values are kept, not the activations.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from export.graph.nodes import copied
from serve.bundle.cpu import available_cores
from serve.errors import BadInput
from serve.model.session import padded

if TYPE_CHECKING:
    from onnx import ModelProto
    from tokenizers import Encoding

# The share of an activation's values that a clipped range leaves out at each end.
CLIPPED = 1e-4


class ChannelRange(NamedTuple):
    """The least and the largest value of each channel of an activation, float32 (channels,)."""

    low: np.ndarray
    high: np.ndarray


class TensorRange(NamedTuple):
    """The least and the largest value of an activation, and both without the share `CLIPPED` of its values at each end."""

    low: float
    high: float
    clipped_low: float
    clipped_high: float


def with_long_texts(calibration: "Sequence[Encoding]", max_length: int) -> "list[Encoding]":
    """`calibration`, and its texts joined to `max_length` tokens, a half, a quarter ... down to 32; two of each length.

    Texts of a task are often short, and ranges from short texts alone leave out later positions. Eight joined texts reduced
    the 99.9th percentile of a 6x384 tagger's difference from float32 from 1.55 to 1.03 on joined texts; short
    texts lost nothing.
    """
    from tokenizers import Encoding

    speaking = [encoding for encoding in calibration if len(encoding)]
    made, length = list(calibration), max_length
    while speaking and length >= 32:
        for start in (0, len(speaking) // 2):
            parts: list[Encoding] = []
            tokens = 0
            while tokens < length:
                parts.append(speaking[(start + len(parts)) % len(speaking)])
                tokens += len(parts[-1])
            long = Encoding.merge(parts)
            long.truncate(length)
            made.append(long)
        length //= 2
    return made


def channel_ranges(
    model: "ModelProto", names: Sequence[str], calibration: "Sequence[Encoding]", threads: int | None = None
) -> dict[str, ChannelRange]:
    """The range of every channel of the activations `names` over all tokens of `calibration`.

    BadInput when the texts have no tokens.
    """
    ranges: dict[str, ChannelRange] = {}
    for values in _activations(model, names, calibration, threads):
        for name, rows in values.items():
            low, high = rows.min(axis=0), rows.max(axis=0)
            if name in ranges:
                low, high = np.minimum(low, ranges[name].low), np.maximum(high, ranges[name].high)
            ranges[name] = ChannelRange(low, high)
    return ranges


def tensor_ranges(
    model: "ModelProto", names: Sequence[str], calibration: "Sequence[Encoding]", threads: int | None = None
) -> dict[str, TensorRange]:
    """The range of the activations `names` over all tokens of `calibration`, whole and clipped. BadInput without tokens."""
    tokens = sum(len(encoding) for encoding in calibration)
    outermost: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # the smallest and the largest values seen so far
    for values in _activations(model, names, calibration, threads):
        for name, rows in values.items():
            kept = int(tokens * rows.shape[1] * CLIPPED) + 1
            flat = rows.ravel()
            least, most = outermost.get(name, (flat[:0], flat[:0]))
            outermost[name] = (
                _smallest(np.concatenate([least, flat]), kept),
                -_smallest(-np.concatenate([most, flat]), kept),
            )
    return {
        name: TensorRange(float(least.min()), float(most.max()), float(least.max()), float(most.min()))
        for name, (least, most) in outermost.items()
    }


def _smallest(values: np.ndarray, count: int) -> np.ndarray:
    return values if len(values) <= count else np.partition(values, count - 1)[:count]


def _activations(
    model: "ModelProto", names: Sequence[str], calibration: "Sequence[Encoding]", threads: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """The activations `names` of each text, each (tokens, channels)."""
    import onnx
    import onnxruntime as ort

    wanted = list(dict.fromkeys(names))
    if not any(len(encoding) for encoding in calibration):
        raise BadInput("the calibration texts have no tokens; give texts like those that will be served")
    if not wanted:
        return
    watched = copied(model)
    del watched.graph.output[:]  # one of them may be wanted
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    options = ort.SessionOptions()
    options.log_severity_level = 3  # suppresses the warning that the added outputs have no declared shape
    options.intra_op_num_threads = threads or available_cores()
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = [node.name for node in session.get_inputs()]
    for encoding in calibration:
        if not len(encoding):
            continue
        feed = padded([encoding], inputs, len(encoding))  # (1, tokens)
        yield {
            name: value.reshape(-1, value.shape[-1])
            for name, value in zip(wanted, session.run(wanted, feed), strict=True)
        }
