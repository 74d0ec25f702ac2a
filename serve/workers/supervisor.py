"""One served model: its queue and its worker processes, each of which is replaced when it dies."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from serve.bundle.cpu import available_cores
from serve.bundle.manifest import Manifest
from serve.bundle.remote_files import is_url
from serve.bundle.runtimes import Device, choose
from serve.model.work_items import Opening, Parts, TokenWork, Work
from serve.observe.metrics import Drift, Expected, Metrics
from serve.observe.request_context import RequestContext
from serve.settings import Limits
from serve.tasks import open_bundle, task_of
from serve.workers.batcher import AHEAD_TOKENS, Batcher, Wait
from serve.workers.process import ModelProcess, WorkOutput, WorkRequest

log = logging.getLogger("serve")

# The queue holds at most this many tokens for each text of its limit. A queue of long texts is full with fewer texts.
QUEUED_TOKENS_PER_TEXT = 64
# A process that was ready and dies within this time is replaced after a pause, an older one at once.
AT_ONCE_S = 1.0
# Pauses before attempts to replace a process that cannot be started, or died at once; doubled each time.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
# After this many failed attempts in a row, waiting and new requests get an error at once.
ATTEMPTS_IN_SILENCE = 3
# How long a stopping model waits for batches under way whose requests have ended, before its processes are ended.
UNWANTED_S = 2.0


class ModelDescription(TypedDict):
    """One model of this server."""

    name: str
    aliases: list[str]
    task: str
    labels: list[str]
    vector_width: int
    multi_label: bool
    relations: bool
    max_length: int
    variant: str
    variants: list[str]
    promises: list[str]
    device: str
    digest: str


class ServedModel:
    """One served bundle, as it was when it was opened.

    `variant`, `threads` and `device` are as in `Pipeline`, but `threads` is 1 by default. `processes` is the number of worker
    processes, by default as in `processes_for`. `whole` as in `Opening`, `known` as in `open_bundle`. `name` is in place
    of the bundle's own: what is served from a folder keeps its name, whatever bundle is put there. BundleError when the bundle is
    damaged, or its variant cannot run here; BadInput for a `device` that is not here.
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
        device: Device = "cpu",
        whole: bool = False,
        known: Collection[str] = (),
        name: str = "",
    ) -> None:
        bundle = open_bundle(bundle_path, known=known)
        if name:
            bundle = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, name=name))
        self.source = bundle_path
        kept = "" if is_url(bundle_path) else bundle.manifest.name
        again = partial(ServedModel, bundle_path, limits, metrics, variant=variant, threads=threads, name=kept)
        self.opened_again: Callable[[], ServedModel] = partial(again, processes=processes, device=device)
        """A model with the same settings from the bundle that is in the folder, or at the URL, now; not started."""
        self.device: Device = device
        self.manifest: Manifest = bundle.manifest
        self.task = task_of(bundle.manifest)
        self.text_answer_bytes = self.task.answer_bytes(bundle.manifest)
        """The most bytes of the answer to a text in JSON, by the options; 0 where the text decides."""
        choice = choose(bundle, variant, device=device)
        for note in choice.notes:
            log.warning("%s", note)
        self.variant = choice.variant
        self.threads = threads or 1
        self.processes = processes or processes_for(device, self.threads)
        self._opening = Opening(
            str(bundle.path), self.manifest.digest, variant, self.threads, choice.runtime, device, whole
        )
        self._metrics = metrics
        scores = bundle.variant(self.variant)[1].validation_scores
        self._confidence = self._tokens = None
        if scores:
            sure = Expected(scores.texts, scores.mean, scores.deviation)
            self._confidence = Drift(self.manifest.name, "confidence", sure, metrics)
        if scores and scores.tokens_mean:
            lengths = Expected(scores.texts, scores.tokens_mean, scores.tokens_deviation)
            self._tokens = Drift(self.manifest.name, "tokens", lengths, metrics)
        self.batcher: Batcher[WorkRequest, WorkOutput] = Batcher(
            batch_tokens=limits.batch_tokens,
            max_texts=limits.queued_texts,
            max_tokens=limits.queued_texts * QUEUED_TOKENS_PER_TEXT,
            max_queue_s=limits.queue_s,
            max_wait_ms=limits.max_wait_ms,
            ahead_tokens=limits.batch_tokens if whole else AHEAD_TOKENS,  # where nobody waits, batches are of one size
            released=lambda reason, texts: metrics.released.labels(self.manifest.name, reason).inc(),
        )
        self._supervising: list[asyncio.Task[None]] = []
        self._running: set[ModelProcess] = set()
        self.start_error: Exception | None = None
        """Why the last attempt to replace a process failed; None if it did not."""
        self._holders = 0
        self._unretained = asyncio.Event()

    async def start(self) -> None:
        """Starts the processes and waits until all are warm. If one cannot start, it ends the others and raises its error."""
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

    @property
    def ready(self) -> bool:
        """Whether at least one worker process can compute."""
        return self.batcher.slots > 0

    async def answers(
        self,
        works: Sequence[Work],
        context: RequestContext | None = None,
        answered: Wait | None = None,
        *,
        keeps_errors: bool = False,
    ) -> list[Any]:
        """One answer (`WorkOutput`) for each work item, in order. Overloaded, before any work, if the queue has no room.

        The model and the times are stored in `context`. `answered` and `keeps_errors` are as in `Batcher.results`.
        """
        context = context or RequestContext()
        context.model, context.variant, context.texts = self.manifest.name, self.variant, len(works)
        context.queued_s = time.perf_counter()
        longest = self.manifest.max_length
        tokens = [
            len(work.input_ids) if isinstance(work, TokenWork) else self.task.estimated_tokens(work, longest)
            for work in works
        ]
        requests = [WorkRequest(work, context, place) for place, work in enumerate(works)]
        try:
            answers = await self.batcher.results(requests, tokens, answered, keeps_errors=keeps_errors)
        except BaseException:  # an item failed, the time is up, or the client has gone
            context.abandon()
            raise
        self._metrics.queue_seconds.labels(self.manifest.name).observe(context.queue_s)
        return answers

    def retain(self) -> None:
        """Keeps the model from stopping until `release`, so that a request which has chosen it can ask."""
        self._holders += 1

    def release(self) -> None:
        """Ends one `retain`."""
        self._holders -= 1
        if not self._holders:
            self._unretained.set()

    async def stop(self, *, at_once: bool = False) -> None:
        """Waits until no request holds the model, then ends the processes; `at_once` kills them, whatever they compute."""
        while self._holders:
            self._unretained.clear()
            await self._unretained.wait()
        if not at_once:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.batcher.close(), UNWANTED_S)
        for task in self._supervising:
            task.cancel()
        await asyncio.gather(*self._supervising, return_exceptions=True)
        await asyncio.gather(*(process.kill() if at_once else process.end() for process in self._running))
        if at_once:
            await self.batcher.close()

    def description(self, aliases: Sequence[str] = ()) -> ModelDescription:
        """The model in the answer of `/v1/models`; `aliases` are its other names."""
        return {
            "name": self.manifest.name,
            "aliases": list(aliases),
            "task": self.manifest.task,
            "labels": self.manifest.labels,
            "vector_width": self.manifest.vector_width,
            "multi_label": self.manifest.multi_label,
            "relations": self.manifest.relations,
            "max_length": self.manifest.max_length,
            "variant": self.variant,
            "variants": sorted(self.manifest.variants),
            "promises": sorted(self.manifest.variants[self.variant].promises),
            "device": self.device,
            "digest": self.manifest.digest,
        }

    async def _supervise(self, process: ModelProcess) -> None:
        """Feeds `process`, and replaces it whenever it dies, until the batcher is closed or this task is cancelled."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            self._running.add(process)
            slot = self.batcher.add_slot(process.run)
            process.on_lost = partial(setattr, slot, "open", False)
            ends: list[asyncio.Future[Any]] = [slot.ended, process.exited, process.lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if slot.ended.done() and slot.ended.exception() is None:
                return
            slot.open = False  # before the next await: requests that arrive now go to other slots
            await process.kill()
            self._running.remove(process)
            await self.batcher.remove_slot(slot)
            with suppress(Exception):  # the waiting requests already have this error
                slot.ended.result()
            status = process.exited.result()
            log.error("a worker process of model %r died with status %s; starting another", self.manifest.name, status)
            pause_s = (
                0.0 if time.monotonic() - began_s > AT_ONCE_S else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            )
            await asyncio.sleep(pause_s)
            process = await self._another()

    async def _another(self) -> ModelProcess:
        """A process to replace one that died, after as many attempts as it takes."""
        pause_s = FIRST_PAUSE_S
        attempt = 0
        while True:
            attempt += 1
            self._metrics.restarts.labels(self.manifest.name).inc()
            try:
                started = await ModelProcess.started(self._opening, self._observe)
                self.start_error = None
                return started
            except Exception as error:  # whatever the error is, the next attempt may succeed
                self.start_error = error
                log.error("no worker process of model %r can be started: %s", self.manifest.name, error)
                if attempt >= ATTEMPTS_IN_SILENCE and not self.ready:
                    self.batcher.give_up(
                        f"no worker process of model {self.manifest.name!r} can be started; see the log"
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _observe(self, parts: Parts) -> None:
        name, metrics = self.manifest.name, self._metrics
        if parts.tokenise_s:  # of the whole batch, given with its first run, or alone if all that it has failed
            metrics.stage_seconds.labels(name, "tokenise").observe(parts.tokenise_s)
        if parts.texts:
            metrics.batch_texts.labels(name).observe(parts.texts)
            metrics.stage_seconds.labels(name, "run").observe(parts.run_s)
            metrics.stage_seconds.labels(name, "decode").observe(parts.decode_s)
            metrics.tokens.labels(name, "text").inc(parts.tokens)
            metrics.tokens.labels(name, "padding").inc(parts.padded_tokens - parts.tokens)
        if self._confidence:
            self._confidence.add(len(parts.scores), sum(parts.scores))
        if self._tokens:
            self._tokens.add(parts.texts, parts.tokens)


def processes_for(device: Device, threads: int) -> int:
    """The worker processes of a model by default: as many as fit the cores; on a GPU one, since each has a CUDA context of its own.

    On a CPU two processes of one thread have up to 2.6 times the throughput of one with two.
    """
    return 1 if device == "cuda" else max(1, available_cores() // threads)
