"""A bundle as a function: text in, answer out, the same that the server gives."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
from tokenizers import Encoding

from serve.answers import (
    Answer,
    AnswerOptions,
    OffsetUnit,
    applying_labels_answer,
    entities_answer,
    labels_answer,
)
from serve.bundle import open_bundle
from serve.choice import choose
from serve.encoding import load_tokenizer
from serve.errors import BadInput, BundleError, InternalError, StillroomError
from serve.session import Session
from serve.texts import as_texts, pairs_of, require_unicode
from serve.work import Logits, Parts, TextWork, TokenWork, Work

log = logging.getLogger("serve")

# Padded tokens in one call of the model: more adds latency and memory, and hardly any texts per second.
BATCH_TOKENS = 4096

# Padded tokens in one run of the model where answers are given as each run ends: what its caches hold, and no longer.
RUN_TOKENS = 512

# (texts, words in each) that warm-up runs: the shapes whose first run would be slow for somebody.
WARM_UP_SHAPES = ((1, 8), (1, 128), (8, 32))


@dataclass(frozen=True)
class TokenRow:
    """A row of token ids as the session reads it, like a tokenizer's `Encoding`."""

    ids: list[int]
    attention_mask: list[int]
    type_ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


Row = Encoding | TokenRow
Answered = Answer | Logits | StillroomError


