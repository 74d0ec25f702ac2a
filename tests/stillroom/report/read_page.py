"""What a reader finds on a page: tags, sections, texts and tables."""

from html.parser import HTMLParser

from stillroom.report.pages import environment

HOSTILE = """<script>alert("x")</script>"><img src=x onerror=alert('x')>&amp;"""


def part(name: str, *values: object) -> str:
    """What one of the macros that all pages are made of writes."""
    return str(getattr(environment().get_template("parts.html").module, name)(*values)).strip()


class Page(HTMLParser):
    """Tags, ids and texts of a page, with a check that every tag that opens also closes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []  # rows of cells, the header first
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"th", "td"}:
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if {"th", "td"} & set(self.open):
            self.tables[-1][-1][-1] = f"{self.tables[-1][-1][-1]} {data.strip()}".strip()

    def words(self) -> str:
        """All texts, one space between."""
        return " ".join(" ".join(self.texts).split())

    def sections(self) -> list[str | None]:
        return [attributes["id"] for tag, attributes in self.tags if tag == "section"]
