"""Write a teacher's answers to texts, for a student to learn from.

A fine-tuned model of transformers answers, a command of yours, or a language model behind an endpoint. `run` and `finetune` read
the file with --teacher-labels (docs/labelling.md). Give the same command again to resume a stopped one, or to ask again about
texts that have no answer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.settings import Labelling
from serve.errors import GateMissed
from serve.options import make
from serve.wording import counted
from stillroom.console import result, say, show
from stillroom.verb import Document, Verb, ourselves


def label(input: Iterable[Path | str] | Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """Write a teacher's answers to the texts of files to `out`, for `finetune(..., teacher_labels=[out])`.

    One of `checkpoint` (a fine-tuned model of transformers), `command` and `url` answers. Settings are the fields of
    `compress.settings.Labelling`. A stopped call resumes when it is made again. Returns the document that `stillroom label --json`
    prints.

    Raises:
        BadInput: the teacher, a file or the output cannot be used.
    """
    from compress.labelling.label import label as label_texts

    return label_texts(make(Labelling, settings | {"input": input, "out": out}, verb="label"), show)


def show_labelled(document: Document) -> None:
    """Prints the number of answers and the file, and the next command."""
    before = f", {document['texts_before']:,} of them before" if document["texts_before"] else ""
    answered = document["texts"] - document["unanswered"]
    result(f"{answered:,} of {document['texts']:,} texts answered by {document['teacher']}{before}")
    if document["requests"]:
        cost = f"; {document['cost']:.4f} at the given prices" if document["cost"] else ""
        result(
            f"{document['requests']:,} requests, {document['retries']:,} of them again; {document['prompt_tokens']:,} tokens of prompts "
            f"and {document['completion_tokens']:,} of answers in all{cost}"
        )
    if document["unanswered"]:
        unanswered = counted(document["unanswered"], "text has", "texts have")
        say(f"{unanswered} an error in place of an answer; the same command asks again.")
    result(f"Answers {document['out']}")
    if not _lacks_answers(document):
        say(
            f"Next    {ourselves()} finetune --model ... --task {document['task']} --data ... --teacher-labels {document['out']} --out ..."
        )


def _lacks_answers(document: Document) -> bool:
    return bool(document["unanswered"] > document["max_unanswered"] * document["texts"])


def check_unanswered(document: Document) -> None:
    """Compares the texts without an answer with the share of them that may have none.

    Raises:
        GateMissed: they are more. The file is written.
    """
    if _lacks_answers(document):
        raise GateMissed(
            f"{document['unanswered']:,} of {document['texts']:,} texts have no answer, more than the share of --max-unanswered "
            f"{document['max_unanswered']:g}. Their rows in {document['out']} say why; the same command asks about them again."
        )


VERB = Verb(
    "label",
    label,
    Labelling,
    help=__doc__,
    show=show_labelled,
    then=check_unanswered,
    examples=(
        "stillroom label --with my_deberta --input my-data/train.jsonl \\\n      --input more.txt --out answers.jsonl",
        "stillroom label --with-url http://localhost:8080/v1 --model qwen3 \\\n"
        "      --task text-classification --label refund --label status \\\n"
        "      --input texts.txt --out answers.jsonl",
        "stillroom label --with-command './rules.py' --task text-classification \\\n"
        "      --input texts.txt --out answers.jsonl",
    ),
)
