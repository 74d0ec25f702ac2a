"""How many cores and machines a rate of requests needs.

From the times in a report of `profile --threads 1`, by simulation: the server's own queue, under random arrivals of texts as long as
those that were timed. Nothing is measured.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import click

from compress.settings import Seed
from latency.load.arrivals import highest_rate
from latency.measure.result_document import ProfileDocument
from serve.errors import BadInput
from serve.options import Settings, again, make, setting
from serve.settings import WORKERS_A_FRONT
from serve.wording import counted
from stillroom.console import bar, result, table
from stillroom.settings import Timing
from stillroom.verb import Argument, Document, Verb

if TYPE_CHECKING:
    from latency.analysis.service_times import ServiceTimes
    from latency.analysis.simulated_server import Simulated

COLUMNS = ["processes", "fronts", "bears, texts/s", "p50 ms", "p99 ms", "cores busy"]
LEAST_SHARE = 0.05  # of what the processes could make of single texts, where the search for a rate begins
MOST_SHARE = 16.0  # batches make more than single texts
MOST_OF_A_FRONT = 0.95  # of the time of the process that reads; beyond it requests wait for that


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
    """How many processes, cores and machines answer `rate` texts a second, simulated from the times in a report of `profile`.

    Settings are the fields of `Capacity`: p99_ms, cores, headroom, and so on. The queue is the server's own, on a clock that does not
    wait; arrivals are a Poisson process, of texts as long as those of the report. Returns the document that
    `stillroom capacity --json` prints.

    Raises:
        BadInput: the report or a setting cannot be used, or no rate has a p99 within the bound.
    """
    from latency.analysis.service_times import service_times

    asked = make(Capacity, settings | {"rate": rate}, verb="capacity")
    document = _report(Path(report))
    times = service_times(document, asked.model)
    cores = asked.cores or document["machine"]["cores"]
    sizes = []
    with bar("capacity") as shown:
        for processes in _sizes(cores):
            sizes.append(_size(times, processes, cores, asked))
            shown(len(sizes), len(_sizes(cores)), f"{processes} processes")
    most = max(sizes, key=lambda size: size["holds_per_s"])
    if not most["holds_per_s"]:
        raise BadInput(
            f"--p99-ms is {asked.p99_ms:g}, and at any rate p99 is above it: one text alone takes {1e3 * times.alone_s():.1f} ms of the "
            "model in the mean. Give a longer time, or a smaller student."
        )
    each = most["holds_per_s"] * (1 - asked.headroom)
    machines = math.ceil(asked.rate / each)
    own = simulated(times, most["processes"], cores, asked.rate / machines, asked)
    found = {
        "rate_per_s": asked.rate,
        "bound_ms": asked.p99_ms,
        "model": times.name,
        "runtime": times.runtime,
        "machine": document["machine"],
        "cores_a_machine": cores,
        "sizes": sizes,
        "processes_a_machine": most["processes"],
        "machines": machines,
        "cores": machines * cores,
        "one_lost": machines + 1,
        "p50_ms": round(own.percentile_ms(50), 3),
        "p99_ms": round(own.percentile_ms(99), 3),
        "processes_busy": round(own.busy, 3),
        "fitted": {
            "call_us": round(1e6 * times.call_s, 2), "token_us": round(1e6 * times.token_s, 3),
            "token_squared_ns": round(1e9 * times.square_s, 3), "text_us": round(1e6 * times.text_s, 2),
            "text_token_us": round(1e6 * times.text_token_s, 3), "all_cores_slower": times.crowded and round(times.crowded, 3),
            "median_error": round(times.error, 4),
        },
        "assumptions": _assumptions(document, times, asked, cores),
    }  # fmt: skip
    if asked.price_per_core_hour is not None:
        found["price_per_hour"] = round(machines * cores * asked.price_per_core_hour, 6)
        found["price_per_million"] = round(found["price_per_hour"] / (asked.rate * 3600) * 1e6, 6)
    return found


def simulated(times: "ServiceTimes", processes: int, cores: int, rate_per_s: float, settings: Capacity) -> "Simulated":
    """A machine with so many processes at this rate. Of several fronts, each with its share of all, one is simulated."""
    from latency.analysis.simulated_server import Machine, simulate

    of_one, its_cores = _front(processes, cores)
    one = Machine(of_one, its_cores, front_s=settings.front_us / 1e6)
    return simulate(times, times.tokens, one, rate_per_s * of_one / processes, settings.queries, settings.seed)


def _fronts(processes: int) -> int:
    return -(-processes // WORKERS_A_FRONT)


def _front(processes: int, cores: int) -> tuple[int, int]:
    """The processes and the cores of one front; of unequal ones that with the fewest."""
    of_one = processes // _fronts(processes)
    return of_one, max(1, cores * of_one // processes)


def _size(times: "ServiceTimes", processes: int, cores: int, settings: Capacity) -> dict[str, Any]:
    """What so many processes of one machine bear."""
    of_one, its_cores = _front(processes, cores)
    rate = processes / of_one * _borne(times, of_one, its_cores, settings)
    row: dict[str, Any] = {"processes": processes, "fronts": _fronts(processes), "holds_per_s": round(rate, 1)}
    if rate:
        at = simulated(times, processes, cores, rate, settings)
        row |= {
            "p50_ms": round(at.percentile_ms(50), 3),
            "p99_ms": round(at.percentile_ms(99), 3),
            "cores_busy": round(processes / of_one * (of_one * at.busy + at.front_busy), 2),
        }
    return row


@cache
def _borne(times: "ServiceTimes", processes: int, cores: int, settings: Capacity) -> float:
    """The highest rate of one front with its processes and cores."""

    @cache  # the search asks twice about a rate that fails, and the same seed gives the same answer
    def holds(rate: float) -> bool:
        tried = simulated(times, processes, cores, rate, settings)
        return tried.percentile_ms(99) <= settings.p99_ms and not tried.refused

    alone_per_s = processes / times.alone_s()
    most = min(alone_per_s * MOST_SHARE, MOST_OF_A_FRONT * 1e6 / settings.front_us)
    return highest_rate(holds, min(LEAST_SHARE * alone_per_s, most), most, tolerance=0.02)


def _sizes(cores: int) -> list[int]:
    """1, 2, 4, ... processes, and one for each core."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power < cores} | {cores})


