"""One model as the server has it: a queue in front, processes behind, each replaced when it dies."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from serve.bundle.cpu_quota import available_cores
from serve.bundle.manifest import Manifest, open_bundle
from serve.bundle.variant_choice import choose
from serve.model.description import ModelDescription
from serve.model.work_items import Opening, Parts, TextWork, Work, estimated_tokens
from serve.observe.metrics import Metrics
from serve.observe.request_context import RequestContext
from serve.settings import Limits
from serve.workers.batcher import Batcher, Reason
from serve.workers.process import Answered, Asked, ModelProcess

log = logging.getLogger("serve")

# Tokens that may wait for each text that may: a full queue of ordinary texts, or fewer long ones.
QUEUED_TOKENS_PER_TEXT = 64
# A process that was ready and dies within so long dies at once.
AT_ONCE_S = 1.0
# Pauses between attempts to replace a process that cannot be started, or dies at once: doubled each time.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
# Attempts in a row after which callers are told so at once, instead of waiting for the next.
ATTEMPTS_IN_SILENCE = 3
# How long a process may go on with what nobody waits for any more, before it is told to leave.
UNWANTED_S = 2.0


class ServedModel:
    """One bundle being served, as it was when it was opened here.

    `variant` and `threads` are as in `Pipeline` (threads: 1 unless given), `processes` how many compute side by side: as many
    as fit the cores unless given. BundleError when the bundle is damaged, or its variant cannot run here.
    """

    def __init__(
        self,
        bundle_path: Path | str,
        limits: Limits,
        metrics: Metrics,
        *,
        variant: str | None = None,
        threads: int | None = None,
        processes: int | None = None,
    ) -> None:
        bundle = open_bundle(bundle_path)
        self.path = Path(bundle_path)
        self._limits, self._variant, self._threads, self._processes = limits, variant, threads, processes
        self.manifest: Manifest = bundle.manifest
        choice = choose(bundle, variant)
        for note in choice.notes:
            log.warning("%s", note)
        self.variant = choice.variant
        # One thread a process, a process a core: two processes of one thread answer up to 2.6 times what one of two does.
        self.threads = threads or 1
        self.processes = processes or max(1, available_cores() // self.threads)
        self._opening = Opening(str(bundle_path), self.manifest.digest, variant, self.threads)
        self._metrics = metrics
        self.batcher: Batcher[Asked, Answered] = Batcher(
            batch_tokens=limits.batch_tokens,
            max_texts=limits.queued_texts,
            max_tokens=limits.queued_texts * QUEUED_TOKENS_PER_TEXT,
            max_queue_s=limits.queue_s,
            max_wait_ms=limits.max_wait_ms,
            released=self._released,
        )
        self._supervising: list[asyncio.Task[None]] = []
        self._running: set[ModelProcess] = set()
        self._holders = 0
        self._let_go = asyncio.Event()

    async def start(self) -> None:
        """Starts the processes and waits until all are warm. What the first that cannot start says; none is left then."""
        starting = [
            asyncio.ensure_future(ModelProcess.started(self._opening, self._observe)) for _ in range(self.processes)
        ]
        try:
            started = await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            ends = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(each.kill() for each in ends if isinstance(each, ModelProcess)))
            raise
        self._supervising = [asyncio.create_task(self._supervise(each)) for each in started]
        self._metrics.serving(
            self.manifest.name,
            task=self.manifest.task,
            variant=self.variant,
            digest=self.manifest.digest,
            waiting_texts=lambda: self.batcher.waiting,
            processes=lambda: self.batcher.slots,
        )

    def opened_again(self) -> "ServedModel":
        """The bundle that lies there now, served in the same way; not started. BundleError as for the first."""
        return ServedModel(
            self.path,
            self._limits,
            self._metrics,
            variant=self._variant,
            threads=self._threads,
            processes=self._processes,
        )

    @property
    def ready(self) -> bool:
        """Whether a process is there to compute."""
        return self.batcher.slots > 0

    async def answers(self, works: list[Work], context: RequestContext | None = None) -> list[Answered]:
        """One answer for each work, in order: its JSON, or logits. Overloaded before any work when there is no room.

        In `context` is noted which model answers and where the time goes.
        """
        context = context or RequestContext()
        context.model, context.variant, context.texts = self.manifest.name, self.variant, len(works)
        context.queued_s = time.perf_counter()
        answers = await self.batcher.results(
            [Asked(work, context) for work in works], [self._estimated_tokens(work) for work in works]
        )
        self._metrics.answered(self.manifest.name, context.queue_s)
        return answers

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it the model does not stop: for whoever has chosen it and is about to ask."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._let_go.set()

    async def stop(self) -> None:
        """Answers all who hold the model, then ends the processes."""
        while self._holders:
            self._let_go.clear()
            await self._let_go.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.batcher.close(), UNWANTED_S)
        for task in self._supervising:
            task.cancel()
        await asyncio.gather(*self._supervising, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._running))

    def description(self, aliases: Sequence[str] = ()) -> ModelDescription:
        """What `/v1/models` says of it; `aliases` are its other names."""
        return {
            "name": self.manifest.name,
            "aliases": list(aliases),
            "task": self.manifest.task,
            "labels": self.manifest.labels,
            "multi_label": self.manifest.multi_label,
            "relations": self.manifest.relations,
            "max_length": self.manifest.max_length,
            "variant": self.variant,
            "variants": sorted(self.manifest.variants),
            "digest": self.manifest.digest,
        }

    async def _supervise(self, process: ModelProcess) -> None:
        """Has `process` compute; when it dies, another in its place; until the batcher is closed, or this is cancelled."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            self._running.add(process)
            slot = self.batcher.add_slot(process.run)
            dying = asyncio.ensure_future(process.process.wait())
            await asyncio.wait([slot.task, dying], return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            if slot.task.done() and slot.task.exception() is None:
                return
            slot.open = False  # at once: what comes while it is buried is for others
            await process.kill()
            self._running.remove(process)
            await self.batcher.remove_slot(slot)
            with suppress(Exception):  # what the slot died of was told to whoever waited for it
                slot.task.result()
            status = process.process.returncode
            log.error("a process of model %r died with status %s; starting another", self.manifest.name, status)
            pause_s = (
                0.0 if time.monotonic() - began_s > AT_ONCE_S else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            )
            await asyncio.sleep(pause_s)
            process = await self._another()

    async def _another(self) -> ModelProcess:
        """A process in the place of one that died, however many attempts it takes."""
        pause_s = FIRST_PAUSE_S
        attempt = 0
        while True:
            attempt += 1
            self._metrics.restarts.labels(self.manifest.name).inc()
            try:
                return await ModelProcess.started(self._opening, self._observe)
            except Exception as error:  # whatever it is, the next attempt may do
                log.error("no process of model %r can be started: %s", self.manifest.name, error)
                if attempt >= ATTEMPTS_IN_SILENCE and not self.ready:
                    self.batcher.give_up(
                        f"no process of model {self.manifest.name!r} can be started; the server's log says why"
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _estimated_tokens(self, work: Work) -> int:
        cut = self.manifest.relations or (
            isinstance(work, TextWork) and (work.options.truncate or work.pair is not None)
        )
        return estimated_tokens(work, self.manifest.max_length if cut else None)

    def _released(self, reason: Reason, texts: int) -> None:
        self._metrics.released.labels(self.manifest.name, reason).inc()

    def _observe(self, parts: Parts) -> None:
        self._metrics.ran(
            self.manifest.name,
            texts=parts.texts,
            tokens=parts.tokens,
            padded_tokens=parts.padded_tokens,
            tokenise_s=parts.tokenise_s,
            run_s=parts.run_s,
            decode_s=parts.decode_s,
        )
