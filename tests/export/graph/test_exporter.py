import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from small_checkpoints import MAX_LENGTH, TAGS, Exported, write_checkpoint

from compress.models.configurations import position_limit
from export.graph.exporter import export_graph
from export.validation.parity import graph_parity
from serve.errors import BadInput

# Each takes torch about ten seconds to export. Those that are not slow have all that differs between families.
FAMILIES = [
    pytest.param("bert", "TokenClassification", id="bert-tokens"),
    pytest.param("bert", "SequenceClassification", id="bert-texts", marks=pytest.mark.slow),
    pytest.param("roberta", "SequenceClassification", id="roberta-texts", marks=pytest.mark.slow),
    pytest.param("distilbert", "TokenClassification", id="distilbert-tokens", marks=pytest.mark.slow),
    pytest.param("electra", "TokenClassification", id="electra-tokens", marks=pytest.mark.slow),
    pytest.param("mpnet", "SequenceClassification", id="mpnet-texts", marks=pytest.mark.slow),
    pytest.param("modernbert", "TokenClassification", id="modernbert-tokens", marks=pytest.mark.slow),
    pytest.param("modernbert", "SequenceClassification", id="modernbert-texts", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_the_graph_answers_like_torch_at_shapes_that_the_export_never_saw(
    exported: Callable[..., Exported], texts: list[str], family: str, head: str
) -> None:
    made = exported(family, head)
    parity = graph_parity(made.checkpoint, made.onnx_file, texts, MAX_LENGTH, threads=1)
    assert parity.passed, parity
    assert (parity.shortest_tokens, parity.longest_tokens) == (1, MAX_LENGTH)
    assert parity.largest < 1e-4


@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_batch_and_sequence_are_free_down_to_one(exported: Callable[..., Exported], family: str, head: str) -> None:
    made = exported(family, head)
    session = ort.InferenceSession(made.onnx_file, providers=["CPUExecutionProvider"])
    assert {tuple(node.shape) for node in session.get_inputs()} == {("batch", "sequence")}
    for batch, tokens in ((1, 1), (1, MAX_LENGTH), (5, 1), (17, 9)):
        (logits,) = session.run(
            ["logits"], {name: np.ones((batch, tokens), dtype=np.int64) for name in made.info.inputs}
        )
        shape = (batch, tokens, len(TAGS)) if head == "TokenClassification" else (batch, len(TAGS))
        assert logits.shape == shape
        assert logits.dtype == np.float32


@pytest.mark.slow
def test_segments_are_an_input_only_where_the_model_tells_them_apart(exported: Callable[..., Exported]) -> None:
    plain = ("input_ids", "attention_mask")
    assert exported("bert", "TokenClassification").info.inputs == (*plain, "token_type_ids")
    assert exported("distilbert", "TokenClassification").info.inputs == plain
    assert exported("roberta", "SequenceClassification").info.inputs == plain


def test_the_description_is_that_of_the_checkpoint(bert: Exported) -> None:
    assert bert.info.labels == tuple(TAGS)
    assert bert.info.size_bytes == bert.onnx_file.stat().st_size
    assert bert.info.operators["LayerNormalization"] == 5


def test_onnxruntime_still_fuses_what_it_can(bert: Exported, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns that the file is for this machine only
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(bert.onnx_file, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    # Two layers: one scaled product of queries and keys in each, five normalisations in all, and no guard against NaN.
    assert kinds["FusedMatMul"] == 2
    assert kinds["LayerNormalization"] == 5
    assert kinds["Gelu"] == 2
    assert kinds["IsNaN"] == 0
    # And not what would make it slower.
    assert kinds["SkipLayerNormalization"] == 0
    assert kinds["BiasGelu"] == 0


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


def test_more_tokens_than_positions_are_refused(bert: Exported, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"max_length 33: .* has positions for {MAX_LENGTH} tokens; give at most 32"):
        export_graph(bert.checkpoint, tmp_path / "model.onnx", MAX_LENGTH + 1)
    with pytest.raises(BadInput, match=r"max_length 2: .* give 3 or more"):
        export_graph(bert.checkpoint, tmp_path / "model.onnx", 2)
    assert not (tmp_path / "model.onnx").exists()


def test_a_roberta_table_has_rows_that_no_token_uses() -> None:
    from transformers import BertConfig, RobertaConfig

    assert position_limit(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512
    assert position_limit(BertConfig(max_position_embeddings=512)) == 512


def test_a_folder_that_is_no_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        export_graph(tmp_path, tmp_path / "model.onnx", 16)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        export_graph(tmp_path, tmp_path / "model.onnx", 16)
    checkpoint = write_checkpoint(tmp_path / "decoder", "gpt2", "LMHeadModel")
    with pytest.raises(BadInput, match="holds a GPT2LMHeadModel; export needs"):
        export_graph(checkpoint, tmp_path / "model.onnx", 16)
