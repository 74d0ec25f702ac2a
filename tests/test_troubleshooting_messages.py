"""Every message that `docs/troubleshooting.md` quotes is one of the program's."""

import ast
import re
from collections.abc import Iterator

from repository import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# What the page quotes of the system and of gates, whose names are values.
OF_OTHERS = re.compile(r"OSError: |int8 over ")
LEAST_CHARACTERS = 12  # a shorter piece of a message would be found anywhere


def literals() -> Iterator[str]:
    """The program's strings, with `...` in the place of what is filled in."""
    for package in ("compress", "export", "latency", "serve", "stillroom"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%[rs]", "...", node.value)


def quoted() -> list[str]:
    """The code spans of the tables that are sentences: flags, commands and names of files are not."""
    rows = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    spans = [span for row in rows for pair in re.findall(r"``(.+?)``|`(.+?)`", row) for span in pair]
    return [span for span in spans if " " in span and not span.startswith("stillroom ") and not OF_OTHERS.search(span)]


def test_every_message_of_the_page_is_in_the_code() -> None:
    known = "\0".join(literals())
    messages = quoted()
    assert len(messages) > 50
    pieces = [(span, piece.strip()) for span in messages for piece in span.split("...")]
    strange = [span for span, piece in pieces if len(piece) >= LEAST_CHARACTERS and piece not in known]
    assert not strange
