"""The settings of `stillroom load`."""

from dataclasses import dataclass
from typing import ClassVar

from compress.settings import Output, Seed, TextColumn
from serve.options import again, setting


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
        None, help="Milliseconds that p99 must stay under in the search.", above=0, shown="50"
    )
    queries: int | None = setting(None, help="Queries of each trial, in place of --seconds.", at_least=1)
    seconds: float | None = setting(None, help="Seconds of arrivals in each trial.", above=0, shown="10")
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
