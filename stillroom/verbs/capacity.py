"""How many cores and machines a rate of requests needs.

From the times in a report of `profile --threads 1`, by simulation: the server's own queue, under random arrivals of texts as long as
those that were timed. Nothing is measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click

from compress.settings import Seed
from serve.options import Settings, again, make, setting
from stillroom.console import result, table
from stillroom.settings import Timing
from stillroom.verb import Argument, Document, Verb


@dataclass(frozen=True, kw_only=True)
class Capacity(Settings):
    """What is asked of how many machines."""

    rate: float = setting(help="Requests a second, of one text each, that all machines together get.", above=0)
    p99_ms: float = setting(50.0, help="Milliseconds that p99 must stay within.", above=0)
    model: str = setting("", help="Name of the model in the report.", shown="that with the most texts a second")
    cores: int | None = setting(
        None,
        help="Cores of one machine, of the kind that the report is of.",
        at_least=1,
        shown="those of the report",
    )
    price_per_core_hour: float | None = again(
        Timing, "price_per_core_hour", help="Price of a core-hour in any currency; gives that of an hour and of a million texts."
    )  # fmt: skip
    headroom: float = setting(0.3, help="Share of what a machine bears that is to stay free.", at_least=0, at_most=0.9)
    front_us: float = setting(150.0, help="Microseconds of a core that a request costs beside the model.", above=0)
    queries: int = setting(
        16_000,
        help="Arrivals of each simulated rate, of which the second half counts.",
        at_least=1000,
        at_most=1_000_000,
    )
    seed: int = again(Seed, "seed", help="Seed of arrivals and of texts.", at_most=None)
    layout: ClassVar = {
        "Options": "rate p99_ms model",
        "The machines": "cores price_per_core_hour headroom",
        "The simulation": "front_us queries seed",
    }


def capacity(report: Path | str, rate: float, **settings: Any) -> dict[str, Any]:
    """How many processes, cores and machines answer `rate` texts a second, simulated from a report of `profile`.

    Settings are the fields of `Capacity`: p99_ms, cores, headroom, and so on. Returns the document that
    `stillroom capacity --json` prints.

    Raises:
        BadInput: the report or a setting cannot be used, or no rate has a p99 within the bound.
    """
    from stillroom.commands.capacity import capacity as found

    return found(report, make(Capacity, settings | {"rate": rate}, verb="capacity"))


def show_capacity(document: Document) -> None:
    """Prints a row per number of processes, then what was found and what it rests on."""
    from stillroom.commands import capacity as of

    table(
        f"{document['model']}, one machine of {document['cores_a_machine']} cores",
        of.COLUMNS,
        [of.row(size) for size in document["sizes"]],
    )
    result(of.sentence(document))
    for line in document["assumptions"]:
        result(f"It assumes {line}.")


VERB = Verb(
    "capacity",
    capacity,
    Capacity,
    help=__doc__,
    arguments=(Argument("report", "The report.json of `stillroom profile --out`, or its folder.", type=click.Path()),),
    show=show_capacity,
    examples=(
        "stillroom profile ner.bundle --data my-data \\\n      --threads 1 --sweep --out timings",
        "stillroom capacity timings --rate 10000 --p99-ms 50",
        "stillroom capacity timings --rate 10000 --cores 16 \\\n      --price-per-core-hour 0.04 --headroom 0.3",
    ),
)
