"""Question answering: the part of a context that answers a question, or none."""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, TypedDict

import msgspec
import numpy as np
from msgspec import Meta
from tokenizers import Encoding

from serve.bundle.manifest import Manifest
from serve.errors import BadInput, TooLarge
from serve.settings import Limits
from serve.tasks.request_fields import ModelName, Offsets, answer_options
from serve.tasks.served_task import Described, Endpoint, ModelFacts, ReadText, ServedTask, scores_in
from serve.text.answers import SCORE_DECIMALS, length_in
from serve.text.inputs import TextWork, as_texts, check_limits, estimated_tokens
from serve.text.questions import EVEN_SCORE, Found, QuestionWindows, found_answer, question_rows, tokens_of_windows
from serve.text.windows import Row, WindowedText


class FoundAnswer(TypedDict):
    """The part of the context that answers the question. `start` and `end` (exclusive) count the unit that was asked for."""

    text: str
    start: int
    end: int


class QuestionAnswer(TypedDict):
    """The answer to one question; null if the context holds none, as far as the model sees.

    `score` tells how much likelier the likeliest answer is than none, from 0 to 1, also where it is not given. `truncated` is false: a
    long context is read in windows.
    """

    answer: FoundAnswer | None
    score: float
    truncated: bool


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Answer one question from its context, or each question of a list from its own, or all from one context."""

    question: Annotated[str | list[str], Meta(description="a question, or a list of questions")]
    context: Annotated[
        str | list[str],
        Meta(description="the text that may hold the answer: one for all questions, or a list as long as question"),
    ]
    model: ModelName = None
    min_score: Annotated[
        float | None, Meta(description="a number from 0 (default) to 1; an answer with a lower score is not given")
    ] = 0.0
    offsets: Offsets = "codepoints"


class AnswerResponse(TypedDict):
    """One answer for each question, in the order of the questions."""

    model: str
    variant: str
    results: list[QuestionAnswer]


class QuestionAnswering(ServedTask):
    """The text is the question, and its pair the context, which is read in windows."""

    def manifest_faults(self, manifest: Manifest) -> Iterator[str]:
        yield from super().manifest_faults(manifest)
        if len(manifest.labels) != 2:
            yield f"{self.name} gives a token two numbers, and there are {len(manifest.labels)} labels"

    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        return "answers in a context"

    def does(self, model: Described) -> str:
        return "answers a question from a context, or says that it holds no answer"

    def works_of(self, request: AnswerRequest, limits: Limits) -> list[TextWork]:
        questions, contexts = as_texts(request.question, "question"), as_texts(request.context, "context")
        if isinstance(request.context, str):
            contexts *= len(questions)
            if len(request.context) * len(questions) > max(limits.body_bytes, len(request.context)):
                raise TooLarge(
                    f"context has {len(request.context):,} characters for each of {len(questions):,} questions; this server takes "
                    f"{limits.body_bytes:,} in all: ask fewer questions at once",
                    field="context",
                )
        elif len(contexts) != len(questions) or isinstance(request.question, str):
            raise BadInput(
                f"context has {len(contexts):,} texts for {len(questions):,} questions; give one context, or a list as long as question",
                field="context",
            )
        check_limits(questions, "question", limits)
        check_limits(contexts, "context", limits)
        options = answer_options(request)
        return [TextWork(*each, options) for each in zip(questions, contexts, strict=True)]

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        return {"score": scores_in(answers)}

    def estimated_tokens(self, work: TextWork, max_length: int) -> int:
        question, context = estimated_tokens(TextWork(work.text)), estimated_tokens(TextWork(work.pair or ""))
        return tokens_of_windows(question, context, max_length)

    def check_work(self, work: TextWork, model: ModelFacts) -> None:
        if work.pair is None:
            raise BadInput(
                f"text_pair: {model.name!r} answers questions about a context; give the question as text and the context as "
                "text_pair",
                field="text_pair",
            )

    def read(self, work: TextWork, encoding: Encoding, model: ModelFacts) -> Row | WindowedText:
        return QuestionWindows(question_rows(encoding, work.pair or "", model.max_length))

    def confidence(self, read: ReadText, logits: Found, model: ModelFacts) -> float | None:
        return None

    def answer(self, read: ReadText, logits: Found, model: ModelFacts) -> QuestionAnswer:
        """The likeliest answer of all windows, if its score is at least the model's threshold and `min_score`."""
        likeliest, context, options = logits, read.work.pair or "", read.work.options
        answer_from = EVEN_SCORE if model.abstain_below is None else model.abstain_below
        given: FoundAnswer | None = None
        if likeliest.start < likeliest.end and likeliest.score >= max(answer_from, options.min_score):
            start = length_in(context[: likeliest.start], options.offsets)
            text = context[likeliest.start : likeliest.end]
            given = {"text": text, "start": start, "end": start + length_in(text, options.offsets)}
        return {"answer": given, "score": round(likeliest.score, SCORE_DECIMALS), "truncated": False}

    def answer_unwindowed(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> QuestionAnswer:
        # Of a text alone there is no context, and no answer.
        tokens = len(read.row)
        (row,) = question_rows(read.row, read.work.pair or "", max(1, tokens))  # type: ignore[arg-type]  # nothing was windowed
        places = row.places
        places[1:] += tokens - len(row)  # a very long question is cut in the row, and was not for this run
        return self.answer(read, found_answer([row], [logits[places]]), model)


QUESTION_ANSWERING = QuestionAnswering(
    name="question-answering",
    per_token=True,
    reads_pairs=True,
    manifest_kinds=("pairs",),
    kind="question-answering",
    no_abstaining="gives no answer where it finds none; leave it out, or give min_score",
    endpoint=Endpoint(
        "/v1/answer",
        "answer",
        "Answer questions from a context",
        (AnswerRequest,),
        AnswerResponse,
        {"question": "Where does Ms Keller live?", "context": "Ms Keller moved from Graz to Rome in May."},
    ),
    answer_type=QuestionAnswer,
    tensors={"score": "FP32"},
    named_outputs=("start_logits", "end_logits"),
    text_fields=("question", "context"),
    needs_pair=True,
    names_labels=False,
    longer_texts="A longer context is read whole, in overlapping windows; a question is cut to 64 tokens.",
)
