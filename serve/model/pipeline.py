"""A bundle as a function from text to answer. The answers are those of the server."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from tokenizers import Encoding

from serve.bundle.manifest import Bundle
from serve.bundle.runtimes import Device, choose
from serve.errors import BadInput, BundleError, InternalError, StillroomError
from serve.model.session import Session
from serve.tasks import Answer, open_bundle, task_of
from serve.tasks.served_task import ReadText, model_facts
from serve.text.answers import AnswerOptions, EncodingFormat, Logits, OffsetUnit, Parts, TextFacts
from serve.text.entity_markers import MARKERS
from serve.text.inputs import TextWork, TokenWork, Work, as_texts, pairs_of, require_unicode, second_texts
from serve.text.spans import Aggregation
from serve.text.tokenizer import load_tokenizer, panics_are_errors
from serve.text.windows import Row, TokenRow, WindowedText, cut

log = logging.getLogger("serve")

# Padded tokens in one run of the model, for each of its threads, so that a run fits the caches. A 3x384 int8 student on one thread
# (AMD EPYC with AVX-512 VNNI, onnxruntime 1.31) took 17 us a token in runs of 128 to 256 tokens, 20 us in runs of 512 and more.
RUN_TOKENS = 256

# The fixed cost of a run, in tokens, for each thread, if its shape differs from that of the run before, as is usual in a server: 165 us
# at 18 us a token on that machine, 300 us at 20 us on a Xeon with AMX. More padding than this costs more than another run.
RUN_COSTS_TOKENS = 16

# The same two numbers on a GPU, for a run as a whole. They are guesses: a run of a small encoder fills a GPU only with thousands of
# tokens, and starting its kernels takes as long as computing a thousand.
GPU_RUN_TOKENS = 8192
GPU_RUN_COSTS_TOKENS = 1024

# (texts, words in each) of the runs of the warm-up. The first run of each shape is slow.
WARM_UP_SHAPES = ((1, 8), (1, 128), (8, 32))


WorkResult = Answer | Logits | StillroomError
# What the model reads of one work item.
Read = Row | WindowedText


class PipelineOptions(TypedDict, total=False):
    """Options of a call of `Pipeline`; their defaults are those of `AnswerOptions`."""

    top_k: int | None
    min_score: float
    offsets: OffsetUnit
    aggregation: Aggregation
    constrained: bool
    truncate: bool
    abstain: bool
    promise: str | None
    encoding_format: EncodingFormat
    dimensions: int | None


class Pipeline:
    """An opened bundle, of a folder, of a URL or one that was read before; call it with texts.

    `variant` is a precision that the bundle has (None: its default), `threads` the threads of one call of the model (None: one
    for every core that this process may use). `openvino` says whether a variant for OpenVINO runs in it (None: where it is
    installed); otherwise onnxruntime runs it. `device` "cuda" is a GPU, see `serve.bundle.runtimes.choose_for_gpu`. Notes
    about the bundle are logged, unless `log_notes` is false.
    BundleError when the bundle is damaged or its graph does not fit its labels.

    >>> Pipeline("bundle")("fly to Rome")  # doctest: +SKIP
    {'entities': [{'label': 'city', 'text': 'Rome', 'start': 7, 'end': 11, 'score': 0.998}], 'truncated': False}

    For a model of relations, give a text and two parts of it:

    >>> asked = {"text": "Rome is in Italy", "head": {"start": 0, "end": 4}, "tail": {"start": 11, "end": 16}}
    >>> Pipeline("relations")(asked)  # doctest: +SKIP
    {'labels': [{'label': 'located_in', 'score': 0.981}, {'label': 'none', 'score': 0.019}], 'truncated': False}
    """

    def __init__(
        self,
        bundle_path: Path | str | Bundle,
        variant: str | None = None,
        threads: int | None = None,
        *,
        openvino: bool | None = None,
        device: Device = "cpu",
        log_notes: bool = True,
    ) -> None:
        self.bundle = bundle_path if isinstance(bundle_path, Bundle) else open_bundle(bundle_path)
        self.manifest = self.bundle.manifest
        self.variant, self.runtime, notes = choose(self.bundle, variant, openvino=openvino, device=device)
        for note in notes if log_notes else ():
            log.warning("%s", note)
        self.task = task_of(self.manifest)
        self._scored = self.bundle.variant(self.variant)[1].validation_scores is not None
        self.tokenizer = load_tokenizer(self.bundle.path, self.manifest.max_length)
        # Texts are tokenised whole and cut here. A tokenizer that truncates also builds all the parts that it cuts off: for a pair
        # of long texts every part of one with every part of the other, which are gigabytes.
        self.tokenizer.no_truncation()
        marker_ids = map(self.tokenizer.token_to_id, MARKERS) if self.task.reads_markers else ()
        self.facts = model_facts(self.bundle, self.variant, frozenset(each for each in marker_ids if each is not None))
        self.session = Session(
            self.bundle.onnx_file(self.variant), threads, self.runtime, self.manifest.max_length, device
        )
        self._check_graph()

    @overload
    def __call__(
        self, text: str | Mapping[str, object], *, text_pair: str | None = None, **options: Unpack[PipelineOptions]
    ) -> Answer: ...

    @overload
    def __call__(
        self,
        text: list[str] | Sequence[Mapping[str, object]],
        *,
        text_pair: list[str] | None = None,
        **options: Unpack[PipelineOptions],
    ) -> list[Answer]: ...

    def __call__(
        self,
        text: str | Mapping[str, object] | list[str] | Sequence[Mapping[str, object]],
        *,
        text_pair: str | list[str] | None = None,
        **options: Unpack[PipelineOptions],
    ) -> Answer | list[Answer]:
        """The answer for one text, or a list of answers in the order of the texts: the elements of `results` of the server.

        `text_pair` is for classes and numbers of texts, and the context of a question; `top_k` and `abstain` are for classes,
        `encoding_format` and `dimensions` for vectors; `min_score`, `offsets` (the unit of
        `start` and `end`), `aggregation` and `constrained` for entities; see `AnswerOptions`. A model of relations takes a text with
        markers, or `{"text", "head": {"start", "end"}, "tail": {"start", "end"}}` in place of a text, as `/v1/relations` does; then
        `offsets` is the unit of `start` and `end`. `promise` is one that the bundle makes, for classes and entities. BadInput for
        anything that is not text, and for a relation without its parts.
        """
        asked = AnswerOptions(**options)
        given = self.task.texts_of(text, asked.offsets)
        texts, pairs = as_texts(given), pairs_of(given, text_pair)
        seconds = second_texts(pairs, len(texts), contexts=self.task.needs_pair)
        self._check(texts, pairs if any(seconds) else None)
        works = [TextWork(*each, asked) for each in zip(texts, seconds, strict=True)]
        answers: dict[int, Answer] = {}
        for done, _ in self.answered(works):
            for place, answer in done:
                if isinstance(answer, StillroomError):
                    raise answer
                assert not isinstance(answer, Logits)
                answers[place] = answer
        return [answers[place] for place in range(len(texts))] if isinstance(given, list) else answers[0]

    def encode(self, texts: list[str], pairs: list[str] | None = None) -> list[Row]:
        """The tokens of each text (with its pair), cut to the model's length. BadInput for half a surrogate pair."""
        return [cut(encoding, self.manifest.max_length) for encoding in self._whole(texts, pairs)]

    def _whole(self, texts: list[str], pairs: list[str] | None) -> list[Encoding]:
        """All tokens of each text (with its pair). BadInput for half a surrogate pair; InternalError where the tokenizer fails."""
        self._check(texts, pairs)
        given = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        try:
            with panics_are_errors():
                return self.tokenizer.encode_batch(given)
        except Exception as error:  # such as a word that is not in a vocabulary without a token for unknown ones
            raise InternalError(f"the tokenizer of {self.manifest.name!r} failed at this text ({error})") from error

    def _check(self, texts: list[str], pairs: list[str] | None) -> None:
        """BadInput for half a surrogate pair, and for pairs if the model reads single texts."""
        if pairs is not None and not self.task.reads_pairs:
            raise BadInput(
                f"text_pair: {self.manifest.name!r} {self.task.one_text} one text; leave it out", field="text_pair"
            )
        for field, given in (("text", texts), ("text_pair", pairs or [])):
            for index, text in enumerate(given):
                require_unicode(text, field, index, len(given))

    def answered(
        self,
        works: Sequence[Work],
        run_tokens: int | None = None,
        unwanted: Callable[[], Iterable[int]] = tuple,
    ) -> Iterator[tuple[list[tuple[int, WorkResult]], Parts]]:
        """Yields after each run of the model, shortest rows first: the answers that are complete, by index in `works`, and its times.

        A run has rows of similar length: at most `run_tokens` padded tokens for each thread (None: RUN_TOKENS, and GPU_RUN_TOKENS in
        all on a GPU), or one row. A text longer than the model becomes several rows, perhaps in several runs, and its answer comes
        with the last. The answer to a work item that fails is its error; the others are not affected. `unwanted` is called before
        each run and gives the indices of those whose answers nobody waits for any longer; they get none.

        Raises:
            InternalError: the model failed on a GPU, which may not recover before the process ends.
        """
        began_s = time.perf_counter()
        read, failed = self._read(works)
        pieces = [(place, window) for place in sorted(read) for window in range(_rows_of(read[place]))]
        lengths = [_row_length(read[place], window) for place, window in pieces]
        tokenise_s = time.perf_counter() - began_s
        if failed:
            yield failed, Parts(0, 0, 0, tokenise_s, 0.0, 0.0)
            tokenise_s = 0.0
        threads = self.session.threads
        most, costs = (run_tokens or RUN_TOKENS) * threads, RUN_COSTS_TOKENS * threads
        if self.session.device == "cuda":
            most, costs = run_tokens or GPU_RUN_TOKENS, GPU_RUN_COSTS_TOKENS
        for batch in length_batches(lengths, most, costs):
            for place in unwanted():
                read.pop(place, None)
            # A text that failed in one window already has its answer; its other windows do not run.
            chosen = [pieces[index] for index in batch if pieces[index][0] in read]
            if not chosen:
                continue
            began_s = time.perf_counter()
            rows = [_row_of(read[place], window) for place, window in chosen]
            logits = self._run_each(rows)
            run_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            done: list[tuple[int, WorkResult]] = []
            completed: dict[int, TextFacts] = {}
            for (place, window), of_row in zip(chosen, logits, strict=True):
                if place not in read:
                    continue
                answer, score = self._done(works[place], read[place], window, of_row)
                if answer is not None:
                    done.append((place, answer))
                    of_text = read.pop(place)
                    windows = range(_rows_of(of_text))
                    tokens = sum(_row_length(of_text, each) for each in windows)
                    completed[place] = TextFacts(len(windows), tokens, score)
            decode_s = time.perf_counter() - began_s
            sizes = [len(row) for row in rows]
            yield done, Parts(len(rows), sum(sizes), len(rows) * max(sizes), tokenise_s, run_s, decode_s, completed)
            tokenise_s = 0.0  # counted with the first run only

    def _read(self, works: Sequence[Work]) -> tuple[dict[int, Read], list[tuple[int, WorkResult]]]:
        """The rows or windows of each work item, by its index; and the errors of the others."""
        read: dict[int, Read] = {}
        failed: list[tuple[int, WorkResult]] = []
        singles: list[tuple[int, TextWork]] = []
        pairs: list[tuple[int, TextWork]] = []
        for place, work in enumerate(works):
            if isinstance(work, TokenWork):
                if min(work.input_ids) >= 0 and max(work.input_ids) < self._vocabulary:
                    read[place] = TokenRow(work.input_ids, work.attention_mask, work.token_type_ids)
                else:
                    wrong = next(each for each in work.input_ids if not 0 <= each < self._vocabulary)
                    strange = BadInput(
                        f"input_ids has {wrong}; the ids of {self.manifest.name!r} are 0 to {self._vocabulary - 1}: "
                        "tokenise with the bundle's tokenizer.json",
                        field="input_ids",
                    )
                    failed.append((place, strange))
            else:
                (singles if work.pair is None else pairs).append((place, work))
        for group in (singles, pairs):
            try:
                read.update(
                    zip([place for place, _ in group], self._readings([work for _, work in group]), strict=True)
                )
            except StillroomError:  # each is tried alone to find the faulty ones
                for place, work in group:
                    try:
                        read[place] = self._readings([work])[0]
                    except StillroomError as error:
                        failed.append((place, error))
        return read, failed

    @cached_property
    def _vocabulary(self) -> int:
        """The largest id plus 1. With a larger id a runtime fails, or reads memory outside the embedding."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _readings(self, works: list[TextWork]) -> list[Read]:
        """The row or windows of each text; all have a pair, or none has. BadInput for one that cannot be answered."""
        if not works:
            return []
        for options in {work.options for work in works}:
            self.task.check_options(options, self.facts)
        for work in works:
            self.task.check_work(work, self.facts)
        pairs = [work.pair for work in works if work.pair is not None]
        encodings = self._whole([work.text for work in works], pairs or None)
        return [self.task.read(*each, self.facts) for each in zip(works, encodings, strict=True)]

    def _run_each(self, rows: list[Row]) -> list[np.ndarray | StillroomError]:
        """The logits of each row. If a run fails, each of its rows runs alone, and a row that fails gets its error."""
        try:
            return list(self.session.run(rows))
        except Exception as error:
            if len(rows) > 1:
                return [self._run_each([row])[0] for row in rows]
            log.exception("the model %r failed", self.manifest.name)
            if self.session.device == "cuda" and not isinstance(error, StillroomError):
                # A fatal error of CUDA lasts as long as the process, so a worker must end, and is replaced.
                raise InternalError("the model failed on the GPU") from error
            return [error if isinstance(error, StillroomError) else InternalError("the model failed")]

    def _done(
        self, work: Work, read: Read, window: int, logits: np.ndarray | StillroomError
    ) -> tuple[WorkResult | None, float | None]:
        """The answer to `work`, or None while it has windows to come; and how sure the model is of it, if that is known."""
        if isinstance(logits, StillroomError):
            return logits, None
        if isinstance(work, TokenWork):
            return Logits(list(logits.shape), np.ascontiguousarray(logits, dtype="<f4").tobytes()), None
        truncated = isinstance(read, TokenRow)  # a part of the text's tokens
        of_text: Any = logits
        if isinstance(read, WindowedText):
            of_text = read.take(window, logits)
            if of_text is None:
                return None, None
            read = read.tokens
        text = ReadText(work, read, self.task.words(work.text, read), truncated)
        score = self.task.confidence(text, of_text, self.facts) if self._scored else None
        try:
            return self.task.answer(text, of_text, self.facts), score
        except StillroomError as error:
            return error, score

    def warm_up(self) -> None:
        """Runs the model at a few shapes and at its longest text, since the first run of a shape is slow."""
        for texts, words_each in (*WARM_UP_SHAPES, (1, self.manifest.max_length)):
            self.session.run(self.encode([" ".join(["warm"] * words_each)] * texts))

    def _check_graph(self) -> None:
        try:
            encoding = self.encode(["shape"])[0]
        except InternalError as error:
            raise BundleError(
                f"{error.message}: 'shape'; export the bundle again with a tokenizer that is whole"
            ) from error
        outputs = self.manifest.outputs
        expected = (len(encoding), outputs) if self.task.per_token else (outputs,)
        shape = self.session.run([encoding])[0].shape
        if shape != expected:
            raise BundleError(
                f"the graph of {self.manifest.name!r} ({self.variant}) gives logits of shape {list(shape)} for one text of "
                f"{len(encoding)} tokens; its task and labels need {list(expected)}: export the bundle again"
            )


def open_pipeline(bundle: Bundle, variant: str, threads: int, device: Device, *, openvino: bool) -> Pipeline:
    """The bundle as a warm `Pipeline`.

    Where OpenVINO cannot run it, as where a process must not write code (`MemoryDenyWriteExecute` of systemd), onnxruntime runs it.
    """
    try:
        pipeline = Pipeline(bundle, variant, threads, openvino=openvino, device=device, log_notes=False)
        pipeline.warm_up()
    except Exception as error:  # OpenVINO has plain RuntimeErrors in a run
        if not openvino:
            raise
        log.error("OpenVINO cannot run %s here, and onnxruntime runs it instead: %s", bundle.path, error)
        return open_pipeline(bundle, variant, threads, device, openvino=False)
    return pipeline


def _rows_of(read: Read) -> int:
    return len(read) if isinstance(read, WindowedText) else 1


def _row_of(read: Read, window: int) -> Row:
    return read.row(window) if isinstance(read, WindowedText) else read


def _row_length(read: Read, window: int) -> int:
    return read.row_length(window) if isinstance(read, WindowedText) else len(read)


def length_batches(lengths: Sequence[int], batch_tokens: int, padding_tokens: int | None = None) -> list[list[int]]:
    """Indices of `lengths`, shortest first, in batches of at most `batch_tokens` padded tokens, or one text.

    No batch has more than `padding_tokens` of padding; None means no bound.
    """
    batches: list[list[int]] = []
    tokens = 0  # of the current batch, without padding
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Lengths ascend, so the whole batch would be padded to this one.
        length = lengths[index]
        padded = (len(batches[-1]) + 1) * length if batches else 0
        tokens += length
        if batches and padded <= batch_tokens and (padding_tokens is None or padded - tokens <= padding_tokens):
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = length
    return batches
