"""How long a server's process takes for a batch of texts, fitted to the measured times of one model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latency.measure.result_document import ProfileDocument
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput
from serve.model.pipeline import RUN_COSTS_TOKENS, RUN_TOKENS, length_batches
from serve.model.session import padded_length

LEAST_LENGTHS = 3  # different numbers of tokens that the times must be of


@dataclass(frozen=True)
class ServiceTimes:
    """The times of one process with one thread: a run of `n` texts padded to `t` tokens takes `call + n t token + n t^2 square` seconds.

    Each text takes `text + tokens text_token` more, to tokenise it and to read its answer.
    """

    name: str
    runtime: Runtime
    call_s: float
    token_s: float
    square_s: float
    text_s: float
    text_token_s: float
    crowded: float | None
    """How much longer a run takes while all cores compute, which share caches and memory; None where the report has no `--sweep`."""
    error: float
    """Median relative error of the fitted runs."""
    tokens: tuple[int, ...]
    """Of the texts that were timed."""

    def run_s(self, texts: int, tokens: int) -> float:
        """Seconds of one run of the model on `texts` texts, of which the longest has `tokens` tokens."""
        padded = padded_length(tokens, self.runtime, None)
        return self.call_s + texts * padded * (self.token_s + padded * self.square_s)

    def parts_s(self, lengths: Sequence[int]) -> list[tuple[list[int], float]]:
        """The runs in which a process answers texts of these lengths: the indices of each, and its seconds with tokenising and decoding."""
        return [
            (part, self.run_s(len(part), max(lengths[i] for i in part)) + sum(self._text_s(lengths[i]) for i in part))
            for part in length_batches(lengths, RUN_TOKENS, RUN_COSTS_TOKENS)
        ]

    def _text_s(self, tokens: int) -> float:
        return self.text_s + self.text_token_s * tokens

    def alone_s(self) -> float:
        """Mean seconds for one text of those that were timed, alone in a run."""
        return float(np.mean([self.run_s(1, tokens) + self._text_s(tokens) for tokens in self.tokens]))


def service_times(document: ProfileDocument, name: str = "") -> ServiceTimes:
    """The times of the model `name` in a report of `profile`; without a name of the one with the most texts a second.

    Raises:
        BadInput: the report lacks the model, or times that a process of a server takes: on a CPU, with one thread, on texts.
    """
    models = [row for row in document.get("models", []) if "single_stream" in row and row["device"] == "cpu"]
    fitting = [row for row in models if row["threads"] == 1 and row["runtime"] in ("onnxruntime", "openvino")]
    if not fitting:
        raise BadInput(
            "The report has no model in onnxruntime or OpenVINO on a CPU with one thread, which a process of a server has. "
            "Make one: `stillroom profile BUNDLE --data TEXTS --threads 1 --out FOLDER`."
        )
    known = ", ".join(repr(row["name"]) for row in fitting)
    if name and name not in [row["name"] for row in fitting]:
        raise BadInput(
            f"--model {name!r} is not in the report with one thread on a CPU; it has {known}. Give one of them."
        )
    chosen: Any = (
        next(row for row in fitting if row["name"] == name)
        if name
        else max(fitting, key=lambda row: row["single_stream"]["texts_per_s"])
    )
    samples = np.array(chosen["single_stream"]["samples"], dtype=np.float64)
    run_ms = {tokens: np.median(samples[samples[:, 0] == tokens, 2]) for tokens in np.unique(samples[:, 0])}
    runs = [(1, int(tokens), float(median_ms) / 1e3) for tokens, median_ms in run_ms.items()]
    runs += [
        (row["batch"], row["tokens"], row["p50_ms"] / 1e3)
        for row in document["candidates"]
        if row["name"] == chosen["name"] and row["runtime"] == chosen["runtime"]
    ]
    if len({tokens for _, tokens, _ in runs}) < LEAST_LENGTHS or max(texts for texts, _, _ in runs) == 1:
        raise BadInput(
            f"The report has too few times of {chosen['name']!r} to tell what a batch takes. "
            "Give --batches 1,8 and --lengths 16,128 to `stillroom profile`."
        )
    padded = [(texts, padded_length(tokens, chosen["runtime"], None), taken) for texts, tokens, taken in runs]
    (call_s, token_s, square_s), error = _fitted(
        [(1.0, texts * tokens, texts * tokens**2) for texts, tokens, _ in padded], [taken for _, _, taken in padded]
    )
    others_s = (samples[:, 1] + samples[:, 3]) / 1e3
    (text_s, text_token_s), _ = _fitted([(1.0, tokens) for tokens in samples[:, 0]], list(others_s))
    cores = document["machine"]["cores"]
    together = [
        row["p50_ms"]
        for row in document.get("sweep", [])
        if row["name"] == chosen["name"] and (row["threads"], row["processes"]) == (1, cores)
    ]
    # The sweep times the first row of the grid.
    alone = [row["p50_ms"] for row in document["candidates"] if row["name"] == chosen["name"]]
    return ServiceTimes(
        chosen["name"],
        chosen["runtime"],
        call_s,
        token_s,
        square_s,
        text_s,
        text_token_s,
        max(1.0, together[0] / alone[0]) if together and cores > 1 else None,
        error,
        tuple(int(tokens) for tokens in samples[:, 0]),
    )


def _fitted(work: Sequence[Sequence[float]], taken_s: Sequence[float]) -> tuple[list[float], float]:
    """The costs of the least relative squared error, none below 0; and the median of the relative errors."""
    from scipy.optimize import nnls

    matrix, taken = np.array(work, dtype=np.float64), np.array(taken_s, dtype=np.float64)
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    costs, _ = nnls(matrix / scale / taken[:, None], np.ones(len(taken)))
    costs = costs / scale
    return [float(cost) for cost in costs], float(np.median(np.abs(matrix @ costs / taken - 1)))