def _report(path: Path) -> ProfileDocument:
    file = path / "report.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"REPORT {path} cannot be read ({error.strerror}); give the report.json that `stillroom profile --out` writes, or its folder."
        ) from None
    except ValueError as error:
        raise BadInput(
            f"REPORT {file} is not JSON ({error}); give the report.json that `stillroom profile --out` writes."
        ) from None
    document = (
        document.get("latency", document) if isinstance(document, dict) else {}
    )  # a report of `run` has it as a part
    if not {"machine", "candidates", "models"} <= set(document):
        raise BadInput(
            f"REPORT {file} is no report of `stillroom profile`; give the report.json that `stillroom profile --out` writes."
        )
    return cast(ProfileDocument, document)


def _assumptions(document: ProfileDocument, times: "ServiceTimes", settings: Capacity, cores: int) -> list[str]:
    tokens = sorted(times.tokens)
    found = [
        f"texts like those of the report: {tokens[len(tokens) // 2]} tokens in the median, {tokens[-1]} at most",
        f"a Poisson process of requests of one text, {settings.front_us:g} us of a core a request beside the model",
        "no other program on the machines, and clients on others",
    ]
    if cores != document["machine"]["cores"]:
        found.append(
            f"{cores} cores as fast as the {document['machine']['cores']} that were measured; caches and memory that more cores share are "
            "not in the figure"
        )
    if times.crowded is None and document["machine"]["cores"] > 1:
        found.append("a core as fast when all compute as alone: `profile --sweep` measures how much slower it is")
    return found


def show_capacity(document: Document) -> None:
    """Prints a row per number of processes, then what was found and what it rests on."""
    rows = []
    for size in document["sizes"]:
        cells = ["none", "", "", ""]
        if rate := size["holds_per_s"]:
            cells = [f"{rate:,.0f}", f"{size['p50_ms']:.2f}", f"{size['p99_ms']:.2f}", f"{size['cores_busy']:.1f}"]
        rows.append([str(size["processes"]), str(size["fronts"]), *cells])
    table(f"{document['model']}, one machine of {document['cores_a_machine']} cores", COLUMNS, rows)
    result(sentence(document))
    for line in document["assumptions"]:
        result(f"It assumes {line}.")


def sentence(document: dict[str, Any]) -> str:
    """The result in a sentence."""
    machines = counted(document["machines"], "machine")
    cores = counted(document["cores_a_machine"], "core")
    price = ""
    if "price_per_hour" in document:
        price = f", for {document['price_per_hour']:g} an hour or {document['price_per_million']:g} a million texts"
    need = f"{document['rate_per_s']:g} texts a second within {document['bound_ms']:g} ms at p99 need {machines} of {cores}"
    reached = f"p50 {document['p50_ms']:.1f} ms, p99 {document['p99_ms']:.1f} ms{price}"
    return f"{need} with {document['model']}: {reached}. {document['one_lost']} bear the loss of one."


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
