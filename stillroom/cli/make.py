"""The verbs that make models: run, distill, finetune, label, select, compare, transfer, search, export."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from compress.settings import Distillation, FineTuning, Labelling, Selecting
from stillroom.cli.options import Argument, Document, Verb, ourselves
from stillroom.console import result, say, table
from stillroom.inputs.recipe import Recipe
from stillroom.settings.compare import Comparison
from stillroom.settings.export import Exporting
from stillroom.settings.search import Searching
from stillroom.settings.transfer import Transferring


def run(recipe: Path | None, dry_run: bool, settings: dict[str, Any]) -> Document:
    """From teacher to bundle: fine-tune, distil, export, check, time.

    RECIPE is a TOML file of settings, named as the flags; flags override it. Give the same command again to resume a stopped run.
    """
    from stillroom.commands.run import pipeline
    from stillroom.inputs.recipe import read_recipe, resolve

    resolved = resolve(read_recipe(recipe) if recipe else {}, settings)
    if dry_run:
        plan = pipeline.plan_of(resolved)
        return dataclasses.asdict(plan) | {"minutes": round(plan.minutes, 1)}
    return pipeline.run(resolved)


def show_run(document: Document) -> None:
    """Prints the result of a run and the next command, or the plan of a dry run."""
    from stillroom.commands.run.result_table import show_plan, show_result

    if "teacher_steps" in document:
        show_plan(document)
        return
    out = Path(document["bundle"])
    show_result(out)
    low, high = document["speedup_interval"]
    other = "the torch teacher" if document["speedup_over"] == "teacher" else "itself in torch"
    result(
        f"The int8 student is {document['speedup']:.1f} times [{low:.1f}, {high:.1f}] as fast as {other} "
        f"(one text of {document['speedup_tokens']} tokens). The run took {document['minutes']:.1f} minutes."
    )
    result(f"Bundle  {out}\nReport  {document['report']}")
    if document["report_with_texts"]:
        result(f"        {document['report_with_texts']} shows texts of the data, and is not part of the bundle")
    say(f"Next    {ourselves()} serve {out}")


def distill(settings: Distillation) -> Document:
    """Distil a student from a teacher on plain text.

    No labels are needed. docs/reference/methods.md describes the methods."""
    from compress.runs.distill import distill_result, distill_student
    from stillroom.console import show

    return distill_result(distill_student(settings, show))


def show_distilled(document: Document) -> None:
    """Prints the student's loss and folder, and the next command."""
    result(
        f"{document['student']} by {document['method']}, loss {document['loss']:.4f} after {document['steps']} steps"
    )
    result(f"Student {document['checkpoint']}")
    say(f"Next    {ourselves()} finetune --model {document['checkpoint']} --task ... --data ... --out ...")


def finetune(settings: FineTuning) -> Document:
    """Fine-tune a model on a task's labels, and on a teacher's soft labels if given."""
    from compress.runs.finetune import fine_tune, finetune_result
    from stillroom.console import show

    return finetune_result(fine_tune(settings, show))


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


def label(settings: Labelling) -> Document:
    """Write a teacher's answers to texts, for a student to learn from.

    A fine-tuned model of transformers answers, a command of yours, or a language model behind an endpoint. `run` and `finetune` read
    the file with --teacher-labels (docs/labelling.md). Give the same command again to resume a stopped one, or to ask again about
    texts that have no answer.
    """
    from compress.labelling.label import label as label_texts
    from stillroom.console import show

    return label_texts(settings, show)


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
        say(
            f"{document['unanswered']:,} texts have an error in place of an answer; the same command asks about them again."
        )
    result(f"Answers {document['out']}")
    say(
        f"Next    {ourselves()} finetune --model ... --task {document['task']} --data ... --teacher-labels {document['out']} --out ..."
    )


def select(settings: Selecting) -> Document:
    """Choose from unlabelled texts those worth labelling.

    Takes the nearest neighbours of labelled texts out of a bank, by the sentence vectors of any encoder; and of these, with --uncertain,
    the ones on which a model is least sure. Texts of the data, repetitions and near duplicates are left out.
    """
    from compress.selecting.select import select as select_texts
    from stillroom.console import show

    return select_texts(settings, show)


def show_selected(document: Document) -> None:
    """Prints how many texts were chosen and the file, and the next command."""
    result(
        f"{document['texts']:,} of {document['bank']:,} texts chosen, each with a cosine of {document['least_similar']:.2f} or more to a "
        f"labelled text; {document['near_duplicates']:,} near duplicates left out"
    )
    result(f"Texts   {document['out']}")
    say(f"Next    {ourselves()} label --with ... --input {document['out']} --out answers.jsonl")


