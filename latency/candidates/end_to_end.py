"""Times a candidate from text to answer in three parts, as in the server: tokenise, run, decode.

A text longer than the candidate's `max_length` is cut, as in the server with `"truncate": true`.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from latency.candidates.candidate import Call, Candidate
from serve.errors import BadInput
from serve.model.pipeline import length_batches
from serve.model.session import padded
from serve.tasks import Answer, task_named
from serve.tasks.served_task import ModelFacts, ReadText
from serve.text.inputs import TextWork
from serve.text.tokenizer import load_tokenizer

Text = str | tuple[str, str]  # or a text with its pair

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class Parts(NamedTuple):
    """The parts of one call on one text, or of a pass over many texts."""

    tokens: int  # without padding, special tokens included
    tokenise_ms: float
    run_ms: float
    decode_ms: float


class TimedAnswers(NamedTuple):
    """A pass over many texts in batches."""

    answers: list[Answer]  # in the order of the texts
    parts: Parts
    padded_tokens: int  # all computed tokens, padding included
    wall_s: float


class EndToEnd:
    """A loaded candidate that takes text. BadInput for a candidate without `reads` or `max_length`."""

    def __init__(self, candidate: Candidate, call: Call) -> None:
        if candidate.reads is None or candidate.max_length is None:
            raise BadInput(f"candidate {candidate.name!r} has no tokenizer and labels; only token ids can be timed")
        self._call, self._reads = call, candidate.reads
        self._tokenizer = load_tokenizer(candidate.reads.folder, candidate.max_length)
        self._decode = _decoder(candidate)

    def one(self, text: Text) -> Parts:
        """Answers one text."""
        start_ns = time.perf_counter_ns()
        encoding = self._tokenizer.encode(text) if isinstance(text, str) else self._tokenizer.encode(*text)
        tokenised_ns = time.perf_counter_ns()
        logits = self._call(padded([encoding], INPUTS, max(1, len(encoding))))
        run_ns = time.perf_counter_ns()
        self._decode(text, encoding, logits[0])
        decoded_ns = time.perf_counter_ns()
        return Parts(
            len(encoding), (tokenised_ns - start_ns) / 1e6, (run_ns - tokenised_ns) / 1e6, (decoded_ns - run_ns) / 1e6
        )

    def many(self, texts: Sequence[Text], batch_tokens: int) -> TimedAnswers:
        """Answers all of `texts`, sorted by length, in batches of at most `batch_tokens` padded tokens."""
        start_s = time.perf_counter()
        encodings = self._tokenizer.encode_batch(list(texts))
        tokenised_s = time.perf_counter()
        run_s = decode_s = 0.0
        padded_tokens = 0
        answers: list[Answer] = [{"labels": [], "truncated": False}] * len(texts)
        for batch in length_batches([len(encoding) for encoding in encodings], batch_tokens):
            chosen = [encodings[i] for i in batch]
            longest = max(1, *(len(each) for each in chosen))
            before_s = time.perf_counter()
            logits = self._call(padded(chosen, INPUTS, longest))
            after_s = time.perf_counter()
            for i, encoding, row in zip(batch, chosen, logits, strict=True):
                answers[i] = self._decode(texts[i], encoding, row)
            run_s += after_s - before_s
            decode_s += time.perf_counter() - after_s
            padded_tokens += longest * len(batch)
        wall_s = time.perf_counter() - start_s
        tokens = sum(map(len, encodings))
        parts = Parts(tokens, 1e3 * (tokenised_s - start_s), 1e3 * run_s, 1e3 * decode_s)
        return TimedAnswers(answers, parts, padded_tokens, wall_s)


def _decoder(candidate: Candidate) -> Callable[[Text, Encoding, np.ndarray], Answer]:
    reads = candidate.reads
    assert reads is not None
    task, facts = task_named(reads.task), ModelFacts(reads.labels, reads.multi_label)

    def answer(given: Text, encoding: Encoding, logits: np.ndarray) -> Answer:
        work = TextWork(given) if isinstance(given, str) else TextWork(*given)
        read = ReadText(work, encoding, task.words(work.text, encoding), bool(encoding.overflowing))
        answered: Answer = task.answer_unwindowed(read, logits, facts)
        return answered

    return answer
