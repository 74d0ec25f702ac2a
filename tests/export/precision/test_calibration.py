import random

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from small_checkpoints import WORDS, Exported
from tokenizers import Encoding

from export.graph.exporter import load_answering_model
from export.graph.nodes import Product, Wiring
from export.precision.calibration import CLIPPED, channel_ranges, tensor_ranges, with_long_texts
from serve.errors import BadInput


@pytest.fixture(scope="module")
def model(bert: Exported) -> onnx.ModelProto:
    return onnx.load(bert.onnx_file)


@pytest.fixture(scope="module")
def products(model: onnx.ModelProto) -> list[Product]:
    return Wiring(model).products()


def torch_inputs(bert: Exported, products: list[Product], encodings: list[Encoding]) -> dict[str, np.ndarray]:
    """What enters each product, (tokens of all texts, channels), read in torch: each text alone."""
    import torch

    classifier = load_answering_model(bert.checkpoint)
    seen: dict[str, list[np.ndarray]] = {product.activation: [] for product in products}

    def keep(name: str):  # type: ignore[no-untyped-def]
        return lambda module, inputs: seen[name].append(inputs[0].numpy()[0])

    for product in products:
        classifier.get_submodule(product.name).register_forward_pre_hook(keep(product.activation))
    with torch.no_grad():
        for encoding in encodings:
            classifier(input_ids=torch.tensor([encoding.ids]))
    return {name: np.concatenate(rows) for name, rows in seen.items()}


def test_every_channels_range_is_what_torch_sees(
    bert: Exported, model: onnx.ModelProto, products: list[Product], texts: list[str]
) -> None:
    encodings = bert.encodings(texts)
    found = channel_ranges(model, [product.activation for product in products], encodings, threads=1)
    seen = torch_inputs(bert, products, encodings)
    assert found.keys() == seen.keys()
    for name, rows in seen.items():
        np.testing.assert_allclose(found[name].low, rows.min(axis=0), atol=1e-4)
        np.testing.assert_allclose(found[name].high, rows.max(axis=0), atol=1e-4)


def test_a_clipped_range_leaves_out_exactly_the_outermost_share(
    bert: Exported, model: onnx.ModelProto, products: list[Product]
) -> None:
    chance = random.Random(0)
    encodings = bert.encodings([" ".join(chance.choices(WORDS, k=chance.randint(5, 25))) for _ in range(200)])
    name = products[-1].activation  # the widest, 64 channels
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.append(onnx.ValueInfoProto(name=name))
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the added output has no declared shape
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = (
        {
            "input_ids": np.array([e.ids]),
            "attention_mask": np.array([e.attention_mask]),
            "token_type_ids": np.array([e.type_ids]),
        }
        for e in encodings
    )
    seen = [session.run([name], each)[0] for each in feeds]
    values = np.sort(np.concatenate([each.ravel() for each in seen]))
    left_out = int(len(values) * CLIPPED)
    assert left_out > 5
    assert values[-2 - left_out] < values[-1 - left_out] * (1 - 1e-4)
    found = tensor_ranges(model, [name], encodings, threads=1)[name]
    np.testing.assert_allclose((found.low, found.high), values[[0, -1]], rtol=1e-5)
    np.testing.assert_allclose((found.clipped_low, found.clipped_high), values[[left_out, -1 - left_out]], rtol=1e-5)
    assert found.clipped_high < found.high


def test_the_order_of_texts_changes_nothing(
    bert: Exported, model: onnx.ModelProto, products: list[Product], texts: list[str]
) -> None:
    names = [product.activation for product in products]
    one, other = (
        (channel_ranges(model, names, encodings, 1), tensor_ranges(model, names, encodings, 1))
        for encodings in (bert.encodings(texts), bert.encodings(texts[::-1]))
    )
    assert one[1] == other[1]
    for name in names:
        np.testing.assert_array_equal(one[0][name].low, other[0][name].low)
        np.testing.assert_array_equal(one[0][name].high, other[0][name].high)


def test_padding_is_not_counted(bert: Exported, model: onnx.ModelProto, products: list[Product]) -> None:
    name = products[0].activation
    short, long = bert.encodings(["rome", " ".join(WORDS)])
    alone = [channel_ranges(model, [name], [encoding], 1)[name] for encoding in (short, long)]
    both = channel_ranges(model, [name], [short, long], 1)[name]
    np.testing.assert_array_equal(both.low, np.minimum(alone[0].low, alone[1].low))
    np.testing.assert_array_equal(both.high, np.maximum(alone[0].high, alone[1].high))
    # Padded to the longer one, the shorter one has other extremes.
    padded = Encoding.merge([short])
    padded.pad(len(long))
    assert (channel_ranges(model, [name], [padded], 1)[name].high > alone[0].high).any()


def test_texts_without_a_token_are_refused(bert: Exported, model: onnx.ModelProto, products: list[Product]) -> None:
    name = products[0].activation
    for nothing in ([], [Encoding.merge([])]):
        for ranges in (channel_ranges, tensor_ranges):
            with pytest.raises(BadInput, match="no tokens"):
                ranges(model, [name], nothing, 1)
    (rome,) = bert.encodings(["rome"])
    for ranges in (channel_ranges, tensor_ranges):
        beside, alone = (ranges(model, [name], each, 1)[name] for each in ([Encoding.merge([]), rome], [rome]))
        np.testing.assert_array_equal(beside, alone)


def test_texts_are_joined_to_the_lengths_that_short_ones_never_reach(bert: Exported) -> None:
    encodings = bert.encodings(["rome", "fly to new york city tomorrow", ""])
    lengths = [len(encoding) for encoding in encodings]
    more = with_long_texts(encodings, 100)
    assert more[:3] == encodings
    assert [len(encoding) for encoding in more] == [*lengths, 100, 100, 50, 50]
    assert [len(encoding) for encoding in encodings] == lengths
    # The two of a length begin with different texts, and what they hold are the texts themselves.
    assert more[3].ids[: lengths[0]] == encodings[0].ids
    assert more[4].ids[: lengths[1]] == encodings[1].ids
    assert with_long_texts([], 100) == []
    assert len(with_long_texts(encodings, 31)) == 3