def compare(settings: Comparison) -> Document:
    """Compare methods of distillation over several seeds.

    All read equally many tokens of the task's text; the table has means with spread and intervals.

    Every comparison has three controls, the same student on labels alone: `labels-new-layers`, `labels-general-layers` (of the
    teacher as given) and `labels` (from the fine-tuned teacher). Each row keeps its student as a checkpoint under OUT/work. A
    stopped comparison goes on where it was; one with more methods adds theirs.

    The learning rate of the last training on the task is chosen on validation from two, with seed 0: one further training a row.
    `--start`, `--teacher-layer` and `--distill-tokens` may be given again, and each value makes further rows for the methods that
    read it. `--export best` makes OUT/bundle of the student that is best on validation.
    """
    from stillroom.commands.compare.run import compare as compare_methods

    return compare_methods(settings)


def show_comparison(document: Document) -> None:
    """Prints a row per method and student."""
    from stillroom.report.comparison_page import compared
    from stillroom.report.formats import written

    reached = document["teacher"]["value"]
    made = compared(document)
    cells = [[written(cell) for cell in row] for row in made.rows]
    table(f"{document['metric']} on test, with 95 % intervals; the teacher reaches {reached:.4f}", made.header, cells)
    best = document["best"]
    say(f"Best on validation: {best['checkpoint']}, {best['validation']:.4f} on average over its seeds")
    if "export" in document:
        result(f"Bundle  {Path(document['report']).parent / document['export']['bundle']}")
    result(f"Report  {document['report']}")


def transfer(settings: Transferring) -> Document:
    """Find the task whose student learns other tasks best.

    Distils a student on each --source by XtremeDistil, trains it on each --target, and chooses the source with the best mean. Then
    trains the student of that source on few labels of each target, beside the same student without a source. Give the same command
    again to resume a stopped transfer.
    """
    from stillroom.commands.transfer.run import transfer_between

    return transfer_between(settings)


def show_transfer(document: Document) -> None:
    """Prints a row per source, a row per point of the curves, what was found, and the next command."""
    from stillroom.report.formats import Table, written
    from stillroom.report.transfer_page import points, sentences, transferred

    def printed(title: str, made: Table) -> None:
        table(title, made.header, [[written(cell) for cell in row] for row in made.rows])

    printed("scores on test with all labels, best source on validation first", transferred(document))
    printed("with few labels", points(document))
    for sentence in sentences(document):
        result(sentence)
    result(f"Student {document['checkpoint']}")
    result(f"Report  {document['report']}")
    say(f"Next    {ourselves()} finetune --model {document['checkpoint']} --task ... --data ... --out ...")


def search(settings: Searching) -> Document:
    """Find the student that learns best within a latency budget.

    Predicts the time of every shape on this machine, from students with random weights that it times once. Then it trains some that
    meet the budget for a few steps each, chosen by optuna, and times the best. Give the same command again to resume a stopped search.
    """
    from stillroom.commands.search import search_for

    return search_for(settings)


def show_search(document: Document) -> None:
    """Prints a row per trained student, what was found, and the next command."""
    from stillroom.report.formats import written
    from stillroom.report.search_page import sentences, tried

    made = tried(document)
    table("short trainings, best first", made.header, [[written(cell) for cell in row] for row in made.rows])
    for sentence in sentences(document):
        result(sentence)
    result(f"Report  {document['report']}")
    if "command" in document:
        say(f"Next    {document['command']}")


def export(checkpoint: Path, settings: Exporting) -> Document:
    """Export a checkpoint to a bundle of ONNX files: fp32, fp16, int8.

    Each file is checked against torch and gated on the task metric."""
    from stillroom.commands.export import export_checkpoint

    return export_checkpoint(str(checkpoint), Path(settings.out), settings)


def show_export(document: Document) -> None:
    """Prints a row per variant, with its score on test where there is one, and the next command."""
    test = document["scores"].get("test") or {}
    rows = []
    for name, variant in document["variants"].items():
        score = test.get(name if variant["runtime"] == "onnxruntime" else f"{name} {variant['runtime']}")
        cells = [f"{score['value']:.4f}", f"{score['low']:.4f} .. {score['high']:.4f}"] if score else ["", ""]
        share = "" if variant["share"] is None else f"{variant['share']:.4f}"
        rows.append([name, variant["runtime"], variant["scheme"], *cells, share, f"{variant['size_bytes'] / 1e6:.1f}"])
    header = ["variant", "runtime", "scheme", document["metric"], "95 % interval", "share of fp32", "MB"]
    table("scores on test, shares on validation" if test else "nothing was scored", header, rows)
    for claim in document["claims"]:
        result(claim)
    result(f"Bundle  {document['bundle']}\nReport  {document['report']}")
    say(f"Next    {ourselves()} serve {document['bundle']}")


