"""The metrics of all front processes in one answer: each front gives its own to the others, over a socket in a folder that they share."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve.observe.metrics import Metrics

# How long the metrics of another front are waited for.
ASK_S = 1.0


class FrontMetrics:
    """The metrics of front `number` of `fronts`, and through `folder` those of the others.

    Every series has the label `front`: a front that was replaced begins again at zero, which a sum over fronts would hide.
    """

    def __init__(self, metrics: Metrics, folder: Path, number: int, fronts: int) -> None:
        self._metrics = metrics
        self._folder = folder
        self._number = number
        self._fronts = fronts

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Within this context the other fronts can ask for the metrics of this one."""

        async def answer(_: asyncio.StreamReader, asking: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                asking.write(self._metrics.text())
                await asking.drain()
            asking.close()

        place = self._place(self._number)
        place.unlink(missing_ok=True)  # of a front that died
        async with await asyncio.start_unix_server(answer, place):
            yield

    async def text(self) -> bytes:
        """All metrics in Prometheus's text format; without those of a front that does not answer."""
        texts = await asyncio.gather(*(self._of(number) for number in range(self._fronts)))
        return generate_latest(_Together(merged(texts)))

    async def _of(self, number: int) -> str:
        if number == self._number:
            return self._metrics.text().decode()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._place(number))
                try:
                    return (await reader.read()).decode()
                finally:
                    writer.close()
        return ""

    def _place(self, number: int) -> Path:
        return self._folder / f"metrics-{number}"


class _Together:
    """What `generate_latest` reads."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """The families."""
        return iter(self._families)


def merged(texts: Iterable[str]) -> list[Metric]:
    """The families of several texts in Prometheus's format, the samples of each text with its number in the label `front`."""
    families: dict[str, Metric] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                kept.samples.append(sample._replace(labels={**sample.labels, "front": str(number)}))
    return list(families.values())
