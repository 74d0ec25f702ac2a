"""An ONNX classifier as users of LitServe, mosec or BentoML write it: returns the most likely label of each text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer


class Student:
    """The int8 graph in `folder`, a transformers folder with `onnx/model_quantized.onnx`; `threads` of one call."""

    def __init__(self, folder: str, threads: int = 1) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.labels = {int(number): label for number, label in config["id2label"].items()}
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.tokenizer.enable_padding()  # to the longest of a batch
        self.tokenizer.enable_truncation(config["max_position_embeddings"])
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(
            str(Path(folder) / "onnx" / "model_quantized.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = [node.name for node in self.session.get_inputs()]
        self(["warm"] * 8)

    def __call__(self, texts: list[str]) -> list[dict[str, Any]]:
        """The label of each text and its probability."""
        encodings = self.tokenizer.encode_batch(texts)
        columns = {
            "input_ids": [encoding.ids for encoding in encodings],
            "attention_mask": [encoding.attention_mask for encoding in encodings],
            "token_type_ids": [encoding.type_ids for encoding in encodings],
        }
        logits = self.session.run(None, {name: np.array(columns[name], dtype=np.int64) for name in self.inputs})[0]
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances = raised / raised.sum(axis=1, keepdims=True)  # (texts, labels)
        return [{"label": self.labels[int(row.argmax())], "score": float(row.max())} for row in chances]
