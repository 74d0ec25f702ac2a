"""Fine-tune a model on a suite's tasks, beside the papers' scores.

The files of the suite are read as they are published. Give the same command again to resume a stopped benchmark.

MODEL is a transformers folder or Hub name, such as a student of `distill`.
"""

import statistics
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from compress.input_errors import Faults
from compress.settings import HubModel, Output, TaskSettings, TrainingMachine
from serve.files import path_beside
from serve.options import again, make, setting
from serve.wording import counted
from stillroom.console import result, say, table
from stillroom.inputs.folders import check_out_folder, check_outside
from stillroom.report.pages import write_document
from stillroom.verb import Argument, Document, Verb

if TYPE_CHECKING:
    from compress.models.pretrained import Opened
    from compress.runs.resumable_stages import Workdir
    from stillroom.verbs.benchmark.suites import SuiteTask

FILES = ("benchmark.json", "benchmark.html")


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
    from compress.runs.resumable_stages import Workdir
    from latency.measure.machine import machine_facts
    from stillroom.report.benchmark_page import page
    from stillroom.verbs.benchmark.suites import SEEDS, tunings
    from stillroom.verbs.benchmark.training import prepare, tune

    given = make(Benchmarking, settings | {"suite": suite, "data": data, "out": out}, verb="benchmark")
    machine = machine_facts()
    folder = Path(given.out)
    work = Workdir(path_beside(folder, ".work"))
    opened, tasks, left = _checked(model, given, work)
    found: list[dict[str, Any]] = []
    seeds = given.seeds or SEEDS[given.grid]
    with work.locked():
        prepared = [prepare(work, task, Path(given.data)) for task in tasks]
        warnings = [warning for each in prepared for warning in each.warnings]
        for warning in warnings:
            say(f"warning: {warning}")
        for task, ready in zip(tasks, prepared, strict=True):
            runs = []
            for tuning in tunings(task, given.grid):
                say(f"{task.name}: rate {tuning.learning_rate:g}, {tuning.epochs:g} epochs, {counted(seeds, 'seed')}")
                made = [tune(work, task, given, opened, ready, tuning, seed) for seed in range(seeds)]
                warnings += [f"{task.name}: {each}" for one in made for each in one["warnings"]]
                runs.append(
                    {**vars(tuning), "validation": statistics.fmean(each["validation"] for each in made), "seeds": made}
                )
            rows = _rows(task, max(runs, key=lambda run: float(run["validation"])))
            found.extend({**row, "tried": len(runs)} for row in rows)
            for row in rows:
                say(f"  {row['task']}: {row['metric']} {row['mean']:.4f}")
    config = opened.config
    mine = f"{config.num_hidden_layers}x{config.hidden_size}"
    published = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))["row"]
    document = {
        "model": {"name": opened.public_name, "shape": mine},
        "suite": given.suite,
        "grid": given.grid,
        "seeds": seeds,
        "rows": found,
        "published": [row for row in published if row["suite"] == given.suite and row["shape"] in (mine, "12x768")],
        "not_run": left,
        "warnings": list(dict.fromkeys(warnings)),
        "machine": machine,
    }
    return write_document(folder, FILES, document, page)


def _checked(model: str, given: Benchmarking, work: "Workdir") -> "tuple[Opened, list[SuiteTask], list[str]]":
    """The model, the tasks, and the names of those that are left out. BadInput names everything that is wrong, missing files too."""
    from compress.models.pretrained import open_model
    from compress.runs.hardware import on_this_machine
    from stillroom.verbs.benchmark.suites import tasks_of

    faults = Faults()
    faults.check(partial(check_out_folder, given.out, FILES, beside=True))
    faults.check(work.refuse_foreign)
    faults.check(partial(check_outside, "MODEL", model, work.root))
    faults.check(lambda: on_this_machine(TaskSettings(task="text-classification", data="", device=given.device)))
    opened = faults.check(lambda: open_model(model, role="MODEL", revision=given.revision))
    every = faults.check(lambda: tasks_of(given.suite, Path(given.data))) or ()
    names = [task.name for task in every]
    if unknown := [name for name in given.tasks if every and name not in names]:
        faults.messages.append(
            f"--only {', '.join(unknown)}: --suite {given.suite} has {', '.join(names)}. Give some of these."
        )
    tasks = [task for task in every if not given.tasks or task.name in given.tasks]
    missing = [file for task in tasks for file in task.files if not (Path(given.data) / file).is_file()]
    if missing:
        faults.messages.append(
            f"--data {given.data} lacks {', '.join(missing)}. Give the folder of {given.suite} as it was published, or --only the tasks "
            "whose files are there."
        )
    faults.raise_if_any()
    assert opened
    return opened, tasks, [name for name in names if given.tasks and name not in given.tasks]


def _rows(task: "SuiteTask", best: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each scored file and metric of the task, from the best fine-tuning."""
    rows = []
    languages = task.name in ("XNLI", "MLQA")  # papers name the language alone, and files of other tasks as MNLI-m
    for suffix in task.scored:
        for metric in task.metrics:
            values = [float(each["scores"][suffix][metric]) for each in best["seeds"]]
            rows.append({
                "task": suffix if languages else f"{task.name}-{suffix}" if suffix else task.name,
                "metric": metric,
                "mean": statistics.fmean(values),
                "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                "seeds": values,
                "learning_rate": best["learning_rate"],
                "epochs": best["epochs"],
            })  # fmt: skip
    return rows


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
