"""One model as the server has it: texts -> tokens -> batches -> answers, each stage timed."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from tokenizers import Encoding

from serve.answers import Answer, AnswerOptions
from serve.batcher import Batcher
from serve.metrics import Metrics
from serve.openapi import ModelDescription
from serve.pipeline import BATCH_TOKENS, Pipeline
from serve.requests import Limits

# Below this many characters tokenising and decoding take less time than handing them to a thread and back.
INLINE_CHARACTERS = 4_000

# Tokens that may wait for each text that may: a full queue of ordinary texts, or fewer long ones.
QUEUED_TOKENS_PER_TEXT = 64

Value = TypeVar("Value")


class ServedModel:
    """One bundle being served: its pipeline, the batcher in front of it, and the counters of both."""

    def __init__(self, pipeline: Pipeline, limits: Limits, metrics: Metrics) -> None:
        self.pipeline = pipeline
        self.manifest = pipeline.manifest
        name = self.manifest.name
        self.batch_texts = metrics.batch_texts.labels(name)
        self.tokenise_seconds = metrics.stage_seconds.labels(name, "tokenise")
        self.run_seconds = metrics.stage_seconds.labels(name, "run")
        self.decode_seconds = metrics.stage_seconds.labels(name, "decode")
        self.batcher: Batcher[Encoding, np.ndarray] = Batcher(
            pipeline.session.run,
            len,
            batch_tokens=BATCH_TOKENS,
            max_texts=limits.queued_texts,
            max_tokens=limits.queued_texts * QUEUED_TOKENS_PER_TEXT,
            observe=self._observe_batch,
        )
        metrics.queue_texts.labels(name).set_function(lambda: self.batcher.waiting)
        metrics.model_info.labels(name, self.manifest.task, pipeline.variant, self.manifest.digest).set(1)

    async def answers(self, texts: list[str], pairs: list[str] | None, options: AnswerOptions) -> list[Answer]:
        """One answer per text, in order. Overloaded before any work when there is no room."""
        self.batcher.refuse_if_full(len(texts))
        characters = sum(map(len, texts)) + sum(map(len, pairs or []))

        began_s = time.perf_counter()
        encodings = await _beside_the_loop(characters, partial(self.pipeline.encode, texts, pairs))
        self.tokenise_seconds.observe(time.perf_counter() - began_s)

        logits = await self.batcher.results(encodings)

        began_s = time.perf_counter()
        answers = await _beside_the_loop(characters, partial(self._decode, texts, encodings, logits, options))
        self.decode_seconds.observe(time.perf_counter() - began_s)
        return answers

    def description(self) -> ModelDescription:
        """What `/v1/models` says of it."""
        return {
            "name": self.manifest.name,
            "task": self.manifest.task,
            "labels": self.manifest.labels,
            "multi_label": self.manifest.multi_label,
            "relations": self.manifest.relations,
            "max_length": self.manifest.max_length,
            "variant": self.pipeline.variant,
            "variants": sorted(self.manifest.variants),
            "digest": self.manifest.digest,
        }

    def _decode(
        self, texts: list[str], encodings: list[Encoding], logits: list[np.ndarray], options: AnswerOptions
    ) -> list[Answer]:
        return [self.pipeline.answer(*each, options) for each in zip(texts, encodings, logits, strict=True)]

    def _observe_batch(self, texts: int, seconds: float) -> None:
        self.batch_texts.observe(texts)
        self.run_seconds.observe(seconds)


async def _beside_the_loop(characters: int, work: Callable[[], Value]) -> Value:
    """`work()`, in a thread when its texts are long enough to hold up other requests."""
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)
