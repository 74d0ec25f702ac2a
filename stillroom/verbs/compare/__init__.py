"""Compare methods of distillation over several seeds.

All read equally many tokens of the task's text; the table has means with spread and intervals.

Every comparison has three controls, the same student on labels alone: `labels-new-layers`, `labels-general-layers` (of the
teacher as given) and `labels` (from the fine-tuned teacher). Each row keeps its student as a checkpoint under OUT/work. A
stopped comparison goes on where it was; one with more methods adds theirs.

The learning rate of the last training on the task is chosen on validation from two, with seed 0: one further training a row.
`--start`, `--teacher-layer` and `--distill-tokens` may be given again, and each value makes further rows for the methods that
read it. `--export best` makes OUT/bundle of the student that is best on validation.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.settings import (
    ALL_CORES,
    TASK_METHODS,
    TEXT_METHODS,
    Distillation,
    FineTunedTeacher,
    Output,
    TaskData,
    TaskSettings,
)
from export.settings import VariantSettings
from serve.bundle.manifest import canonical_json
from serve.errors import GateMissed
from serve.options import again, make, setting
from stillroom.console import result, say, table
from stillroom.report.pages import page_or, write_page, write_text
from stillroom.settings import BundleChecks, SeveralTrainings
from stillroom.verb import Document, Verb

BUNDLE = "bundle"
# In --out: the bundle's report stands beside it if a gate was missed, and a killed export leaves its work.
WRITTEN = (
    "work", "compare.json", "report.html", "table.md", BUNDLE, f"{BUNDLE}.report.html", f"{BUNDLE}.report.json",
    f"{BUNDLE}.export-work",
)  # fmt: skip
# A checkpoint has a shape of its own, and `layer-map` belongs to methods with a map.
STARTS = ("spread", "alternate", "first", "last", "random")


@dataclass(frozen=True, kw_only=True)
class Comparison(FineTunedTeacher, TaskData):
    """Settings of `stillroom compare`."""

    teacher: str = again(Distillation, "teacher")
    task: str = again(TaskData, "task", help="What the models answer.")
    out: str = again(
        Output, "out", help="Folder for compare.json, report.html and table.md; trainings live in OUT/work."
    )
    export: Literal["none", "best"] = setting(
        "none",
        help="Whether the student that is best on validation becomes a bundle, OUT/bundle; on a finished comparison nothing else "
        "is done.",
    )
    methods: tuple[str, ...] = setting(
        help="A method (docs/reference/methods.md); minilm@12x384 trains an assistant of that shape first.",
        suggested=(*TEXT_METHODS, *TASK_METHODS),
        flag="--method",
        metavar="NAME",
    )
    students: tuple[str, ...] = again(TaskSettings, "student", ("3x384",), shown=None, flag="--student")
    seeds: int = again(SeveralTrainings, "seeds")
    corpus: tuple[str, ...] = again(Distillation, "corpus", ())
    source_data: str = setting("", help="Data of the task from which a method transfers: a folder or name as --data.")
    source_task: str = again(TaskData, "task", "", help="The task of --source-data.", shown="that of --task")
    max_length: int = again(
        FineTunedTeacher, "max_length", help="Longest text of the task in tokens.", shown="what the teacher takes"
    )
    tokens: int = again(Distillation, "tokens", 128, help="Longest piece of the corpus, in tokens.", shown=None)
    starts: tuple[str, ...] = setting(
        ("spread",),
        help="Layers of the teacher that students start from where they fit; random are new ones. May be given again to compare several.",
        choices=STARTS,
        flag="--start",
    )
    teacher_layers: tuple[int, ...] = again(
        TaskSettings,
        "teacher_layer",
        (),
        help="Teacher layer whose relations are learned, from 1, for methods that learn those of one layer. May be given again to "
        "compare several.",
        at_least=1,
        flag="--teacher-layer",
    )
    distill_tokens: tuple[int, ...] = setting(
        (1_000_000,),
        help="Tokens of plain text, for methods that learn from it. May be given again to compare several.",
        at_least=1,
    )
    label_learning_rates: tuple[float, ...] = setting(
        (),
        help="Peak learning rate of the last training on the task. May be given again: seed 0 of every row trains with each, the best on "
        "validation is taken for all seeds of the row, and every value but one costs each row a further training. One value: no choice.",
        above=0,
        flag="--label-learning-rate",
        shown="two, half and one and a half of the stage's own: 0.0002 and 0.0006 on labels",
    )
    task_tokens: int = setting(1_000_000, help="Tokens of the task's text that every training reads.", at_least=1)
    gate: float = again(VariantSettings, "gate", help="Least share of the fp32 metric that int8 keeps, for --export.")
    teacher_gate: float = again(
        BundleChecks, "teacher_gate", help="Least share of the teacher's metric, on validation, for --export."
    )
    latency_seconds: float = again(
        BundleChecks, "latency_seconds", help="Seconds for timing the bundle's variants; 0 skips it."
    )
    threads: int = again(FineTunedTeacher, "threads", shown=f"{ALL_CORES}, shared by the jobs")
    jobs: int = setting(1, help="Trainings at once.", at_least=1, at_most=4096)
    layout: ClassVar = {
        "What to make": "teacher revision task data out export methods students seeds",
        "Data": "corpus source_data source_task max_length tokens",
        "Student": "starts teacher_layers distill_tokens label_learning_rates task_tokens",
        "Teacher": "teacher_epochs teacher_learning_rate",
        "Bundle, for --export": "gate teacher_gate latency_seconds",
        "Machine": "batch device threads jobs precision",
    }


def compare(**settings: Any) -> Document:
    """Train every method on every student with every seed, and score each; settings are the fields of `Comparison`.

    Methods that begin on plain text start from the given teacher, and end with training on labels. Methods that begin on the task
    start from the teacher fine-tuned on it. All read the same number of tokens of the task's text, and plain text on top.
    Finished rows and their students are kept, so a stopped comparison resumes, and methods can be added. Returns the document
    that `stillroom compare --json` prints. Raises BadInput: anything wrong with what was given, before any training; or
    OUT/bundle holds another student. GateMissed: the best student missed a gate of `--export best`; all else is written, and is
    the error's document.
    """
    from compress.runs.lineage import read_lineage
    from compress.runs.resumable_stages import Workdir
    from export.packing.writer import refuse_foreign
    from stillroom.verbs.compare.document import document_of, export_best
    from stillroom.verbs.compare.queue import open_queue, train_all
    from stillroom.verbs.compare.training import checked

    given = make(Comparison, settings, verb="compare")
    methods, students = tuple(dict.fromkeys(given.methods)), tuple(dict.fromkeys(given.students))
    given = replace(given, methods=methods, students=students)
    inputs_of = checked(given)
    out = Path(given.out)
    if given.export == "best":
        refuse_foreign(out / BUNDLE)
    work = Workdir(out / "work")
    with work.locked():
        queue = open_queue(given, inputs_of, work)
        train_all(given, queue)
        document = document_of(given, inputs_of, work, queue.rows, read_lineage(work.root / "teacher"))
        for row in document["rows"]:
            for doubt in row["doubts"]:
                say(f"warning: {doubt}")
        _write(out, document)
        report = {"report": str(page_or(out / "report.html", "table.md"))}
        if given.export == "best":
            try:
                document["export"] = export_best(given, document, queue)
            except GateMissed as missed:
                document["export"] = missed.document
                _write(out, document)
                message = f"{missed.message} The comparison is kept: {report['report']}."
                raise GateMissed(message, document=document | report) from None
            _write(out, document)
    return document | report


def _write(out: Path, document: Document) -> None:
    from stillroom.report.comparison_page import markdown, page

    write_text(out / "compare.json", canonical_json(document).decode())
    write_page(out / "report.html", partial(page, document))
    write_text(out / "table.md", markdown(document))


def show_comparison(document: Document) -> None:
    """Prints a row per method and student."""
    from stillroom.report.comparison_page import compared, supported_gains

    reached = document["teacher"]["value"]
    made = compared(document)
    table(
        f"{document['metric']} on test, with 95 % intervals; the teacher reaches {reached:.4f}", made.header, made.texts
    )
    say(supported_gains(document))
    best = document["best"]
    say(f"Best on validation: {best['checkpoint']}, {best['validation']:.4f} on average over its seeds")
    if "export" in document:
        result(f"Bundle  {Path(document['report']).parent / document['export']['bundle']}")
    result(f"Report  {document['report']}")


VERB = Verb(
    "compare",
    compare,
    Comparison,
    help=__doc__,
    show=show_comparison,
    examples=(
        "stillroom compare --teacher my_teacher --task text-classification \\\n"
        "      --data my-data --corpus text.txt --out compared \\\n"
        "      --method minilmv2 --method soft-labels",
    ),
)
