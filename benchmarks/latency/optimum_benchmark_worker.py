"""Runs optimum-benchmark once, in its own environment: prints the latencies of its forward passes in ms as JSON."""

import json
import sys

import optimum.pipelines
import torch
from optimum.onnxruntime import ORTModelForSequenceClassification, ORTModelForTokenClassification

# optimum-benchmark 0.6.0 reads this table, which optimum 2 has removed.
if not hasattr(optimum.pipelines, "ORT_SUPPORTED_TASKS"):
    optimum.pipelines.ORT_SUPPORTED_TASKS = {
        "token-classification": {"class": (ORTModelForTokenClassification,)},
        "text-classification": {"class": (ORTModelForSequenceClassification,)},
    }

from optimum_benchmark import (
    Benchmark,
    BenchmarkConfig,
    InferenceConfig,
    InlineConfig,
    ORTConfig,
    PyTorchConfig,
)


def main() -> None:
    backend, model, task, batch, tokens, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    shared = {"model": model, "device": "cpu", "task": task, "library": "transformers", "model_type": "bert"}
    if backend == "torch":
        chosen = PyTorchConfig(**shared)
    else:
        options = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
        chosen = ORTConfig(**shared, export=False, session_options=options)
    scenario = InferenceConfig(
        latency=True,
        duration=float(seconds),
        iterations=10,
        warmup_runs=10,
        input_shapes={"batch_size": int(batch), "sequence_length": int(tokens)},
    )
    config = BenchmarkConfig(
        name="peer", launcher=InlineConfig(device_isolation=False), scenario=scenario, backend=chosen
    )
    report = Benchmark.launch(config).to_dict()
    print(json.dumps([1e3 * value for value in report["forward"]["latency"]["values"]]))


if __name__ == "__main__":
    main()
