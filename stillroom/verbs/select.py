"""Choose from unlabelled texts those worth labelling.

Takes the nearest neighbours of labelled texts out of a bank, by the sentence vectors of any encoder; and of these, with --uncertain,
the ones on which a model is least sure. Texts of the data, repetitions and near duplicates are left out.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.settings import Selecting
from serve.options import make
from stillroom.console import result, say, show
from stillroom.verb import Document, Verb, ourselves


def select(
    bank: Iterable[Path | str] | Path | str, like: Path | str, out: Path | str, **settings: Any
) -> dict[str, Any]:
    """Write to `out` the texts of the files `bank` that are nearest to the labelled ones under `like`.

    Needs `task` and `encoder`; other settings are the fields of `compress.settings.Selecting`. Returns the document that `stillroom
    select --json` prints.

    Raises:
        BadInput: the bank, the data, a model or the output cannot be used, or no text is left.
    """
    from compress.selecting import select as select_texts

    return select_texts(make(Selecting, settings | {"bank": bank, "like": like, "out": out}, verb="select"), show)


def show_selected(document: Document) -> None:
    """Prints how many texts were chosen and the file, and the next command."""
    result(
        f"{document['texts']:,} of {document['bank']:,} texts chosen, each with a cosine of {document['least_similar']:.2f} or more to a "
        f"labelled text; {document['near_duplicates']:,} near duplicates left out"
    )
    result(f"Texts   {document['out']}")
    say(f"Next    {ourselves()} label --with ... --input {document['out']} --out answers.jsonl")


VERB = Verb(
    "select",
    select,
    Selecting,
    help=__doc__,
    show=show_selected,
    examples=(
        "stillroom select --bank inbox.txt --like my-data --task text-classification \\\n"
        "      --encoder all-MiniLM-L6-v2 --out chosen.jsonl",
        "stillroom select --bank inbox.txt --like my-data --task text-classification \\\n"
        "      --encoder all-MiniLM-L6-v2 --with student --uncertain 500 \\\n"
        "      --out to-label.jsonl",
    ),
)
