"""Compare int8 with onnxruntime's `quantize_dynamic` at its defaults, both of the same float32 graph, in turns.

    python benchmarks/export/against_dynamic.py BUNDLE --texts F [--batches 8] [--lengths 64] [--seconds 60] [--json F]

Each candidate runs in its own process, without idle threads that spin. Ratios are paired over turns, with 95 % intervals; above 1
is faster than dynamic.
"""

import argparse
import json
import tempfile
from pathlib import Path

from onnxruntime.quantization import quantize_dynamic

from compress.data.texts import read_texts
from latency.candidates.candidate import Candidate
from latency.profile import Plan, time_grid
from serve.bundle.cpu import available_cores
from serve.bundle.runtimes import has_openvino
from serve.tasks import open_bundle
from serve.text.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--batches", default="8")
    parser.add_argument("--lengths", default="64")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bundle = open_bundle(given.bundle)
    batches, lengths = ([int(n) for n in text.split(",")] for text in (given.batches, given.lengths))
    runtimes = ["onnxruntime", "openvino"] if has_openvino() else ["onnxruntime"]
    with tempfile.TemporaryDirectory() as folder:
        dynamic = Path(folder) / "dynamic.onnx"
        quantize_dynamic(bundle.onnx_file("fp32"), dynamic)
        candidates = [Candidate("quantize_dynamic", "onnxruntime", "int8", dynamic, given.threads)]
        candidates += [
            Candidate(f"{variant} {runtime}", runtime, variant, bundle.onnx_file(variant), given.threads)
            for variant in bundle.manifest.variants
            for runtime in runtimes
        ]
        document = time_grid(
            candidates,
            read_texts(given.texts),
            load_tokenizer(bundle.path, bundle.manifest.max_length),
            Plan(tuple(batches), tuple(lengths), given.seconds),
        )
        ratios = {(row["b"], row["batch"], row["tokens"]): row for row in document["ratios"]}
        for row in document["candidates"]:
            found = ratios.get((row["name"], row["batch"], row["tokens"]))
            against = f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" if found else "1"
            print(
                f"{row['batch']} x {row['tokens']}  {row['name']:20s} {row['size_bytes'] / 1e6:6.1f} MB  "
                f"p50 {row['p50_ms']:7.2f} ms  {against}"
            )
    if given.json:
        given.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
