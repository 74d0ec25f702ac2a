"""The command line: parse, call one verb, print. Errors become one message and an exit code."""

import inspect as inspect_module
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from compress import distributed
from serve.errors import BadInput, GateMissed, StillroomError
from stillroom.console import console, say
from stillroom.inputs.recipe import Recipe

app = typer.Typer(
    name="stillroom",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Teacher -> distil -> export -> measure -> serve. A large text encoder in, a small one out: proven, measured, served.",
)

# What the `build` extra brings; serving needs none of it.
BUILD_PACKAGES = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "onnx",
    "onnxscript",
    "pyarrow",
    "tomli_w",
}

MAIN_SPEAKS_S = 10.0  # seconds in which the main process meets what another one has met

TRAINING_VERBS = ("distill", "finetune", "run")  # which several processes may be started for

ACCUMULATE = "Parts that a step's batch is cut into, for memory; dropout apart the same is learned."
TRACKER = "Where metrics go beside metrics.jsonl: tensorboard, wandb or mlflow; may be given again."
SCHEDULE = "Of a paper, by name (docs/methods.md); flags override it."
PROFILE_FILES = {"report.html", "report.json", "table.md"}  # what `profile --out` writes, and may replace
LOAD_FILES = {"load.json", "table.md"}  # the same of `load --out`

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]


def main() -> None:
    """The `stillroom` command. Exit codes: 0 done, 1 a fault of ours, 2 bad input or usage, 3 a gate was missed."""
    # A training thread that spins while it waits starves whatever shares the machine; with two cores and one busy
    # neighbour a step took five times as long. The OpenMP runtime reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    sys.exit(guarded(app))


def guarded(call: Callable[[], Any]) -> int:
    """The exit code of `call`; what it raises becomes one message, and a traceback in a log where the fault is ours."""
    try:
        call()
    except SystemExit as leaving:
        if leaving.code == 130:
            say(
                "Stopped. `run`, `distill`, `finetune`, `compare` and `annotate` go on where they were when the same command is given "
                "again."
            )
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except StillroomError as error:
        if error.exit_code == 1:
            return _our_fault(error)
        _after_the_main_one()
        console.print("[bold red]stillroom:[/] ", end="")
        say(error.message)
        return error.exit_code
    except Exception as error:
        # The last line of defence: a person gets a sentence and the place of the details, not a wall of frames.
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing not in BUILD_PACKAGES:
            return _our_fault(error)
        console.print("[bold red]stillroom:[/] ", end="")
        say(
            f"This verb makes models and needs {missing}, which the base install leaves out. "
            'Run in a clone of stillroom: pip install -c constraints.txt -e ".[build]"'
        )
        return 2
    return 0


def _after_the_main_one() -> None:
    """Of several processes another one speaks only where the main one has not: a launcher ends all when the first ends."""
    if not distributed.main():
        time.sleep(MAIN_SPEAKS_S)
        console.quiet = False


def _our_fault(error: Exception) -> int:
    console.quiet = False  # of whichever process it is: faults of ours need not come in all of them
    with tempfile.NamedTemporaryFile("w", prefix="stillroom-", suffix=".log", delete=False, encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    console.print("[bold red]stillroom:[/] ", end="")
    say(f"a fault of this program ({type(error).__name__}: {error}). The details are in {log.name}.")
    return 1


def ourselves() -> str:
    """How a person calls this command: by its name where the shell would find it, otherwise by its path."""
    found = shutil.which("stillroom")
    here = Path(sys.argv[0])
    if found or here.name != "stillroom":
        return "stillroom"
    return str(here)


def _print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"stillroom {version('stillroom')}\n")
        raise typer.Exit()


