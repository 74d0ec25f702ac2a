"""Draw the two plots of `docs/choosing.md` from what `choosing.py` wrote: test score over labels, and over distilled tokens.

    pip install matplotlib
    python benchmarks/distill/choosing_plots.py --results choosing.json [--results another.json] --out docs/images

A point is the mean over seeds, a bar reaches from the lowest seed to the highest. Labels alone have the better of their two rates on
validation. The dashed line is the teacher.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# The body that `choosing.py` names 100M, by an estimate from bytes, read 83 million tokens by count.
TOKENS = {"general": 0, "300k": 300_000, "3M": 3_000_000, "100M": 83_000_000}
INK, PAPER = "#24292f", "#ffffff"
LOOKS = {
    "labels": ("labels alone", "#8250df", "o"),
    "soft-0.9": ("soft labels of the same texts", "#0969da", "s"),
    "rest-0.9": ("soft labels, the other texts unlabelled", "#1a7f37", "^"),
}


def named(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a training from the others."""
    return tuple(row[key] for key in ("set", "body", "arm", "seed", "rate"))


def points(rows: list[dict[str, Any]], name: str, body: str, arm: str) -> list[float]:
    """Test scores of the seeds, at the rate that is best on validation with seed 0."""
    found = [row for row in rows if (row["set"], row["body"], row["arm"]) == (name, body, arm)]
    if not found:
        return []
    best = max((row for row in found if row["seed"] == 0), key=lambda row: row["validation"])
    return [row["test"] for row in found if row["rate"] == best["rate"]]


def curve(axes: Axes, places: list[float], scores: list[list[float]], label: str, colour: str, **look: Any) -> None:
    """One line through the means."""
    kept = [(place, seeds) for place, seeds in zip(places, scores, strict=True) if seeds]
    if not kept:
        return
    means = [statistics.fmean(seeds) for _, seeds in kept]
    bars = [
        [mean - min(seeds) for mean, (_, seeds) in zip(means, kept, strict=True)],
        [max(seeds) - mean for mean, (_, seeds) in zip(means, kept, strict=True)],
    ]
    axes.errorbar(
        [place for place, _ in kept], means, bars, label=label, color=colour, capsize=3, linewidth=1.6, **look
    )


def over_labels(document: dict[str, Any], axes: Axes) -> None:
    """Accuracy on clinc150 over its labelled texts; filled from the fine-tuned teacher's layers, open from new layers."""
    teachers = {row["set"]: row for row in document["teachers"] if row["set"].startswith("clinc150")}
    order = sorted(teachers, key=lambda name: teachers[name]["labelled"])
    places = [float(teachers[name]["labelled"]) for name in order]
    axes.plot(places, [teachers[name]["test"] for name in order], "--", color=INK, label="teacher", linewidth=1)
    for body, of_body, open_marker in (("tuned", "", False), ("new", ", new layers", True)):
        for arm, (label, colour, marker) in LOOKS.items():
            scores = [points(document["rows"], name, body, arm) for name in order]
            look = {"marker": marker, "linestyle": ":" if open_marker else "-"}
            curve(axes, places, scores, label + of_body, colour, **look, **({"mfc": PAPER} if open_marker else {}))
    axes.set(xscale="log", xlabel="labelled texts of clinc150 (150 classes)", ylabel="accuracy on test")
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.minorticks_off()


def over_tokens(document: dict[str, Any], axes: Axes, name: str) -> None:
    """The score of one set over the tokens that MiniLMv2 read before; the first point is the general teacher's layers."""
    teacher = next(row["test"] for row in document["teachers"] if row["set"] == name)
    axes.axhline(teacher, linestyle="--", color=INK, label="teacher", linewidth=1)
    places = [max(tokens, 30_000) for tokens in TOKENS.values()]
    for arm, (label, colour, marker) in LOOKS.items():
        curve(
            axes, places, [points(document["rows"], name, body, arm) for body in TOKENS], label, colour, marker=marker
        )
    tuned = points(document["rows"], name, "tuned", "labels")
    if tuned:
        axes.axhline(
            statistics.fmean(tuned), linestyle=":", color="#8250df", label="labels alone, fine-tuned teacher's layers"
        )
    axes.set(
        xscale="log",
        xlabel=f"tokens of plain text distilled before {name}, from general layers",
        ylabel="score on test",
    )
    axes.set_xticks(places, ["none", "300,000", "3,000,000", "83,000,000"])
    axes.minorticks_off()


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, action="append", required=True, help="the first has the teachers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", default="clinc150-10", help="of the plot over tokens")
    given = parser.parse_args()
    document, *more = (json.loads(file.read_text(encoding="utf-8")) for file in given.results)
    for other in more:
        known = {named(row) for row in document["rows"]}
        document["rows"] += [row for row in other["rows"] if named(row) not in known]
    given.out.mkdir(parents=True, exist_ok=True)
    mpl.rcParams |= {"svg.hashsalt": "choosing", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    plots = {
        "choosing-labels": over_labels,
        "choosing-tokens": lambda document, axes: over_tokens(document, axes, given.set),
    }
    for file, draw in plots.items():
        figure, axes = plt.subplots(figsize=(7.2, 5.0), facecolor=PAPER)
        draw(document, axes)
        axes.grid(color="#d0d7de", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
        figure.tight_layout()
        figure.savefig(given.out / f"{file}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
