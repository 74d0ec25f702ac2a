"""One served model: its queues, and the threads of this process that run it."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from serve.bundle.cpu import available_cores
from serve.bundle.manifest import Manifest
from serve.bundle.runtimes import Device, Runtime, choose
from serve.errors import Unavailable
from serve.observe.metrics import Drift, Expected, Metrics
from serve.observe.request_context import RequestContext
from serve.settings import Limits
from serve.tasks import open_bundle, task_of
from serve.text.answers import Parts, TextFacts
from serve.text.inputs import TextWork, TokenWork, Work
from serve.workers.batcher import Batcher, Cores, Reason, Wait
from serve.workers.memo import Kept, Memo, reason_to_forget
from serve.workers.model_threads import HUNG_S, ModelThreads, WorkOutput, WorkRequest, in_a_thread, renice

if TYPE_CHECKING:
    from serve.model.pipeline import Pipeline

log = logging.getLogger("serve")

# A queue holds at most this many tokens for each text of its limit. A queue of long texts is full with fewer texts.
QUEUED_TOKENS_PER_TEXT = 64
# How long a stopping model waits for batches under way whose requests have ended.
UNWANTED_S = 2.0
# What the threads of a model yield to that of the event loop, which needs a core for moments only, but at once; and the thread of
# long texts, which hold a core for long, to that of the others.
NICE, NICE_FOR_LONG = 5, 10
MOST_AT_ONCE = 4


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

    A text longer than a batch has a queue and a thread of its own, so that no short text waits for it: the system divides the core
    between the threads, in slices of some milliseconds.

    `variant`, `threads` and `device` are as in `Pipeline`, but `threads` is 1 by default. `openvino` False keeps it from running in
    OpenVINO. `known` as in `open_bundle`. `name` is in place of the bundle's own: what is served keeps its name, whatever bundle comes
    into its place. `memo` keeps answers, if it has room and they depend on their text alone; `cores` are those of the server.
    BundleError when the bundle is damaged, or its variant cannot run here; BadInput for a `device` that is not here.
    """

    def __init__(
        self,
        bundle_path: Path | str,
        limits: Limits,
        metrics: Metrics,
        memo: Memo | None = None,
        cores: Cores | None = None,
        *,
        variant: str | None = None,
        threads: int | None = None,
        device: Device = "cpu",
        openvino: bool | None = None,
        known: str = "",
        name: str = "",
    ) -> None:
        bundle = open_bundle(bundle_path, known=known)
        if name:
            bundle = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, name=name))
        name = bundle.manifest.name
        again = partial(
            ServedModel, bundle_path, limits, metrics, memo, cores, variant=variant, threads=threads, name=name
        )
        self.opened_again: Callable[[], ServedModel] = partial(again, device=device, openvino=openvino)
        """A model with the same settings from the bundle that is in the folder, or at the URL, now; not started."""
        self.device: Device = device
        self.manifest: Manifest = bundle.manifest
        self.task = task_of(bundle.manifest)
        self.text_answer_bytes = self.task.answer_bytes(bundle.manifest)
        """The most bytes of the answer to a text in JSON, by the options; 0 where the text decides."""
        choice = choose(bundle, variant, device=device, openvino=openvino)
        for note in choice.notes:
            log.warning("%s", note)
        self.variant = choice.variant
        self.threads = threads or 1
        on_openvino = choice.runtime == "openvino"
        self._open = partial(_opened, bundle, self.variant, self.threads, device, openvino=on_openvino)
        self._metrics = metrics
        self._memo = memo or Memo(0)
        self._memo_name = b""
        """The bundle, variant and runtime whose answers the memo keeps; empty if it keeps none."""
        scores = bundle.variant(self.variant)[1].validation_scores
        self._confidence = self._tokens = None
        if scores:
            sure = Expected(scores.texts, scores.mean, scores.deviation)
            self._confidence = Drift(self.manifest.name, "confidence", sure, metrics)
        if scores and scores.tokens_mean:
            lengths = Expected(scores.texts, scores.tokens_mean, scores.tokens_deviation)
            self._tokens = Drift(self.manifest.name, "tokens", lengths, metrics)
        self._long_tokens = limits.batch_tokens
        # It does not refer to this model, so that a model which is replaced is freed without a garbage collection.
        count_of = partial(metrics.released.labels, bundle.manifest.name)

        def released(reason: Reason, texts: int) -> None:
            count_of(reason).inc()

        self.batchers: tuple[Batcher[WorkRequest, WorkOutput], ...] = tuple(
            Batcher(
                batch_tokens=limits.batch_tokens,
                max_texts=limits.queued_texts,
                max_tokens=limits.queued_texts * QUEUED_TOKENS_PER_TEXT,
                max_queue_s=limits.queue_s,
                max_wait_ms=limits.max_wait_ms,
                released=released,
                cores=cores,
            )
            for _ in range(2)
        )
        """Of texts that fit a batch, and of longer ones."""
        self._running: list[ModelThreads] = []
        self.ready = False
        """Whether it can compute."""
        self.on_broken: Callable[[str], None] = lambda reason: None
        """Called with the reason when only a new process can run the model."""
        self._holders = 0
        self._unretained = asyncio.Event()

    async def start(self) -> None:
        """Opens the model and runs it for warm-up. Raises the error of opening it; Unavailable if it takes too long."""
        try:
            pipeline = await in_a_thread(self._open, HUNG_S)
        except TimeoutError as error:
            raise Unavailable(f"model {self.manifest.name!r} could not be opened: {error}") from error
        if self._memo.limit_bytes:
            self._use_memo(pipeline.runtime)
        for batcher, niceness in zip(self.batchers, (NICE, NICE_FOR_LONG), strict=True):
            count = batches_at_once(self.threads)
            running = ModelThreads(
                pipeline, self._observe, self._memo.put, self._broken, count=count, niceness=niceness
            )
            self._running.append(running)
            batcher.open(running.run, count)
        self.ready = True
        self._metrics.serving(
            self.manifest.name,
            task=self.manifest.task,
            variant=self.variant,
            digest=self.manifest.digest,
            waiting_texts=lambda: sum(batcher.waiting for batcher in self.batchers),
            ready=lambda: self.ready,
        )

    def _use_memo(self, runtime: Runtime) -> None:
        name = self.manifest.name
        if reason := reason_to_forget(self.manifest, self.variant, runtime, self.device):
            log.warning("--memo-mib has no effect on model %r: %s", name, reason)
            return
        self._memo_name = f"{self.manifest.digest} {self.variant} {runtime}".encode()
        for lookups in (self._metrics.memo_hits, self._metrics.memo_misses):
            lookups.labels(name)  # present from the start, as others are

    def _broken(self, reason: str) -> None:
        if not self.ready:
            return
        self.ready = False
        log.error("model %r must be opened in another process: %s", self.manifest.name, reason)
        self.give_up(f"model {self.manifest.name!r} cannot answer: {reason}")
        self.on_broken(reason)

    def give_up(self, reason: str) -> None:
        """Fails waiting and new requests with Unavailable and `reason`."""
        for batcher in self.batchers:
            batcher.give_up(reason)

    @property
    def full_s(self) -> float:
        """Estimated seconds until there is room for one more text that is not long; 0 if there is room."""
        return self.batchers[0].full_s

    async def answers(
        self, works: Sequence[Work], context: RequestContext | None = None, answered: Wait | None = None
    ) -> list[Any]:
        """One answer (`WorkOutput`) for each work item, in order. Overloaded, before any work, if the queue has no room.

        The model and the times are stored in `context`. `answered` is as in `Batcher.results`.
        """
        context = context or RequestContext()
        context.model, context.variant, context.texts = self.manifest.name, self.variant, len(works)
        context.queued_s = time.perf_counter()
        kept: dict[int, Kept] = {}
        requests: list[WorkRequest] = []
        for place, work in enumerate(works):
            key = None
            if self._memo_name and isinstance(work, TextWork):
                key = self._memo.key(self._memo_name, context.key_digest, work)
                if found := self._memo.get(key):
                    kept[place] = found
                    continue
            requests.append(WorkRequest(work, context, place, key))
        longest = self.manifest.max_length
        tokens = [
            len(work.input_ids) if isinstance(work, TokenWork) else self.task.estimated_tokens(work, longest)
            for work, *_ in requests
        ]
        try:
            if max(tokens, default=0) <= self._long_tokens:
                answers = await self.batchers[0].results(requests, tokens, answered)
            else:
                answers = await self._answers_of_both(requests, tokens, answered)
        except BaseException:  # an item failed, the time is up, or the client has gone
            context.abandon()
            raise
        name = self.manifest.name
        if context.stages:  # something was computed
            self._metrics.queue_seconds.labels(name).observe(context.queue_s)
        if self._memo_name:
            self._metrics.memo_misses.labels(name).inc(sum(each.key is not None for each in requests))
        if not kept:
            return answers
        self._metrics.memo_hits.labels(name).inc(len(kept))
        self._watch_drift([each.facts for each in kept.values()])
        computed = iter(answers)
        return [kept[place].answer if place in kept else next(computed) for place in range(len(works))]

    async def _answers_of_both(
        self, requests: list[WorkRequest], tokens: list[int], answered: Wait | None
    ) -> list[WorkOutput]:
        """`answers` of texts some of which are long."""
        places = [[i for i, each in enumerate(tokens) if (each > self._long_tokens) == long] for long in (False, True)]
        parts = [(each, of) for each, of in zip(self.batchers, places, strict=True) if of]
        for batcher, of in parts:
            batcher.refuse_if_full(len(of), sum(tokens[i] for i in of))
        waits: list[Wait] = [asyncio.get_running_loop().create_future() for _ in parts]

        def end(ended: Wait) -> None:
            error = None if ended.cancelled() else ended.exception()
            for wait in waits:
                if not wait.done():
                    wait.set_exception(error) if error else wait.cancel()

        if answered:
            answered.add_done_callback(end)
        try:
            async with asyncio.TaskGroup() as group:
                results = [
                    group.create_task(batcher.results([requests[i] for i in of], [tokens[i] for i in of], wait))
                    for (batcher, of), wait in zip(parts, waits, strict=True)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if answered:
                answered.remove_done_callback(end)
        found = {
            i: answer
            for (_, of), result in zip(parts, results, strict=True)
            for i, answer in zip(of, result.result(), strict=True)
        }
        return [found[i] for i in range(len(requests))]

    def retain(self) -> None:
        """Keeps the model from stopping until `release`, so that a request which has chosen it can ask."""
        self._holders += 1

    def release(self) -> None:
        """Ends one `retain`."""
        self._holders -= 1
        if not self._holders:
            self._unretained.set()

    async def stop(self) -> None:
        """Waits until no request holds the model, then ends its threads."""
        while self._holders:
            self._unretained.clear()
            await self._unretained.wait()
        self.ready = False
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWANTED_S):
                await asyncio.gather(*(batcher.close() for batcher in self.batchers))
        await asyncio.gather(*(running.end(UNWANTED_S) for running in self._running))
        self._running.clear()
        self._memo.clear()

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
        self._watch_drift(parts.completed.values())

    def _watch_drift(self, texts: Collection[TextFacts]) -> None:
        if self._confidence:
            scores = [each.score for each in texts if each.score is not None]
            self._confidence.add(len(scores), sum(scores))
        if self._tokens:
            self._tokens.add(sum(each.rows for each in texts), sum(each.tokens for each in texts))


def batches_at_once(threads: int) -> int:
    """The batches that one process computes at a time in a long queue, so that a large request has other cores where they are idle."""
    return max(1, min(MOST_AT_ONCE, available_cores() // threads))


def _opened(*asked: Any, **how: Any) -> "Pipeline":
    renice(NICE)  # so that the threads of the runtime and the tokenizer inherit it
    from serve.model.pipeline import open_pipeline  # it loads the runtime, which the process that accepts does not need

    return open_pipeline(*asked, **how)


def processes_for(device: Device, threads: int) -> int:
    """The processes of a server by default: as many as fit the cores; on a GPU one, since each has a CUDA context of its own.

    On a CPU two processes of one thread have up to 2.6 times the throughput of one with two.
    """
    return 1 if device == "cuda" else max(1, available_cores() // threads)
