"""HTML pages from the templates in `templates/`: every value is escaped, and an undefined name is an error.

Jinja2 is in an extra. If it is not installed, no page is written, and all other files are.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.bundle.manifest import canonical_json
from serve.files import replacing
from stillroom.console import say
from stillroom.report.charts import kind_of
from stillroom.report.drawings import BAR_PX
from stillroom.report.formats import written

if TYPE_CHECKING:
    from jinja2 import Environment

LEFT_OUT = (
    "HTML pages are left out, because Jinja2 is not installed; every other file is written. For pages, "
    "run in a clone of stillroom: pip install '.[report]'"
)
LONG_TABLE = 25  # longer tables are collapsed


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


def rendered(template: str, values: Mapping[str, object]) -> str:
    """`template` with `values`, as one self-contained HTML document, without scripts other than the template's own."""
    return environment().get_template(template).render(values)


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
    found.filters["kind"] = kind_of
    return found
