"""Load a running server, of stillroom or another, as many users do.

Queries are sent at their times, whether or not earlier ones are answered.

Latency counts from the time at which a query was due. Without --rate, it searches for the highest rate whose p99 stays
under --bound-ms while no query is refused, fails or times out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compress.settings import Output, Seed, TextColumn
from serve.options import again, make, setting
from stillroom.console import result, table
from stillroom.verb import Argument, Document, Verb


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

    Settings are the fields of `Loading`: rate, bound_ms, seconds, and so on. Returns the document that
    `stillroom load --json` prints.

    Raises:
        BadInput: the URL, the file or a setting cannot be used, or a first request is not answered with 2xx.
    """
    from stillroom.commands.load import load as load_server
    from stillroom.commands.load import write

    chosen = make(Loading, settings | {"data": data}, verb="load")
    document = load_server(url, chosen)
    if chosen.out:
        write(Path(chosen.out), document)
    return document


def show_load(document: Document) -> None:
    """Prints a row per trial, then what was found."""
    from stillroom.commands import load as loading

    table(document["url"], loading.COLUMNS, loading.rows(document["trials"]))
    for line in (loading.sentence(document), *document["doubts"]):
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