class Pipeline:
    """An opened bundle that answers.

    `variant` is a precision that the bundle has (None: its default), `threads` those of one call of the model (None:
    every core that this process may use). BundleError when the bundle is damaged or its graph does not fit its labels.

    >>> Pipeline("bundle")("fly to Rome")  # doctest: +SKIP
    {'entities': [{'label': 'city', 'text': 'Rome', 'start': 7, 'end': 11, 'score': 0.998}], 'truncated': False}
    """

    def __init__(self, bundle_path: Path | str, variant: str | None = None, threads: int | None = None) -> None:
        self.bundle = open_bundle(bundle_path)
        self.manifest = self.bundle.manifest
        self.variant, self.runtime, notes = choose(self.bundle, variant)
        for note in notes:
            log.warning("%s", note)
        self.tokenizer = load_tokenizer(self.bundle.path, self.manifest.max_length)
        self.session = Session(
            self.bundle.onnx_file(self.variant), threads, self.runtime, max_length=self.manifest.max_length
        )
        self._check_graph()

    @overload
    def __call__(
        self,
        text: str,
        *,
        text_pair: str | None = None,
        top_k: int | None = None,
        min_score: float = 0.0,
        offsets: OffsetUnit = "codepoints",
    ) -> Answer: ...

    @overload
    def __call__(
        self,
        text: list[str],
        *,
        text_pair: list[str] | None = None,
        top_k: int | None = None,
        min_score: float = 0.0,
        offsets: OffsetUnit = "codepoints",
    ) -> list[Answer]: ...

    def __call__(
        self,
        text: str | list[str],
        *,
        text_pair: str | list[str] | None = None,
        top_k: int | None = None,
        min_score: float = 0.0,
        offsets: OffsetUnit = "codepoints",
    ) -> Answer | list[Answer]:
        """The answer for one text, or a list of them in the order of the texts: elements of the server's `results`.

        `text_pair` and `top_k` are for text classification, `min_score` and `offsets` (the unit of `start` and `end`)
        for entities. BadInput for anything that is not text.
        """
        options = AnswerOptions(min_score=min_score, offsets=offsets, top_k=top_k)
        texts = as_texts(text)
        encodings = self.encode(texts, pairs_of(text, text_pair))
        logits: list[np.ndarray] = [np.empty(0)] * len(texts)
        for batch in length_batches([len(encoding) for encoding in encodings], BATCH_TOKENS):
            for index, row in zip(batch, self.session.run([encodings[i] for i in batch]), strict=True):
                logits[index] = row
        answers = [self.answer(*each, options) for each in zip(texts, encodings, logits, strict=True)]
        return answers[0] if isinstance(text, str) else answers

    def encode(self, texts: list[str], pairs: list[str] | None = None) -> list[Encoding]:
        """The tokens of each text (with its pair), cut at the model's length. BadInput for text that is not Unicode."""
        for index, text in enumerate(texts):
            require_unicode(text, "text", index, len(texts))
        if pairs is None:
            return self.tokenizer.encode_batch(list(texts))
        if self.manifest.task != "text-classification":
            raise BadInput(f"text_pair: {self.manifest.name!r} finds entities in one text", field="text_pair")
        for index, text in enumerate(pairs):
            require_unicode(text, "text_pair", index, len(pairs))
        return self.tokenizer.encode_batch(list(zip(texts, pairs, strict=True)))

    def answer(self, text: str, encoding: Encoding, logits: np.ndarray, options: AnswerOptions) -> Answer:
        """What the logits of one text say; their shape is (tokens, tags) or (labels,)."""
        if self.manifest.task == "token-classification":
            return entities_answer(text, encoding, logits, self.manifest.labels, options)
        if self.manifest.multi_label:
            return applying_labels_answer(encoding, logits, self.manifest.labels, options)
        return labels_answer(encoding, logits, self.manifest.labels, options)

    def answered(self, works: Sequence[Work]) -> Iterator[tuple[list[tuple[int, Answered]], Parts]]:
        """The answers to `works` by their places, a run of the model at a time, the shortest first.

        One that fails is answered by its error, and spoils no other's answer.
        """
        began_s = time.perf_counter()
        rows, failed = self._rows(works)
        tokenise_s = time.perf_counter() - began_s
        if failed:
            yield failed, Parts(0, 0, 0, tokenise_s, 0.0, 0.0)
            tokenise_s = 0.0
        places = sorted(rows)
        for batch in length_batches([len(rows[place]) for place in places], RUN_TOKENS):
            chosen = [places[index] for index in batch]
            began_s = time.perf_counter()
            logits = self._run_each([rows[place] for place in chosen])
            run_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            done = [
                (place, self._done(works[place], rows[place], row)) for place, row in zip(chosen, logits, strict=True)
            ]
            decode_s = time.perf_counter() - began_s
            lengths = [len(rows[place]) for place in chosen]
            yield done, Parts(len(chosen), sum(lengths), len(chosen) * max(lengths), tokenise_s, run_s, decode_s)
            tokenise_s = 0.0  # told once

    def _rows(self, works: Sequence[Work]) -> tuple[dict[int, Row], list[tuple[int, Answered]]]:
        """What the model reads of each work, by its place; and those that it cannot read."""
        rows: dict[int, Row] = {}
        failed: list[tuple[int, Answered]] = []
        singles: list[tuple[int, TextWork]] = []
        pairs: list[tuple[int, TextWork]] = []
        for place, work in enumerate(works):
            if isinstance(work, TokenWork):
                if min(work.input_ids) >= 0 and max(work.input_ids) < self._vocabulary:
                    rows[place] = TokenRow(work.input_ids, work.attention_mask, work.token_type_ids)
                else:
                    failed.append((place, self._strange_id(work.input_ids)))
            else:
                (singles if work.pair is None else pairs).append((place, work))
        for group in (singles, pairs):
            try:
                rows.update(zip([place for place, _ in group], self._encoded([work for _, work in group]), strict=True))
            except StillroomError:  # which of them it was is found by taking each alone
                for place, work in group:
                    try:
                        rows[place] = self._encoded([work])[0]
                    except StillroomError as error:
                        failed.append((place, error))
        return rows, failed

    @cached_property
    def _vocabulary(self) -> int:
        """How many ids there are, gaps included. A runtime that looks up one beyond fails, or reads other memory."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _strange_id(self, ids: list[int]) -> BadInput:
        wrong = next(each for each in ids if not 0 <= each < self._vocabulary)
        return BadInput(
            f"input_ids holds {wrong}; {self.manifest.name!r} knows the ids 0 to {self._vocabulary - 1}: "
            "tokenise with the bundle's own tokenizer.json",
            field="input_ids",
        )

    def _encoded(self, works: list[TextWork]) -> list[Encoding]:
        """The tokens of texts that all have a pair, or all have none."""
        if not works:
            return []
        pairs = [work.pair for work in works if work.pair is not None]
        return self.encode([work.text for work in works], pairs or None)

    def _run_each(self, rows: list[Row]) -> list[np.ndarray | StillroomError]:
        """The logits of each row, or the error that it fails with alone."""
        try:
            return list(self.session.run(rows))
        except Exception as error:
            if len(rows) > 1:
                return [self._run_each([row])[0] for row in rows]
            log.exception("the model %r failed", self.manifest.name)
            return [error if isinstance(error, StillroomError) else InternalError("the model failed")]

    def _done(self, work: Work, row: Row, logits: np.ndarray | StillroomError) -> Answered:
        if isinstance(logits, StillroomError):
            return logits
        if isinstance(work, TokenWork):
            return Logits(list(logits.shape), np.ascontiguousarray(logits, dtype="<f4").tobytes())
        assert isinstance(row, Encoding)
        return self.answer(work.text, row, logits, work.options)

    def warm_up(self) -> None:
        """Run the model at a few shapes and its longest text, so that no caller is the first."""
        for texts, words_each in (*WARM_UP_SHAPES, (1, self.manifest.max_length)):
            self.session.run(self.encode([" ".join(["warm"] * words_each)] * texts))

    def _check_graph(self) -> None:
        encoding = self.encode(["shape"])[0]
        labels = len(self.manifest.labels)
        expected = (len(encoding), labels) if self.manifest.task == "token-classification" else (labels,)
        shape = self.session.run([encoding])[0].shape
        if shape != expected:
            raise BundleError(
                f"the graph of {self.manifest.name!r} ({self.variant}) gives logits of shape {shape} for one text of "
                f"{len(encoding)} tokens; its task and {labels} labels need {expected}: export the bundle anew"
            )


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, shortest first, in batches of at most `batch_tokens` padded tokens, or one text."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Ascending, so this length is the width that the whole batch would be padded to.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
