"""The costs of a model: operations and bytes relative to the machine's peaks, energy and money."""

import json
from collections.abc import Mapping, Sequence

from latency.analysis.roofline import flops_per_text, parameters, weights_read_bytes
from latency.candidates.candidate import Candidate
from latency.measure.result_document import Cost, ModelRow, Peaks, Work
from serve.errors import BadInput

SECONDS_AN_HOUR = 3600
PEAKS = {"fp32": "fp32_gflop_per_s", "bf16": "bf16_gflop_per_s", "int8": "int8_gflop_per_s"}


def add_costs(
    models: Mapping[str, ModelRow],
    candidates: Sequence[Candidate],
    work: Work,
    peaks: Peaks,
    price_per_core_hour: float | None = None,
) -> None:
    """Adds the costs that follow from speed and size to each of `models`; an unknown one stays absent.

    Operations are those of a text of the mean length. The bytes of a text are the weights, read once: the least that a call
    moves. A bandwidth share above 1 means that the weights came from a cache.
    """
    for candidate in candidates:
        row = models[candidate.name]
        cost = row["cost"]
        _add_size(cost, candidate, round(work["tokens_mean"]), row["notes"])
        stream, offline = row.get("single_stream"), row.get("offline")
        bandwidth = peaks.get("bandwidth_gb_per_s")
        if stream and bandwidth and "bytes_per_text" in cost and candidate.device == "cpu":
            seconds = stream["parts_ms"]["run"] / 1e3
            cost["bandwidth_share"] = round(cost["bytes_per_text"] / seconds / 1e9 / bandwidth, 4)
        if not offline:
            continue
        texts_per_hour = SECONDS_AN_HOUR * offline["texts_per_s"]
        cost["texts_per_hour"] = round(texts_per_hour)
        if price_per_core_hour is not None and candidate.device == "cpu":
            cost["price_per_million"] = round(1e6 / texts_per_hour * price_per_core_hour * candidate.threads, 6)
        if "joules_per_text" in offline:
            cost["joules_per_text"] = offline["joules_per_text"]
        if "flops_per_text" in cost:
            reached = cost["flops_per_text"] * offline["texts_per_s"] / 1e9
            cost["gflop_per_s"] = round(reached, 3)
            peak = peaks.get(PEAKS.get(candidate.precision, ""))
            if isinstance(peak, float) and candidate.device == "cpu":
                cost["peak_share"] = round(reached / peak, 4)


def _add_size(cost: Cost, candidate: Candidate, tokens: int, notes: list[str]) -> None:
    count = parameters(candidate.path)
    if count is not None:
        cost["parameters"] = count
    read_bytes = weights_read_bytes(candidate.path, tokens)
    if read_bytes is not None:
        cost["bytes_per_text"] = float(read_bytes)
    reads = candidate.reads
    if reads is None or not (reads.folder / "config.json").is_file():  # a bundle need not have one
        return
    config = json.loads((reads.folder / "config.json").read_text(encoding="utf-8"))
    try:
        cost["flops_per_text"] = flops_per_text(config, tokens, labels=len(reads.labels))
    except BadInput as error:
        notes.append(f"The operations were not counted: {error.message}.")
