"""Fine-tune a model on a task's labels, and on a teacher's soft labels if given."""

from pathlib import Path
from typing import Any

from compress.settings import FineTuning
from serve.options import make
from stillroom.console import result, say, show
from stillroom.verb import Document, Verb, ourselves


def finetune(model: str, task: str, data: str, out: Path | str, **settings: Any) -> Path:
    """Fine-tune a model on a task's labels, and on a teacher's soft labels if given, and write it as a checkpoint with a head.

    Settings are the fields of `compress.settings.FineTuning`: teacher, unlabelled, epochs, and so on. The weights that score
    best on validation are kept. A killed call resumes from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: the model, the teacher or the data cannot be used, or the two read text in different ways.
    """
    from compress.runs.finetune import fine_tune

    return fine_tune(
        make(FineTuning, settings | {"model": model, "task": task, "data": data, "out": out}, verb="finetune"), show
    )


def _finetune(**settings: Any) -> Document:
    from compress.runs.finetune import finetune_result

    return finetune_result(finetune(**settings))


def show_finetuned(document: Document) -> None:
    """Prints the model's score on validation and its folder, and the next command."""
    from compress.evaluation.generated import METRIC
    from compress.runs.finetune import result_line

    result(result_line(document))
    result(f"Model   {document['checkpoint']}")
    then = "evaluate" if document["metric"] == METRIC else "export"  # a model that generates has no bundle
    say(
        f"Next    {ourselves()} {then} {document['checkpoint']} --data ...{' --out BUNDLE' if then == 'export' else ''}"
    )


VERB = Verb(
    "finetune",
    _finetune,
    FineTuning,
    help=__doc__,
    show=show_finetuned,
    examples=(
        "stillroom finetune --model bert-base-uncased --task text-classification \\\n"
        "      --data my-data --out teacher",
        "stillroom finetune --model small --task text-classification \\\n"
        "      --data my-data --teacher teacher --out student",
        "stillroom finetune --model small --task text-classification \\\n"
        "      --data my-data --teacher-labels answers.jsonl --out student",
    ),
)
