"""Finds weights that an ONNX file takes from other files ("external data"), without the onnx package and without reading weights.

A path to another file may name any file of the machine, whose content would become part of answers. A bundle's graphs hold all
their weights, so such a graph is refused. https://protobuf.dev/programming-guides/encoding/ describes the format that is read here.
"""

from pathlib import Path
from typing import BinaryIO

# Each message of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto that may hold a tensor: its fields in which the way there
# goes on, by number.
HOLDERS = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor: where its values are, and whether they are in the file (0)

VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # wire types; 3 and 4, groups, are in no ONNX file
LEAST_NO_KEY = 1 << 32  # some readers cut a larger key off, and would read another field
MOST_FIELDS = 2_000_000  # the graph of a model of 12 layers has about 20,000


class _Malformed(Exception):
    """The file is no protobuf message, or has more fields than are read."""


def graph_fault(file: Path) -> str | None:
    """What is wrong with an ONNX file: it takes weights from other files, or is no ONNX file. None if neither is so."""
    try:
        with file.open("rb") as source:
            external = _has_external_data(source, file.stat().st_size)
    except _Malformed as fault:
        return f"is not an ONNX file ({fault})"
    return (
        "takes weights from other files (external data), and a bundle's graph must hold its own" if external else None
    )


def _has_external_data(source: BinaryIO, size_bytes: int) -> bool:
    """Whether a tensor of the model in `source` is kept elsewhere."""
    position, opened = 0, [("Model", size_bytes)]  # messages around the position, and where each ends
    for _ in range(MOST_FIELDS):
        while opened and position == opened[-1][1]:
            opened.pop()
        if not opened:
            return False
        message, end = opened[-1]
        key, key_bytes = _varint(source)
        field, wire = key >> 3, key & 7
        value, value_bytes = _varint(source) if wire in (VARINT, LENGTH) else (0, 0)
        position += key_bytes + value_bytes
        skipped = {VARINT: 0, EIGHT_BYTES: 8, LENGTH: value, FOUR_BYTES: 4}.get(wire)
        if key >= LEAST_NO_KEY or skipped is None or position + skipped > end:
            raise _Malformed(f"no field of a message ends at byte {position:,}")
        if message == "Tensor" and (
            (field == EXTERNAL_DATA and wire == LENGTH) or (field == DATA_LOCATION and wire == VARINT and value)
        ):
            return True
        if wire == LENGTH and (inner := HOLDERS[message].get(field)):
            opened.append((inner, position + skipped))
        else:
            source.seek(skipped, 1)
            position += skipped
    raise _Malformed(f"it has more than {MOST_FIELDS:,} fields")


def _varint(source: BinaryIO) -> tuple[int, int]:
    """A number, and the bytes that it takes: seven bits in each, the lowest first, and a high bit where another follows."""
    value = 0
    for place in range(10):
        read = source.read(1)
        if not read:
            raise _Malformed("it ends within a field")
        value |= (read[0] & 0x7F) << 7 * place
        if read[0] < 0x80:
            return value, place + 1
    raise _Malformed("a number of more than ten bytes")