VERBS = (
    Verb(
        run,
        Recipe,
        arguments=(
            Argument(
                "recipe", "A TOML file of settings; flags override it.", required=False, type=click.Path(path_type=Path)
            ),
            click.Option(["--dry-run"], is_flag=True, help="Print the plan with minutes and memory; train nothing."),
        ),
        raw=True,
        shown=show_run,
        examples=(
            "stillroom run --teacher bert-base-uncased --task token-classification \\\n"
            "      --data my-data --student 3x384 --out ner.bundle",
            "stillroom run recipe.toml --student 6x384 --out larger.bundle",
            "stillroom run recipe.toml --dry-run",
        ),
    ),
    Verb(
        distill,
        Distillation,
        shown=show_distilled,
        examples=(
            "stillroom distill --teacher bert-base-uncased --student 6x384 \\\n      --corpus text.txt --out small",
            "stillroom distill --teacher bert-base-uncased --corpus text.txt --out small \\\n"
            "      --method hidden-states --layer-map uniform",
        ),
    ),
    Verb(
        finetune,
        FineTuning,
        shown=show_finetuned,
        examples=(
            "stillroom finetune --model bert-base-uncased --task text-classification \\\n"
            "      --data my-data --out teacher",
            "stillroom finetune --model small --task text-classification \\\n"
            "      --data my-data --teacher teacher --out student",
            "stillroom finetune --model small --task text-classification \\\n"
            "      --data my-data --teacher-labels answers.jsonl --out student",
        ),
    ),
    Verb(
        label,
        Labelling,
        shown=show_labelled,
        examples=(
            "stillroom label --with my_deberta --input my-data/train.jsonl \\\n"
            "      --input more.txt --out answers.jsonl",
            "stillroom label --with-url http://localhost:8080/v1 --model qwen3 \\\n"
            "      --task text-classification --label refund --label status \\\n"
            "      --input texts.txt --out answers.jsonl",
            "stillroom label --with-command './rules.py' --task text-classification \\\n"
            "      --input texts.txt --out answers.jsonl",
        ),
    ),
    Verb(
        select,
        Selecting,
        shown=show_selected,
        examples=(
            "stillroom select --bank inbox.txt --like my-data --task text-classification \\\n"
            "      --encoder all-MiniLM-L6-v2 --out chosen.jsonl",
            "stillroom select --bank inbox.txt --like my-data --task text-classification \\\n"
            "      --encoder all-MiniLM-L6-v2 --with student --uncertain 500 \\\n"
            "      --out to-label.jsonl",
        ),
    ),
    Verb(
        compare,
        Comparison,
        shown=show_comparison,
        examples=(
            "stillroom compare --teacher my_teacher --task text-classification \\\n"
            "      --data my-data --corpus text.txt --out compared \\\n"
            "      --method minilmv2 --method soft-labels",
        ),
    ),
    Verb(
        transfer,
        Transferring,
        shown=show_transfer,
        examples=(
            "stillroom transfer --teacher my_teacher --out found \\\n"
            "      --source intents=text-classification:clinc150 \\\n"
            "      --source chunks=token-classification:conll2000 \\\n"
            "      --target snips=text-classification:snips",
            "stillroom transfer --teacher my_teacher --out found --student 3x384 \\\n"
            "      --source text-classification:news --source text-classification:reviews \\\n"
            "      --target text-classification:tickets --labels 20,200 --most-minutes 60",
        ),
    ),
    Verb(
        search,
        Searching,
        shown=show_search,
        examples=(
            "stillroom search --teacher my_teacher --task text-classification \\\n"
            "      --data my-data --budget-ms 2 --out found",
            "stillroom search --teacher my_teacher --task token-classification \\\n"
            "      --data my-data --budget-ms 5 --percentile 99 --tokens 64 --out found",
        ),
    ),
    Verb(
        export,
        Exporting,
        arguments=(
            Argument(
                "checkpoint", "Transformers folder or Hub name with a head for a task.", type=click.Path(path_type=Path)
            ),
        ),
        shown=show_export,
        examples=(
            "stillroom export my_checkpoint --out ner.bundle",
            "stillroom export my_checkpoint --data my-data --out ner.bundle",
            "stillroom export my_checkpoint --data my-data --out ner.bundle \\\n"
            "      --variants fp32,fp16,int8 --runtime openvino",
        ),
    ),
)
