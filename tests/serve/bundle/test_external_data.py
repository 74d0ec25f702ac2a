import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from lookup_bundles import write_manifest
from onnx import TensorProto, helper

from serve.bundle import external_data
from serve.errors import BundleError
from serve.tasks import open_bundle


def elsewhere() -> TensorProto:
    """A tensor whose values are the bytes of another file."""
    tensor = TensorProto(name="elsewhere", data_type=TensorProto.UINT8, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../secret")
    return tensor


def placed(model: onnx.ModelProto, place: str) -> None:
    """Puts the tensor into the model, at each place where ONNX has tensors."""
    graph, tensor = model.graph, elsewhere()
    sparse = onnx.SparseTensorProto(values=tensor, dims=[4])
    subgraph = helper.make_graph([], "subgraph", [], [], [tensor])
    node = helper.make_node("Constant", [], ["made"], value=tensor)
    if place == "initializer":
        graph.initializer.append(tensor)
    elif place == "location alone":
        del tensor.external_data[:]
        graph.initializer.append(tensor)
    elif place == "entries alone":
        tensor.ClearField("data_location")
        graph.initializer.append(tensor)
    elif place == "sparse initializer":
        graph.sparse_initializer.append(sparse)
    elif place == "constant":
        graph.node.append(node)
    elif place == "lists of an attribute":
        graph.node[0].attribute.append(onnx.AttributeProto(name="mine", tensors=[TensorProto(), tensor]))
    elif place == "sparse constant":
        graph.node.append(onnx.NodeProto(attribute=[onnx.AttributeProto(name="mine", sparse_tensor=sparse)]))
    elif place == "subgraphs in subgraphs":
        for _ in range(30):
            subgraph = helper.make_graph([helper.make_node("If", ["a"], ["b"], then_branch=subgraph)], "outer", [], [])
        graph.node.append(subgraph.node[0])
    elif place == "function":
        function = helper.make_function("mine", "call", [], ["made"], [node], [helper.make_opsetid("", 18)])
        model.functions.append(function)
    else:
        model.training_info.append(onnx.TrainingInfoProto(algorithm=subgraph))


PLACES = (
    "initializer", "location alone", "entries alone", "sparse initializer", "constant", "lists of an attribute", "sparse constant",
    "subgraphs in subgraphs", "function", "training",
)  # fmt: skip


@pytest.fixture
def bundle_of(bundle_copy: Path) -> Callable[[bytes], Path]:
    """Makes a bundle with that graph, and a true manifest."""

    def make(graph: bytes) -> Path:
        (bundle_copy / "onnx" / "model.onnx").write_bytes(graph)
        write_manifest(bundle_copy)
        return bundle_copy

    return make


@pytest.mark.parametrize("place", PLACES)
def test_a_graph_that_takes_weights_from_other_files_is_refused_wherever_it_names_them(
    entities_bundle: Path, bundle_of: Callable[[bytes], Path], place: str
) -> None:
    model = onnx.load(entities_bundle / "onnx" / "model.onnx")
    placed(model, place)
    with pytest.raises(BundleError, match=r"onnx/model\.onnx takes weights from other files"):
        open_bundle(bundle_of(model.SerializeToString()))


@pytest.mark.parametrize(
    "graph",
    [
        b"not a graph",
        b"<net name='another format'/>",
        b"\x3a",  # a field without its length
        b"\x3a\x05\x0a",  # one that ends after the file
        b"\x3a\x02\x0a\x7f",  # one that ends after its message
        b"\xff" * 20,
        b"\x3a\x0a\x2a\x08\xf0\x80\x80\x80\x10\x01\x2a\x00",  # a field whose number some readers would cut off to that of the location
    ],
)
def test_a_file_that_is_no_onnx_is_refused(bundle_of: Callable[[bytes], Path], graph: bytes) -> None:
    with pytest.raises(BundleError, match=r"onnx/model\.onnx is not an ONNX file"):
        open_bundle(bundle_of(graph))


def test_a_graph_with_too_many_fields_is_refused(
    bundle_of: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_data, "MOST_FIELDS", 1_000)
    with pytest.raises(BundleError, match="more than 1,000 fields"):
        open_bundle(bundle_of(b"\x08\x0a" * 1_001))
    open_bundle(bundle_of(b"\x08\x0a" * 999))


def test_a_variant_whose_file_is_not_checked_as_a_graph_is_refused(bundle_copy: Path) -> None:
    os.rename(bundle_copy / "onnx" / "model.onnx", bundle_copy / "onnx" / "model.txt")
    write_manifest(
        bundle_copy, variants={"fp32": {"file": "onnx/model.txt", "scheme": "fp32", "runtime": "onnxruntime"}}
    )
    with pytest.raises(BundleError, match=r"'onnx/model.txt' of variant 'fp32' does not end in \.onnx"):
        open_bundle(bundle_copy)


def test_every_message_of_onnx_that_leads_to_a_tensor_is_looked_into() -> None:
    messages: dict[str, Any] = {}  # each that is in a model, by its name
    left = [onnx.ModelProto.DESCRIPTOR]
    while left:
        message = left.pop()
        if message.name not in messages:
            messages[message.name] = message
            left += [field.message_type for field in message.fields if field.message_type]
    leads: dict[str, dict[int, str]] = {"TensorProto": {}}
    for _ in messages:
        for name, message in messages.items():
            inner = {field.number: field.message_type.name for field in message.fields if field.message_type}
            if there := {number: held for number, held in inner.items() if held in leads}:
                leads[name] = there
    plain = {
        name.removesuffix("Proto"): {number: held.removesuffix("Proto") for number, held in there.items()}
        for name, there in leads.items()
    }
    assert plain == external_data.HOLDERS
