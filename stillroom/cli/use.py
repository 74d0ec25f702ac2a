"""The verbs that use a bundle: serve, annotate, push."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.settings import ServeSettings
from stillroom.cli.options import Argument, Document, FolderOrUrl, Verb
from stillroom.console import console, result, say
from stillroom.settings.annotate import Annotation
from stillroom.settings.push import Pushing


def serve(bundles: tuple[Path | str, ...], settings: ServeSettings) -> None:
    """Serve bundles over HTTP."""
    from serve.http.app import serve as serve_bundles

    serve_bundles(list(bundles), settings, quiet=console.quiet)


def annotate(bundle: Path | str, settings: dict[str, Any]) -> Document:
    """Answer a whole file of texts, or many, on all cores or by Ray on many machines.

    Each row keeps its fields and gets the answer beside them. Give the same command again to resume a stopped one.
    """
    from serve.options import make
    from stillroom.commands.annotate.bulk.run import annotate_files, is_bulk
    from stillroom.commands.annotate.runner import annotate as annotate_rows
    from stillroom.inputs.local_bundle import local_bundle

    annotation = make(Annotation, {"bundle": bundle} | settings, verb="annotate")
    annotation = replace(annotation, bundle=local_bundle(bundle))
    return annotate_files(annotation) if is_bulk(annotation) else annotate_rows(annotation)


def show_annotation(document: Document) -> None:
    """Prints the number of rows and the speed, on stderr, since the answers may be on stdout."""
    from stillroom.commands.annotate.bulk.run import summary as summary_of_files
    from stillroom.commands.annotate.runner import summary

    for line in (summary_of_files if "parts" in document else summary)(document):
        say(line)


def push(bundle: Path | str, url: str, settings: Pushing) -> Document:
    """Upload a bundle to a URL, which `serve` and other verbs then take.

    Every file is verified first, and the manifest is uploaded last. A bundle that is there already is not uploaded again."""
    from stillroom.commands.push import push as push_bundle

    return push_bundle(bundle, url, settings)


def show_push(document: Document) -> None:
    """Prints what is now where."""
    what = f"{document['name']} ({document['digest'][:12]}, {document['bytes'] / 1e6:.1f} MB)"
    if document["uploaded"]:
        result(f"{what} is at {document['url']}")
    else:
        result(f"{what} is at {document['url']} already; nothing was uploaded")


BUNDLE = "A bundle: its folder or URL."

VERBS = (
    Verb(
        serve,
        ServeSettings,
        arguments=(
            Argument("bundles", "One or more bundles: folders or URLs.", nargs=-1, required=True, type=FolderOrUrl()),
        ),
        examples=(
            "stillroom serve ner.bundle --port 8000",
            "stillroom serve s3://models/ner",
        ),
    ),
    Verb(
        annotate,
        Annotation,
        arguments=(Argument("bundle", BUNDLE, type=FolderOrUrl()),),
        raw=True,
        shown=show_annotation,
        examples=(
            "stillroom annotate ner.bundle --input tickets.jsonl --output answers.jsonl",
            "zcat texts.gz | stillroom annotate ner.bundle --input - --format txt \\\n      --output - --min-score 0.5",
            "stillroom annotate ner.bundle --input 'tickets/*.parquet' --output answers/",
            "stillroom annotate ner.bundle --input s3://in/tickets \\\n      --output s3://out/answers --ray 10.0.0.1:6379",
        ),
    ),
    Verb(
        push,
        Pushing,
        arguments=(
            Argument("bundle", BUNDLE, type=FolderOrUrl()),
            Argument("url", "Where to: s3://, gs://, az://, hf://OWNER/NAME or file://."),
        ),
        shown=show_push,
        examples=(
            "stillroom push ner.bundle s3://models/ner",
            "stillroom push ner.bundle hf://OWNER/ner",
            "stillroom push ner.bundle gs://models/ner --replace",
        ),
    ),
)
