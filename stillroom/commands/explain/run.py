"""Compares two models layer by layer, and writes the document and the page."""

from functools import partial
from pathlib import Path
from typing import Any

from compress.models.attention_reading import open_reader
from serve.bundle.manifest import canonical_json
from stillroom.commands.explain.document import document_of
from stillroom.commands.explain.inputs import open_inputs
from stillroom.commands.explain.shown import shown_texts
from stillroom.console import say
from stillroom.inputs.out_folder import check_out_folder
from stillroom.report.explain_page import page
from stillroom.report.pages import can_write_pages, page_or, write_page, write_text
from stillroom.verbs.explain import Explaining

DOCUMENT, PAGE = "explain.json", "explain.html"


def explain_models(teacher: str, student: str, given: Explaining) -> dict[str, Any]:
    """See `stillroom.explain`."""
    out = Path(given.out)
    check_out_folder(out, (DOCUMENT, PAGE))
    inputs = open_inputs(teacher, student, given)
    for note in inputs.notes:
        say(f"warning: {note}")
    theirs, ours = (open_reader(opened, inputs.task) for opened in (inputs.teacher, inputs.student))
    document, figures = document_of(given, inputs, theirs, ours)
    shown = shown_texts(inputs, theirs, ours, figures, given.shown_texts) if can_write_pages() else []
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / DOCUMENT, canonical_json(document).decode())
    write_page(out / PAGE, partial(page, document, shown))
    return document | {"report": str(page_or(out / PAGE, DOCUMENT))}
