"""Comparison with an earlier report: its models run again beside the current ones. Its old times are not used."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latency.candidates.candidate import Candidate
from latency.measure.statistics import process_ratio
from serve.bundle.manifest import MANIFEST, sha256_file
from serve.errors import BadInput

BEFORE = " (before)"
# A candidate counts as slower if the whole interval is above this. With 1.0, one equal pair in forty would count as slower.
SLOWER = 1.02


def given_models(models: Sequence[Path]) -> list[dict[str, Any]]:
    """`models` with their fingerprints, so that a later call can run exactly the same ones again."""
    return [{"model": str(model), "mark": _fingerprint(model)} for model in models]


def models_of(report: Path) -> list[Path]:
    """The models of the earlier `report.json`.

    Raises BadInput if it is not such a report, or if a model is missing or has changed.
    """
    try:
        given: Any = json.loads(report.read_text(encoding="utf-8"))["given"]
        listed = [(Path(each["model"]), str(each["mark"])) for each in given]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"--against {report} is not a report.json of `stillroom profile` ({type(error).__name__}); give one from its "
            "--out folder."
        ) from None
    for model, before in listed:
        if not model.exists():
            raise BadInput(
                f"--against {report}: its model {model} does not exist any more. Restore it: --against runs it again."
            )
        if _fingerprint(model) != before:
            raise BadInput(
                f"--against {report}: its model {model} has changed since. Keep the earlier model in a folder of its own, and "
                "give the new one on the command line."
            )
    return [model for model, _ in listed]


def _fingerprint(model: Path) -> str:
    if (model / MANIFEST).is_file():
        return sha256_file(model / MANIFEST)  # the manifest has the SHA-256 of every other file
    if model.is_file():
        return sha256_file(model)
    from compress.runs.stages import folder_fingerprint

    return hashlib.sha256(folder_fingerprint(model).encode()).hexdigest()


def named_before(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The earlier candidates, with BEFORE in their names."""
    return [replace(candidate, name=candidate.name + BEFORE) for candidate in candidates]


def refuse_strangers(now: Sequence[Candidate], before: Sequence[Candidate]) -> None:
    """Raises BadInput if no candidate can be compared."""
    kinds = {(candidate.runtime, candidate.precision, candidate.device) for candidate in before}
    if not any((candidate.runtime, candidate.precision, candidate.device) in kinds for candidate in now):
        raise BadInput(
            "No model runs in the same runtime and precision as a model of --against, so there is nothing to compare. "
            "Give models of the same kind, or --runtimes."
        )


def regressions(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares each candidate with the earlier one of the same name, else of the same runtime, precision and device.

    Several of a kind are matched in the given order. Candidates without a match are left out.
    """
    models = document["models"]
    before = [model for model in models if model["name"].endswith(BEFORE)]
    now = [model for model in models if model not in before]
    matches: dict[str, dict[str, Any]] = {}
    of_a_kind = ("runtime", "precision", "device")
    ways: tuple[Callable[[dict[str, Any], dict[str, Any]], bool], ...] = (
        lambda old, new: old["name"] == new["name"] + BEFORE,
        lambda old, new: all(old[key] == new[key] for key in of_a_kind),
    )
    for alike in ways:
        for model in now:
            match = next((old for old in before if alike(old, model)), None)
            if match and model["name"] not in matches:
                before.remove(match)
                matches[model["name"]] = match
    return [
        row for model in now if model["name"] in matches for row in _compared(document, matches[model["name"]], model)
    ]


def _compared(document: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    rows = {(row["name"], row["batch"], row["tokens"]): row for row in document["candidates"]}
    found = []
    for (name, batch, tokens), row in rows.items():
        if name == new["name"]:
            was = rows[old["name"], batch, tokens]
            found.append(_row(old, new, f"batch {batch} x {tokens} tokens", turns_of(row), turns_of(was)))
    if "single_stream" in old and "single_stream" in new:
        now, was_stream = new["single_stream"], old["single_stream"]
        sizes = [each["turn_sizes"] for each in (now, was_stream)]
        times = [np.array([sum(sample[1:]) for sample in each["samples"]]) for each in (now, was_stream)]
        turns = [np.split(each, np.cumsum(size)[:-1]) for each, size in zip(times, sizes, strict=True)]
        found.append(_row(old, new, "single stream", *turns))
    return found


def turns_of(row: dict[str, Any]) -> list[Any]:
    """The samples of each turn, in ms."""
    return list(np.split(np.array(row["samples_ms"]), np.cumsum(row["turn_sizes"])[:-1]))


def _row(
    old: dict[str, Any], new: dict[str, Any], where: str, now: Sequence[Any], was: Sequence[Any]
) -> dict[str, Any]:
    ratio, low, high = process_ratio(now, was)
    return {
        "name": new["name"],
        "before": old["name"],
        "where": where,
        "ratio": round(ratio, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "slower": low > SLOWER,
    }


def speed_gates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A gate for each comparison: the upper end of the speed ratio must reach 1 / SLOWER."""
    return [
        {
            "name": f"{row['name']}, {row['where']}: speed relative to before, upper end",
            "value": round(1 / row["low"], 4),
            "needed": round(1 / SLOWER, 4),
            "passed": not row["slower"],
        }
        for row in rows
    ]


def regression_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each comparison."""
    return [
        f"{row['name']}, {row['where']}: {row['ratio']:.3f} times as long as before [{row['low']:.3f}, {row['high']:.3f}]"
        + (", slower" if row["slower"] else "")
        for row in rows
    ]
