"""The settings of `stillroom capacity`."""

from dataclasses import dataclass
from typing import ClassVar

from compress.settings import Seed
from serve.options import Settings, again, setting


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
    price_per_core_hour: float | None = setting(
        None,
        help="Price of a core-hour in any currency; gives that of an hour and of a million texts.",
        above=0,
    )
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
