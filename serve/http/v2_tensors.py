"""Tensors of the Open Inference Protocol: in the JSON, or as bytes after it (Triton's binary tensor data extension).

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

import math
import struct
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from serve.errors import BadInput, BadRequest
from serve.http.request_bodies import decode, decode_json

Datatype = Literal["BYTES", "INT64", "FP32"]

NULL = msgspec.Raw(b"null")
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

BYTES_LENGTH = struct.Struct("<I")  # before each element of a binary BYTES tensor: its length in bytes
# Limits of shapes. No valid request comes near them.
MOST_SIZES = 8
LARGEST_SIZE = 2**63 - 1

# Parameters that MLServer's clients send with requests, inputs and outputs. They are ignored.
IGNORED = ("content_type", "headers")


class _Ignored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    content_type: str | None = None
    headers: dict[str, object] | None = None


class InputParameters(_Ignored, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of one input."""

    binary_data_size: int | None = None


class InputTensor(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One input, with its data, or with `binary_data_size` if the data follows the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters | None = None
    data: msgspec.Raw = NULL


class OutputParameters(_Ignored, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of one requested output."""

    binary_data: bool | None = None


class RequestedOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One requested output."""

    name: str
    parameters: OutputParameters | None = None


class InferRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The JSON of a request. The route checks `parameters`, since they depend on the model."""

    inputs: Annotated[
        list[InputTensor], Meta(description='a list of tensors, each with "name", "shape", "datatype" and "data"')
    ]
    model_name: Annotated[str | None, Meta(description="the model's name, as in the path")] = None
    id: Annotated[str | None, Meta(description="a string, which the answer repeats")] = None
    parameters: Annotated[dict[str, object] | None, Meta(description="an object of options")] = None
    outputs: Annotated[list[RequestedOutput] | None, Meta(description='a list of {"name"}; default: all outputs')] = (
        None
    )


class Tensor(NamedTuple):
    """Values in row-major order: strings of a BYTES tensor, or integers of an INT64 tensor."""

    shape: tuple[int, ...]
    values: list[str] | list[int]


class OutputTensor(NamedTuple):
    """One output. `data` is a list of the elements of a BYTES tensor, or the little-endian floats of an FP32 tensor."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: list[bytes] | bytes


def read_tensors(
    body: bytes, json_bytes: str | None, kinds: dict[str, Datatype]
) -> tuple[InferRequest, dict[str, Tensor]]:
    """A request and its inputs by name. `json_bytes` is the header with the length of the JSON, `kinds` the datatype of each input.

    BadRequest if the body does not match that header; BadInput, with the field, for unknown tensors and wrong data.
    """
    said = str(len(body)) if json_bytes is None else json_bytes
    if not (said.isascii() and said.isdigit() and len(said) < 20 and int(said) <= len(body)):
        raise BadRequest(
            f"Inference-Header-Content-Length is {said[:40]!r}, and the body has {len(body):,} bytes; give the length of the JSON in bytes"
        )
    length = int(said)
    asked = decode(body[:length], InferRequest)
    behind = memoryview(body)[length:]
    tensors: dict[str, Tensor] = {}
    for index, each in enumerate(asked.inputs):
        field = f"inputs[{index}]"
        if each.name not in kinds:
            raise BadInput(
                f"{field} is {each.name!r}; the inputs are {', '.join(map(repr, kinds))}", field=f"{field}.name"
            )
        if each.name in tensors:
            raise BadInput(f"{field} is a second {each.name!r}; send each input once", field=f"{field}.name")
        if each.datatype != kinds[each.name]:
            raise BadInput(
                f"{field} ({each.name}) has the datatype {each.datatype!r}; it must be {kinds[each.name]}",
                field=f"{field}.datatype",
            )
        size = each.parameters.binary_data_size if each.parameters else None
        if (size is None) == (bytes(each.data) == b"null"):
            raise BadInput(
                f"{field} ({each.name}) must have its values either in data or, with binary_data_size, after the JSON",
                field=f"{field}.data",
            )
        if size is None:
            tensors[each.name] = _in_json(each, field)
            continue
        if not 0 <= size <= len(behind):
            raise BadInput(
                f"{field} ({each.name}) has binary_data_size {size:,}, and {len(behind):,} bytes are left after the JSON; "
                "check it, and that Inference-Header-Content-Length is the length of the JSON",
                field=f"{field}.parameters.binary_data_size",
            )
        tensors[each.name] = _in_bytes(each, behind[:size], field)
        behind = behind[size:]
    if behind:
        raise BadRequest(f"bytes that belong to no input: {len(behind):,}; give each input its binary_data_size")
    return asked, tensors


def written(content: dict[str, object], outputs: list[tuple[OutputTensor, bool]]) -> tuple[bytes, int | None]:
    """The body of an answer with `outputs`, each as bytes after the JSON if its flag is true; and the JSON's length, if one is."""
    described: list[dict[str, object]] = []
    behind: list[bytes] = []
    for tensor, as_bytes in outputs:
        one: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if as_bytes:
            packed = tensor.data
            if isinstance(packed, list):
                packed = b"".join(part for each in packed for part in (BYTES_LENGTH.pack(len(each)), each))
            one["parameters"] = {"binary_data_size": len(packed)}
            behind.append(packed)
        elif isinstance(tensor.data, list):
            one["data"] = [each.decode("utf-8") for each in tensor.data]
        else:
            one["data"] = np.frombuffer(tensor.data, dtype="<f4").tolist()
        described.append(one)
    head = msgspec.json.encode({**content, "outputs": described})
    return b"".join([head, *behind]), len(head) if behind else None


def _in_json(tensor: InputTensor, field: str) -> Tensor:
    """The values of a tensor in JSON: a flat list, or a list of rows that match its shape."""
    count = _elements(tensor, field)
    scalar, called = (str, "strings") if tensor.datatype == "BYTES" else (Int64, "INT64")
    try:
        data = decode_json(bytes(tensor.data), list[scalar | list[scalar]])  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"{field} ({tensor.name}): data must be a list of {called}, or a list of such lists ({error})",
            field=f"{field}.data",
        ) from error
    rows = [row for row in data if isinstance(row, list)]
    if rows:
        if (
            len(tensor.shape) != 2
            or [len(row) for row in rows] != [tensor.shape[1]] * len(data)
            or len(data) != tensor.shape[0]
        ):
            widths = ", ".join(map(str, sorted({len(row) for row in rows})))
            raise BadInput(
                f"{field} ({tensor.name}): data is {len(data):,} x {widths} {called}, and the shape is {tensor.shape}; "
                "make them equal, with all rows of one length",
                field=f"{field}.data",
            )
        data = [value for row in rows for value in row]
    if len(data) != count:
        raise BadInput(
            f"{field} ({tensor.name}): the shape {tensor.shape} needs {count:,} {called}, and data has {len(data):,}; make them equal",
            field=f"{field}.data",
        )
    return Tensor(tuple(tensor.shape), data)  # type: ignore[arg-type]  # scalars by now


def _in_bytes(tensor: InputTensor, data: memoryview, field: str) -> Tensor:
    """The values of a tensor after the JSON."""
    count = _elements(tensor, field)
    if tensor.datatype == "INT64":
        if len(data) != 8 * count:
            raise BadInput(
                f"{field} ({tensor.name}): the shape {tensor.shape} needs {8 * count:,} bytes, 8 for each INT64, and "
                f"binary_data_size is {len(data):,}; make them equal",
                field=f"{field}.shape",
            )
        return Tensor(tuple(tensor.shape), np.frombuffer(data, dtype="<i8").tolist())
    values = _unpacked(tensor.name, data, field)
    if len(values) != count:
        raise BadInput(
            f"{field} ({tensor.name}): the shape {tensor.shape} needs {count:,} strings, and the data has {len(values):,}; make them equal",
            field=f"{field}.shape",
        )
    return Tensor(tuple(tensor.shape), values)


def _unpacked(name: str, data: memoryview, field: str) -> list[str]:
    values: list[str] = []
    while data:
        length = BYTES_LENGTH.unpack(data[:4])[0] if len(data) >= BYTES_LENGTH.size else -1
        if not 0 <= length <= len(data) - BYTES_LENGTH.size:
            raise BadInput(
                f"{field} ({name}): string {len(values)} is cut short; send four bytes of length, little-endian, then its UTF-8",
                field=field,
            )
        try:
            values.append(str(data[4 : 4 + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise BadInput(f"{field} ({name}): string {len(values)} is not UTF-8 ({error})", field=field) from error
        data = data[4 + length :]
    return values


def _elements(tensor: InputTensor, field: str) -> int:
    """The number of values in the tensor's shape."""
    if not 1 <= len(tensor.shape) <= MOST_SIZES or any(not 1 <= size <= LARGEST_SIZE for size in tensor.shape):
        raise BadInput(
            f"{field} ({tensor.name}) has the shape {str(tensor.shape)[:100]}; "
            f"give 1 to {MOST_SIZES} sizes, each 1 or more",
            field=f"{field}.shape",
        )
    return math.prod(tensor.shape)
