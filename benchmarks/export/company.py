"""Count answers that depend on the other texts of the batch.

    python benchmarks/export/company.py CHECKPOINT --onnx FILE [--onnx FILE ...] --texts F [--count 10000] [--batches 5]
        [--runtime onnxruntime,openvino] [--dynamic]

Every text is answered alone and in `--batches` random batches of 2 to 32 texts. An answer counts if any bit differs. `--dynamic`
adds onnxruntime's `quantize_dynamic` at its defaults, made from the first file.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding

from compress.data.texts import read_texts
from serve.model.session import Session
from serve.text.tokenizer import load_tokenizer


def differing(session: Session, encodings: Sequence[Encoding], batches: int, seed: int = 0) -> tuple[int, int, float]:
    """The number of answers in batches, of those that differ in any bit from the text's answer alone, and the largest difference."""
    alone = [session.run([encoding])[0] for encoding in encodings]
    chance = random.Random(seed)
    answers = moved = 0
    largest = 0.0
    for _ in range(batches):
        order = list(range(len(encodings)))
        chance.shuffle(order)
        while order:
            members = [order.pop() for _ in range(min(len(order), chance.randint(2, 32)))]
            for index, logits in zip(members, session.run([encodings[i] for i in members]), strict=True):
                answers += 1
                if logits.tobytes() != alone[index].tobytes():
                    moved += 1
                    largest = max(largest, float(np.abs(logits - alone[index]).max()))
    return answers, moved, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--onnx", type=Path, action="append", required=True)
    parser.add_argument("--texts", type=Path, action="append", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--runtime", default="onnxruntime")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dynamic", action="store_true")
    given = parser.parse_args()
    texts = [text for file in given.texts for text in read_texts(file)][: given.count]
    encodings = load_tokenizer(given.checkpoint, given.max_length).encode_batch(texts)
    with tempfile.TemporaryDirectory() as folder:
        files = [(file.name, file, runtime) for file in given.onnx for runtime in given.runtime.split(",")]
        if given.dynamic:
            from onnxruntime.quantization import quantize_dynamic

            made = Path(folder) / "dynamic.onnx"
            quantize_dynamic(given.onnx[0], made)
            files.append(("quantize_dynamic", made, "onnxruntime"))
        for name, file, runtime in files:
            began = time.perf_counter()
            session = Session(file, given.threads, runtime, given.max_length)
            answers, moved, largest = differing(session, encodings, given.batches)
            print(
                f"{name:24s} {runtime:12s} {len(texts):,} texts, {answers:,} answers in batches: {moved:,} differ, "
                f"by at most {largest:.3g} ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
