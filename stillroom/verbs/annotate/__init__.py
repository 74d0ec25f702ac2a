"""Answer a whole file of texts, or many, on all cores or by Ray on many machines.

Each row keeps its fields and gets the answer beside them. Give the same command again to resume a stopped one.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.settings import TextColumns
from serve.bundle.runtimes import Device
from serve.options import Settings, again, group, make, setting
from serve.settings import ServeSettings
from serve.text.answers import AnswerOptions
from stillroom.console import say
from stillroom.inputs.folders import local_bundle
from stillroom.verb import Argument, Document, FolderOrUrl, Verb

MOST = 1024  # processes or threads; more would only wait for each other


@dataclass(frozen=True)
class Annotation(Settings):
    """What to annotate, and how."""

    bundle: Path
    input: Path | str = setting(
        help="A file of text: .jsonl, .json, .csv, .tsv or .parquet with `text`, or .txt; .gz too; - is stdin. Or many: a folder, a "
        "pattern such as 'in/*.parquet', or a URL (s3://, gs://, az://).",
    )
    output: Path | str = setting(
        help="JSON lines, one for each row, in order; - is stdout. A name that ends in .parquet is a table, in .npy an array of vectors. "
        "For many inputs: a folder or URL, which gets a file for each part.",
    )
    options: AnswerOptions = group(AnswerOptions, panel="Answers")
    format: Literal["jsonl", "json", "csv", "tsv", "txt", "parquet"] | None = setting(
        None, help="Format of the input.", shown="what its name ends with"
    )
    answer_field: str = setting(
        "answer", help="The field that holds the answer in each row of the output.", flag="--field"
    )
    bad_rows: Literal["stop", "skip"] = setting(
        "stop",
        help="At a row that cannot be answered: stop before it, or write its error in place of an answer.",
    )
    restart: bool = setting(False, help="Start over when the output has rows already.")
    part_rows: int = setting(
        8192,
        help="Rows of a part, for many inputs. With --ray, or an output in a store, what is killed loses the part that it works on.",
        at_least=1,
    )
    ray: str | None = setting(
        None,
        help="Answer by Ray: local, or the address of a cluster, HOST:6379. Many inputs or one.",
        suggested=("local",),
        metavar="ADDRESS",
        shown="without",
    )
    variant: str | None = again(ServeSettings, "variant", help="Exported file to run.", shown="the bundle's")
    device: Device = again(ServeSettings, "device")
    processes: int | None = again(
        ServeSettings, "processes", help="Processes that run the model side by side.", at_most=MOST
    )
    threads: int | None = again(ServeSettings, "threads", at_most=MOST)
    text_column: str = again(
        TextColumns, "text_column", "text", help="The field or column that holds the text.", shown=None, panel=""
    )
    text_pair_column: str = again(
        TextColumns, "text_pair_column", "text_pair", help="The field or column that holds the second of two texts.",
        shown=None, panel="",
    )  # fmt: skip
    layout: ClassVar = {
        "Rows": "input output format answer_field bad_rows restart part_rows text_column text_pair_column",
        "Machine": "ray variant device processes threads",
    }


def annotate(bundle: Path | str, **settings: Any) -> Document:
    """Answers the texts of a file, or of many; settings are the fields of `Annotation`."""
    from stillroom.verbs.annotate.run import annotate as annotate_inputs

    annotation = make(Annotation, {"bundle": bundle} | settings, verb="annotate")
    return annotate_inputs(replace(annotation, bundle=local_bundle(bundle)))


def show_annotation(document: Document) -> None:
    """Prints the number of rows and the speed, on stderr, since the answers may be on stdout."""
    from stillroom.verbs.annotate.run import summary

    say(summary(document))


VERB = Verb(
    "annotate",
    annotate,
    Annotation,
    help=__doc__,
    arguments=(Argument("bundle", "A bundle: its folder or URL.", type=FolderOrUrl()),),
    show=show_annotation,
    examples=(
        "stillroom annotate ner.bundle --input tickets.jsonl --output answers.jsonl",
        "zcat texts.gz | stillroom annotate ner.bundle --input - --format txt \\\n      --output - --min-score 0.5",
        "stillroom annotate ner.bundle --input 'tickets/*.parquet' --output answers/",
        "stillroom annotate ner.bundle --input s3://my-texts/tickets \\\n      --output s3://my-answers/tickets --ray 10.0.0.1:6379",
    ),
)
