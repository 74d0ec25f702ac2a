"""Feature extraction: a vector for a text, in the form of OpenAI's endpoint."""

import base64
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Literal, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from serve.bundle.manifest import Manifest
from serve.errors import BadInput
from serve.settings import Limits
from serve.tasks.request_fields import ModelName, Truncate, answer_options
from serve.tasks.served_task import IN_WINDOWS, Described, Endpoint, ModelFacts, ReadText, ServedTask
from serve.text.answers import NUMBER_DIGITS, AnswerOptions, EncodingFormat
from serve.text.inputs import TextWork, text_works

# Of a number of a vector of length 1; shorter in JSON than all the digits of its float32.
VECTOR_DECIMALS = 7


# `-0.1234567,` of a vector of length 1, and `-1.234567e-05,` of others.
BYTES_OF_NUMBER = {True: 11, False: 14}


class VectorAnswer(TypedDict):
    """The vector that a model of `feature-extraction` gives one text: numbers, or as `base64` their bytes in float32, little-endian.

    `tokens` are those of the text; `truncated` is true if the model did not read the whole text.
    """

    embedding: list[float] | str
    tokens: int
    truncated: bool


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Give one text, or each text of a list, its vector. The form is that of OpenAI's endpoint of this name."""

    input: Annotated[
        str | list[str],
        Meta(
            description="a string, or a list of strings; token ids are not read, since they may be of another tokenizer "
            "(LangChain: check_embedding_ctx_length=False)"
        ),
    ]
    model: ModelName = None
    encoding_format: Annotated[
        EncodingFormat | None,
        Meta(description='"float" (default: numbers) or "base64" (their float32 bytes, little-endian)'),
    ] = "float"
    dimensions: Annotated[
        int | None,
        Meta(description="a whole number from 1, how many numbers to keep, at length 1 again; default: all"),
    ] = None
    truncate: Truncate = False
    user: Annotated[str | None, Meta(description="a string, which is not used")] = None


class Embedding(TypedDict):
    """The vector of the text with this place in `input`: numbers, or their float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(TypedDict):
    """The tokens of all texts, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(TypedDict):
    """One vector for each text, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    variant: str
    usage: Usage


class FeatureExtraction(ServedTask):
    """A text gets the model's vector, or its first numbers."""

    def manifest_faults(self, manifest: Manifest) -> Iterator[str]:
        if manifest.vector_width <= 0:
            yield f"vector_width is {manifest.vector_width}, and {self.name} needs one above 0"
        if manifest.labels:
            yield f"{self.name} has no labels"
        yield from self.kind_faults(manifest)

    def answer_kind(self, labels: Sequence[str], kinds: Collection[str] = ()) -> str:
        return "sentence vectors"

    def does(self, model: Described) -> str:
        return f"gives a text a vector of {model.vector_width} numbers{', of length 1' if model.normalised else ''}"

    def works_of(self, request: EmbeddingsRequest, limits: Limits) -> list[TextWork]:
        return text_works(request.input, None, answer_options(request), limits, field="input")

    def response(self, model: str, variant: str, answers: Sequence[bytes]) -> dict[str, object]:
        vectors = [msgspec.json.decode(answer, type=_Vector) for answer in answers]
        tokens = sum(vector.tokens for vector in vectors)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector.embedding}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "variant": variant,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def answer_bytes(self, manifest: Manifest) -> Callable[[AnswerOptions], int]:
        def most(options: AnswerOptions) -> int:
            each = 16 / 3 if options.encoding_format == "base64" else BYTES_OF_NUMBER[manifest.normalised]
            return int(each * min(options.dimensions or manifest.vector_width, manifest.vector_width))

        return most

    def tensor_values(self, answers: Sequence[bytes]) -> dict[str, list[bytes] | np.ndarray]:
        vectors = []
        for answer in answers:
            embedding = msgspec.json.decode(answer, type=_Numbers).embedding
            if isinstance(embedding, str):
                vectors.append(np.frombuffer(base64.b64decode(embedding), dtype="<f4"))
            else:
                vectors.append(np.asarray(embedding, dtype="<f4"))
        return {"embedding": np.stack(vectors)}

    def check_options(self, options: AnswerOptions, model: ModelFacts) -> None:
        super().check_options(options, model)
        width = model.vector_width
        if options.dimensions is not None and options.dimensions > width:
            raise BadInput(
                f"dimensions is {options.dimensions:,}; the vectors of {model.name!r} have {width:,} numbers",
                field="dimensions",
            )

    def answer(self, read: ReadText, logits: np.ndarray, model: ModelFacts) -> VectorAnswer:
        """The vector, or its first `dimensions` numbers.

        A vector that was cut is brought to length 1, and with `normalised` every one: the mean of windows has another length.
        """
        logits, options = model.calibrated(logits), read.work.options
        kept = logits[: options.dimensions].astype(np.float64)
        of_length_1 = model.normalised or options.dimensions is not None
        if of_length_1:
            kept = kept / max(float(np.linalg.norm(kept)), 1e-12)
        embedding: list[float] | str
        if options.encoding_format == "base64":
            embedding = base64.b64encode(kept.astype("<f4").tobytes()).decode()
        elif of_length_1:
            embedding = np.round(kept, VECTOR_DECIMALS).tolist()
        else:
            embedding = [float(f"{number:.{NUMBER_DIGITS}g}") for number in kept.tolist()]
        return {"embedding": embedding, "tokens": len(read.row), "truncated": read.truncated}


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    tokens: int


class _Numbers(msgspec.Struct):
    embedding: list[float] | str


FEATURE_EXTRACTION = FeatureExtraction(
    name="feature-extraction",
    kind="feature-extraction",
    smaller_by="dimensions",
    one_text="gives a vector to",
    names_labels=False,
    longer_texts=IN_WINDOWS,
    no_abstaining="gives a vector, which it does for every text; leave it out",
    endpoint=Endpoint(
        "/v1/embeddings",
        "embeddings",
        "Give texts their vectors",
        (EmbeddingsRequest,),
        EmbeddingsResponse,
        {"input": ["A man plays a guitar.", "Someone makes music."]},
    ),
    answer_type=VectorAnswer,
    tensors={"embedding": "FP32"},
    named_outputs=("last_hidden_state", "sentence_embedding"),
)
