"""The verbs that measure models: evaluate, explain, benchmark, profile, load, capacity, inspect."""

import shlex
import sys
from pathlib import Path

import click

from serve.bundle.remote_files import shown
from serve.errors import GateMissed
from serve.observe.logs import plain
from stillroom.cli.options import Argument, Document, FolderOrUrl, Verb
from stillroom.console import KEPT, result, say, table
from stillroom.settings.benchmark import Benchmarking
from stillroom.settings.capacity import Capacity
from stillroom.settings.evaluate import Evaluation
from stillroom.settings.explain import Explaining
from stillroom.settings.load import Loading
from stillroom.settings.profile import Profiling


def evaluate(model: str, settings: Evaluation) -> Document:
    """The task metric of a bundle or checkpoint on labelled data.

    The score comes with a bootstrap interval."""
    from stillroom.commands.evaluate.run import evaluate_on

    return evaluate_on(model, settings)


def show_evaluation(document: Document) -> None:
    """Prints a row per label, then the score."""
    from stillroom.commands.evaluate.run import LABEL_COLUMNS, LANGUAGE_COLUMNS, label_rows, language_rows

    against = f", against {document['teacher']}" if "teacher" in document else ""
    if document["labels"]:
        table("each label", LABEL_COLUMNS, label_rows(document))
    for name, each in document.get("scores", {}).items():
        result(f"{name} {each['value']:.4f} [{each['low']:.4f}, {each['high']:.4f}]")
    if "neighbour_accuracy" in document:
        result(
            "nearest text of train has the label: "
            + ", ".join(f"{k} {v:.4f}" for k, v in document["neighbour_accuracy"].items())
        )
    if "languages" in document:
        table("each language", LANGUAGE_COLUMNS, language_rows(document))
        result(f"mean of {len(document['languages'])} languages: {document['mean_of_languages']:.4f}")
    result(
        f"{document['metric']} {document['value']:.4f} [{document['low']:.4f}, {document['high']:.4f}] on "
        f"{document['examples']} texts, by {document['variant']}{against}"
    )
    if document["unknown_labels"]:
        say(f"warning: the data has labels that the model lacks: {', '.join(document['unknown_labels'])}")
    for warning in document.get("warnings", []):
        say(f"warning: {warning}")


def explain(teacher: str, student: str, settings: Explaining) -> Document:
    """What a student's layers learned, beside its teacher's.

    Compares attention and value relations of layers, shows the attention on a page, and clusters spans of each layer. The page and the
    document hold texts of the data.

    TEACHER and STUDENT are transformers folders or Hub names with the same tokenizer; the student may be of any method and shape.
    """
    from stillroom.commands.explain.run import explain_models

    return explain_models(teacher, student, settings)


def show_explained(document: Document) -> None:
    """Prints a row per pair of layers, a row per layer, and the page."""
    from stillroom.report.explain_page import cluster_table, layer_table, sentences
    from stillroom.report.formats import Table, written

    def printed(title: str, made: Table) -> None:
        table(title, made.header, [[written(cell) for cell in row] for row in made.rows])

    printed("divergence of the student from the teacher, nats", layer_table(document))
    if clusters := cluster_table(document):
        printed("NMI of clusters of spans and their labels", clusters)
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")


def benchmark(model: str, settings: Benchmarking) -> Document:
    """Fine-tune a model on a suite's tasks, beside the papers' scores.

    The files of the suite are read as they are published. Give the same command again to resume a stopped benchmark.

    MODEL is a transformers folder or Hub name, such as a student of `distill`.
    """
    from stillroom.commands.benchmark.run import benchmark_model

    return benchmark_model(model, settings)


def show_benchmark(document: Document) -> None:
    """Prints our scores beside the papers'."""
    from stillroom.report.benchmark_page import beside, sentences
    from stillroom.report.formats import written

    made = beside(document)
    table(f"{document['suite']}, in percent", made.header, [[written(cell) for cell in row] for row in made.rows])
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")


def profile(models: tuple[Path | str, ...], settings: Profiling) -> Document:
    """Latency and accuracy of models side by side, on this machine.

    Names the best model, precision and runtime within a budget.

    MODELS are bundles, checkpoint folders and .onnx files; the others are compared with the first. Candidates take turns, each
    in its own process, until the intervals of their ratios are narrow or the time is up.
    """
    from stillroom.commands.profile.run import profile as profile_these

    out = Path(settings.out) if settings.out else None
    command = " ".join(["stillroom", *map(shlex.quote, sys.argv[1:])])
    return dict(profile_these(models, settings, out=out, command=command))


def show_profile(document: Document) -> None:
    """Prints the report's table, its answers, and the comparisons with an earlier report."""
    from stillroom.commands.profile.papers_table import paper_markdown
    from stillroom.commands.profile.speed_regression import regression_lines
    from stillroom.report.profile_page import answer_lines, profile_markdown

    paper = "paper" in document
    report = paper_markdown(document["paper"]) if paper else profile_markdown(document)  # type: ignore[arg-type]
    sys.stdout.write(plain(report, KEPT))
    lines = [] if paper else [*answer_lines(document), *regression_lines(document.get("regression", []))]  # type: ignore[arg-type]
    for line in lines:
        result(line)
    if "report" in document:
        result(f"Report  {document['report']}")


def gate_of_profile(document: Document) -> None:
    """Checks the comparisons with an earlier report.

    Raises:
        GateMissed: a model is slower than before, beyond the interval.
    """
    gates = document.get("gates", [])
    if missed := [gate for gate in gates if not gate["passed"]]:
        raise GateMissed(f"{len(missed)} of {len(gates)} comparisons: slower than before, beyond the interval.")


