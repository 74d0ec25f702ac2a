"""Which sampler of `stillroom search` finds better students in as many trials: optuna's, the controller, or chance.

    python benchmarks/distill/samplers.py --search benchmarks/results/search_conll2000_2026-11-27.json --out samplers.json

Nothing is trained. The score of a shape is a smooth function fitted to the students that the search trained, one for the teacher's width,
where layers are copied, and one for narrower students; plus noise, drawn anew for each seed. Regret is the best score of all shapes that
meet the budget less the best that was tried. `first` takes half of the trials from the shapes that a search tries before it asks a
sampler, as it does; `alone` asks the sampler from the first trial on; `narrow` does so among students with new layers.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.evaluation.metrics import Score
from compress.models.shapes import Shape, shape_of
from latency.analysis.latency_model import LatencyModel
from latency.measure.machine import machine_facts
from stillroom.student_search.space import Space
from stillroom.student_search.trials import Trial, first_shapes, suggested

NOISE = 0.005  # by about half a point one training differs from the next (docs/measurements/accuracy.md)
AT = (4, 8, 12, 16, 24)
SAMPLERS = ("tpe", "controller", "chance")


def features(shape: Shape) -> list[float]:
    """What a score is a linear function of."""
    return [1.0, *np.log([shape.layers, shape.hidden, shape.ffn])]


def smooth_scores(
    trained: dict[Shape, float], shapes: Sequence[Shape], wide: int
) -> tuple[dict[Shape, float], dict[str, float]]:
    """A score for each of `shapes`, fitted to those that were trained, and the root mean square of what the fits miss."""
    found, missed = {}, {}
    for name, of in (("wide", True), ("narrow", False)):
        known = [shape for shape in trained if (shape.hidden == wide) is of]
        x, y = np.array([features(shape) for shape in known]), np.array([trained[shape] for shape in known])
        weights = np.linalg.lstsq(x, y, rcond=None)[0]
        missed[name] = float(np.sqrt(np.mean((x @ weights - y) ** 2)))
        found |= {shape: float(np.dot(features(shape), weights)) for shape in shapes if (shape.hidden == wide) is of}
    return found, missed


def by_chance(fitting: list[Shape], found: dict[Shape, Trial], first: list[Shape], seed: int) -> Iterator[Shape]:
    """The `first`, then the others in any order."""
    yield from first
    order = np.random.default_rng(seed).permutation(len(fitting))
    yield from (fitting[i] for i in order if fitting[i] not in found)


def best_after(
    sampler: Any,
    space: Space,
    fitting: list[Shape],
    scores: dict[Shape, float],
    latency: LatencyModel,
    budget_ms: float,
    *,
    first: list[Shape],
    seed: int,
) -> list[float]:
    """The best score after each trial."""  # fmt: skip
    found: dict[Shape, Trial] = {}
    shapes = (
        by_chance(fitting, found, first, seed)
        if sampler == "chance"
        else suggested(
            sampler, space, fitting, found, seed=seed, first=first, predicted_ms=latency.p50_ms, budget_ms=budget_ms
        )
    )
    best: list[float] = []
    for shape in shapes:
        value = scores[shape]
        found[shape] = Trial(shape, Score(value, value, value), np.zeros((1, 3)), 0.0)
        best.append(max([value, *best[-1:]]))
        if len(best) == max(AT):
            break
    return best


def main() -> None:
    """Simulate and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--search", type=Path, required=True)
    reader.add_argument("--seeds", type=int, default=100)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    search = json.loads(given.search.read_text(encoding="utf-8"))["search"]
    costs, space = search["latency_model"], Space(shape_of("6x384"))
    latency, budget_ms = LatencyModel(costs["ms_by_operator"], costs["p99_over_p50"]), search["budget_ms"]
    fitting = [shape for shape in space.shapes() if latency.p50_ms(shape) <= budget_ms]
    trained = {shape_of(row["student"]): row["validation"]["value"] for row in search["trials"]}
    smooth, missed = smooth_scores(trained, fitting, space.teacher.hidden)
    narrow = [shape for shape in fitting if shape.hidden < space.teacher.hidden]
    # Half of 16 trials, as in that search, is more than these are.
    settings = {"first": (fitting, first_shapes(space, fitting)), "alone": (fitting, []), "narrow": (narrow, [])}
    rows = []
    for name, (shapes, first) in settings.items():
        regrets: dict[str, list[list[float]]] = {sampler: [] for sampler in SAMPLERS}
        for seed in range(given.seeds):
            noise = np.random.default_rng(10_000 + seed).normal(0, NOISE, len(shapes))
            scores = {shape: smooth[shape] + float(apart) for shape, apart in zip(shapes, noise, strict=True)}
            for sampler in SAMPLERS:
                best = best_after(sampler, space, shapes, scores, latency, budget_ms, first=first, seed=seed)
                regrets[sampler].append([max(scores.values()) - best[n - 1] for n in AT])
        for sampler, several in regrets.items():
            values = np.array(several)
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            against = values - np.array(regrets["tpe"])
            paired = against.std(axis=0, ddof=1) / np.sqrt(len(values))
            rows.append({
                "setting": name, "sampler": sampler, "shapes": len(shapes), "first": len(first), "trials": list(AT),
                "regret": values.mean(axis=0).tolist(), "standard_error": error.tolist(),
                "minus_tpe": against.mean(axis=0).tolist(), "minus_tpe_error": paired.tolist(),
            })  # fmt: skip
            print(name, sampler, [f"{value:.4f}" for value in rows[-1]["regret"]], flush=True)
    document = {"machine": machine_facts(), "seeds": given.seeds, "noise": NOISE, "fit_missed": missed, "rows": rows}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
