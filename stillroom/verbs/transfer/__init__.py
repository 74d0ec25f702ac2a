"""Find the task whose student learns other tasks best.

Distils a student on each --source by XtremeDistil, trains it on each --target, and chooses the source with the best mean. Then
trains the student of that source on few labels of each target, beside the same student without a source. Give the same command
again to resume a stopped transfer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compress.settings import FineTunedTeacher, Output, TaskSettings
from serve.files import path_beside
from serve.options import again, make, setting
from stillroom.console import result, say, table
from stillroom.report.pages import write_document
from stillroom.settings import SeveralTrainings
from stillroom.verb import Document, Verb, ourselves

FILES = ("transfer.json", "transfer.html")
FORM = "[NAME=]TASK:DATA"


@dataclass(frozen=True, kw_only=True)
class Transferring(FineTunedTeacher, SeveralTrainings):
    """Settings of `stillroom transfer`."""

    sources: tuple[str, ...] = setting(
        help="A task to distil a student on first: TASK is text-classification or token-classification, DATA a folder with train, "
        "validation and test files or a `datasets` name, NAME what tables call it (otherwise the last part of DATA).",
        flag="--source", metavar=FORM,
    )  # fmt: skip
    targets: tuple[str, ...] = setting(
        help="A task to train the student on after that, named the same way.",
        flag="--target", metavar=FORM,
    )  # fmt: skip
    out: str = again(Output, "out", help="Folder for transfer.json and transfer.html; trainings are kept in OUT.work.")
    student: str = again(TaskSettings, "student", "3x384", shown=None)
    seeds: int = again(SeveralTrainings, "seeds", help="Trainings of each cell of the table and each point of a curve.")
    labels: tuple[int, ...] = setting(
        (10, 50, 100, 500), help="Labelled texts of the target that a point of its curve learns from; all of them are one more point.",
        at_least=1,
    )  # fmt: skip
    teacher_epochs: int | None = again(
        FineTunedTeacher, "teacher_epochs", help="Epochs of fine-tuning the teacher on a source, at most."
    )
    source_steps: int = setting(
        1_000, help="Steps of distilling a student on a source, all stages together.", at_least=10
    )
    target_steps: int = setting(
        300, help="Steps of training the student on a target, however many labels it has.", at_least=1
    )
    target_learning_rate: float = setting(4e-4, help="Peak learning rate on a target.", above=0)
    most_minutes: float = again(SeveralTrainings, "most_minutes", 240.0)
    layout: ClassVar = {
        "What to make": "teacher revision sources targets out student seeds",
        "Data": "labels max_length",
        "Teacher": "teacher_epochs teacher_learning_rate",
        "Student": "source_steps target_steps target_learning_rate",
        "Machine": "most_minutes batch device threads precision",
    }


def transfer(**settings: Any) -> dict[str, Any]:
    """Which source makes the best student for the targets; settings are the fields of `Transferring`.

    Returns the document that `stillroom transfer --json` prints (docs/transferring.md lists its keys).

    Raises:
        BadInput: anything wrong with what was given, before any training; a teacher that is no better than chance on its source; or
            the minutes are over before one seed of the table is complete.
    """
    from compress.runs.hardware import same_bits
    from compress.runs.resumable_stages import Workdir
    from latency.measure.machine import machine_facts
    from stillroom.report.transfer_page import page
    from stillroom.verbs.transfer.document import document_of
    from stillroom.verbs.transfer.tasks import open_tasks
    from stillroom.verbs.transfer.training import train

    given = make(Transferring, settings, verb="transfer")
    machine = machine_facts()
    out = Path(given.out)
    work = Workdir(path_beside(out, ".work"))
    tasks = open_tasks(given, out, work)
    for warning in dict.fromkeys(tasks.warnings):
        say(f"warning: {warning}")
    for name, count in tasks.left_out.items():
        if count:
            say(f"{name}: {count:,} texts of its train are in validation or test of a target and were left out")
    same_bits(next(iter(tasks.targets.values())).settings.threads)
    with work.locked():
        found, chosen = train(given, tasks, work)
        document = document_of(given, tasks, work, found, chosen) | {"machine": machine}
    return write_document(out, FILES, document, page)


def show_transfer(document: Document) -> None:
    """Prints a row per source, a row per point of the curves, what was found, and the next command."""
    from stillroom.report.transfer_page import points, sentences, transferred

    scores, few = transferred(document), points(document)
    table("scores on test with all labels, best source on validation first", scores.header, scores.texts)
    table("with few labels", few.header, few.texts)
    for sentence in sentences(document):
        result(sentence)
    result(f"Student {document['checkpoint']}")
    result(f"Report  {document['report']}")
    say(f"Next    {ourselves()} finetune --model {document['checkpoint']} --task ... --data ... --out ...")


VERB = Verb(
    "transfer",
    transfer,
    Transferring,
    help=__doc__,
    show=show_transfer,
    examples=(
        "stillroom transfer --teacher my_teacher --out found \\\n"
        "      --source intents=text-classification:clinc150 \\\n"
        "      --source chunks=token-classification:conll2000 \\\n"
        "      --target snips=text-classification:snips",
        "stillroom transfer --teacher my_teacher --out found --student 3x384 \\\n"
        "      --source text-classification:news --source text-classification:reviews \\\n"
        "      --target text-classification:tickets --labels 20,200 --most-minutes 60",
    ),
)
