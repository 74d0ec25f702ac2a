"""The command line: parse, call one verb, print. Errors become one message and an exit code."""

import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click
from click.shell_completion import get_completion_class

from compress import distributed
from compress.runs.threads import training_spins, wait_for_work
from serve.errors import BadInput, InternalError, StillroomError, is_panic
from serve.files import drop_unwritten, no_room, reader_gone, refused
from serve.wording import all_of
from stillroom.console import console, say
from stillroom.verb import WIDTH, write_rows

# What the `build` extra brings; serving needs none of it.
BUILD_PACKAGES = {
    "torch", "transformers", "accelerate", "datasets", "safetensors", "onnx", "onnxscript", "pyarrow", "tomli_w", "sklearn", "scipy",
    "optuna",
}  # fmt: skip

NO_TEMPORARY_FOLDER = "No usable temporary directory found"  # of Python's tempfile, which many parts and libraries ask

MAIN_SPEAKS_S = 10.0  # how long the other processes wait for the main one to meet and report the same error

LAUNCHED_VERBS = ("distill", "finetune", "run")  # which several processes may be started for
TRAINING_VERBS = (*LAUNCHED_VERBS, "benchmark", "compare", "label", "search", "select", "transfer", "demo")

RESUMED_VERBS = (*LAUNCHED_VERBS, "compare", "transfer", "search", "benchmark", "label", "annotate", "demo")
OF_A_TOKENIZER = (
    "Most often it is a tokenizer that cannot read a text of the data. Save the model's tokenizer again with transformers, or leave that "
    "text out."
)
SHELLS = ("bash", "zsh", "fish")
COMPLETE = "_STILLROOM_COMPLETE"

# Headings of the help, with their verbs.
GROUPS = {
    heading: tuple(import_module(f"stillroom.verbs.{name}").VERB for name in names.split())
    for heading, names in {
        "Make models": "run distill finetune label select compare transfer search export",
        "Measure them": "evaluate explain benchmark profile load inspect",
        "Use them": "serve annotate push",
        "Try it": "demo",
    }.items()
}


@contextmanager
def _output_read() -> Iterator[None]:
    """BadInput if the reader of the output has gone. click and rich would leave without a word, as after a fault of this program."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        of_rich = isinstance(error, SystemExit)  # which has put the null device in place of the output by now
        if of_rich and not isinstance(error.__context__, BrokenPipeError):
            raise
        if not of_rich and not reader_gone(sys.stdout):  # click would leave without a word
            raise InternalError(
                f"a pipe or connection was closed by its other end ({error}); give the same command again"
            ) from error
        drop_unwritten(sys.stdout)
        raise BadInput(
            "the output was closed before all of it was written; read it to its end, or write it to a file"
        ) from error


class Verbs(click.Group):
    """All verbs, listed in groups."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a heading per group, and a line per verb."""
        for heading, verbs in GROUPS.items():
            with formatter.section(click.style(heading, bold=True)):
                write_rows(formatter, [(f"{verb.name:<10}", verb.summary) for verb in verbs])

    def make_context(self, *given: Any, **how: Any) -> click.Context:
        """Like click's, which prints a help or the version here."""
        with _output_read():
            return super().make_context(*given, **how)

    def invoke(self, ctx: click.Context) -> Any:
        """Like click's, but tells of an output that is not read."""
        with _output_read():
            return super().invoke(ctx)

    def main(self, *given: Any, **how: Any) -> Any:
        """Like click's, but exceptions go on to `guarded`, which reports them."""
        return super().main(
            *given, **{"prog_name": "stillroom", "complete_var": COMPLETE, **how, "standalone_mode": False}
        )


def _completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell:
        kind = get_completion_class(shell)
        assert kind
        sys.stdout.write(kind(ctx.command, {}, "stillroom", COMPLETE).source() + "\n")
        ctx.exit()


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"stillroom {version('stillroom')}\n")
        ctx.exit()


