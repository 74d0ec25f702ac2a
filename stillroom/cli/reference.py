"""The reference page of all flags, made from the settings: `python -m stillroom.cli.reference > docs/flags.md`."""

import sys
from collections.abc import Iterator

from serve.options import Option, described
from stillroom.cli.main import GROUPS
from stillroom.cli.options import Verb, panels_of

HEAD = """# Flags

Every flag of every verb, with its default. A recipe of `run` takes the same names with `_` for `-`. `stillroom VERB --help`
shows the same. This page is made from the settings: `python -m stillroom.cli.reference > docs/flags.md`.

Every verb takes `-q` (errors alone on stderr) and `-v` (what libraries log too), and every verb but `serve` takes `--json`: one
document on stdout, nothing else there.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *(line for heading, verbs in GROUPS.items() for line in _group(heading, verbs))])


def _group(heading: str, verbs: tuple[Verb, ...]) -> Iterator[str]:
    yield f"## {heading}\n"
    for verb in verbs:
        yield f"### stillroom {verb.name}\n"
        yield f"{verb.summary}\n"
        if verb.settings:
            yield "| flag | default | range | |"
            yield "|---|---|---|---|"
            yield from (_row(option) for options in panels_of(verb.settings).values() for option in options)
            yield ""


def _row(option: Option) -> str:
    default = "needed" if option.required else option.default_shown
    cells = (f"`{option.flag}`", default, option.range, described(option))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
