"""Fine-tune a model on a suite's tasks, beside the papers' scores.

The files of the suite are read as they are published. Give the same command again to resume a stopped benchmark.

MODEL is a transformers folder or Hub name, such as a student of `distill`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from compress.settings import HubModel, Output, TrainingMachine
from serve.options import again, make, setting
from stillroom.console import result, table
from stillroom.verb import Argument, Document, Verb


@dataclass(frozen=True, kw_only=True)
class Benchmarking(HubModel, TrainingMachine):
    """Settings of `stillroom benchmark`."""

    suite: Literal["glue", "xnli", "conll2003", "wikiann", "crossner", "squad1", "squad2", "mlqa"] = setting(
        help="The suite."
    )
    data: str = setting(metavar="FOLDER", help="Folder of the suite's files as they are published.")
    out: str = again(
        Output, "out", help="Folder for benchmark.json and benchmark.html; trainings are kept in OUT.work."
    )
    tasks: tuple[str, ...] = setting(
        (), help="A task of the suite, such as SST-2. May be given again.", flag="--only", metavar="TASK", shown="all"
    )
    grid: Literal["one", "minilm", "compared"] = setting(
        "one",
        help="Rates and epochs that are tried: one, or those of MiniLM or of the comparative analysis (docs/benchmarking.md).",
    )
    seeds: int = setting(0, help="Trainings of each.", at_least=0, at_most=100, shown="1, or the paper's: 4 and 3")
    layout: ClassVar = {"Options": "suite data out tasks grid seeds revision device threads precision"}


def benchmark(model: str, suite: str, data: Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """The scores of `model` on the tasks of a suite; settings are the fields of `Benchmarking`.

    Returns the document that `stillroom benchmark --json` prints (docs/benchmarking.md lists its keys).

    Raises:
        BadInput: the model, the suite or its files cannot be used.
    """
    from stillroom.verbs.benchmark.run import benchmark_model

    given = settings | {"suite": suite, "data": data, "out": out}
    return benchmark_model(model, make(Benchmarking, given, verb="benchmark"))


def show_benchmark(document: Document) -> None:
    """Prints our scores beside the papers'."""
    from stillroom.report.benchmark_page import beside, sentences

    made = beside(document)
    table(f"{document['suite']}, in percent", made.header, made.texts)
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")


VERB = Verb(
    "benchmark",
    benchmark,
    Benchmarking,
    help=__doc__,
    arguments=(
        Argument("model", "Transformers folder or Hub name, such as a student of `distill`.", type=click.Path()),
    ),
    show=show_benchmark,
    examples=(
        "stillroom benchmark student --suite glue --data GLUE --out scores",
        "stillroom benchmark student --suite glue --data GLUE --only SST-2 --only RTE \\\n      --grid minilm --out scores",
    ),
)