@click.group(cls=Verbs, no_args_is_help=True, context_settings=WIDTH)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version and exit."
)
@click.option(
    "--completion", type=click.Choice(SHELLS), is_eager=True, expose_value=False, callback=_completion,
    help='Print a script that completes verbs, flags and choices: eval "$(stillroom --completion bash)".',
)  # fmt: skip
@click.pass_context
def app(context: click.Context) -> None:
    """A large text encoder in, a small one out: distilled, exported, measured and served."""
    # A thread that spins until it gets work starves whatever shares the machine: with two cores and one busy neighbour, a
    # training step took five times as long. Here, because no verb has loaded torch yet.
    wait_for_work(training_spins() if context.invoked_subcommand in TRAINING_VERBS else 0)
    _launched(context.invoked_subcommand)


for _verbs in GROUPS.values():
    for _verb in _verbs:
        app.add_command(_verb)


def main() -> None:
    """The `stillroom` command. Exit codes: 0 done, 1 a fault of ours, 2 bad input or usage, 3 a gate was missed."""
    sys.exit(guarded(app))


def guarded(call: Callable[[], Any]) -> int:
    """The exit code of `call`. An exception becomes one message; an error of this program also a traceback in a log."""
    try:
        code = call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (click.Abort, KeyboardInterrupt):
        distributed.failed("it was stopped")
        verb = next((word for word in sys.argv[1:] if word in app.commands), "")
        resumes = verb in RESUMED_VERBS and "-" not in sys.argv  # an output on stdout begins anew
        say(f"Stopped. {'To resume, give the same command again' if resumes else 'The same command starts over'}.")
        return 130
    except click.ClickException as usage:
        distributed.failed(usage.format_message())
        usage.show()
        return usage.exit_code
    except Exception as error:
        return _explain(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        return _explain(BadInput(f"A library in Rust gave up: {error}. {OF_A_TOKENIZER}"))
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Prints one message about `error`; returns its exit code."""
    code = 2
    if isinstance(error, StillroomError) and error.exit_code != 1:
        message, code = error.message, error.exit_code
    elif no_room(error):
        message = f"There is no room to write: {error}. Make room and give the same command again."
    elif said := refused(error):
        message = said
    elif isinstance(error, FileNotFoundError) and NO_TEMPORARY_FOLDER in str(error):
        message = f"{str(error).partition('] ')[2]}. Set TMPDIR to a folder that can be written."
    elif type(error).__name__ == "OutOfMemoryError":  # torch's; it need not be imported here
        asked = str(error).partition(" GPU ")[0].strip()
        message = (
            f"The GPU's memory is too small: {asked} Give --device cpu. Training also takes less with --accumulate 4, which computes "
            "each batch in 4 parts, or with --precision bf16; its finished stages are kept."
        )
    else:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing not in BUILD_PACKAGES:
            return _our_fault(error)
        message = (
            f"This verb makes models and needs {missing}, which the base install leaves out. "
            'Run in a clone of stillroom: pip install -c constraints.txt -e ".[build]"'
        )
    distributed.failed(message)
    if not distributed.main():  # the main one reports the error first, and the launcher then ends the others
        time.sleep(MAIN_SPEAKS_S)
    _complain(message)
    return code


def _complain(message: str) -> None:
    console.quiet = (
        False  # errors are printed with --quiet, too, and an error of ours in every process: it may occur in one alone
    )
    with suppress(SystemExit):  # of rich, where nobody reads stderr: the exit code still tells
        console.print("[bold red]stillroom:[/] ", end="")
        say(message)


def _our_fault(error: Exception) -> int:
    distributed.failed(f"a fault of this program ({type(error).__name__}: {error})")
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="stillroom-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            traceback.print_exception(error, file=log)
        details = f"The details are in {log.name}."
    except OSError as refused:
        details = f"No file with the details can be written ({refused}); --verbose prints them."
    if logging.getLogger().isEnabledFor(logging.INFO):
        traceback.print_exception(error)
    _complain(f"a fault of this program ({type(error).__name__}: {error}). {details}")
    return 1


def _launched(verb: str | None) -> None:
    """Lets only the main process print, where several were started to train, and waits for the others.

    Raises:
        BadInput: several processes were started for a verb that trains in one, or cannot reach each other.
    """
    distributed.check_launch()
    if not distributed.main():
        console.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as this process is
    if distributed.count() > 1 and verb not in LAUNCHED_VERBS:
        raise BadInput(
            f"{distributed.count()} processes were started for `{verb}`; only {all_of(LAUNCHED_VERBS)} "
            "train in several. "
            "Run this one without torchrun or accelerate launch."
        )
    distributed.meet(_complain)
