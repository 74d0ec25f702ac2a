"""Tiny random checkpoints, each with a real tokenizer."""

import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors

from export.graph.exporter import GraphInfo, quiet
from serve.bundle.runtimes import has_openvino
from serve.text.tokenizer import load_tokenizer

TAGS = ["O", "B-city", "I-city", "B-date", "I-date"]
MAX_LENGTH = 32
WORDS = [
    *("book", "a", "table", "in", "rome", "for", "two", "on", "friday", "please", "fly", "to", "new", "york"),
    *("city", "tomorrow", "morning", "and", "cancel", "my", "order"),
]

needs_openvino = pytest.mark.skipif(not has_openvino(), reason="OpenVINO is not installed: pip install openvino")

# One head of each family, each exported once for all tests: torch takes seconds for each. Those that are not slow have all
# that differs between families.
FAMILIES = [
    pytest.param("bert", "TokenClassification", id="bert"),
    pytest.param("roberta", "SequenceClassification", id="roberta", marks=pytest.mark.slow),
    pytest.param("xlm-roberta", "TokenClassification", id="xlm-roberta", marks=pytest.mark.slow),
    pytest.param("distilbert", "TokenClassification", id="distilbert", marks=pytest.mark.slow),
    pytest.param("electra", "TokenClassification", id="electra", marks=pytest.mark.slow),
    pytest.param("mpnet", "SequenceClassification", id="mpnet", marks=pytest.mark.slow),
    pytest.param("modernbert", "TokenClassification", id="modernbert"),
]


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    onnx_file: Path
    info: GraphInfo

    def encodings(self, texts: list[str]) -> list[Encoding]:
        return load_tokenizer(self.checkpoint, MAX_LENGTH).encode_batch(texts)


def farthest(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """The largest difference between the logits of the same texts."""
    return max(float(np.abs(one - other).max()) for one, other in zip(expected, actual, strict=True))


def with_constants(model: onnx.ModelProto, changes: dict[str, np.ndarray], out: Path) -> Path:
    """The graph `model` in the file `out`, with other float32 values for the constants named."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for constant in copy.graph.initializer:
        if constant.name in changes:
            constant.CopyFrom(numpy_helper.from_array(changes[constant.name].astype(np.float32), constant.name))
    onnx.save(copy, out)
    return out


def write_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of the words, letters and digits above that pads to 16 tokens, as saved ones do."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    pieces += [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase + string.digits)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    # The linter takes every argument named token for a password.
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.enable_padding(length=16)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def write_checkpoint(
    folder: Path, family: str = "bert", head: str = "TokenClassification", labels: int = 5, positions: int = MAX_LENGTH
) -> Path:
    """A random 2x32 model of `family` with a head, and its tokenizer; a BERT has as many `positions`."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 128, "num_labels": labels, "initializer_range": 0.3, "pad_token_id": 0}
    wide = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    prefix = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "gpt2": "GPT2"} | {
        "electra": "Electra",
        "mpnet": "MPNet",
        "modernbert": "ModernBert",
        "xlm-roberta": "XLMRoberta",
    }
    settings = {
        "bert": {**wide, "max_position_embeddings": positions},
        "roberta": {**wide, "max_position_embeddings": MAX_LENGTH + 1, "type_vocab_size": 1},
        "xlm-roberta": {**wide, "max_position_embeddings": MAX_LENGTH + 1, "type_vocab_size": 1},
        "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": MAX_LENGTH},
        "electra": {**wide, "embedding_size": 16, "max_position_embeddings": MAX_LENGTH},
        "mpnet": {**wide, "max_position_embeddings": MAX_LENGTH + 2},
        # A window of 8 tokens, so that most of a text lies outside it.
        "modernbert": {**wide, "max_position_embeddings": MAX_LENGTH, "local_attention": 8, "cls_token_id": 2}
        | {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "global_attn_every_n_layers": 2},
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    }[family]
    config = getattr(transformers, f"{prefix[family]}Config")(**shape, **settings)
    if labels == len(TAGS):
        config.id2label = dict(enumerate(TAGS))
        config.label2id = {tag: index for index, tag in enumerate(TAGS)}
    kind = getattr(transformers, f"{prefix[family]}{head}" if family == "gpt2" else f"{prefix[family]}For{head}")
    with quiet():
        model = kind(config)
        # Fresh biases are all 0 and scales all 1, and the exporter makes one constant of equal ones; trained ones differ.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        write_tokenizer(folder)
    return folder
