"""Distil a student from a teacher on plain text.

No labels are needed. docs/reference/methods.md describes the methods.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.settings import Distillation
from serve.options import make
from stillroom.console import result, say, show
from stillroom.verb import Document, Verb, ourselves


def distill(teacher: str, corpus: Iterable[Path | str] | Path | str, out: Path | str, **settings: Any) -> Path:
    """Distil a task-agnostic student on plain text, and write it as a checkpoint that `AutoModel` opens.

    Settings are the fields of `compress.settings.Distillation`: student, method, epochs, and so on. A killed call resumes
    from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: an unknown method, teacher, student or file; relation heads that do not divide both widths.
    """
    from compress.runs.distill import distill_student

    return distill_student(
        make(Distillation, settings | {"teacher": teacher, "corpus": corpus, "out": out}, verb="distill"),
        show,
    )


def _distill(**settings: Any) -> Document:
    from compress.runs.distill import distill_result

    return distill_result(distill(**settings))


def show_distilled(document: Document) -> None:
    """Prints the student's loss and folder, and the next command."""
    result(
        f"{document['student']} by {document['method']}, loss {document['loss']:.4f} after {document['steps']} steps"
    )
    result(f"Student {document['checkpoint']}")
    say(f"Next    {ourselves()} finetune --model {document['checkpoint']} --task ... --data ... --out ...")


VERB = Verb(
    "distill",
    _distill,
    Distillation,
    help=__doc__,
    show=show_distilled,
    examples=(
        "stillroom distill --teacher bert-base-uncased --student 6x384 \\\n      --corpus text.txt --out small",
        "stillroom distill --teacher bert-base-uncased --corpus text.txt --out small \\\n"
        "      --method hidden-states --layer-map uniform",
    ),
)
