"""What a task does in serving: its messages, its options, from a text to rows, and from logits to an answer.

Each file of this folder has one such object. It is looked up once, where a bundle is opened, and passed on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from tokenizers import Encoding

from serve.bundle.manifest import Bundle, Manifest, SecondText, TaskName, kinds_of, label_faults
from serve.errors import BadInput
from serve.settings import Limits
from serve.tasks.request_fields import options_of
from serve.text.answers import AnswerOptions, OffsetUnit, confidence
from serve.text.inputs import TextWork, estimated_tokens
from serve.text.spans import Word
from serve.text.windows import Row, WindowedText, Windows, cut

Datatype = Literal["BYTES", "FP32"]

# What the answer for which a promise was made depends on, and the values that it was made for.
PROMISED_WITH = {"min_score": 0.0, "abstain": False, "aggregation": "first", "constrained": False}


IN_WINDOWS = 'A longer text is read whole, in overlapping windows; `"truncate": true` cuts it, and the answer says so.'


class Described(Protocol):
    """What a description of a model needs to know of it."""

    @property
    def multi_label(self) -> bool: ...
    @property
    def pairs(self) -> bool: ...
    @property
    def vector_width(self) -> int: ...
    @property
    def normalised(self) -> bool: ...


class Endpoint(NamedTuple):
    """A path of `/v1`, and how its OpenAPI document describes it."""

    path: str
    operation: str
    summary: str
    requests: tuple[type[msgspec.Struct], ...]
    response: Any
    """The TypedDict of the whole response."""
    example: Mapping[str, object]


@dataclass(frozen=True)
class ModelFacts:
    """What a task must know of the model whose texts it reads and whose logits it decodes."""

    labels: Sequence[str]
    multi_label: bool = False
    second_text: SecondText = "either"
    name: str = ""
    variant: str = ""
    max_length: int = 0
    vector_width: int = 0
    normalised: bool = False
    temperature: float = 1.0
    abstain_below: float | None = None
    promises: Mapping[str, float] = field(default_factory=dict)
    marker_ids: frozenset[int] = frozenset()
    """The ids of the markers around the parts of a text; none for models that read texts without them."""

    def calibrated(self, logits: np.ndarray) -> np.ndarray:
        """The logits at the model's temperature."""
        # In float64, so that different logits stay different and the order of labels does not change.
        return logits if self.temperature == 1.0 else logits.astype(np.float64) / self.temperature


def model_facts(bundle: Bundle, variant: str, marker_ids: frozenset[int] = frozenset()) -> ModelFacts:
    """The facts of a variant of `bundle`."""
    manifest, described = bundle.manifest, bundle.variant(variant)[1]
    return ModelFacts(
        labels=manifest.labels,
        multi_label=manifest.multi_label,
        second_text=manifest.second_text,
        name=manifest.name,
        variant=variant,
        max_length=manifest.max_length,
        vector_width=manifest.vector_width,
        normalised=manifest.normalised,
        temperature=described.temperature,
        abstain_below=described.abstain_below,
        promises=described.promises,
        marker_ids=marker_ids,
    )


class ReadText(NamedTuple):
    """A text that the model has read."""

    work: TextWork
    row: Row
    """Its tokens."""
    words: Sequence[Word] = ()
    """Those of `ServedTask.words`."""
    truncated: bool = False
    """Whether tokens of the text were left out."""


