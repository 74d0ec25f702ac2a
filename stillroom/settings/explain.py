"""The settings of `stillroom explain`."""

from dataclasses import dataclass
from typing import ClassVar

from compress.settings import Output, RowColumns, Seed
from serve.options import again, setting


@dataclass(frozen=True, kw_only=True)
class Explaining(Seed, RowColumns):
    """The texts that two models are compared on, and what of them is compared."""

    data: str = setting(
        help="A file of texts, with labels or without. Entities or tags, such as CoNLL columns, also give clusters of spans."
    )
    out: str = again(Output, "out", help="Folder for explain.json and explain.html, which hold texts of the data.")
    layers: tuple[str, ...] = setting(
        (),
        help="A layer of the teacher and one of the student to compare, from 1, such as 12:6.",
        flag="--layer",
        metavar="T:S",
        shown="the layers of both models evenly spread, ending with the last of each",
    )
    most_texts: int = setting(
        200, help="Texts that the figures are of; of more, so many are drawn with --seed.", at_least=1
    )
    shown_texts: int = setting(
        8, help="Texts whose attention is on the page: those that differ most, then the first.", at_least=0, at_most=100
    )
    max_length: int = setting(128, help="Longest text in tokens; of longer ones the beginning is read.", at_least=8)
    spans: int = setting(3000, help="Spans with a label that are clustered, at most.", at_least=0)
    unlabelled_spans: int = setting(
        500,
        help="Spans without a label that are clustered with them, at most; they count as one more label.",
        at_least=0,
    )
    layout: ClassVar = {"Options": "data out layers most_texts shown_texts max_length spans unlabelled_spans seed"}
