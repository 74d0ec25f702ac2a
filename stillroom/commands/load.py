"""`stillroom load`: sends real texts to a running server, at one rate or at rates up to the highest that it sustains."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compress.data.columns import columns_of
from compress.data.texts import read_texts
from compress.input_errors import Faults
from latency.load.generator import MOST_QUERIES, ramp, request_bodies
from latency.load.generator import load as send
from latency.load.http_client import Target, check_headers, probe, target_of
from latency.load.trial import LoadTrial
from latency.measure.machine import machine_facts
from serve.options import rule_faults
from stillroom.console import bar
from stillroom.inputs.out_folder import check_out_folder
from stillroom.report.formats import markdown
from stillroom.report.pages import write_text
from stillroom.verbs.load import Loading

FILES = ("load.json", "table.md")  # what `write` writes, and may replace
COLUMNS = ["rate/s", "p50 ms", "p90 ms", "p99 ms", "ok", "refused", "errors", "timeouts", "late p99 ms", "held"]


def load(url: str, settings: Loading) -> dict[str, Any]:
    """Load the server at `url` with the texts of a file, sent whether or not earlier ones are answered.

    With `rate`, one trial at that many queries a second. Without it, a search for the highest rate whose p99 stays under the
    bound while no query is refused or fails. Returns the document that `stillroom load --json` prints.

    Raises:
        BadInput: all that is wrong with the URL, the file, the template, the numbers and the folder `out`; or the first request
            is not answered with 2xx.
    """
    machine = machine_facts()  # of the client, before any work, which would count as load
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
            "connections": settings.connections, "timeout_s": settings.timeout, "headers": _headers(settings),
            "seed": settings.seed, "progress": shown,
        }  # fmt: skip
        if settings.rate is None:
            bound_ms, seconds = settings.bound_ms or 50.0, _trial_seconds(settings)
            found = ramp(url, bodies, bound_ms=bound_ms, seconds=seconds, queries=settings.queries, **how)
            return document | found
        tried = send(url, bodies, rate_per_s=settings.rate, queries=_first_queries(settings), **how)
    return document | {"rate_per_s": settings.rate, "trials": [tried.trial()], "doubts": tried.doubts()}


def _checked(url: str, settings: Loading) -> tuple[Target, list[str], list[bytes]]:
    """The target, the texts, and a request body for each. BadInput names all faults."""
    faults = Faults()
    faults.messages += _faults(settings)
    if settings.out:
        faults.check(partial(check_out_folder, Path(settings.out), FILES))
    faults.check(partial(check_headers, _headers(settings)))
    target = faults.check(partial(target_of, url))
    texts = faults.check(partial(read_texts, Path(settings.data), columns_of(settings))) or []
    bodies = faults.check(partial(request_bodies, settings.template, texts)) or []
    faults.raise_if_any()
    assert target is not None
    return target_of(url, _headers(settings)), texts, bodies


def _faults(settings: Loading) -> list[str]:
    """Which settings do not go together, a sentence each."""
    found = rule_faults(settings)
    if _first_queries(settings) > MOST_QUERIES:
        found.append(
            f"a trial would have {_first_queries(settings):,} queries; at most {MOST_QUERIES:,} are possible. Give a lower --rate, or "
            "fewer --seconds or --queries."
        )
    if unclear := [repr(header) for header in settings.headers if ":" not in header]:
        found.append(f'--header {", ".join(unclear)} has no colon; give each as "Name: value".')
    return found


def _trial_seconds(settings: Loading) -> float:
    """Seconds of arrivals in a trial without a number of queries."""
    return 10.0 if settings.seconds is None else settings.seconds


def _first_queries(settings: Loading) -> int:
    """The queries of a trial at the given rate; a lower bound where the rate is searched for."""
    return settings.queries or max(1, round((settings.rate or 0.0) * _trial_seconds(settings)))


def _headers(settings: Loading) -> dict[str, str]:
    """The headers by name."""
    parted = [header.partition(":") for header in settings.headers]
    return {name.strip(): value.strip() for name, colon, value in parted if colon}


def rows(trials: Sequence[LoadTrial]) -> list[list[str]]:
    """The cells of a table of `trials` under COLUMNS, in order of rate."""
    return [_row(trial) for trial in sorted(trials, key=lambda trial: trial["rate_per_s"])]


def _row(trial: LoadTrial) -> list[str]:
    errors = sum(trial["errors"].values())
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(trial["errors"].items()))
    return [
        f"{trial['rate_per_s']:.1f}",
        *("" if ms is None else f"{ms:.2f}" for ms in (trial["p50_ms"], trial["p90_ms"], trial["p99_ms"])),
        str(trial["ok"]),
        str(trial["refused"]),
        f"{errors} ({kinds})" if errors else "0",
        str(trial["timeouts"]),
        f"{trial['late_p99_ms']:.2f}",
        {True: "yes", False: "no", None: ""}[trial.get("held")],
    ]


def sentence(document: dict[str, Any]) -> str:
    """The result in a sentence."""
    if "bound_ms" not in document:
        (trial,) = document["trials"]
        return (
            f"{trial['answered_per_s']:.1f} answers with 2xx a second, at {trial['rate_per_s']:.1f} queries a second."
        )
    if not document["rate_per_s"]:
        return f"No rate that was tried had a p99 under {document['bound_ms']:g} ms with every query answered."
    return (
        f"The highest rate whose p99 stayed under {document['bound_ms']:g} ms, with every query answered, is "
        f"{document['rate_per_s']:.1f}/s."
    )


def write(out: Path, document: dict[str, Any]) -> None:
    """Writes `document` with all raw samples as load.json, and its table as table.md, into the folder `out`, each in one step."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "load.json", json.dumps(document, indent=1))
    table = markdown(COLUMNS, rows(document["trials"]))
    doubts = "".join(f"- {doubt}\n" for doubt in document["doubts"])
    write_text(out / "table.md", f"{sentence(document)}\n\n{table}\n{doubts}")
