"""One ONNX graph in onnxruntime: token ids in, logits out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Encoding

from serve.errors import BundleError, InternalError
from serve.threads import available_cores

KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


class Session:
    """An open graph; `run` may be called from several threads.

    `threads` is the number of onnxruntime's own threads for one call; None takes every core that this process may use.
    """

    def __init__(self, onnx_file: Path, threads: int | None = None) -> None:
        self.threads = threads or available_cores()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # Idle threads that spin take the core from the tokeniser, the web server and other sessions.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(str(onnx_file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no base class of their own
            raise BundleError(f"{onnx_file} does not open in onnxruntime {ort.__version__}: {error}") from error
        self.inputs: tuple[str, ...] = tuple(node.name for node in self._session.get_inputs())
        outputs = [node.name for node in self._session.get_outputs()]
        if unknown := set(self.inputs) - KNOWN_INPUTS:
            raise BundleError(f"{onnx_file} wants the inputs {sorted(unknown)}; known are {sorted(KNOWN_INPUTS)}")
        if "logits" not in outputs:
            raise BundleError(f"{onnx_file} has the outputs {outputs}; one must be called logits")

    def run(self, encodings: Sequence[Encoding]) -> list[np.ndarray]:
        """The logits of each text, float32: (tokens, labels) when tokens are classified, (labels,) when texts are.

        Texts are padded on the right to the longest of the call, and the padding is cut off again.
        InternalError when the model gives NaN or an infinity.
        """
        if not encodings:
            return []
        logits = np.asarray(self._session.run(["logits"], _padded(encodings, self.inputs))[0], dtype=np.float32)
        rows = [row[: len(encoding)] if row.ndim > 1 else row for row, encoding in zip(logits, encodings, strict=True)]
        if not all(np.isfinite(row).all() for row in rows):
            raise InternalError("the model gave logits that are not finite numbers")
        return rows


def _padded(encodings: Sequence[Encoding], inputs: Sequence[str]) -> dict[str, np.ndarray]:
    """The graph's inputs by name, each (texts, longest) int64, zero where there is padding."""
    # Padding is masked out, so its id does not matter; 0 is in every vocabulary.
    columns = {
        "input_ids": [encoding.ids for encoding in encodings],
        "attention_mask": [encoding.attention_mask for encoding in encodings],
        "token_type_ids": [encoding.type_ids for encoding in encodings],
    }
    longest = max(1, *(len(encoding) for encoding in encodings))
    padded = {}
    for name in inputs:
        padded[name] = np.zeros((len(encodings), longest), dtype=np.int64)
        for row, values in zip(padded[name], columns[name], strict=True):
            row[: len(values)] = values
    return padded
