"""The settings of `stillroom load`."""

from dataclasses import dataclass

from compress.settings import TextColumn
from serve.options import check, setting

WHAT, SEARCH, CLIENT = "What to send", "Rate and duration", "Client"


@dataclass(frozen=True, kw_only=True)
class Loading(TextColumn):
    """What is sent to a running server, and how often."""

    data: str = setting(help="A file of text like that of real queries.", metavar="FILE", panel=WHAT)
    template: str = setting(
        '{"text": "TEXT"}',
        help="JSON of a request, in which the string TEXT stands for a text.",
        metavar="JSON",
        panel=WHAT,
    )
    headers: tuple[str, ...] = setting((), help='"Name: value".', flag="--header", panel=WHAT)
    out: str = setting(
        "", help="Folder for load.json, with all raw samples, and table.md.", metavar="FOLDER", panel=WHAT
    )
    rate: float | None = setting(
        None, help="Queries a second.", above=0, shown="the highest is searched for", panel=SEARCH
    )
    bound_ms: float | None = setting(
        None, help="Milliseconds that p99 must stay under in the search.", above=0, shown="50", panel=SEARCH
    )
    queries: int | None = setting(None, help="Queries of each trial, in place of --seconds.", at_least=1, panel=SEARCH)
    seconds: float | None = setting(None, help="Seconds of arrivals in each trial.", above=0, shown="10", panel=SEARCH)
    connections: int = setting(
        256, help="Most open at once; a wait for one counts as latency.", at_least=1, at_most=60_000, panel=CLIENT
    )
    timeout: float = setting(10.0, help="Seconds after which a query is given up.", above=0, panel=CLIENT)
    seed: int = setting(0, help="Seed of the arrival times and of the order of the texts.", at_least=0, panel=CLIENT)

    def __post_init__(self) -> None:
        check(self)
