"""A bundle as a function: text in, answer out, the same that the server gives."""

import logging
from collections.abc import Sequence
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
from serve.errors import BadInput, BundleError
from serve.session import Session

log = logging.getLogger("serve")

# Padded tokens in one call of the model: more adds latency and memory, and hardly any texts per second.
BATCH_TOKENS = 4096

# (texts, words in each) that warm-up runs: the shapes whose first run would be slow for somebody.
WARM_UP_SHAPES = ((1, 8), (1, 128), (8, 32))


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
            _require_unicode(text, "text", index, len(texts))
        if pairs is None:
            return self.tokenizer.encode_batch(list(texts))
        if self.manifest.task != "text-classification":
            raise BadInput(f"text_pair: {self.manifest.name!r} finds entities in one text", field="text_pair")
        for index, text in enumerate(pairs):
            _require_unicode(text, "text_pair", index, len(pairs))
        return self.tokenizer.encode_batch(list(zip(texts, pairs, strict=True)))

    def answer(self, text: str, encoding: Encoding, logits: np.ndarray, options: AnswerOptions) -> Answer:
        """What the logits of one text say; their shape is (tokens, tags) or (labels,)."""
        if self.manifest.task == "token-classification":
            return entities_answer(text, encoding, logits, self.manifest.labels, options)
        if self.manifest.multi_label:
            return applying_labels_answer(encoding, logits, self.manifest.labels, options)
        return labels_answer(encoding, logits, self.manifest.labels, options)

    def warm_up(self) -> None:
        """Run the model at a few shapes, so that no caller is the first."""
        for texts, words_each in WARM_UP_SHAPES:
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


def as_texts(text: str | list[str]) -> list[str]:
    """One text or many as a list. BadInput for anything else, and for an empty list."""
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list):
        raise BadInput(f"text is a {type(text).__name__}; give a string or a list of strings", field="text")
    if not texts:
        raise BadInput("text is an empty list; give at least one text", field="text")
    for index, each in enumerate(texts):
        if not isinstance(each, str):
            raise BadInput(f"text[{index}] is a {type(each).__name__}; give a string", field=f"text[{index}]")
    return texts


def pairs_of(text: str | list[str], text_pair: str | list[str] | None) -> list[str] | None:
    """The second texts as a list, as many as there are first ones. BadInput when the two do not match."""
    if text_pair is None:
        return None
    if isinstance(text, str) != isinstance(text_pair, str) or len(as_texts(text)) != len(as_texts(text_pair)):
        raise BadInput("text_pair: give as many texts as in text, a string for a string", field="text_pair")
    return as_texts(text_pair)


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


def _require_unicode(text: str, field: str, index: int, count: int) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = field if count == 1 else f"{field}[{index}]"
        raise BadInput(
            f"{name} has half a surrogate pair at {error.start}, which is no character; send whole characters",
            field=name,
        ) from error
