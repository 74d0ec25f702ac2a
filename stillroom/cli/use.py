"""The verbs that use a bundle: serve, annotate."""

from pathlib import Path
from typing import Any

import click

from serve.settings import ServeSettings
from stillroom.cli.options import Argument, Document, Verb
from stillroom.console import console, say
from stillroom.settings.annotate import Annotation


def serve(bundles: tuple[Path, ...], settings: ServeSettings) -> None:
    """Serve bundles over HTTP."""
    from serve.http.app import serve as serve_bundles

    serve_bundles(list(bundles), settings, quiet=console.quiet)


def annotate(bundle: Path, settings: dict[str, Any]) -> Document:
    """Answer a whole file of texts, on all cores, in order.

    Each row keeps its fields and gets the answer beside them. Give the same command again to resume a stopped one.
    """
    from serve.options import make
    from stillroom.commands.annotate.runner import annotate as annotate_rows

    return annotate_rows(make(Annotation, {"bundle": bundle} | settings, verb="annotate"))


def show_annotation(document: Document) -> None:
    """Prints the number of rows and the speed, on stderr, since the answers may be on stdout."""
    from stillroom.commands.annotate.runner import summary

    for line in summary(document):
        say(line)


VERBS = (
    Verb(
        serve,
        ServeSettings,
        arguments=(
            Argument("bundles", "One or more bundles.", nargs=-1, required=True, type=click.Path(path_type=Path)),
        ),
        examples=("stillroom serve ner.bundle --port 8000",),
    ),
    Verb(
        annotate,
        Annotation,
        arguments=(Argument("bundle", "A bundle.", type=click.Path(path_type=Path)),),
        raw=True,
        shown=show_annotation,
        examples=(
            "stillroom annotate ner.bundle --input tickets.jsonl --output answers.jsonl",
            "zcat texts.gz | stillroom annotate ner.bundle --input - --format txt \\\n      --output - --min-score 0.5",
        ),
    ),
)
