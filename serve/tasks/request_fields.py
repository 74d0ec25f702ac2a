"""Fields that requests of several endpoints have, and the options in a request."""

import dataclasses
import functools
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.text.answers import AnswerOptions, OffsetUnit

DEFAULT_OPTIONS = AnswerOptions()

# Each description is also the end of an error message: "top_k: ...; give a whole number from 1, ...".
# A field that may be left out may also be null, which is the same.
Text = Annotated[str | list[str], Meta(description="a string, or a list of strings")]
ModelName = Annotated[
    str | None, Meta(description="a name or alias from /v1/models; default: the first model for this endpoint")
]
Promise = Annotated[
    str | None,
    Meta(description="a promise of the model, as in /v1/models (default: none): no answer is given below its score"),
]
TextPair = Annotated[
    str | list[str] | None, Meta(description="the second text of each pair: a string, or a list as long as text")
]
Truncate = Annotated[
    bool | None,
    Meta(
        description="true or false (default): true cuts a text longer than the model instead of reading it in windows"
    ),
]
# No enum: generators of clients write Right and right alike.
Direction = Annotated[
    Annotated[str, Meta(pattern="^[Rr]ight$")] | None, Meta(description='"right", the end at which a text is cut')
]
TopK = Annotated[
    int | None,
    Meta(
        description="a whole number from 1, how many labels to return; default: all labels, or those that apply if any number of "
        "labels may apply"
    ),
]
Offsets = Annotated[
    OffsetUnit | None,
    Meta(description='"codepoints" (default), "utf16" (as in JavaScript) or "utf8" (bytes), the unit of start and end'),
]
Abstain = Annotated[
    bool | None,
    Meta(
        description="true or false (default): true returns no label if the highest score is below the bundle's abstain_below"
    ),
]


@functools.cache
def options_of(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of a request that are fields of `AnswerOptions`."""
    return [field.name for field in dataclasses.fields(AnswerOptions) if field.name in kind.__struct_fields__]


def answer_options(asked: msgspec.Struct) -> AnswerOptions:
    """The options in a request; null is the default. BadInput for a value out of range."""
    given = {name: value for name in options_of(type(asked)) if (value := getattr(asked, name)) is not None}
    return AnswerOptions(**given) if given else DEFAULT_OPTIONS
