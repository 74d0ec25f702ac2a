"""The reference page of all flags, made from the settings: `python -m stillroom.cli.reference > docs/reference/flags.md`."""

import sys
from collections.abc import Iterator

from serve.options import Option, described
from stillroom.cli.main import GROUPS
from stillroom.verb import Argument, Setting, Verb, panels_of

EVERY_VERB = ("as_json", "quiet", "verbose")
HEAD = """# Flags

Every flag of every verb, with its default and its range. In Python and in a recipe of `run`, a setting has the flag's name with `_`
for `-`, or the name beside the flag. This page is made from the settings: `python -m stillroom.cli.reference > docs/reference/flags.md`.

Every verb takes `-q` (only errors on stderr) and `-v` (what libraries log, too). Every verb but `serve` takes `--json` (one document
on stdout, and nothing else).
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *(line for heading, verbs in GROUPS.items() for line in _group(heading, verbs))])


def _group(heading: str, verbs: tuple[Verb, ...]) -> Iterator[str]:
    yield f"## {heading}\n"
    for verb in verbs:
        yield f"### stillroom {verb.name}\n"
        yield f"{verb.summary}\n"
        yield "| flag | default | range | |"
        yield "|---|---|---|---|"
        own = [each for each in verb.params if isinstance(each, Argument)]
        yield from (_cells(f"`{each.name.upper()}`", "needed" if each.required else "", "", each.about) for each in own)
        yield from (_row(option) for options in panels_of(verb.settings).values() for option in options)
        plain = [
            each for each in verb.params if not isinstance(each, Argument | Setting) and each.name not in EVERY_VERB
        ]
        yield from (_cells(f"`{each.opts[0]}`", "", "", str(getattr(each, "help", ""))) for each in plain)
        yield ""


def _row(option: Option) -> str:
    default = "needed" if option.required else option.default_shown
    other = "" if option.flag == "--" + option.name.replace("_", "-") else f" `{option.name}`"
    return _cells(f"`{option.flag}`{other}", default, option.range, described(option))


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
