"""What a student's layers learned, beside its teacher's.

Compares attention and value relations of layers, shows the attention on a page, and clusters spans of each layer. The page and the
document hold texts of the data.

TEACHER and STUDENT are transformers folders or Hub names with the same tokenizer; the student may be of any method and shape.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click

from compress.settings import FineTunedTeacher, Output, RowColumns, Seed
from serve.options import again, make, setting
from stillroom.console import result, say, table
from stillroom.inputs.folders import check_out_folder
from stillroom.report.pages import can_write_pages, write_document
from stillroom.verb import Argument, Document, Verb

FILES = ("explain.json", "explain.html")


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
    max_length: int = again(
        FineTunedTeacher, "max_length", 128, help="Longest text in tokens; of longer ones the beginning is read.", at_least=8, shown=None
    )  # fmt: skip
    spans: int = setting(3000, help="Spans with a label that are clustered, at most.", at_least=0)
    unlabelled_spans: int = setting(
        500,
        help="Spans without a label that are clustered with them, at most; they count as one more label.",
        at_least=0,
    )
    layout: ClassVar = {"Options": "data out layers most_texts shown_texts max_length spans unlabelled_spans seed"}


def explain(teacher: str, student: str, data: Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """What the layers of `student` learned, beside those of `teacher`, on the texts of the file `data`; written to the folder `out`.

    Settings are the fields of `Explaining`: layers, most_texts, shown_texts, and so on. Returns the
    document that `stillroom explain --json` prints (docs/explaining.md lists its keys). Divergences are in nats.

    Raises:
        BadInput: a model, the data, a layer or `out` cannot be used, or the models have different tokenizers.
    """
    from compress.models.attention_reading import open_reader
    from stillroom.report.explain_page import page
    from stillroom.verbs.explain.document import document_of, shown_texts
    from stillroom.verbs.explain.inputs import open_inputs

    given = make(Explaining, settings | {"data": data, "out": out}, verb="explain")
    check_out_folder(given.out, FILES)
    inputs = open_inputs(teacher, student, given)
    for note in inputs.notes:
        say(f"warning: {note}")
    theirs, ours = (open_reader(opened, inputs.task) for opened in (inputs.teacher, inputs.student))
    document, figures = document_of(given, inputs, theirs, ours)
    shown = shown_texts(inputs, theirs, ours, figures, given.shown_texts) if can_write_pages() else []
    return write_document(Path(given.out), FILES, document, lambda document: page(document, shown))


def show_explained(document: Document) -> None:
    """Prints a row per pair of layers, a row per layer, and the page."""
    from stillroom.report.explain_page import cluster_table, layer_table, sentences

    layers = layer_table(document)
    table("divergence of the student from the teacher, nats", layers.header, layers.texts)
    if clusters := cluster_table(document):
        table("NMI of clusters of spans and their labels", clusters.header, clusters.texts)
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")


VERB = Verb(
    "explain",
    explain,
    Explaining,
    help=__doc__,
    arguments=(
        Argument("teacher", "Transformers folder or Hub name.", type=click.Path()),
        Argument("student", "Transformers folder or Hub name of a model with the same tokenizer.", type=click.Path()),
    ),
    show=show_explained,
    examples=(
        "stillroom explain my_teacher student --data my-data/test.jsonl --out explained",
        "stillroom explain bert-base-uncased student --data chunks.conll \\\n      --layer 12:6 --layer 10:6 --out explained",
    ),
)
