"""The tables that end a run: scores, sizes and latency."""

from pathlib import Path
from typing import Any

from stillroom.console import result, table
from stillroom.report.doubts import doubts
from stillroom.report.latency_table import PAIRED
from stillroom.verbs.run.report import read_json


def show_result(out: Path) -> None:
    """Prints the tables that end a run."""
    report = read_json(out / "report.json")
    rows = []
    first = report["summary"][0]
    teacher = first["metric"] if first["name"] == "teacher" else 0
    for row in report["summary"]:
        share = f"{row['metric'] / teacher:.3f}" if teacher else ""
        size = f"{row['size_bytes'] / 1e6:.1f}" if row["size_bytes"] is not None else ""
        rows.append([row["name"], f"{row['metric']:.4f}", f"{row['low']:.4f} .. {row['high']:.4f}", share, size])
    table(report["metric_name"], ["model", "value", "95 % interval", "of teacher", "MB"], rows)
    latency = report["latency"]
    ratios = {(r["b"], r["batch"], r["tokens"]): r for r in latency["ratios"]}
    lines = []
    for row in latency["candidates"]:
        found = ratios.get((row["name"], row["batch"], row["tokens"]))
        times = f"{found['ratio']:.1f}x [{found['low']:.1f}, {found['high']:.1f}]" if found else "1"
        cells = [
            row["name"],
            f"{row['batch']} x {row['tokens']}",
            *(f"{row[k]:.2f}" for k in ("p50_ms", "p90_ms", "p99_ms")),
        ]
        lines.append([*cells, f"{row['texts_per_s']:.0f}", times])
    machine = latency["machine"]
    baseline = latency["candidates"][0]["name"].partition(" ")[0]  # teacher, or without a model as teacher the student
    table(
        f"latency on {machine['cpu']}, {machine['cores']} cores",
        [
            "model",
            "texts x tokens",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "texts/s",
            f"against torch {baseline}",
        ],
        lines,
    )
    result(PAIRED)
    if found := doubts(latency):
        result(found.sentence)
    for claim in report["claims"]:
        result(claim)


def show_plan(plan: dict[str, Any]) -> None:
    """Prints the stages with their steps and minutes; `plan` is a `time_budget.Plan` as a dictionary."""
    steps = {
        "teacher": plan["teacher_steps"],
        "undistilled": plan["student_steps"],
        "student": plan["student_steps"],
    }
    rows = [
        [name, str(steps.get(name, "")), f"{seconds / 60:.1f}"] for name, seconds in plan["seconds"].items() if seconds
    ]
    table("plan, from a few timed steps; nothing was trained", ["stage", "steps", "minutes"], rows)
    result(f"About {plan['minutes']:.0f} minutes and {plan['memory_bytes'] / 2**30:.1f} GiB of memory.")