@app.callback()
def stillroom(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Teacher -> distil -> export -> measure -> serve. A large text encoder in, a small one out: proven, measured, served."""
    _launched(context.invoked_subcommand)


def _launched(verb: str | None) -> None:
    """Where several processes were started to train, the main one speaks for all.

    Raises:
        BadInput: they were started for a verb that does not train in several.
    """
    distributed.check_launch()
    if not distributed.main():
        console.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as this process is
    if distributed.count() > 1 and verb not in TRAINING_VERBS:
        raise BadInput(
            f"{distributed.count()} processes were started for `{verb}`; only {', '.join(TRAINING_VERBS)} train in several. "
            "Run this one without torchrun or accelerate launch."
        )


def _setting(name: str, *flags: str, help: str) -> Any:
    """An option of `run` that shows the recipe's default, which a recipe file may have overridden."""
    default = getattr(Recipe(), name)
    if isinstance(default, bool):
        default = "yes" if default else "no"
    shown = f"{default:g}" if isinstance(default, float) else str(default) or "none"
    return typer.Option(*flags, help=help, show_default=shown)


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="A TOML file of settings; flags override it.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Transformers folder or Hub name of a BERT-like encoder.")] = None,
    task: Annotated[str | None, typer.Option(help="token-classification or text-classification.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with train, validation and test files, or a `datasets` name.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The bundle to write; stages live in OUT.work.")] = None,
    student: Annotated[
        str | None, _setting("student", help="6x768 6x384 4x576 3x384 ... or layers=5,hidden=320,heads=10,ffn=1280.")
    ] = None,
    name: Annotated[str | None, _setting("name", help="What the server calls the model.")] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Plain text for the relation stage; may be given again.")
    ] = None,
    unlabelled: Annotated[
        list[str] | None, typer.Option(help="In-domain text that the teacher labels; may be given again.")
    ] = None,
    augment: Annotated[
        int | None, _setting("augment", help="Texts generated from each labelled one, for the teacher to label.")
    ] = None,
    seed: Annotated[int | None, _setting("seed", help="Fixes everything that is drawn at random.")] = None,
    threads: Annotated[
        int | None, _setting("threads", help="Cores to use; all that this process may use unless given.")
    ] = None,
    precision: Annotated[
        str | None,
        _setting("precision", help="Of training: fp32, bf16, fp16 on GPUs, or auto: bf16 where the machine has it."),
    ] = None,
    max_length: Annotated[int | None, _setting("max_length", help="Longest text in tokens.")] = None,
    batch: Annotated[int | None, _setting("batch", help="Texts a training step.")] = None,
    accumulate: Annotated[int | None, _setting("accumulate", help=ACCUMULATE)] = None,
    trackers: Annotated[list[str] | None, typer.Option("--tracker", help=TRACKER)] = None,
    new_head: Annotated[
        bool | None,
        _setting("new_head", "--new-head/--own-head", help="Fine-tune a new head though the teacher has one."),
    ] = None,
    teacher_epochs: Annotated[
        int | None, _setting("teacher_epochs", help="At most; it stops when validation stops improving.")
    ] = None,
    teacher_patience: Annotated[
        int | None, _setting("teacher_patience", help="Epochs without a new best before it stops.")
    ] = None,
    teacher_learning_rate: Annotated[
        float | None, _setting("teacher_learning_rate", help="Peak rate of its fine-tuning.")
    ] = None,
    relation_epochs: Annotated[
        float | None, _setting("relation_epochs", help="MiniLMv2 relations over all text; 0 leaves them out.")
    ] = None,
    relation_heads: Annotated[
        int | None, _setting("relation_heads", help="The paper's 48, or the nearest that fits, unless given.")
    ] = None,
    relation_layer: Annotated[
        int | None, _setting("relation_layer", help="The teacher's layer to learn from, from 1.")
    ] = None,
    relation_tokens: Annotated[int | None, _setting("relation_tokens", help="Longest piece of the corpus.")] = None,
    relation_learning_rate: Annotated[
        float | None, _setting("relation_learning_rate", help="Peak rate of the relation stage.")
    ] = None,
    student_epochs: Annotated[int | None, _setting("student_epochs", help="Of task distillation.")] = None,
    student_learning_rate: Annotated[
        float | None, _setting("student_learning_rate", help="Peak rate of the student's training.")
    ] = None,
    temperature: Annotated[float | None, _setting("temperature", help="Of the soft labels.")] = None,
    soft_weight: Annotated[
        float | None, _setting("soft_weight", help="Of the soft labels; the labels have the rest.")
    ] = None,
    undistilled: Annotated[
        bool | None, _setting("undistilled", "--undistilled/--no-undistilled", help="Train the comparison too.")
    ] = None,
    teacher_gate: Annotated[
        float | None, _setting("teacher_gate", help="Least share of the teacher's metric that is shipped.")
    ] = None,
    gate: Annotated[float | None, _setting("gate", help="Least share of the fp32 metric that int8 keeps.")] = None,
    out_of_scope: Annotated[
        str | None, _setting("out_of_scope", help="Label of texts that the model has no answer to, to abstain from.")
    ] = None,
    keep_right: Annotated[
        float | None,
        _setting("keep_right", help="Or the share of right answers to keep when it abstains; 0 is never to abstain."),
    ] = None,
    max_minutes: Annotated[float | None, _setting("max_minutes", help="Fit the training to this many minutes.")] = None,
    latency_seconds: Annotated[
        float | None, _setting("latency_seconds", help="For timing all models together.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, _setting("checkpoint_seconds", help="Work that a kill loses at most.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run stopped (which a rerun does anyway).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with minutes and memory; train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """From teacher to bundle in one command: fine-tune -> distil -> export -> check -> time.

    [bold]Examples[/]

      stillroom run --teacher bert-base-uncased --task token-classification --data my-data --student 3x384 --out ner.bundle

      stillroom run recipe.toml --student 6x384 --out larger.bundle

      stillroom run recipe.toml --dry-run
    """
    given = {
        key: value
        for key, value in locals().items()
        if key not in {"recipe", "resume", "dry_run", "as_json"} and value is not None
    }
    from stillroom.inputs.recipe import read_recipe, resolve

    resolved = resolve(read_recipe(recipe) if recipe else {}, given)
    from stillroom.commands.run import pipeline

    if dry_run:
        _show_plan(pipeline.plan_of(resolved), as_json)
        return
    document = pipeline.run(resolved)
    if as_json:
        _print_json(document)
        return
    _show_run(document)


def _show_run(document: dict[str, Any]) -> None:
    from stillroom.commands.run import result_table

    out = Path(document["bundle"])
    result_table.show_result(out)
    low, high = document["speedup_interval"]
    say(
        f"The int8 student is {document['speedup']:.1f} times [{low:.1f}, {high:.1f}] as fast as the torch teacher "
        f"(one text of {document['speedup_tokens']} tokens). All of it took {document['minutes']:.1f} minutes."
    )
    say(f"Bundle  {out}\nReport  {document['report']}")
    if document["report_with_texts"]:
        say(f"        {document['report_with_texts']} has texts of the data too, and is not part of the bundle")
    say(f"Next    {ourselves()} serve {out}")


def _show_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        import dataclasses

        _print_json(dataclasses.asdict(plan) | {"minutes": round(plan.minutes, 1)})
        return
    from stillroom.console import table

    steps = {
        "teacher": plan.teacher_steps,
        "relations": plan.relation_steps,
        "undistilled": plan.relation_steps + plan.student_steps,
        "student": plan.student_steps,
    }
    rows = [
        [name, str(steps.get(name, "")), f"{seconds / 60:.1f}"] for name, seconds in plan.seconds.items() if seconds
    ]
    table("plan, from a few timed steps; nothing was trained", ["stage", "steps", "minutes"], rows)
    say(f"About {plan.minutes:.0f} minutes and {plan.memory_bytes / 2**30:.1f} GiB of memory.")


def _with_serve_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with every field of `ServeSettings` as an option, so that each setting stands in one place."""
    from serve.settings import options

    signature = inspect_module.signature(verb)
    parameters = [
        each for each in signature.parameters.values() if each.kind is not inspect_module.Parameter.VAR_KEYWORD
    ]
    for option in options():
        kind: Any = Literal[option.choices] if option.choices else option.kind
        if option.several:
            kind = list[kind]
        panel = {"limits": "What one request may ask", "connections": "What clients may occupy"}.get(option.group or "")
        described = typer.Option(help=option.help, rich_help_panel=panel)
        annotation: Any = Annotated[kind if option.default is not None else kind | None, described]
        parameters.append(
            inspect_module.Parameter(
                option.name,
                inspect_module.Parameter.KEYWORD_ONLY,
                default=list(option.default) if option.several else option.default,
                annotation=annotation,
            )
        )
    verb.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ |= {each.name: each.annotation for each in parameters}
    return verb


@app.command()
@_with_serve_settings
def serve(bundles: Annotated[list[Path], typer.Argument(help="One or more bundles.")], **given: Any) -> None:
    """Answer over HTTP from bundles. No torch is needed.

    [bold]Example[/]

      stillroom serve ner.bundle --port 8000
    """
    from serve.http.app import serve as serve_bundles
    from serve.settings import settings_of

    serve_bundles(bundles, settings_of(given))


@app.command()
def annotate(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    input: Annotated[
        Path, typer.Option(help="A file of text: .jsonl, .csv or .tsv with `text`, or .txt; .gz too; - is stdin.")
    ],
    output: Annotated[Path, typer.Option(help="JSON lines, one for each row, in order; - is stdout.")],
    format: Annotated[
        str | None, typer.Option(help="Of the input: jsonl, txt, csv or tsv.", show_default="its name's")
    ] = None,
    field: Annotated[str, typer.Option(help="Under which a row's answer is added to it.")] = "answer",
    min_score: Annotated[float, typer.Option(help="Entities that score less are left out, 0 to 1.")] = 0.0,
    offsets: Annotated[str, typer.Option(help="What start and end count: codepoints, utf16 or utf8.")] = "codepoints",
    aggregation: Annotated[
        str, typer.Option(help="How tags of tokens become entities: first, average, max or strict.")
    ] = "first",
    constrained: Annotated[
        bool, typer.Option("--constrained", help="Take the likeliest tags that form a valid sequence.")
    ] = False,
    top_k: Annotated[int | None, typer.Option(help="How many labels.", show_default="all")] = None,
    abstain: Annotated[
        bool, typer.Option("--abstain", help="Give no label where the bundle's model is not sure enough.")
    ] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts longer than the model; they are read in windows otherwise.")
    ] = False,
    bad_rows: Annotated[
        str, typer.Option(help="stop at the first, or skip: its line holds an error in place of an answer.")
    ] = "stop",
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew where the output has rows already.")] = False,
    variant: Annotated[str | None, typer.Option(help="Precision.", show_default="the bundle's")] = None,
    processes: Annotated[
        int | None, typer.Option(help="That compute side by side.", show_default="as many as fit the cores")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Of one process.", show_default="1")] = None,
    as_json: Json = False,
) -> None:
    """Answers to a whole file of texts, on all cores, in order. No torch is needed.

    Rows come back as they were with the answer beside them. A stopped command goes on where it was when it is given again.

    [bold]Examples[/]

      stillroom annotate ner.bundle --input tickets.jsonl --output answers.jsonl

      zcat texts.gz | stillroom annotate ner.bundle --input - --format txt --output - --min-score 0.5
    """
    from serve.text.answers import AnswerOptions
    from stillroom.commands.annotate.runner import Annotation, summary
    from stillroom.commands.annotate.runner import annotate as annotate_rows

    if as_json and str(output) == "-":
        raise BadInput("--json and --output - both want stdout; give --output a file")
    options = AnswerOptions(min_score, offsets, top_k, aggregation, constrained, truncate, abstain)  # type: ignore[arg-type]
    document = annotate_rows(
        Annotation(
            bundle, input, output, options, format=format, answer_field=field, bad_rows=bad_rows, restart=restart,  # type: ignore[arg-type]
            variant=variant, processes=processes, threads=threads,
        )
    )  # fmt: skip
    if as_json:
        _print_json(document)
        return
    for line in summary(document):
        say(line)


@app.command()
def inspect(bundle: Annotated[Path, typer.Argument(help="A bundle.")], as_json: Json = False) -> None:
    """Verify every file of a bundle and say what it is.

    [bold]Example[/]

      stillroom inspect ner.bundle
    """
    from serve.bundle.manifest import MANIFEST, open_bundle

    opened = open_bundle(bundle)
    document = json.loads((bundle / MANIFEST).read_text(encoding="utf-8")) | {"verified": True}
    if as_json:
        _print_json(document)
        return
    from stillroom.commands.inspect import explain

    explain(opened)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Bundle, checkpoint folder or Hub name.")],
    data: Annotated[Path, typer.Option(help="A file of labelled examples.")],
    variant: Annotated[str | None, typer.Option(help="Precision of a bundle: fp32 or int8.")] = None,
    task: Annotated[str | None, typer.Option(help="Of a checkpoint, where its head does not tell.")] = None,
    as_json: Json = False,
) -> None:
    """The task metric of a bundle or checkpoint on a labelled file, with its bootstrap interval.

    [bold]Example[/]

      stillroom evaluate ner.bundle --data my-data/test.jsonl --variant int8
    """
    from stillroom.commands.evaluate import evaluate as evaluate_model

    document = evaluate_model(model, data, variant=variant, task=task)
    if as_json:
        _print_json(document)
    else:
        say(
            f"{document['metric']} {document['value']:.4f} [{document['low']:.4f}, {document['high']:.4f}] on "
            f"{document['examples']} texts, by {document['variant']}"
        )
        if document["unknown_labels"]:
            say(f"warning: the model has never heard of these labels: {', '.join(document['unknown_labels'])}")


@app.command()
def distill(
    teacher: Annotated[str, typer.Option(help="Transformers folder or Hub name.")],
    corpus: Annotated[list[Path], typer.Option(help="Plain text, one document a line; may be given again.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write.")],
    student: Annotated[
        str,
        typer.Option(
            help="6x768 6x384 4x576 3x384 ... or layers=5,hidden=320,heads=10,ffn=1280.", show_default="3x384"
        ),
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help="minilmv2 minilm directminilm hidden-states output-distribution tinybert-general distilbert mlm-kd mlm, "
            "or an ablation: minilm-no-value-relation minilm-value-mse minilm-hidden-relation minilm-layer-to-layer."
        ),
    ] = "minilmv2",
    schedule: Annotated[str, typer.Option(help=SCHEDULE)] = "",
    epochs: Annotated[
        float | None, typer.Option(help="Over the corpus, all stages of the method together.", show_default="1")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak rate.", show_default="that of each stage")] = 0.0,
    batch: Annotated[int | None, typer.Option(help="Pieces of text a step.", show_default="32")] = None,
    relation_heads: Annotated[
        int, typer.Option(help="What all heads are split into anew.", show_default="48, or the nearest that fits")
    ] = 0,
    teacher_layer: Annotated[int, typer.Option(help="From 1.", show_default="usual for this depth")] = 0,
    layer_map: Annotated[
        str, typer.Option(help="single last uniform uniform-consecutive uniform+last; none is the method's own.")
    ] = "",
    tokens: Annotated[int | None, typer.Option(help="Longest piece of text.", show_default="128")] = None,
    whole_words: Annotated[
        bool, typer.Option("--whole-words", help="Hide whole words where the method learns from masked text.")
    ] = False,
    start: Annotated[
        str,
        typer.Option(
            help="Layers of the teacher, where they fit: uniform alternate first last, or layer-map; random are new ones; "
            "otherwise a checkpoint of the student's own."
        ),
    ] = "uniform",
    assistants: Annotated[
        list[str] | None,
        typer.Option(
            "--assistant",
            help="A student between teacher and student, such as 6x576; may be given again, in order. auto is MiniLM's rule.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes everything that is drawn at random.")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or, on GPUs, fp16.")] = "fp32",
    accumulate: Annotated[int, typer.Option(help=ACCUMULATE)] = 1,
    trackers: Annotated[list[str] | None, typer.Option("--tracker", help=TRACKER)] = None,
    teacher_cache: Annotated[
        str,
        typer.Option(
            help="Folder that keeps what the teacher computes, a byte a number: for more than one epoch, or more than one student.",
            show_default="none",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """A task-agnostic student from a teacher and plain text, by any method of the papers (docs/methods.md).

    [bold]Examples[/]

      stillroom distill --teacher bert-base-uncased --student 6x384 --corpus text.txt --out small

      stillroom distill --teacher bert-base-uncased --student 6x384 --corpus text.txt --out small --method hidden-states --layer-map uniform
    """
    from stillroom.api import distill as distil_student

    made = distil_student(
        teacher, corpus, out, student=student, method=method, epochs=epochs, learning_rate=learning_rate, batch=batch,
        relation_heads=relation_heads, teacher_layer=teacher_layer, layer_map=layer_map, tokens=tokens,
        whole_words=whole_words, start=start, assistants=tuple(assistants or ()), seed=seed, precision=precision,
        schedule=schedule, accumulate=accumulate, trackers=tuple(trackers or ()), teacher_cache=teacher_cache,
    )  # fmt: skip
    if as_json:
        _print_json({"checkpoint": str(made)})
    else:
        say(f"Student {made}. Next: stillroom finetune --model {made} --task ... --data ... --out ...")


@app.command()
def finetune(
    model: Annotated[str, typer.Option(help="Transformers folder or Hub name, such as a student of `distill`.")],
    task: Annotated[str, typer.Option(help="token-classification or text-classification.")],
    data: Annotated[str, typer.Option(help="Folder with train, validation and test files, or a `datasets` name.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write.")],
    teacher: Annotated[
        str,
        typer.Option(help="Fine-tuned on the task: its soft labels are learned too; none learns from labels alone."),
    ] = "",
    unlabelled: Annotated[
        list[str] | None, typer.Option(help="In-domain text that the teacher labels; may be given again.")
    ] = None,
    schedule: Annotated[str, typer.Option(help=SCHEDULE)] = "",
    epochs: Annotated[float | None, typer.Option(help="Over the labelled text, at most.", show_default="5")] = None,
    patience: Annotated[int, typer.Option(help="Epochs without a new best before it stops; 0 never does.")] = 2,
    learning_rate: Annotated[float | None, typer.Option(help="Peak rate.", show_default="1e-4")] = None,
    batch: Annotated[int | None, typer.Option(help="Texts a step.", show_default="32")] = None,
    max_length: Annotated[int, typer.Option(help="Longest text in tokens.", show_default="what the model takes")] = 0,
    temperature: Annotated[float | None, typer.Option(help="Of the soft labels.", show_default="2")] = None,
    soft_weight: Annotated[
        float | None, typer.Option(help="Of the soft labels; the labels have the rest.", show_default="0.9")
    ] = None,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Even where the model has one for other labels.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Fixes everything that is drawn at random.")] = 0,
    threads: Annotated[int, typer.Option(help="Cores.", show_default="all")] = 0,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16, fp16 on GPUs, or auto: bf16 where the machine has it.")
    ] = "auto",
    accumulate: Annotated[int, typer.Option(help=ACCUMULATE)] = 1,
    trackers: Annotated[list[str] | None, typer.Option("--tracker", help=TRACKER)] = None,
    as_json: Json = False,
) -> None:
    """A model with a head for a task: trained on labels, or on a teacher's soft labels and them.

    [bold]Examples[/]

      stillroom finetune --model bert-base-uncased --task text-classification --data my-data --out teacher

      stillroom finetune --model small --task text-classification --data my-data --teacher teacher --out student
    """
    from stillroom.api import finetune as fine_tune

    made = fine_tune(
        model, task, data, out, teacher=teacher, unlabelled=tuple(unlabelled or ()), epochs=epochs, patience=patience,
        learning_rate=learning_rate, batch=batch, max_length=max_length, temperature=temperature, soft_weight=soft_weight,
        new_head=new_head, seed=seed, threads=threads, precision=precision, schedule=schedule,
        accumulate=accumulate, trackers=tuple(trackers or ()),
    )  # fmt: skip
    if as_json:
        _print_json({"checkpoint": str(made)})
    else:
        say(f"Model {made}. Next: stillroom export {made} --data {data} --out BUNDLE")


@app.command()
def compare(
    teacher: Annotated[str, typer.Option(help="Transformers folder or Hub name.")],
    task: Annotated[str, typer.Option(help="token-classification or text-classification.")],
    data: Annotated[str, typer.Option(help="Folder with train, validation and test files, or a `datasets` name.")],
    out: Annotated[
        Path, typer.Option(help="Folder for compare.json, report.html and table.md; rows live in OUT/work.")
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Names with commas between them (docs/methods.md); minilm@6x576 goes by way of an assistant."
        ),
    ],
    students: Annotated[
        list[str] | None, typer.Option("--student", help="3x384 unless given; may be given again.")
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Plain text, one document a line; may be given again.")
    ] = None,
    source_data: Annotated[
        str, typer.Option(help="Of the task from which a method transfers: a folder or name as --data.")
    ] = "",
    source_task: Annotated[str, typer.Option(help="That task, where it is another than --task.")] = "",
    seeds: Annotated[int, typer.Option(help="Trainings of each method.")] = 3,
    distil_tokens: Annotated[int, typer.Option(help="Of plain text, for methods that learn from it.")] = 1_000_000,
    task_tokens: Annotated[
        int, typer.Option(help="Of the task's text; methods without plain text get both here.")
    ] = 1_000_000,
    batch: Annotated[int, typer.Option(help="Texts a step.")] = 32,
    tokens: Annotated[int, typer.Option(help="Longest piece of the corpus.")] = 128,
    max_length: Annotated[int, typer.Option(help="Longest text of the task; 0 is what the teacher takes.")] = 0,
    teacher_epochs: Annotated[int, typer.Option(help="Of fine-tuning the teacher, at most.")] = 5,
    teacher_learning_rate: Annotated[float, typer.Option(help="Peak rate of that.")] = 1e-4,
    threads: Annotated[int, typer.Option(help="Cores of one training; 0 is all.")] = 0,
    jobs: Annotated[int, typer.Option(help="Trainings at once.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, bf16, or auto: bf16 where the machine has it.")] = "auto",
    as_json: Json = False,
) -> None:
    """Methods of distillation side by side: equal tokens, several seeds, means with spread and intervals.

    The same student without a teacher's help comes with every comparison: `random` starts anew, `none` from the teacher's
    layers. A stopped comparison goes on where it was; one with more methods adds theirs.

    [bold]Example[/]

      stillroom compare --teacher my_teacher --task text-classification --data my-data --corpus text.txt
      --methods minilmv2,minilm@6x576,soft-labels --out compared
    """
    from stillroom.commands.compare import Comparison
    from stillroom.commands.compare import compare as compare_methods
    from stillroom.report.comparison_page import HEADER, cells

    document = compare_methods(
        Comparison(
            teacher, task, data, str(out), tuple(name.strip() for name in methods.split(",") if name.strip()),
            students=tuple(students or ["3x384"]), corpus=tuple(corpus or ()), source_data=source_data,
            source_task=source_task, seeds=seeds, distil_tokens=distil_tokens,
            task_tokens=task_tokens, batch=batch, tokens=tokens, max_length=max_length, teacher_epochs=teacher_epochs,
            teacher_learning_rate=teacher_learning_rate, threads=threads, jobs=jobs, precision=precision,
        )
    )  # fmt: skip
    if as_json:
        _print_json(document)
        return
    from stillroom.console import table

    reached = document["teacher"]["value"]
    table(f"{document['metric']} on test; the teacher reaches {reached:.4f}", list(HEADER), cells(document))
    say(f"Report  {out / 'report.html'}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A transformers folder with a head for a task.")],
    out: Annotated[Path, typer.Option(help="The bundle to write.")],
    data: Annotated[
        str, typer.Option(help="Folder with train, validation and test files: calibrates, gates, reports.")
    ],
    precision: Annotated[str, typer.Option(help="Graphs to make: fp32, fp16, int8.")] = "fp32,int8",
    gate: Annotated[float, typer.Option(help="Least share of the fp32 metric that int8 and fp16 keep.")] = 0.99,
    out_of_scope: Annotated[
        str,
        typer.Option(help="Label of texts that the model has no answer to, to tell these apart.", show_default="none"),
    ] = "",
    keep_right: Annotated[
        float, typer.Option(help="Or the share of right answers to keep when it abstains; 0 is never to abstain.")
    ] = 0.95,
    int8: Annotated[
        str,
        typer.Option(help="static; weight-only, near fp32 and no faster; dynamic, whose answers depend on the batch."),
    ] = "static",
    runtime: Annotated[
        str, typer.Option(help="What serves int8: onnxruntime, or openvino where it is installed.")
    ] = "onnxruntime",
    fuse: Annotated[
        str,
        typer.Option(
            help="Kernels to join for GPUs: attention,skip-layer-norm,bias-gelu,embedding.", show_default="none"
        ),
    ] = "",
    keep_words_of: Annotated[
        list[Path] | None, typer.Option(help="Trim the vocabulary to the words of this text; may be given again.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the server calls the model.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest text in tokens; 0 is all that the model takes.")] = 0,
    latency_seconds: Annotated[float, typer.Option(help="For timing every variant and runtime; 0 leaves it out.")] = 20,
    threads: Annotated[int, typer.Option(help="Cores to use; 0 is all.")] = 0,
    as_json: Json = False,
) -> None:
    """A checkpoint as a bundle: fp32, fp16 and int8, checked against torch and gated on the task metric.

    [bold]Examples[/]

      stillroom export my_checkpoint --data my-data --out ner.bundle

      stillroom export my_checkpoint --data my-data --out ner.bundle --precision fp32,fp16,int8 --runtime openvino
    """
    from stillroom.api import export as export_bundle

    made = export_bundle(
        checkpoint, out, data, precision=precision, gate=gate, out_of_scope=out_of_scope, keep_right=keep_right,
        int8=int8, runtime=runtime, fuse=fuse,
        keep_words_of=tuple(keep_words_of or ()), name=name, max_length=max_length, latency_seconds=latency_seconds,
        threads=threads,
    )  # fmt: skip
    report = out.with_name(f"{out.name}.report.json")
    if as_json:
        _print_json({"bundle": str(made), "report": str(report)})
        return
    from stillroom.console import table

    document = json.loads(report.read_text(encoding="utf-8"))
    agreement = document["agreement"]
    rows = [
        [
            row["name"],
            f"{row['metric']:.4f}",
            f"{row['low']:.4f} .. {row['high']:.4f}",
            f"{agreement[row['name']]['share']:.4f}",
            f"{agreement[row['name']]['labels_changed_per_10k']:.1f}",
            f"{row['size_bytes'] / 1e6:.1f}",
        ]
        for row in document["summary"]
    ]
    header = ["variant", "value", "95 % interval", "of fp32", "labels changed per 10k", "MB"]
    table(document["metric_name"], header, rows)
    for claim in document["claims"]:
        say(claim)
    say(f"Bundle {made}. Report {report.with_suffix('.html')}. Next: {ourselves()} serve {made}")


@app.command()
def profile(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Bundles, checkpoint folders and .onnx files; the first is compared with.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="Texts to time on, labelled ones for a metric; or a folder of splits, whose test it takes."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, report.json and table.md; graphs stay in OUT.work.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cpu,cuda.")] = "cpu",
    runtimes: Annotated[
        str,
        typer.Option(
            help="Of torch, torch-compile, torch-cuda-graphs, onnxruntime, onnxruntime-tensorrt, openvino.",
            show_default="what each model pins; torch and onnxruntime for checkpoints",
        ),
    ] = "",
    precisions: Annotated[str, typer.Option(help="Of torch: fp32, bf16, fp16.")] = "fp32",
    batches: Annotated[str, typer.Option(help="Texts a call, of the grid.")] = "1,8",
    lengths: Annotated[str, typer.Option(help="Tokens a text, of the grid.")] = "16,128",
    seconds: Annotated[
        float,
        typer.Option(help="Of timing; exports, loading, scoring and six turns of every model at least come on top."),
    ] = 120.0,
    tight: Annotated[float, typer.Option(help="How closely speed-ups are to be known, relative.")] = 0.02,
    threads: Annotated[int, typer.Option(help="Of one call.", show_default="what fits this container")] = 0,
    budget_ms: Annotated[
        float | None, typer.Option(help="What one text may take; the best that meets it is named.")
    ] = None,
    percentile: Annotated[int, typer.Option(help="At which the budget holds: 50, 90, 95 or 99.")] = 99,
    bound_ms: Annotated[
        float | None, typer.Option(help="Finds the highest rate of arrivals whose p99 stays within this.")
    ] = None,
    price_per_core_hour: Annotated[float | None, typer.Option(help="For the price of a million texts.")] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try every split of the cores into threads and processes.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="A report.json of before: its models run again beside these; slower ends with 3."),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Time the papers' teacher and students (random weights) beside their figures."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Which model, at which precision, in which runtime, meets a budget here, and what it costs in accuracy.

    Candidates take turns, each in a process of its own, until their ratios are known closely or the time is up.

    [bold]Examples[/]

      stillroom profile my_teacher ner.bundle --data my-data --out timings --budget-ms 5

      stillroom profile ner.bundle --against timings/report.json --out again

      stillroom profile --paper
    """
    from stillroom.commands.profile.papers_table import paper_markdown
    from stillroom.commands.profile.run import Profiling, profile_models, profile_paper, write_profile
    from stillroom.commands.profile.speed_regression import regression_lines
    from stillroom.report.profile_page import answer_lines, profile_markdown

    _refuse_unless_ours(out, PROFILE_FILES)
    if paper and (models or against):
        raise BadInput("--paper makes its own models; leave MODEL and --against out.")
    settings = Profiling(
        data=data, device=device, runtimes=runtimes, precisions=precisions, batches=_numbers(batches),
        lengths=_numbers(lengths), seconds=seconds, tight=tight, threads=threads, budget_ms=budget_ms,
        percentile=percentile, bound_ms=bound_ms, price_per_core_hour=price_per_core_hour, sweep=sweep,
    )  # fmt: skip
    work = out and out.with_name(f"{out.name}.work")
    document = profile_paper(settings) if paper else profile_models(models or [], settings, work=work, against=against)
    document["command"] = " ".join(["stillroom", *map(shlex.quote, sys.argv[1:])])
    if out:
        write_profile(out, document)
    if as_json:
        _print_json(document)
    else:
        sys.stdout.write(paper_markdown(document["paper"]) if paper else profile_markdown(document))
        for line in [] if paper else answer_lines(document):
            say(line)
    if out:
        say(f"Report  {out / 'report.html'}")
    lines = regression_lines(document.get("regression", []))
    for line in lines:
        say(line)
    slower = [row for row in document.get("regression", []) if row["slower"]]
    if slower:
        raise GateMissed(f"{len(slower)} of {len(lines)} comparisons are slower than before, beyond their intervals.")


@app.command()
def load(
    url: Annotated[str, typer.Argument(help="Where the server takes a text by POST, http or https.")],
    data: Annotated[Path, typer.Option(help="A file of text, as real queries are.")],
    rate: Annotated[
        float | None, typer.Option(help="Queries a second; without it the highest is searched for.")
    ] = None,
    bound_ms: Annotated[float | None, typer.Option(help="What p99 is to stay under.", show_default="50")] = None,
    queries: Annotated[int | None, typer.Option(help="Of each trial, in place of --seconds.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Of arrivals, each trial.", show_default="10")] = None,
    template: Annotated[
        str, typer.Option(help="JSON of a request, in which the string TEXT stands for a text.")
    ] = '{"text": "TEXT"}',
    headers: Annotated[list[str] | None, typer.Option("--header", help='"Name: value"; may be given again.')] = None,
    connections: Annotated[int, typer.Option(help="Open at once at most; queries beyond wait, which counts.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds after which a query is given up.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Fixes the moments of arrival and the order of the texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for load.json, with all raw samples, and table.md.")] = None,
    as_json: Json = False,
) -> None:
    """Load a running server, ours or another's, as many users do: queries come whether or not earlier ones are answered.

    Latency counts from the moment at which a query was meant to leave. Without --rate it searches for the highest rate whose p99
    stays under --bound-ms while nothing is refused, fails or times out.

    [bold]Examples[/]

      stillroom load http://127.0.0.1:8000/v1/entities --data my-data/test.jsonl --rate 200

      stillroom load http://127.0.0.1:8000/v1/entities --data my-data/test.jsonl --bound-ms 50 --out loaded

      stillroom load https://example.com/classify --data texts.txt --template '{"input": \\["TEXT"]}' --header "X-Api-Key: K"
    """
    from stillroom.commands import load
    from stillroom.console import table

    _refuse_unless_ours(out, LOAD_FILES)
    document = load.load(
        url, data, rate=rate, bound_ms=bound_ms, queries=queries, seconds=seconds, template=template,
        headers=tuple(headers or ()), connections=connections, timeout=timeout, seed=seed,
    )  # fmt: skip
    if out:
        load.write(out, document)
    if as_json:
        _print_json(document)
        return
    table(url, load.COLUMNS, load.rows(document["trials"]))
    for line in (load.sentence(document), *document["doubts"]):
        say(line)


def _refuse_unless_ours(out: Path | None, files: set[str]) -> None:
    """BadInput when something else than `files` is at `out`."""
    if out and out.exists() and not (out.is_dir() and {f.name for f in out.iterdir()} <= files):
        raise BadInput(
            f"--out {out} is there already and holds other things; nothing was written. Give another folder."
        )


def _numbers(listed: str) -> tuple[int, ...]:
    parts = listed.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise BadInput(f"{listed!r} is not a list of whole numbers from 1, such as 1,8.")
    return tuple(int(part) for part in parts)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """`run` on a small set of support messages made by this program, with the teacher in the `demo` extra.

    [bold]Example[/]

      stillroom demo --out demo
    """
    from stillroom.commands.demo import demo as run_demo

    document = run_demo(out)
    if as_json:
        _print_json(document)
        return
    _show_run(document)
    say(
        "Then    curl -s localhost:8000/v1/entities -H 'content-type: application/json' "
        '-d \'{"text": "The kettle from order 4471-220 is broken, please call Marta Kowalska at +48 601 555 010."}\''
    )