def load(url: str, settings: Loading) -> Document:
    """Load a running server, of stillroom or another, as many users do.

    Queries are sent at their times, whether or not earlier ones are answered.

    Latency counts from the time at which a query was due. Without --rate, it searches for the highest rate whose p99 stays
    under --bound-ms while no query is refused, fails or times out.
    """
    from stillroom.commands import load as loading

    out = Path(settings.out) if settings.out else None
    document = loading.load(url, settings)
    if out:
        loading.write(out, document)
    return document


def show_load(document: Document) -> None:
    """Prints a row per trial, then what was found."""
    from stillroom.commands import load as loading

    table(document["url"], loading.COLUMNS, loading.rows(document["trials"]))
    for line in (loading.sentence(document), *document["doubts"]):
        result(line)


def capacity(report: str, settings: Capacity) -> Document:
    """How many cores and machines a rate of requests needs.

    From the times in a report of `profile --threads 1`, by simulation: the server's own queue, under random arrivals of texts as long as
    those that were timed. Nothing is measured.
    """
    from stillroom.commands.capacity import capacity as found

    return found(report, settings)


def show_capacity(document: Document) -> None:
    """Prints a row per number of processes, then what was found and what it rests on."""
    from stillroom.commands import capacity as of

    table(
        f"{document['model']}, one machine of {document['cores_a_machine']} cores",
        of.COLUMNS,
        [of.row(size) for size in document["sizes"]],
    )
    result(of.sentence(document))
    for line in document["assumptions"]:
        result(f"It assumes {line}.")


def inspect(bundle: Path | str) -> Document:
    """Verify every file of a bundle and describe it."""
    from stillroom.commands.inspect import inspected
    from stillroom.inputs.local_bundle import local_bundle

    folder = local_bundle(bundle)
    return inspected(folder) | {"bundle": shown(bundle), "folder": str(folder)}


def show_bundle(document: Document) -> None:
    """Prints what the bundle is, in tables."""
    from serve.tasks import open_bundle
    from stillroom.commands.inspect import explain

    explain(open_bundle(Path(document["folder"])))


VERBS = (
    Verb(
        evaluate,
        Evaluation,
        arguments=(Argument("model", "Bundle (folder or URL), checkpoint folder or Hub name.", type=click.Path()),),
        shown=show_evaluation,
        examples=("stillroom evaluate ner.bundle --data my-data/test.jsonl --variant int8",),
    ),
    Verb(
        explain,
        Explaining,
        arguments=(
            Argument("teacher", "Transformers folder or Hub name.", type=click.Path()),
            Argument(
                "student", "Transformers folder or Hub name of a model with the same tokenizer.", type=click.Path()
            ),
        ),
        shown=show_explained,
        examples=(
            "stillroom explain my_teacher student --data my-data/test.jsonl --out explained",
            "stillroom explain bert-base-uncased student --data chunks.conll \\\n      --layer 12:6 --layer 10:6 --out explained",
        ),
    ),
    Verb(
        benchmark,
        Benchmarking,
        arguments=(
            Argument("model", "Transformers folder or Hub name, such as a student of `distill`.", type=click.Path()),
        ),
        shown=show_benchmark,
        examples=(
            "stillroom benchmark student --suite glue --data GLUE --out scores",
            "stillroom benchmark student --suite glue --data GLUE --only SST-2 --only RTE \\\n      --grid minilm --out scores",
        ),
    ),
    Verb(
        profile,
        Profiling,
        arguments=(
            Argument(
                "models",
                "Bundles (folders or URLs), checkpoint folders and .onnx files; the others are compared with the first.",
                nargs=-1,
                type=FolderOrUrl(),
            ),
        ),
        shown=show_profile,
        then=gate_of_profile,
        examples=(
            "stillroom profile my_teacher ner.bundle --data my-data \\\n      --out timings --budget-ms 5",
            "stillroom profile ner.bundle --against timings/report.json --out again",
            "stillroom profile --paper",
        ),
    ),
    Verb(
        load,
        Loading,
        arguments=(Argument("url", "Where the server takes a text by POST, http or https."),),
        shown=show_load,
        examples=(
            "stillroom load http://127.0.0.1:8000/v1/entities \\\n      --data my-data/test.jsonl --rate 200",
            "stillroom load http://127.0.0.1:8000/v1/entities \\\n      --data my-data/test.jsonl --bound-ms 50",
            "stillroom load https://example.com/classify --data texts.txt \\\n"
            '      --template \'{"input": ["TEXT"]}\' --header "X-Api-Key: K"',
        ),
    ),
    Verb(
        capacity,
        Capacity,
        arguments=(
            Argument("report", "The report.json of `stillroom profile --out`, or its folder.", type=click.Path()),
        ),
        shown=show_capacity,
        examples=(
            "stillroom profile ner.bundle --data my-data \\\n      --threads 1 --sweep --out timings",
            "stillroom capacity timings --rate 10000 --p99-ms 50",
            "stillroom capacity timings --rate 10000 --cores 16 \\\n      --price-per-core-hour 0.04 --headroom 0.3",
        ),
    ),
    Verb(
        inspect,
        arguments=(Argument("bundle", "A bundle: its folder or URL.", type=FolderOrUrl()),),
        shown=show_bundle,
        examples=("stillroom inspect ner.bundle", "stillroom inspect https://example.com/models/ner"),
    ),
)
