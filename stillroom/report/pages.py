"""HTML pages from the templates in `templates/`: every value is escaped, and a name that is not given is an error.

Jinja2 is in an extra. Where it is not installed there are no pages; everything else is written as ever.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from serve.bundle.replaced_files import replacing
from stillroom.console import say
from stillroom.report.charts import kind_of
from stillroom.report.drawings import BAR_PX
from stillroom.report.formats import written

if TYPE_CHECKING:
    from jinja2 import Environment

LEFT_OUT = (
    "HTML pages are left out, because Jinja2 is not installed; every other file is written. For pages: "
    "in a clone of stillroom, pip install '.[report]'"
)
LONG_TABLE = 25  # rows from which a table is folded away until a reader asks for it


@cache
def can_write_pages() -> bool:
    """Is Jinja2 here? If not, one message, the first time, says that there are no pages, and what to install."""
    if find_spec("jinja2"):
        return True
    say(LEFT_OUT)
    return False


def write_page(path: Path, page: Callable[[], str]) -> None:
    """Writes what `page` makes to `path`; where there are no pages an older one goes, since it tells of something else."""
    if can_write_pages():
        write_text(path, page())
    else:
        path.unlink(missing_ok=True)


def page_or(path: Path, instead: str) -> Path:
    """The page `path`, or where there are no pages the file `instead` beside it, which holds the same figures."""
    return path if path.is_file() else path.with_name(instead)


def rendered(template: str, values: Mapping[str, object]) -> str:
    """`template` with `values`, as one self-contained HTML document without scripts."""
    return environment().get_template(template).render(values)


def page_bytes(page: str) -> bytes:
    """The HTML `page` as it stands in a file: UTF-8, with a reference for what that cannot hold."""
    return page.encode("utf-8", errors="xmlcharrefreplace")


def write_text(path: Path, text: str) -> None:
    """Writes a page, a table or JSON to `path`; a reader never sees half of it."""
    with replacing(path) as beside:
        beside.write_bytes(page_bytes(text))


@cache
def environment() -> "Environment":
    """The templates with what they may call. Floats, None and truth values are written as `written` writes them."""
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
    found.filters["kind"] = kind_of
    return found
