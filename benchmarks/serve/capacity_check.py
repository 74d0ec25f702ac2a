"""What `stillroom capacity` predicts, beside what a server of one and of two processes does under `stillroom load`.

    python benchmarks/serve/capacity_check.py BUNDLE TEXTS [--report FOLDER] [--rounds 3] [--seconds 6] [--client-us 60] [--json F]

Without `--report` the bundle is profiled first (`--threads 1 --sweep`). Each round tries every number of processes at four shares of
the rate that is predicted to hold p99 at 50 ms, then searches the highest rate that does. Client and server share the machine, so
the client's `--client-us` of a core a request counts with the server's own. Shown: predicted and measured p50 and p99, the median of
the rounds and the extremes, and the predicted over the measured.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from running import endpoint, serving

import stillroom
from latency.analysis.service_times import ServiceTimes, service_times
from latency.measure.machine import machine_facts
from latency.measure.result_document import ProfileDocument
from stillroom.verbs.capacity import Capacity, simulated

SHARES = (0.3, 0.5, 0.7, 0.85)
BOUND_MS = 50.0


def profiled(bundle: Path, texts: Path, out: Path) -> ProfileDocument:
    """The times of the bundle's variant."""
    how = {"data": str(texts), "threads": 1, "sweep": True, "seconds": 40.0, "out": str(out)}
    return cast(ProfileDocument, stillroom.profile([bundle], **how))


def measured(url: str, texts: Path, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """One trial of a rate."""
    document = stillroom.load(url, texts, rate=rate, seconds=seconds, seed=seed)
    (trial,) = document["trials"]
    return {
        "p50_ms": trial["p50_ms"],
        "p99_ms": trial["p99_ms"],
        "late_p99_ms": trial["late_p99_ms"],
        "refused": trial["refused"],
    }


def rows(
    bundle: Path, texts: Path, times: ServiceTimes, settings: Capacity, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Predicted and measured, by processes and rate."""
    cores = machine_facts()["cores"]
    predicted = stillroom.capacity(given.report, 1000, model=times.name, p99_ms=BOUND_MS, front_us=settings.front_us)[
        "sizes"
    ]
    found: list[dict[str, Any]] = []
    for size in predicted:
        for share in SHARES:
            rate = share * size["holds_per_s"]
            at = simulated(times, size["processes"], cores, rate, settings)
            found.append({
                "processes": size["processes"], "share": share, "rate_per_s": round(rate),
                "predicted": {"p50_ms": at.percentile_ms(50), "p99_ms": at.percentile_ms(99)}, "rounds": [],
            })  # fmt: skip
        found.append({"processes": size["processes"], "predicted": {"holds_per_s": size["holds_per_s"]}, "rounds": []})
    for seed in range(given.rounds):
        for processes in {row["processes"]: None for row in found}:
            with serving([bundle], "--processes", str(processes)) as server:
                url = f"http://{server.place.host}:{server.place.port}{endpoint(bundle)}"
                measured(url, texts, 500, 1.0, seed)  # warm
                for row in (row for row in found if row["processes"] == processes):
                    if "share" in row:
                        row["rounds"].append(measured(url, texts, row["rate_per_s"], given.seconds, seed))
                    else:
                        ramp = stillroom.load(url, texts, bound_ms=BOUND_MS, seconds=given.seconds, seed=seed)
                        row["rounds"].append({"holds_per_s": ramp["rate_per_s"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--client-us", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.report is None:
            given.report = Path(folder) / "timed"
            profiled(given.bundle, given.texts, given.report)
        document = cast(ProfileDocument, json.loads((given.report / "report.json").read_text(encoding="utf-8")))
        times = service_times(document, given.model)
        settings = Capacity(rate=1000, front_us=Capacity.front_us + given.client_us)
        found = rows(given.bundle, given.texts, times, settings, given)
    for row in found:
        for name, value in row["predicted"].items():
            got = [each[name] for each in row["rounds"]]
            middle = statistics.median(got)
            where = f"{row['processes']} processes" + (f" at {row['rate_per_s']:,}/s" if "share" in row else "")
            print(
                f"{where:28} {name:12} predicted {value:9.2f}  measured {middle:9.2f} ({min(got):.2f} to {max(got):.2f})  "
                f"ratio {value / middle if middle else float('nan'):.2f}"
            )
    if given.json:
        fitted = {name: value for name, value in vars(times).items() if name != "tokens"}
        given.json.write_text(
            json.dumps({"machine": machine_facts(), "fitted": fitted, "rows": found}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
