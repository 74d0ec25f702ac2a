"""Serve bundles over HTTP."""

from pathlib import Path
from typing import Any

from serve.options import make
from serve.settings import ServeSettings
from stillroom.console import console
from stillroom.verb import Argument, FolderOrUrl, Verb


def serve(bundles: tuple[Path | str, ...], **settings: Any) -> None:
    """Serves `bundles` until it is stopped; settings are the fields of `serve.settings.ServeSettings`."""
    from serve.http.app import serve as serve_bundles

    serve_bundles(list(bundles), make(ServeSettings, settings, verb="serve"), quiet=console.quiet)


VERB = Verb(
    "serve",
    serve,
    ServeSettings,
    help=__doc__,
    arguments=(
        Argument("bundles", "One or more bundles: folders or URLs.", nargs=-1, required=True, type=FolderOrUrl()),
    ),
    examples=(
        "stillroom serve ner.bundle --port 8000",
        "stillroom serve s3://models/ner",
    ),
)
