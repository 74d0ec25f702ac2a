"""Load a running server, of stillroom or another, as many users do.

Queries are sent at their times, whether or not earlier ones are answered.

Latency counts from the time at which a query was due. Without --rate, it searches for the highest rate whose p99 stays
under --bound-ms while no query is refused, fails or times out.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.data.columns import columns_of
from compress.data.texts import read_texts
from compress.input_errors import Faults
from compress.settings import Output, Seed, TextColumn
from latency.measure.machine import machine_facts
from serve.options import again, make, rule_faults, setting
from stillroom.console import bar, result, table
from stillroom.inputs.folders import check_out_folder
from stillroom.report.formats import markdown
from stillroom.report.pages import write_text
from stillroom.verb import Argument, Document, Verb

if TYPE_CHECKING:
    from latency.load.http_client import Target

FILES = ("load.json", "table.md")  # in --out
COLUMNS = ["rate/s", "p50 ms", "p90 ms", "p99 ms", "ok", "refused", "errors", "timeouts", "late p99 ms", "held"]


@dataclass(frozen=True, kw_only=True)
class Loading(TextColumn):
    """What is sent to a running server, and how often."""

    data: str = setting(help="A file of text like that of real queries.", metavar="FILE")
    template: str = setting(
        '{"text": "TEXT"}',
        help="JSON of a request, in which the string TEXT stands for a text.",
        metavar="JSON",
    )
    headers: tuple[str, ...] = setting((), help='"Name: value".', flag="--header")
    out: str = again(Output, "out", "", help="Folder for load.json, with all raw samples, and table.md.")
    rate: float | None = setting(None, help="Queries a second.", above=0, shown="the highest is searched for")
    bound_ms: float | None = setting(
        None, help="Milliseconds that p99 must stay under in the search.", above=0, shown="50", excludes="rate"
    )
    queries: int | None = setting(None, help="Queries of each trial, in place of --seconds.", at_least=1)
    seconds: float | None = setting(
        None, help="Seconds of arrivals in each trial.", above=0, shown="10", excludes="queries"
    )
    connections: int = setting(
        256, help="Most open at once; a wait for one counts as latency.", at_least=1, at_most=60_000
    )
    timeout: float = setting(10.0, help="Seconds after which a query is given up.", above=0)
    seed: int = again(Seed, "seed", help="Seed of the arrival times and of the order of the texts.", at_most=None)
    layout: ClassVar = {
        "What to send": "data template headers out",
        "Rate and duration": "rate bound_ms queries seconds",
        "Client": "connections timeout seed",
    }


def load(url: str, data: Path | str, **settings: Any) -> dict[str, Any]:
    """Load a running server with the texts of the file `data`, at one rate or at rates up to the highest that it sustains.

    Settings are the fields of `Loading`: rate, bound_ms, seconds, and so on. Texts are sent whether or not earlier ones are answered.
    With `rate` there is one trial at that many queries a second; without it a search for the highest rate whose p99 stays under the
    bound while no query is refused or fails. Returns the document that `stillroom load --json` prints.

    Raises:
        BadInput: all that is wrong with the URL, the file, the template, the numbers and the folder `out`; or a first request is not
            answered with 2xx.
    """
    from latency.load.generator import load as send
    from latency.load.generator import ramp
    from latency.load.http_client import probe

    asked = make(Loading, settings | {"data": data}, verb="load")
    machine = machine_facts()  # of the client, before any work, which would count as load
    headers = {
        name.strip(): value.strip() for name, colon, value in (each.partition(":") for each in asked.headers) if colon
    }
    seconds = 10.0 if asked.seconds is None else asked.seconds
    queries = asked.queries or max(
        1, round((asked.rate or 0.0) * seconds)
    )  # a lower bound where the rate is searched for
    target, bodies = _checked(url, asked, headers, queries)
    probe(target, bodies[0], asked.timeout)
    document: dict[str, Any] = {
        "url": url,
        "machine": machine,
        "conditions": {
            "texts": len(bodies), "template": asked.template, "connections": asked.connections, "timeout_s": asked.timeout,
            "seed": asked.seed,
        },
    }  # fmt: skip
    with bar("load", draws_per_s=1) as shown:  # a drawing makes queries late
        how: dict[str, Any] = {
            "connections": asked.connections, "timeout_s": asked.timeout, "headers": headers, "seed": asked.seed, "progress": shown,
        }  # fmt: skip
        if asked.rate is None:
            bound_ms = asked.bound_ms or 50.0
            document |= ramp(url, bodies, bound_ms=bound_ms, seconds=seconds, queries=asked.queries, **how)
        else:
            tried = send(url, bodies, rate_per_s=asked.rate, queries=queries, **how)
            document |= {"rate_per_s": asked.rate, "trials": [tried.trial()], "doubts": tried.doubts()}
    if asked.out:
        _write(Path(asked.out), document)
    return document


def _checked(url: str, asked: Loading, headers: dict[str, str], queries: int) -> "tuple[Target, list[bytes]]":
    """The target, and a request body for each text. BadInput names all faults."""
    from latency.load.generator import MOST_QUERIES, request_bodies
    from latency.load.http_client import check_headers, target_of

    faults = Faults()
    faults.messages += rule_faults(asked)
    if queries > MOST_QUERIES:
        faults.messages.append(
            f"a trial would have {queries:,} queries; at most {MOST_QUERIES:,} are possible. Give a lower --rate, or fewer --seconds or "
            "--queries."
        )
    if unclear := [repr(header) for header in asked.headers if ":" not in header]:
        faults.messages.append(f'--header {", ".join(unclear)} has no colon; give each as "Name: value".')
    if asked.out:
        faults.check(partial(check_out_folder, asked.out, FILES))
    faults.check(partial(check_headers, headers))
    faults.check(partial(target_of, url))
    texts = faults.check(partial(read_texts, Path(asked.data), columns_of(asked))) or []
    bodies = faults.check(partial(request_bodies, asked.template, texts)) or []
    faults.raise_if_any()
    return target_of(url, headers), bodies


def _rows(trials: list[dict[str, Any]]) -> list[list[str]]:
    """The cells of a table of `trials` under COLUMNS, in order of rate."""
    rows = []
    for trial in sorted(trials, key=lambda trial: trial["rate_per_s"]):
        errors = sum(trial["errors"].values())
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(trial["errors"].items()))
        rows.append(
            [
                f"{trial['rate_per_s']:.1f}",
                *("" if ms is None else f"{ms:.2f}" for ms in (trial["p50_ms"], trial["p90_ms"], trial["p99_ms"])),
                str(trial["ok"]),
                str(trial["refused"]),
                f"{errors} ({kinds})" if errors else "0",
                str(trial["timeouts"]),
                f"{trial['late_p99_ms']:.2f}",
                {True: "yes", False: "no", None: ""}[trial.get("held")],
            ]
        )
    return rows


def _sentence(document: dict[str, Any]) -> str:
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


def _write(out: Path, document: dict[str, Any]) -> None:
    """Writes `document` with all raw samples as load.json, and its table as table.md, into the folder `out`, each in one step."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "load.json", json.dumps(document, indent=1))
    made = markdown(COLUMNS, _rows(document["trials"]))
    doubts = "".join(f"- {doubt}\n" for doubt in document["doubts"])
    write_text(out / "table.md", f"{_sentence(document)}\n\n{made}\n{doubts}")


def show_load(document: Document) -> None:
    """Prints a row per trial, then what was found."""
    table(document["url"], COLUMNS, _rows(document["trials"]))
    for line in (_sentence(document), *document["doubts"]):
        result(line)


VERB = Verb(
    "load",
    load,
    Loading,
    help=__doc__,
    arguments=(Argument("url", "Where the server takes a text by POST, http or https."),),
    show=show_load,
    examples=(
        "stillroom load http://127.0.0.1:8000/v1/entities \\\n      --data my-data/test.jsonl --rate 200",
        "stillroom load http://127.0.0.1:8000/v1/entities \\\n      --data my-data/test.jsonl --bound-ms 50",
        "stillroom load https://example.com/classify --data texts.txt \\\n"
        '      --template \'{"input": ["TEXT"]}\' --header "X-Api-Key: K"',
    ),
)
