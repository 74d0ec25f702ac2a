"""Tensors as the Open Inference Protocol sends them: in JSON, or as bytes behind it (Triton's binary tensor data extension).

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

import math
import struct
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from serve.errors import BadInput, BadRequest
from serve.http.v1.requests import decode

Datatype = Literal["BYTES", "INT64", "FP32"]

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

BYTES_LENGTH = struct.Struct("<I")  # stands before each element of a binary BYTES tensor


class InputParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be said of one input. `content_type` is what MLServer's clients add; it changes nothing here."""

    binary_data_size: int | None = None
    content_type: str | None = None


class InputTensor(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One input: its data here, or behind the JSON where `binary_data_size` is said."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw | UnsetType = UNSET


class OutputParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one output is wanted."""

    binary_data: bool | None = None


class RequestedOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One output that is wanted."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The JSON of a request; `parameters` are read by who knows the model."""

    inputs: Annotated[
        list[InputTensor], Meta(description='a list of tensors, each with "name", "shape", "datatype" and "data"')
    ]
    id: Annotated[str | None, Meta(description="a string, given back with the answer")] = None
    parameters: Annotated[dict[str, object], Meta(description="an object of options")] = {}
    outputs: Annotated[list[RequestedOutput], Meta(description='a list of {"name"}; without it all are given')] = []


class Tensor(NamedTuple):
    """Values in row-major order: strings of a BYTES tensor, integers of an INT64 one."""

    shape: tuple[int, ...]
    values: list[str] | list[int]


class OutputTensor(NamedTuple):
    """One output: `data` is a list of each element's bytes of a BYTES tensor, and little-endian floats of an FP32 one."""

    name: str
    datatype: Datatype
    shape: list[int]
    data: list[bytes] | bytes


def read_tensors(
    body: bytes, json_bytes: str | None, kinds: dict[str, Datatype]
) -> tuple[InferRequest, dict[str, Tensor]]:
    """A request and its inputs by name. `json_bytes` is the header that says how long the JSON is, `kinds` what inputs there are.

    BadRequest when the body is not as that header says; BadInput, with the field, when a tensor is not what it says it is.
    """
    length = len(body) if json_bytes is None else _json_length(json_bytes, len(body))
    asked = decode(body[:length], InferRequest)
    behind = memoryview(body)[length:]
    tensors: dict[str, Tensor] = {}
    for index, each in enumerate(asked.inputs):
        field = f"inputs[{index}]"
        if each.name not in kinds:
            raise BadInput(f"{field} is called {each.name!r}; the inputs are {_listed(kinds)}", field=f"{field}.name")
        if each.name in tensors:
            raise BadInput(f"{field} is a second {each.name!r}; send each input once", field=f"{field}.name")
        if each.datatype != kinds[each.name]:
            raise BadInput(
                f"{field} ({each.name}) is of datatype {each.datatype!r}; it must be {kinds[each.name]}",
                field=f"{field}.datatype",
            )
        size = each.parameters.binary_data_size
        if (size is None) == (each.data is UNSET):
            raise BadInput(
                f"{field} ({each.name}) needs its values either as data or, with binary_data_size, behind the JSON",
                field=f"{field}.data",
            )
        if size is None:
            tensors[each.name] = _in_json(each, field)
            continue
        if not 0 <= size <= len(behind):
            raise BadInput(
                f"{field} ({each.name}) is said to have {size} bytes, and {len(behind)} are left behind the JSON; "
                "Inference-Header-Content-Length says where the JSON ends",
                field=f"{field}.parameters.binary_data_size",
            )
        tensors[each.name] = _in_bytes(each, behind[:size], field)
        behind = behind[size:]
    if behind:
        raise BadRequest(f"{len(behind)} bytes behind the JSON belong to no input; give each its binary_data_size")
    return asked, tensors


def written(content: dict[str, object], outputs: list[tuple[OutputTensor, bool]]) -> tuple[bytes, int | None]:
    """The body of an answer with its `outputs`, each as bytes behind the JSON where its flag says so; and the JSON's length, if any is."""
    described: list[dict[str, object]] = []
    behind: list[bytes] = []
    for tensor, as_bytes in outputs:
        one: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if as_bytes:
            packed = _packed(tensor.data) if isinstance(tensor.data, list) else tensor.data
            one["parameters"] = {"binary_data_size": len(packed)}
            behind.append(packed)
        elif isinstance(tensor.data, list):
            one["data"] = [each.decode("utf-8") for each in tensor.data]
        else:
            one["data"] = np.frombuffer(tensor.data, dtype="<f4").tolist()
        described.append(one)
    head = msgspec.json.encode({**content, "outputs": described})
    return b"".join([head, *behind]), len(head) if behind else None


def _json_length(said: str, body_bytes: int) -> int:
    if not (said.isascii() and said.isdigit() and len(said) < 20 and int(said) <= body_bytes):
        raise BadRequest(
            f"Inference-Header-Content-Length is {said[:40]!r}, and the body has {body_bytes} bytes; give the bytes of the JSON"
        )
    return int(said)


def _in_json(tensor: InputTensor, field: str) -> Tensor:
    """The values of a tensor in JSON: one flat list, or lists in a list as its shape says."""
    count = _elements(tensor, field)
    scalar, called = (str, "strings") if tensor.datatype == "BYTES" else (Int64, "INT64")
    assert isinstance(tensor.data, msgspec.Raw)
    try:
        data = msgspec.json.decode(tensor.data, type=list[scalar | list[scalar]])  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"{field} ({tensor.name}): data is no list of {called}, nor a list of such lists ({error})",
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
                f"{field} ({tensor.name}): data has {len(data)} rows of {widths} {called}, its shape is {tensor.shape}; "
                "make them agree, all rows of one length",
                field=f"{field}.data",
            )
        data = [value for row in rows for value in row]
    if len(data) != count:
        raise BadInput(
            f"{field} ({tensor.name}): data has {len(data)} {called}, its shape {tensor.shape} is of {count}; make them agree",
            field=f"{field}.data",
        )
    return Tensor(tuple(tensor.shape), data)  # type: ignore[arg-type]  # scalars by now


