"""The command line: parse, call one verb, print. Errors become one message and an exit code."""

import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import click
from click.shell_completion import get_completion_class

from compress import distributed
from serve.errors import BadInput, StillroomError
from stillroom.cli import demo, judge, make, use
from stillroom.cli.options import WIDTH, write_rows
from stillroom.console import console, say

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

STOPPED = "Stopped. `run`, `distill`, `finetune`, `compare` and `annotate` go on where they were when the same command is given again."
SHELLS = ("bash", "zsh", "fish")
COMPLETE = "_STILLROOM_COMPLETE"

# Under which heading help lists which verbs.
GROUPS = {"Make models": make.VERBS, "Judge them": judge.VERBS, "Use them": use.VERBS, "Try it": demo.VERBS}


class Verbs(click.Group):
    """All verbs, listed in groups."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A heading a group, and what each verb does in a line."""
        for heading, verbs in GROUPS.items():
            with formatter.section(click.style(heading, bold=True)):
                write_rows(formatter, [(f"{verb.name:<10}", verb.summary) for verb in verbs])

    def main(self, *given: Any, **how: Any) -> Any:
        """As click's, but what it raises is told by `guarded`."""
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
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version and leave."
)
@click.option(
    "--completion", type=click.Choice(SHELLS), is_eager=True, expose_value=False, callback=_completion,
    help='Print what makes a shell complete verbs, flags and choices: eval "$(stillroom --completion bash)".',
)  # fmt: skip
@click.pass_context
def app(context: click.Context) -> None:
    """A large text encoder in, a small one out: distilled, exported, measured and served."""
    _launched(context.invoked_subcommand)


for _verbs in GROUPS.values():
    for _verb in _verbs:
        app.add_command(_verb)


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
        code = call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (click.Abort, KeyboardInterrupt):
        say(STOPPED)
        return 130
    except click.ClickException as usage:
        usage.show()
        return usage.exit_code
    except Exception as error:
        return _explain(error)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """One message about `error`; its exit code."""
    if isinstance(error, StillroomError) and error.exit_code != 1:
        message, code = error.message, error.exit_code
    else:
        # The last line of defence: a person gets a sentence and the place of the details, not a wall of frames.
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing not in BUILD_PACKAGES:
            return _our_fault(error)
        message, code = (
            (
                f"This verb makes models and needs {missing}, which the base install leaves out. "
                'Run in a clone of stillroom: pip install -c constraints.txt -e ".[build]"'
            ),
            2,
        )
    _after_the_main_one()
    _complain(message)
    return code


def _complain(message: str) -> None:
    console.print("[bold red]stillroom:[/] ", end="")
    say(message)


def _after_the_main_one() -> None:
    """Of several processes another one speaks only where the main one has not: a launcher ends all when the first ends."""
    if not distributed.main():
        time.sleep(MAIN_SPEAKS_S)
    console.quiet = False  # whatever --quiet says: an error is told


def _our_fault(error: Exception) -> int:
    console.quiet = False  # of whichever process it is: faults of ours need not come in all of them
    with tempfile.NamedTemporaryFile("w", prefix="stillroom-", suffix=".log", delete=False, encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    if logging.getLogger().isEnabledFor(logging.INFO):
        traceback.print_exception(error)
    _complain(f"a fault of this program ({type(error).__name__}: {error}). The details are in {log.name}.")
    return 1


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
