"""HTML pages of sections, all laid out by `templates/page.html`: every value is escaped, and an undefined name is an error.

Jinja2 is in an extra. If it is not installed, no page is written, and all other files are.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from serve.bundle.manifest import canonical_json
from serve.files import replacing
from stillroom.console import say
from stillroom.report.charts import kind_of
from stillroom.report.drawings import BAR_PX, Chart
from stillroom.report.formats import Table, written

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LEFT_OUT = (
    "HTML pages are left out, because Jinja2 is not installed; every other file is written. For pages, "
    "run in a clone of stillroom: pip install '.[report]'"
)
LONG_TABLE = 25  # longer tables are collapsed

# A part of a page: a paragraph, lines, names and values, a table, a chart; or a macro of `templates/parts.html` and its arguments, of
# which the last is what the part holds. `note` and `said` are macros of `templates/notes.html`. A part that holds nothing is left out.
MACROS = {str: "paragraph", list: "lines", dict: "facts", Table: "table", Chart: "chart"}
Look = Literal[
    "answer", "quiet", "pre", "command", "warnings", "verdict", "under", "details", "opened", "figure", "charts", "bars", "doubts",
    "advice", "attention", "note", "said",
]  # fmt: skip
Part = str | Sequence[str] | Mapping[str, Any] | Table | Chart | tuple[Look, *tuple[Any, ...]] | None


@cache
def can_write_pages() -> bool:
    """Whether Jinja2 is installed. If it is not, the first call prints what to install."""
    if find_spec("jinja2"):
        return True
    say(LEFT_OUT)
    return False


def write_page(path: Path, page: Callable[[], str]) -> None:
    """Writes the result of `page` to `path`. Without Jinja2 it removes an older page, which would not fit the new figures."""
    if can_write_pages():
        write_text(path, page())
    else:
        path.unlink(missing_ok=True)


def page_or(path: Path, instead: str) -> Path:
    """The page `path` if it exists, otherwise the file `instead` beside it, with the same figures."""
    return path if path.is_file() else path.with_name(instead)


def rendered(
    title: str, lead: Sequence[Part], sections: Iterable[tuple[str, str, Sequence[Part]]], script: str = ""
) -> str:
    """One self-contained HTML document: `lead`, then `sections`, each an id, a heading and parts. One that holds nothing is left out.

    No script runs but the file `script` of `templates/`.
    """
    from markupsafe import Markup

    code = Markup(environment().get_template(script).render() if script else "")  # noqa: S704 - a file of this package
    return environment().get_template("page.html").render(
        title=title,
        lead=lead,
        sections=[section for section in sections if _holds(section[2])],
        script=code,
        script_hash=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
    )  # fmt: skip


def _holds(part: Any) -> bool:
    """Whether `part` holds anything; of several parts, one that does more than explain the others."""
    name, held = (part[0], part[-1]) if type(part) is tuple else ("", part)
    if isinstance(held, list):
        return any(_holds(each) for each in held if not (type(each) is tuple and each[0] in ("quiet", "note")))
    return name == "note" or bool(held)


def _laid_out(parts: Iterable[Part]) -> "Markup":
    """`parts` as HTML."""
    from markupsafe import Markup

    macros = environment().get_template("parts.html").module
    calls = (part if type(part) is tuple else (MACROS[type(part)], part) for part in parts if _holds(part))
    return Markup("\n").join(getattr(macros, name)(*values) for name, *values in calls)


def page_bytes(page: str) -> bytes:
    """The HTML `page` as UTF-8, with a character reference for what UTF-8 cannot encode."""
    return page.encode("utf-8", errors="xmlcharrefreplace")


def write_text(path: Path, text: str) -> None:
    """Writes a page, a table or JSON to `path` in one step: a reader never sees half of it."""
    with replacing(path) as beside:
        beside.write_bytes(page_bytes(text))


def write_document(
    out: Path, files: tuple[str, str], document: dict[str, Any], page: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Writes `document` as JSON and as its `page` into the folder `out`, under the names `files`; the document that `--json` prints."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / files[0], canonical_json(document).decode())
    write_page(out / files[1], lambda: page(document))
    return document | {"report": str(page_or(out / files[1], files[0]))}


@cache
def environment() -> "Environment":
    """The templates' environment. Floats, None and booleans are formatted by `written`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("stillroom.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: written(value) if value is None or isinstance(value, bool | float) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"LONG_TABLE": LONG_TABLE, "BAR_PX": BAR_PX}
    found.filters |= {"kind": kind_of, "laid_out": _laid_out}
    return found
