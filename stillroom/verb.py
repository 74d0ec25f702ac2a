"""A verb of the command line, made from its settings dataclass: options, completion, help, and how its result is printed."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from compress.settings import COLUMNS
from serve.bundle.remote_files import is_url
from serve.errors import BadInput, GateMissed
from serve.options import Option, described, options_of
from stillroom.console import console, libraries_speak
from stillroom.settings import CARD

LATER = (CARD, COLUMNS)
NOT_SHOWN = re.compile(
    "[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # JSON escapes other control characters by itself
FIRST_COLUMN = 26  # characters of flag and value in help; longer ones have their help below them

WIDTH = {"max_content_width": 100}

Document = dict[str, Any]


class Verb(click.Command):
    """One verb: `call` returns its document, `show` prints that for a person, and `--json` prints it unchanged.

    `call` gets the arguments and the given settings of `kind` by name, and None for a needed one that is missing: `make` names it.
    `--json` prints the document of a `GateMissed`, too. `then` is called last, and may raise a `GateMissed`.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Document | None],
        kind: Any = None,
        *,
        help: str | None,
        arguments: Sequence[click.Parameter] = (),
        examples: Sequence[str] = (),
        show: Callable[[Any], None] | None = None,
        then: Callable[[Document], None] | None = None,
    ) -> None:
        self.call, self.kind, self.examples, self.show, self.then = call, kind, examples, show, then
        self.settings = options_of(kind) if kind else ()
        about_json = "Print one JSON document on stdout, and nothing else."
        about_libraries = (
            "Print also what transformers, datasets and other libraries log, and tracebacks of internal errors."
        )
        params = [
            *arguments,
            *map(Setting, self.settings),
            *([click.Option(["--json", "as_json"], is_flag=True, help=about_json)] if show else []),
            click.Option(["--quiet", "-q"], is_flag=True, help="Print only errors on stderr."),
            click.Option(["--verbose", "-v"], is_flag=True, help=about_libraries),
        ]
        super().__init__(name, params=params, help=help, callback=self._run, context_settings=WIDTH)

    @property
    def summary(self) -> str:
        """The first line of its help."""
        return (self.help or "").splitlines()[0]

    def _run(self, as_json: bool = False, quiet: bool = False, verbose: bool = False, **given: Any) -> None:
        console.quiet = console.quiet or quiet
        if verbose:
            libraries_speak()
        if as_json and str(given.get("output")) == "-":
            raise BadInput("--json and --output - both write to stdout; give --output a file.")
        for option in self.settings:
            if given[option.name] in (None, ()) and not option.required:
                del given[option.name]
        try:
            document = self.call(**given)
        except GateMissed as missed:
            if as_json and missed.document:
                print_json(missed.document)
            raise
        if self.show and document is not None:
            if as_json:
                print_json(document)
            else:
                self.show(document)
        if self.then and document is not None:
            self.then(document)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options under their headings, with choices and defaults whole, then examples."""
        arguments = [
            (str(p.make_metavar(ctx)), str(getattr(p, "about", "")))
            for p in self.params
            if isinstance(p, click.Argument)
        ]
        by_panel = {"Arguments": arguments} if arguments else {}
        for panel, options in panels_of(self.settings).items():
            by_panel[panel] = [(_spelled(option), _help_of(option)) for option in options]
        shared = [p.get_help_record(ctx) for p in self.get_params(ctx) if not isinstance(p, Setting | Argument)]
        by_panel.setdefault("Output", []).extend(record for record in shared if record)
        for panel, rows in by_panel.items():
            with formatter.section(click.style(panel, bold=True)):
                write_rows(formatter, rows)
        if self.examples:
            with formatter.section(click.style("Examples", bold=True)):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def panels_of(settings: Sequence[Option]) -> dict[str, list[Option]]:
    """Options under their headings; those in LATER come last."""
    found: dict[str, list[Option]] = {}
    for option in sorted(settings, key=lambda option: LATER.index(option.panel) if option.panel in LATER else -1):
        found.setdefault(option.panel or "Options", []).append(option)
    return found


class Setting(click.Option):
    """An option made from a field of a settings dataclass."""

    def __init__(self, option: Option) -> None:
        self.option = option
        flags = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag
        kind: Any = bool if option.kind is bool else Value(option)
        super().__init__(
            [flags, option.name], type=kind, default=None, multiple=option.several, metavar=_metavar(option)
        )


class Value(click.ParamType[Any]):
    """One value of a setting. Text becomes a number here; the dataclass checks ranges and choices of all settings at once."""

    def __init__(self, option: Option) -> None:
        self.option, self.name = option, option.kind.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` as the settings dataclass takes it. Text that is no number stays text: the dataclass refuses it."""
        if self.option.kind in (int, float) and not self.option.listed:
            try:
                return self.option.kind(value)
            except ValueError:
                return value
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Its choices or suggested names, otherwise files. In a list with commas the last value is completed."""
        names = self.option.choices or self.option.suggested
        if not names:
            of_file = self.option.kind is Path or self.option.metavar in ("FILE", "FOLDER") or not self.option.metavar
            return [CompletionItem(incomplete, type="file")] if of_file and self.option.kind in (Path, str) else []
        before, comma, last = incomplete.rpartition(",") if self.option.listed else ("", "", incomplete)
        return [CompletionItem(f"{before}{comma}{name}") for name in map(str, names) if name.startswith(last)]


class Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, name: str, about: str, **how: Any) -> None:
        self.about = about
        super().__init__([name], **how)


class FolderOrUrl(click.Path):
    """A path, or a URL as it was given: paths have no `//`."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` as a path, unless it is a URL."""
        return value if is_url(value) else super().convert(value, param, ctx)


def write_rows(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Writes rows of a name and its help. Names are not broken at hyphens, as in click's own table."""
    column = min(max(len(name) for name, _ in rows), FIRST_COLUMN) + 2
    margin = " " * formatter.current_indent
    for name, text in rows:
        lines = textwrap.wrap(text, formatter.width - len(margin) - column, break_on_hyphens=False) or [""]
        if len(name) > column - 2:
            lines.insert(0, "")
        first, *others = lines
        formatter.write(f"{margin}{click.style(name, fg='cyan')}{' ' * (column - len(name))}{first}".rstrip() + "\n")
        formatter.write("".join(f"{margin}{' ' * column}{line}\n" for line in others))


def print_json(document: Any) -> None:
    """One JSON document on standard output, which may be a terminal: control characters and half surrogate pairs are escaped."""
    said = NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(document, ensure_ascii=False, indent=2))
    try:
        said.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # of an old locale; JSON may escape all other letters
        said = json.dumps(document, indent=2)
    sys.stdout.write(f"{said}\n")


def ourselves() -> str:
    """This command as a user types it: its name where the shell finds it, otherwise its path."""
    here = Path(sys.argv[0])
    if shutil.which("stillroom") or here.name != "stillroom":
        return "stillroom"
    return str(here)


def _metavar(option: Option) -> str:
    if option.metavar:
        return option.metavar
    if option.choices:
        return "NAME" + (",..." if option.several else "")
    usual = {int: "N", float: "X", Path: "FILE"}.get(option.kind, "TEXT")
    return usual + (f",{usual}" if option.listed else "")


def _spelled(option: Option) -> str:
    """A flag and what stands for its value."""
    if option.kind is bool:
        return f"--[no-]{option.flag[2:]}" if option.default else option.flag
    return f"{option.flag} {_metavar(option)}"


def _help_of(option: Option) -> str:
    if option.required:
        return f"{described(option)} [needed]"
    if option.kind is bool and not option.default:
        return described(option)
    return f"{described(option)} [{option.default_shown}]" if option.default_shown else described(option)
