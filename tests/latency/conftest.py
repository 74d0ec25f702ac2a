"""A tiny world for timing: a random BERT checkpoint, a three-node ONNX graph, and a word tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from latency.candidates.candidate import Candidate
from latency.measure.interleave import Workload

WORDS = "[PAD] [UNK] [CLS] [SEP] book a table for two in Oslo tomorrow play jazz".split()  # noqa: SIM905 - a list of words


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder: 1 layer, 16 wide, 5 tags, at most 32 tokens, saved in half precision."""
    import torch
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-bert")
    BertForTokenClassification(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with one input and one output: logits (batch, 1) = log of the mean of a row's input_ids."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["floats", "axes"], ["mean"], keepdims=1),
            helper.make_node("Log", ["mean"], ["logits"]),
        ],
        "log-mean",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    file = tmp_path_factory.mktemp("tiny-onnx") / "model.onnx"
    onnx.save(model, file)
    return file


@pytest.fixture
def torch_candidate(tiny_bert: Path) -> Candidate:
    return Candidate("teacher", "torch", "fp32", tiny_bert, threads=1)


@pytest.fixture
def onnx_candidate(tiny_onnx: Path) -> Candidate:
    return Candidate("student", "onnxruntime", "fp32", tiny_onnx, threads=1)


@pytest.fixture
def workload() -> Workload:
    return Workload("batch 2 x 6 tokens", 2, 6, np.array([[2, 4, 5, 6, 7, 3], [2, 8, 9, 10, 11, 3]]))


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Words split at spaces, wrapped as `[CLS] ... [SEP]`."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer
