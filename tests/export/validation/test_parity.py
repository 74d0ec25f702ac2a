import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_checkpoints import MAX_LENGTH, Exported, with_constants
from transformers import BertConfig

from export.graph.nodes import Wiring
from export.precision.int8 import NO_SATURATION, quantise_dynamic
from export.validation.parity import SHAPES, TOLERANCES, _compare, graph_parity, shapes_of, variant_parity
from serve.errors import BadInput
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer


def with_constant_changed(source: Path, out: Path, ending: str, index: tuple[int, ...], by: float) -> Path:
    """A copy of the graph in which one number of the constant whose name ends in `ending` is another."""
    model = onnx.load(source)
    ((name, value),) = [each for each in Wiring(model).constants.items() if each[0].endswith(ending)]
    value = value.copy()
    value[index] += by
    return with_constants(model, {name: value}, out)


def with_logit_moved(source: Path, out: Path, label: int, by: float) -> Path:
    """A copy of the graph of a text classifier that says `by` more of one of its five labels."""
    model = onnx.load(source)
    for node in model.graph.node:
        node.output[:] = ["unmoved" if name == "logits" else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Add", ["unmoved", "move"], ["logits"]))
    move = (np.arange(5) == label).astype(np.float32) * np.float32(by)
    model.graph.initializer.append(numpy_helper.from_array(move, "move"))
    onnx.save(model, out)
    return out


def test_one_wrong_weight_is_rejected_unless_the_tolerance_is_set_wider(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    wrong = with_constant_changed(bert.onnx_file, tmp_path / "wrong.onnx", "classifier.bias", (2,), 0.01)
    given = (bert.checkpoint, wrong, texts, MAX_LENGTH)
    refused, passed = graph_parity(*given, threads=1), graph_parity(*given, threads=1, atol=0.02)
    assert (refused.passed, refused.absolute_tolerance) == (False, 1e-4)
    assert refused.beyond_tolerance == refused.positions
    assert refused.largest == pytest.approx(0.01, rel=0.01)
    assert (passed.passed, passed.absolute_tolerance, passed.beyond_tolerance) == (True, 0.02, 0)


def test_a_row_that_is_wrong_only_at_one_position_is_found_where_it_is(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    last = (MAX_LENGTH - 1, 0)
    wrong = with_constant_changed(bert.onnx_file, tmp_path / "wrong.onnx", "position_embeddings.weight", last, 0.5)
    parity = graph_parity(bert.checkpoint, wrong, texts, MAX_LENGTH, threads=1)
    assert not parity.passed
    assert 0 < parity.beyond_tolerance < parity.positions
    assert parity.largest_at.tokens == parity.largest_at.padded_tokens == MAX_LENGTH


def test_a_graph_that_ignores_the_mask_is_rejected(bert: Exported, texts: list[str], tmp_path: Path) -> None:
    model = onnx.load(bert.onnx_file)
    # An attention mask of ones everywhere: right for every text alone, wrong as soon as one is padded.
    ones = onnx.helper.make_node("Equal", ["attention_mask", "attention_mask"], ["is_one"], name="is_one")
    cast = onnx.helper.make_node("Cast", ["is_one"], ["all_ones"], name="all_ones", to=onnx.TensorProto.INT64)
    for node in model.graph.node:
        node.input[:] = ["all_ones" if name == "attention_mask" else name for name in node.input]
    nodes = [ones, cast, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "maskless.onnx")
    parity = graph_parity(bert.checkpoint, tmp_path / "maskless.onnx", texts, MAX_LENGTH, threads=1)
    assert not parity.passed
    assert parity.largest_at.batch > 1
    assert parity.largest_at.tokens < parity.largest_at.padded_tokens


def test_labels_that_the_reference_holds_equal_are_ties_not_changes(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    twins = tmp_path / "checkpoint"
    shutil.copytree(bert.checkpoint, twins)
    weights = load_file(twins / "model.safetensors")
    # Two labels with one classifier row; one of them wins everywhere, by nothing.
    weights["classifier.weight"][2] = weights["classifier.weight"][1]
    weights["classifier.bias"][:] = [0, 50, 50, 0, 0]
    save_file(weights, twins / "model.safetensors", metadata={"format": "pt"})
    model = onnx.load(bert.onnx_file)
    constants = Wiring(model).constants
    (bias,) = [name for name in constants if name.endswith("classifier.bias")]
    ((rows, weight),) = [each for each in constants.items() if each[1].shape == (32, 5)]
    weight = weight.copy()
    weight[:, 2] = weight[:, 1]
    with_constants(model, {bias: np.array([0, 50, 50 + 3e-5, 0, 0]), rows: weight}, tmp_path / "twins.onnx")
    parity = graph_parity(twins, tmp_path / "twins.onnx", texts, MAX_LENGTH, threads=1)
    assert parity.ties == parity.positions
    assert parity.labels_changed == 0
    assert parity.passed


def test_int8_passes_when_company_changes_no_bit(bert: Exported, bert_int8: Path, texts: list[str]) -> None:
    parity = variant_parity("int8", bert.checkpoint, bert.onnx_file, bert_int8, texts, MAX_LENGTH, threads=1)
    assert parity.passed
    assert (parity.precision, parity.company_differences, parity.company_texts) == ("int8", 0, len(texts) + SHAPES)
    assert 0 < parity.p999 <= parity.largest
    assert parity.labels_changed_per_10k == parity.labels_changed / parity.positions * 10_000


def test_dynamic_int8_whose_answers_depend_on_company_is_rejected(
    bert: Exported, texts: list[str], tmp_path: Path
) -> None:
    dynamic = tmp_path / "dynamic.onnx"
    made = quantise_dynamic(onnx.load(bert.onnx_file), dynamic)
    assert (made.scheme, made.products, made.cpu) == ("dynamic", 12, NO_SATURATION)
    assert sum(node.op_type == "MatMulInteger" for node in onnx.load(dynamic).graph.node) == 12
    parity = variant_parity("int8", bert.checkpoint, bert.onnx_file, dynamic, texts, MAX_LENGTH, threads=1)
    assert not parity.passed
    assert parity.company_differences > len(texts) // 2
    assert parity.company_largest > 1e-4


def test_lengths_go_from_one_token_to_the_maximum(bert: Exported) -> None:
    tokenizer = load_tokenizer(bert.checkpoint, MAX_LENGTH)
    lengths = [len(encoding) for encoding in shapes_of(["rome", "new york"], tokenizer, MAX_LENGTH)]
    assert lengths == [3, 4, 1, 32, 2, 31, 3, 16, 8]
    assert all(len(set(encoding.attention_mask)) == 1 for encoding in shapes_of(["rome"], tokenizer, MAX_LENGTH))


def test_parity_without_texts_is_refused(bert: Exported) -> None:
    with pytest.raises(BadInput, match="no tokens"):
        graph_parity(bert.checkpoint, bert.onnx_file, [], MAX_LENGTH)


def test_pairs_are_compared_with_both_segments(bert: Exported, texts: list[str]) -> None:
    pairs = [(text, other) for text, other in zip(texts, texts[::-1], strict=True)]
    encodings = shapes_of(pairs, load_tokenizer(bert.checkpoint, MAX_LENGTH), MAX_LENGTH)
    assert any(1 in encoding.type_ids for encoding in encodings)
    assert graph_parity(bert.checkpoint, bert.onnx_file, pairs, MAX_LENGTH, threads=1).passed


@pytest.mark.slow
def test_where_any_number_of_labels_may_apply_a_text_changes_when_one_of_them_turns(
    exported: Callable[..., Exported], texts: list[str], tmp_path: Path
) -> None:
    classifier = exported("bert", "SequenceClassification")
    several = Path(shutil.copytree(classifier.checkpoint, tmp_path / "several"))
    config = json.loads((several / "config.json").read_text(encoding="utf-8"))
    (several / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    encodings = shapes_of(texts, load_tokenizer(several, MAX_LENGTH), MAX_LENGTH)
    logits = np.stack([Session(classifier.onnx_file, 1).run([encoding])[0] for encoding in encodings])
    # The label whose logits are nearest to 0 is pushed up by the median distance, so that it turns for some texts.
    label = int(np.abs(logits).mean(axis=0).argmin())
    push = float(np.median(np.abs(logits[:, label])))
    wrong = with_logit_moved(classifier.onnx_file, tmp_path / "wrong.onnx", label, push)
    turned = int(((logits[:, label] > 0) != (logits[:, label] + push > 0)).sum())
    assert 0 < turned < len(texts)
    parity = variant_parity("int8", several, classifier.onnx_file, wrong, texts, MAX_LENGTH, threads=1)
    assert parity.labels_changed == 3 * turned  # once for each batch size
    nudged = with_logit_moved(classifier.onnx_file, tmp_path / "nudged.onnx", label, 1e-6)
    assert graph_parity(several, nudged, texts, MAX_LENGTH, threads=1).passed


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
def test_numbers_may_differ_by_a_share_of_their_spread_whatever_their_unit(
    unit: float, bert: Exported, texts: list[str]
) -> None:
    encodings = shapes_of(texts[:20], load_tokenizer(bert.checkpoint, MAX_LENGTH), MAX_LENGTH)
    config = BertConfig(architectures=["BertForSequenceClassification"], num_labels=1, problem_type="regression")
    numbers = {id(each): np.array([unit * (number - 3.0)]) for number, each in enumerate(encodings)}

    def passes(off: float) -> bool:
        return _compare(
            "fp32", TOLERANCES["fp32"], "onnxruntime",
            lambda batch: [numbers[id(each)] for each in batch],
            lambda batch: [numbers[id(each)] + unit * off for each in batch],
            encodings, config, company_texts=4, seed=0,
        ).passed  # fmt: skip

    assert passes(1e-4)
    assert not passes(1e-2)