def _in_bytes(tensor: InputTensor, data: memoryview, field: str) -> Tensor:
    """The values of a tensor behind the JSON."""
    count = _elements(tensor, field)
    if tensor.datatype == "INT64":
        if len(data) != 8 * count:
            raise BadInput(
                f"{field} ({tensor.name}) has {len(data)} bytes, its shape {tensor.shape} is of {count} INT64 of 8 bytes; "
                "make them agree",
                field=f"{field}.shape",
            )
        return Tensor(tuple(tensor.shape), np.frombuffer(data, dtype="<i8").tolist())
    values = _unpacked(tensor.name, data, field)
    if len(values) != count:
        raise BadInput(
            f"{field} ({tensor.name}) holds {len(values)} strings, its shape {tensor.shape} is of {count}; make them agree",
            field=f"{field}.shape",
        )
    return Tensor(tuple(tensor.shape), values)


def _unpacked(name: str, data: memoryview, field: str) -> list[str]:
    values: list[str] = []
    while data:
        length = BYTES_LENGTH.unpack(data[:4])[0] if len(data) >= BYTES_LENGTH.size else -1
        if not 0 <= length <= len(data) - BYTES_LENGTH.size:
            raise BadInput(
                f"{field} ({name}): string {len(values)} is cut short; write four bytes of length, little-endian, then its UTF-8",
                field=field,
            )
        try:
            values.append(str(data[4 : 4 + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise BadInput(f"{field} ({name}): string {len(values)} is not UTF-8 ({error})", field=field) from error
        data = data[4 + length :]
    return values


def _packed(elements: list[bytes]) -> bytes:
    return b"".join(part for each in elements for part in (BYTES_LENGTH.pack(len(each)), each))


# What shapes may be of; none that is answered comes near.
MOST_SIZES = 8
LARGEST_SIZE = 2**63 - 1


def _elements(tensor: InputTensor, field: str) -> int:
    """How many values the tensor's shape is of."""
    if not 1 <= len(tensor.shape) <= MOST_SIZES or any(not 1 <= size <= LARGEST_SIZE for size in tensor.shape):
        raise BadInput(
            f"{field} ({tensor.name}) has the shape {str(tensor.shape)[:100]}; "
            f"give at least one size and at most {MOST_SIZES}, each 1 or more",
            field=f"{field}.shape",
        )
    return math.prod(tensor.shape)


def _listed(names: dict[str, Datatype]) -> str:
    return ", ".join(map(repr, names))
