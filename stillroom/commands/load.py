"""The verb `load`: real texts against a running server, at one rate or at the highest that it bears."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compress.data.examples import read_texts
from compress.input_errors import Faults
from latency.load.generator import MOST_QUERIES, OUR_TEMPLATE, ramp, request_bodies
from latency.load.generator import load as send
from latency.load.http_client import Target, check_headers, probe, target_of
from latency.load.trial import LoadTrial
from latency.measure.machine import machine_facts
from stillroom.console import bar
from stillroom.report.run_page import write_page

COLUMNS = ["rate/s", "p50 ms", "p90 ms", "p99 ms", "ok", "refused", "errors", "timeouts", "late p99 ms", "held"]
MOST_CONNECTIONS = 60_000  # about as many ports as one address has


@dataclass(frozen=True)
class Loading:
    """The settings of `stillroom load`."""

    data: str
    """A file of texts, as real queries are."""
    rate: float | None = None
    """Queries a second; without it the highest is searched for."""
    bound_ms: float | None = None
    """What p99 is to stay under while the highest rate is searched for; 50 unless given."""
    queries: int | None = None
    """Of each trial, in place of `seconds`."""
    seconds: float | None = None
    """Of arrivals, each trial; 10 unless given."""
    template: str = OUR_TEMPLATE
    """JSON of a request, in which the string TEXT stands for a text."""
    headers: tuple[str, ...] = ()
    """Each of the form "Name: value"."""
    connections: int = 256
    """Open at once at most; queries beyond wait, which counts."""
    timeout: float = 10.0
    """Seconds after which a query is given up."""
    seed: int = 0
    """Fixes the moments of arrival and the order of the texts."""

    def faults(self) -> list[str]:
        """What is wrong with the settings themselves, a sentence each."""
        found = []
        if self.rate is not None and self.bound_ms is not None:
            found.append("--rate is tried as it is, and --bound-ms is searched a rate for; give one of them.")
        if self.queries is not None and self.seconds is not None:
            found.append("--queries and --seconds both say how long a trial is; give one of them.")
        numbers = {
            "rate": self.rate, "bound-ms": self.bound_ms, "queries": self.queries, "seconds": self.seconds,
            "connections": self.connections, "timeout": self.timeout,
        }  # fmt: skip
        wrong = {name: n for name, n in numbers.items() if n is not None and not 0 < n < math.inf}
        found += [f"--{name} is {n:g}; a number above 0 is needed." for name, n in wrong.items()]
        if self.connections > MOST_CONNECTIONS:
            found.append(f"--connections is {self.connections:,}; {MOST_CONNECTIONS:,} at most can be open.")
        if self.seed < 0:
            found.append(f"--seed is {self.seed}; 0 or more is needed.")
        if not wrong.keys() & {"rate", "queries", "seconds"} and self.first_queries > MOST_QUERIES:
            found.append(
                f"a trial would have {self.first_queries:,} queries; {MOST_QUERIES:,} at most are kept. Give a lower --rate, or a "
                "shorter trial."
            )
        if unclear := [repr(header) for header in self.headers if ":" not in header]:
            found.append(f'--header {", ".join(unclear)} has no colon; give each as "Name: value".')
        return found

    @property
    def trial_seconds(self) -> float:
        """Of arrivals, of a trial that is not of so many queries."""
        return 10.0 if self.seconds is None else self.seconds

    @property
    def first_queries(self) -> int:
        """How many queries are known to be sent: those of a trial at `rate`."""
        return self.queries or max(1, round((self.rate or 0.0) * self.trial_seconds))

    @property
    def sent_headers(self) -> dict[str, str]:
        """`headers` by name."""
        parted = [header.partition(":") for header in self.headers]
        return {name.strip(): value.strip() for name, colon, value in parted if colon}


def load(url: str, settings: Loading) -> dict[str, Any]:
    """Load the server at `url` with the texts of a file, which come whether or not earlier ones are answered.

    With a rate one trial at so many queries a second; otherwise the highest rate whose p99 stays under the bound while
    nothing is refused or fails. Returns the document that `stillroom load --json` prints.

    Raises:
        BadInput: the URL, the file, the template or numbers cannot be used, all of it in one message; or a first request is
            not answered with 2xx.
    """
    machine = machine_facts()  # of the client, before any work of ours
    target, texts, bodies = _checked(url, settings)
    probe(target, bodies[0], settings.timeout)
    document: dict[str, Any] = {
        "url": url,
        "machine": machine,
        "conditions": {
            "texts": len(texts), "template": settings.template, "connections": settings.connections,
            "timeout_s": settings.timeout, "seed": settings.seed,
        },
    }  # fmt: skip
    with bar("load", draws_per_s=1) as shown:  # a drawing makes queries late
        how: dict[str, Any] = {
            "connections": settings.connections, "timeout_s": settings.timeout, "headers": settings.sent_headers,
            "seed": settings.seed, "progress": shown,
        }  # fmt: skip
        if settings.rate is None:
            bound_ms, seconds = settings.bound_ms or 50.0, settings.trial_seconds
            found = ramp(url, bodies, bound_ms=bound_ms, seconds=seconds, queries=settings.queries, **how)
            return document | found
        tried = send(url, bodies, rate_per_s=settings.rate, queries=settings.first_queries, **how)
    return document | {"rate_per_s": settings.rate, "trials": [tried.trial()], "doubts": tried.doubts()}


def _checked(url: str, settings: Loading) -> tuple[Target, list[str], list[bytes]]:
    """Where the load goes, its texts, and a request for each. BadInput names all that is wrong."""
    faults = Faults()
    faults.messages += settings.faults()
    faults.check(partial(check_headers, settings.sent_headers))
    target = faults.check(partial(target_of, url))
    texts = faults.check(partial(read_texts, Path(settings.data))) or []
    bodies = faults.check(partial(request_bodies, settings.template, texts)) or []
    faults.raise_if_any()
    assert target is not None
    return target_of(url, settings.sent_headers), texts, bodies


def rows(trials: Sequence[LoadTrial]) -> list[list[str]]:
    """The cells of a table of `trials` under COLUMNS, by rate."""
    return [_row(trial) for trial in sorted(trials, key=lambda trial: trial["rate_per_s"])]


def _row(trial: LoadTrial) -> list[str]:
    errors = sum(trial["errors"].values())
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(trial["errors"].items()))
    return [
        f"{trial['rate_per_s']:.1f}",
        *("none" if ms is None else f"{ms:.2f}" for ms in (trial["p50_ms"], trial["p90_ms"], trial["p99_ms"])),
        str(trial["ok"]),
        str(trial["refused"]),
        f"{errors} ({kinds})" if errors else "0",
        str(trial["timeouts"]),
        f"{trial['late_p99_ms']:.2f}",
        {True: "yes", False: "no", None: ""}[trial.get("held")],
    ]


def sentence(document: dict[str, Any]) -> str:
    """What was found, in words."""
    if "bound_ms" not in document:
        (trial,) = document["trials"]
        return f"{trial['answered_per_s']:.1f} ok answers a second, of {trial['rate_per_s']:.1f} queries a second."
    if not document["rate_per_s"]:
        return f"No rate that was tried kept its p99 under {document['bound_ms']:g} ms with every query answered."
    return (
        f"The highest rate whose p99 stayed under {document['bound_ms']:g} ms, with every query answered, is "
        f"{document['rate_per_s']:.1f}/s."
    )


def write(out: Path, document: dict[str, Any]) -> None:
    """`document` with all raw samples as load.json in the folder `out`, and its table as table.md, each in one step."""
    out.mkdir(parents=True, exist_ok=True)
    write_page(out / "load.json", json.dumps(document, indent=1))
    lines = [COLUMNS, ["---:"] * len(COLUMNS), *rows(document["trials"])]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    doubts = "".join(f"- {doubt}\n" for doubt in document["doubts"])
    write_page(out / "table.md", f"{sentence(document)}\n\n{table}\n{doubts}")
