"""The verb `load`: real texts against a running server, at one rate or at the highest that it bears."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.data.columns import Columns
from compress.data.texts import read_texts
from latency.load.generator import OUR_TEMPLATE, LoadTrial, ramp, request_bodies
from latency.load.generator import load as send
from latency.load.http_client import probe, target_of
from latency.measure.machine import machine_facts
from serve.errors import BadInput
from stillroom.console import bar

COLUMNS = ["rate/s", "p50 ms", "p90 ms", "p99 ms", "ok", "refused", "errors", "timeouts", "late p99 ms", "held"]


def load(
    url: str,
    data: Path | str,
    *,
    rate: float | None = None,
    bound_ms: float | None = None,
    queries: int | None = None,
    seconds: float | None = None,
    template: str = OUR_TEMPLATE,
    headers: Sequence[str] = (),
    connections: int = 256,
    timeout: float = 10.0,
    seed: int = 0,
    text_column: str = "",
) -> dict[str, Any]:
    """Load the server at `url` with the texts of `data`, which come whether or not earlier ones are answered.

    With `rate` one trial at so many queries a second; otherwise the highest rate whose p99 stays under `bound_ms` (50) while
    nothing is refused or fails. A trial has `seconds` (10) of arrivals, or `queries` of them. A body is `template` with a
    text for its string "TEXT"; `headers` are of the form "Name: value"; `timeout` is in seconds; `text_column` is what `data`
    calls the text. Returns the document that `stillroom load --json` prints.

    Raises:
        BadInput: the file, the template or a number cannot be used, or a first request is not answered with 2xx.
    """
    if rate is not None and bound_ms is not None:
        raise BadInput("--rate is tried as it is, and --bound-ms is searched a rate for; give one of them.")
    if queries is not None and seconds is not None:
        raise BadInput("--queries and --seconds both say how long a trial is; give one of them.")
    numbers = {
        "rate": rate, "bound-ms": bound_ms, "queries": queries, "seconds": seconds, "connections": connections,
        "timeout": timeout,
    }  # fmt: skip
    if wrong := [f"--{name} is {n:g}" for name, n in numbers.items() if n is not None and not 0 < n < math.inf]:
        raise BadInput(f"{'; '.join(wrong)}: a number above 0 is needed.")
    seconds = seconds or 10.0
    sent_headers = _headers(headers)
    target = target_of(url, sent_headers)
    texts = read_texts(Path(data), Columns(text=text_column or "text"))
    bodies = request_bodies(template, texts)
    probe(target, bodies[0], timeout)
    document: dict[str, Any] = {
        "url": url,
        "machine": machine_facts(),  # of the client, before the load
        "conditions": {
            "texts": len(texts), "template": template, "connections": connections, "timeout_s": timeout, "seed": seed,
        },
    }  # fmt: skip
    with bar("load", draws_per_s=1) as shown:  # a drawing makes queries late
        if rate is None:
            found = ramp(
                url, bodies, bound_ms=bound_ms or 50.0, seconds=seconds, queries=queries, connections=connections,
                timeout_s=timeout, headers=sent_headers, seed=seed, progress=shown,
            )  # fmt: skip
            return document | found
        tried = send(
            url, bodies, rate_per_s=rate, queries=queries or max(1, round(rate * seconds)), connections=connections,
            timeout_s=timeout, headers=sent_headers, seed=seed, progress=shown,
        )  # fmt: skip
    return document | {"rate_per_s": rate, "trials": [tried.trial()], "doubts": tried.doubts()}


def _headers(given: Sequence[str]) -> dict[str, str]:
    parted = [header.partition(":") for header in given]
    if unclear := [header for header, (_, colon, _) in zip(given, parted, strict=True) if not colon]:
        raise BadInput(f'--header {unclear[0]!r} has no colon; give one as "Name: value".')
    return {name.strip(): value.strip() for name, _, value in parted}


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
    """`document` with all raw samples as load.json in the folder `out`, and its table as table.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "load.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    lines = [COLUMNS, ["---:"] * len(COLUMNS), *rows(document["trials"])]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    doubts = "".join(f"- {doubt}\n" for doubt in document["doubts"])
    (out / "table.md").write_text(f"{sentence(document)}\n\n{table}\n{doubts}", encoding="utf-8")
