"""From teacher to bundle: fine-tune, distil, export, check, time.

RECIPE is a TOML file of settings, named as the flags; flags override it. Give the same command again to resume a stopped run.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stillroom.console import result, say
from stillroom.inputs.recipe import Recipe, read_recipe, resolve
from stillroom.verb import Argument, Document, Verb, ourselves


def run(**settings: Any) -> dict[str, Any]:
    """From a teacher to a bundle. Settings are the fields of `stillroom.inputs.recipe.Recipe`.

    Returns the document that `stillroom run --json` prints.

    Raises:
        BadInput: anything wrong with what was given, before any training.
        GateMissed: the student fell short of a gate.
    """
    from stillroom.verbs.run.pipeline import run as make_bundle

    return make_bundle(resolve({}, {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}))


def _run(recipe: Path | None, dry_run: bool, **settings: Any) -> Document:
    from stillroom.verbs.run import pipeline

    resolved = resolve(read_recipe(recipe) if recipe else {}, settings)
    if dry_run:
        plan = pipeline.plan_of(resolved)
        return asdict(plan) | {"minutes": round(plan.minutes, 1)}
    return pipeline.run(resolved)


def show_run(document: Document) -> None:
    """Prints the result of a run and the next command, or the plan of a dry run."""
    from stillroom.verbs.run.result_table import show_plan, show_result

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


VERB = Verb(
    "run",
    _run,
    Recipe,
    help=__doc__,
    arguments=(
        Argument(
            "recipe", "A TOML file of settings; flags override it.", required=False, type=click.Path(path_type=Path)
        ),
        click.Option(["--dry-run"], is_flag=True, help="Print the plan with minutes and memory; train nothing."),
    ),
    show=show_run,
    examples=(
        "stillroom run --teacher bert-base-uncased --task token-classification \\\n"
        "      --data my-data --student 3x384 --out ner.bundle",
        "stillroom run recipe.toml --student 6x384 --out larger.bundle",
        "stillroom run recipe.toml --dry-run",
    ),
)
