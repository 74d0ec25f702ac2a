"""A report of `profile` whose times follow a known formula."""

from typing import Any

import numpy as np

CALL_MS, TOKEN_MS, SQUARE_MS, TEXT_MS, TEXT_TOKEN_MS = 0.2, 0.02, 0.0001, 0.03, 0.002
NAME = "student ORT int8"


def run_ms(texts: int, tokens: int) -> float:
    """The time of one run."""
    return CALL_MS + texts * tokens * (TOKEN_MS + tokens * SQUARE_MS)


def timed_report(threads: int = 1, cores: int = 2, noise: float = 0.0, crowded: float = 0.0) -> dict[str, Any]:
    """Times of one model; with `crowded`, also those of a process on each core."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 40, 400)
    factors = rng.lognormal(0, noise, (400, 2)) if noise else np.ones((400, 2))
    samples = [
        [int(each), 0.6 * (TEXT_MS + TEXT_TOKEN_MS * each), run_ms(1, each) * f, 0.4 * (TEXT_MS + TEXT_TOKEN_MS * each)]
        for each, (f, _) in zip(tokens.tolist(), factors, strict=True)
    ]
    whole = [sum(sample[1:]) for sample in samples]
    named = {"name": NAME, "runtime": "onnxruntime", "precision": "int8", "device": "cpu"}
    return {
        "machine": {"cpu": "some processor", "cores": cores, "versions": {}},
        "candidates": [
            {**named, "batch": batch, "tokens": length, "p50_ms": run_ms(batch, length)}
            for batch in (1, 8)
            for length in (16, 128)
        ],
        "models": [
            {
                **named,
                "model": "student.bundle",
                "threads": threads,
                "single_stream": {"samples": samples, "texts_per_s": 1000 / float(np.mean(whole))},
            }
        ],
        "sweep": [{"name": NAME, "threads": 1, "processes": cores, "p50_ms": crowded * run_ms(1, 16)}] * bool(crowded),
    }