@dataclass(frozen=True, eq=False)
class ServedTask(ABC):
    """A task of the server and of `Pipeline`."""

    name: TaskName
    kind: str
    """In `/v1` and in messages; differs from the name where models of one task have different endpoints."""
    endpoint: Endpoint
    answer_type: Any
    """The TypedDict of the answer to one text."""
    per_token: bool = False
    """Whether the model gives numbers to each token; otherwise it gives them to each text."""
    reads_pairs: bool = False
    """Whether it may read two texts at once."""
    manifest_kinds: tuple[str, ...] = ()
    """Which of the flags `multi_label`, `relations` and `pairs` a manifest of it may have."""
    one_text: str = ""
    """What it does to one text, for models that never read two: "finds entities in"."""
    no_abstaining: str = ""
    """Why a model cannot abstain, and what to do instead; empty if it can."""
    tensors: Mapping[str, Datatype] = field(default_factory=dict)
    """The outputs of `/v2` for texts, beside `answer` and `logits`."""
    text_fields: tuple[str, str] = ("text", "text_pair")
    """The fields of a row of data that hold its two texts."""
    needs_pair: bool = False
    reads_markers: bool = False
    """Whether the parts of a text that it is asked about stand between markers."""
    smaller_by: str = ""
    """The option that makes an answer smaller."""
    names_labels: bool = True
    """Whether an answer is made of labels, which have names and probabilities."""
    longer_texts: str = f"{IN_WINDOWS} A longer pair of texts is cut."
    """How it reads a text that is longer than the model takes."""
    named_outputs: tuple[str, ...] = ()
    """Outputs of its graphs before `logits`, by the names that other libraries read. What answers here is made of `logits` alone."""
    hub_task: str = ""
    """Its name on the Hub, where that is another one."""

    @property
    def option_names(self) -> list[str]:
        """The options of its endpoint."""
        return options_of(self.endpoint.requests[0])

    @property
    def tensor_options(self) -> list[str]:
        """The options of a request to `/v2`, whose texts are plain."""
        return self.option_names

    # The bundle.

    def manifest_faults(self, manifest: Manifest) -> Iterator[str]:
        """Why a bundle of this task cannot have such labels and outputs."""
        if manifest.vector_width > 0:
            yield f"vector_width is {manifest.vector_width}, and {self.name} has no vectors"
        yield from label_faults(manifest.labels)
        yield from self.kind_faults(manifest)

    def kind_faults(self, manifest: Manifest) -> Iterator[str]:
        """The kinds of classification that the manifest has and the task has not."""
        for kind in kinds_of(manifest):
            if kind not in self.manifest_kinds:
                yield f"{kind} is for text-classification, not for {self.name}"

    @abstractmethod
    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        """The kind of a model's answers in words, such as "single label"; `kinds` are its `kinds_of`."""

    def label_names(self, labels: Sequence[str]) -> Sequence[str]:
        """The names that answers give, of a model with these `labels`."""
        return labels

    @abstractmethod
    def does(self, model: Described) -> str:
        """What `model` does, as the end of a sentence: "finds entities in text"."""

    # Requests.

    def request_type(self, body: bytes) -> type[msgspec.Struct]:
        """Which of the requests of its endpoint `body` is."""
        return self.endpoint.requests[0]

    @abstractmethod
    def works_of(self, request: Any, limits: Limits) -> list[TextWork]:
        """The texts of a request with their options. BadInput or TooLarge, with the field, for what cannot be answered."""

    def texts_of(self, given: object, unit: OffsetUnit) -> object:
        """`given` with each item that is no plain text as the text that the model reads. BadInput as in `works_of`."""
        return given

    def response(self, model: str, variant: str, answers: Sequence[bytes]) -> dict[str, object]:
        """The body of the response with `answers` in JSON."""
        return {"model": model, "variant": variant, "results": [msgspec.Raw(answer) for answer in answers]}

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        """The values of `tensors` for these answers in JSON."""
        return {}

    def estimated_tokens(self, work: TextWork, max_length: int) -> int:
        """About how many tokens the model computes for `work`."""
        return estimated_tokens(work, max_length if work.options.truncate or work.pair is not None else None)

    def answer_bytes(self, manifest: Manifest) -> Callable[[AnswerOptions], int]:
        """A function from options to the most bytes of a text's answer in JSON; 0 where the text decides."""
        return lambda _: 0

    # From a text to rows.

    def check_options(self, options: AnswerOptions, model: ModelFacts) -> None:
        """BadInput for an option that `model` cannot follow, such as a promise that it does not make."""
        promise = options.promise
        if promise is not None:
            if voided := [name for name, usual in PROMISED_WITH.items() if getattr(options, name) != usual]:
                raise BadInput(
                    f"{voided[0]}: promise {promise!r} was made for answers without {voided[0]}; leave one of the two out",
                    field=voided[0],
                )
            if promise not in model.promises:
                known = f"its promises are {', '.join(sorted(model.promises))}" if model.promises else "it makes none"
                raise BadInput(
                    f"promise: variant {model.variant!r} of {model.name!r} does not promise {promise!r}; {known}. `--promise` of "
                    "`stillroom run` and `export` makes one",
                    field="promise",
                )
        if not options.abstain:
            return
        if self.no_abstaining:
            raise BadInput(f"abstain: {model.name!r} {self.no_abstaining}", field="abstain")
        if model.abstain_below is None:
            raise BadInput(
                f"abstain: variant {model.variant!r} of {model.name!r} has no `abstain_below` in its manifest; export "
                "the bundle again, which finds one on validation data, or leave abstain out and use the scores",
                field="abstain",
            )

    def check_work(self, work: TextWork, model: ModelFacts) -> None:
        """BadInput for a text that cannot be answered, such as one alone where the model was trained on pairs."""
        if work.pair is None and model.second_text == "needed":
            raise BadInput(
                f"text_pair is missing: {model.name!r} was trained on pairs of texts; give the second text of each as text_pair",
                field="text_pair",
            )
        if work.pair is not None and model.second_text == "refused":
            raise BadInput(
                f"text_pair was given: {model.name!r} was trained on texts without a second one; leave it out",
                field="text_pair",
            )

    def read(self, work: TextWork, encoding: Encoding, model: ModelFacts) -> Row | WindowedText:
        """The row that the model reads of a text, which is its `encoding` unless that is too long; or its windows."""
        if len(encoding) <= model.max_length:
            return encoding
        if work.options.truncate or work.pair is not None:
            return cut(encoding, model.max_length)
        return Windows(work.text, encoding, model.max_length)

    # From logits to an answer.

    def words(self, text: str, row: Row) -> Sequence[Word]:
        """The words of `text`, if the model labels words."""
        return ()

    def confidence(self, read: ReadText, logits: Any, model: ModelFacts) -> float | None:
        """How sure the model is of its answer (see `serve.text.answers.confidence`); None if there is nothing to be sure of."""
        return confidence(logits[None] / model.temperature, multi_label=model.multi_label)

    @abstractmethod
    def answer(self, read: ReadText, logits: Any, model: ModelFacts) -> Any:
        """The answer made of the logits of a text's row, (tokens, labels) or (labels,), or of what its windows gave together.

        BadInput where no sequence of the tags is valid.
        """

    def answer_unwindowed(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> Any:
        """The answer of a model that read the whole text, or what was cut of it, in one row."""
        return self.answer(read, logits, model)


def scores_in(answers: Sequence[bytes]) -> np.ndarray:
    """The `score` of each of `answers` in JSON."""
    return np.asarray([msgspec.json.decode(answer, type=_Score).score for answer in answers], dtype="<f4")


class _Score(msgspec.Struct):
    score: float
