import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from small_checkpoints import FAMILIES, MAX_LENGTH, TAGS, Exported, farthest, needs_openvino, write_checkpoint

from export.graph.exporter import export_graph, operators_of
from export.validation.parity import graph_parity
from serve.errors import BadInput
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer

OTHER_HEADS = [
    pytest.param("bert", "SequenceClassification", id="bert-texts", marks=pytest.mark.slow),
    pytest.param("modernbert", "SequenceClassification", id="modernbert-texts", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "head"), [*FAMILIES, *OTHER_HEADS])
def test_the_graph_answers_like_torch_at_any_batch_and_length(
    exported: Callable[..., Exported], texts: list[str], family: str, head: str
) -> None:
    made = exported(family, head)
    parity = graph_parity(made.checkpoint, made.onnx_file, texts, MAX_LENGTH, threads=1)
    assert parity.passed, parity
    assert (parity.shortest_tokens, parity.longest_tokens) == (1, MAX_LENGTH)
    assert parity.largest < 1e-4
    # Segments are an input only where the model tells them apart.
    segments = ["token_type_ids"] if family in ("bert", "electra") else []
    assert list(made.info.inputs) == ["input_ids", "attention_mask", *segments]
    session = ort.InferenceSession(made.onnx_file, providers=["CPUExecutionProvider"])
    for batch, tokens in ((1, 1), (1, MAX_LENGTH), (5, 1), (17, 9)):
        inputs = {name: np.ones((batch, tokens), dtype=np.int64) for name in made.info.inputs}
        (logits,) = session.run(["logits"], inputs)
        shape = (batch, tokens, len(TAGS)) if head == "TokenClassification" else (batch, len(TAGS))
        assert (logits.shape, logits.dtype) == (shape, np.float32)


def test_a_graph_that_answers_questions_has_the_ends_of_answers_by_the_names_that_other_libraries_read(
    tmp_path: Path,
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", head="QuestionAnswering", labels=2)
    export_graph(checkpoint, tmp_path / "model.onnx", MAX_LENGTH)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_outputs()] == ["start_logits", "end_logits", "logits"]
    inputs = {node.name: np.ones((3, 7), dtype=np.int64) for node in session.get_inputs()}
    start, end, logits = session.run(None, inputs)
    assert start.shape == (3, 7)
    np.testing.assert_array_equal(np.stack([start, end], axis=-1), logits)


@needs_openvino
def test_openvino_finds_the_logits_that_it_calls_by_the_name_of_what_they_are_made_of(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", head="QuestionAnswering", labels=2)
    export_graph(checkpoint, tmp_path / "model.onnx", MAX_LENGTH)
    rows = load_tokenizer(checkpoint, MAX_LENGTH).encode_batch(["book a table in rome", "fly to new york"])
    theirs, ours = (Session(tmp_path / "model.onnx", 1, runtime).run(rows) for runtime in ("onnxruntime", "openvino"))
    assert farthest(theirs, ours) < 1e-4


def test_the_description_is_that_of_the_checkpoint_and_the_graph(bert: Exported) -> None:
    assert bert.info.labels == tuple(TAGS)
    assert bert.info.size_bytes == bert.onnx_file.stat().st_size
    assert operators_of(onnx.load(bert.onnx_file)) == bert.info.operators
    assert bert.info.operators["LayerNormalization"] == 5


def test_onnxruntime_still_fuses_what_it_can(bert: Exported, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this machine only
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(bert.onnx_file, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    # Two layers: one scaled product of queries and keys in each, five normalisations in all, no guard against NaN.
    assert [kinds[kind] for kind in ("FusedMatMul", "LayerNormalization", "Gelu", "IsNaN")] == [2, 5, 2, 0]
    # And not what would make it slower.
    assert [kinds[kind] for kind in ("SkipLayerNormalization", "BiasGelu")] == [0, 0]


def test_equal_checkpoints_in_different_folders_give_equal_bytes_in_silence(
    bert: Exported, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "another name"
    shutil.copytree(bert.checkpoint, elsewhere)
    export_graph(elsewhere, tmp_path / "again.onnx", MAX_LENGTH)
    assert capfd.readouterr() == ("", "")
    content = bert.onnx_file.read_bytes()
    assert (tmp_path / "again.onnx").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []
    for trace in (b".py", b"site-packages", str(bert.checkpoint).encode()):
        assert trace not in content


@pytest.mark.parametrize(("max_length", "advice"), [(MAX_LENGTH + 1, "at most 32"), (2, "3 or more")])
def test_more_tokens_than_positions_or_none_but_special_ones_are_refused(
    bert: Exported, tmp_path: Path, max_length: int, advice: str
) -> None:
    with pytest.raises(BadInput, match=f"max_length {max_length}.*{advice}"):
        export_graph(bert.checkpoint, tmp_path / "model.onnx", max_length)
    assert not (tmp_path / "model.onnx").exists()


def test_a_folder_that_is_no_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        export_graph(tmp_path, tmp_path / "model.onnx", 16)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="JSON"):
        export_graph(tmp_path, tmp_path / "model.onnx", 16)
    checkpoint = write_checkpoint(tmp_path / "decoder", "gpt2", "LMHeadModel")
    with pytest.raises(BadInput, match="GPT2LMHeadModel"):
        export_graph(checkpoint, tmp_path / "model.onnx", 16)
