"""Reads words with their tags in columns, as corpora of CoNLL's shared tasks have them: a word a line, a blank line after each text.

The layout of a file is read first (what separates columns, how many there are, which hold tags), then its rows.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from compress.data.columns import Columns
from compress.data.row_fields import Fault, note
from serve.text.labels import OUTSIDE, PREFIXED

DOCUMENT = "-DOCSTART-"  # a line that begins so ends a text
COMMENTS = ("#", "%%")  # lines that begin so may be comments: `# id`, `# text =`, but also the word `#` with its tag
BLANKS = " \t\r\f\v"  # a no-break space is none: it may be part of a word
SEPARATOR = re.compile(f"[{BLANKS}]+")
SHARE = 0.9  # of lines whose first column is a number, from which it holds no words
# A cell of a column of spans: `(x*` begins one, `*` goes on, `*)` ends it, `(x*)` or `(x)` is one of one word. As in OntoNotes.
SPAN = re.compile(r"(\([^()*]+)?\*\)?|\([^()*]+\)")

# Names of columns in a header, in small letters, with _ for blanks: of words, of tags of entities, of other tags, and of any column.
WORDS = re.compile(r"(\w+_)?(words?|tokens?|forms?)(_(form|text|str))?|texts?|sentence")
ENTITY_TAGS = re.compile(
    r"(\w+_)?(ner|ne|named_entity|entity|entities|bio|bioes|bilou|iob2?|labels?)(_?(tags?|labels?|types?))?"
)
TAGS = re.compile(r"(\w+_)?tags?")
NAME = re.compile(r"\w+|sentence_#")

Lines = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Layout:
    """How the columns of a file are laid out."""

    tabs: bool
    """Whether tabs alone separate columns; otherwise blanks do."""
    width: int
    """The number of columns of most lines."""
    tags: frozenset[str]
    """What is in the last column of lines that are no comments for certain."""
    even: bool
    """Whether all lines have as many columns."""
    tagged: bool
    """Whether most lines end in `O` or a tag with a prefix."""
    brackets: bool
    """Whether the last column has spans in brackets, see `SPAN`."""
    header: str
    """The line that names the columns, before all others; empty if there is none."""
    fault: str
    """Why words and tags are not in the columns that are read; empty if they may be."""


def conll_rows(path: Path, lines: Lines, columns: Columns, faults: list[Fault]) -> Iterator[tuple[int, object]]:
    """The texts of a file of columns, each with the line of its first word: the word is first in a line, its tag last.

    Columns are separated by tabs where most lines have some, and otherwise by blanks. A blank line ends a text, and so does
    `-DOCSTART-`. A line before a text that begins with `#` or `%%` is a comment, unless it is a word with its tag. A line that names the
    columns is left out, wherever it stands. Tags may be spans in brackets, such as `(x*` and `*)`.

    Args:
        path: names the file in faults.
        lines: reads the lines of the file, without their line feeds, anew at each call.
        columns: the names of the fields of the rows.
        faults: gets lines that are not of the layout.

    Raises:
        UnreadableFrom: `lines` raised it, or there are too many faults.
    """
    layout = layout_of(lines)
    if layout.fault:
        faults.append(Fault(str(path), None, layout.fault))
        return
    tokens: list[str] = []
    tags: list[str] = []
    start, inside = 1, ""
    for number, line in enumerate(chain(lines(), [""]), 1):
        cells = _cells(line, tabs=layout.tabs)
        if not cells or line.startswith(DOCUMENT) or (line == layout.header and (layout.tagged or not tokens)):
            if inside:
                note(
                    faults,
                    Fault(str(path), start, f"has a text whose last span ({inside}*) is not closed; close it by )"),
                )
            elif tokens:
                yield start, {columns.tokens: tokens, columns.tags: tags}
            tokens, tags, inside = [], [], ""
        elif line.startswith(COMMENTS) and not _is_word(cells, layout, within=bool(tokens)):
            if tokens:
                reason = (
                    f"begins with {cells[0][:20]!r} like a comment, and is between words; put comments before a text"
                )
                note(faults, Fault(str(path), number, reason))
        elif reason := _line_fault(line, cells, layout) or (_span_fault(cells[-1], inside) if layout.brackets else ""):
            note(faults, Fault(str(path), number, reason))
        else:
            start = start if tokens else number
            tokens.append(cells[0])
            tag = cells[-1]
            if layout.brackets:
                label = tag.strip("(*)")
                tag = f"B-{label}" if label else f"I-{inside}" if inside else OUTSIDE
                inside = "" if cells[-1].endswith(")") else label or inside
            tags.append(tag)


def _cells(line: str, *, tabs: bool) -> list[str]:
    """The columns of a line; none of a blank one. Tabs that align columns make no empty ones, but the word may be empty."""
    if not tabs:
        return SEPARATOR.split(there) if (there := line.strip(BLANKS)) else []
    cells = [cell.strip(BLANKS) for cell in line.split("\t")]
    return [cells[0], *filter(None, cells[1:])] if any(cells) else []


def _is_word(cells: Sequence[str], layout: Layout, *, within: bool) -> bool:
    """Whether a line that begins like a comment is a word with its tag; `within` a text no comment is expected.

    It has all columns, and ends in a tag, or begins as `#word` does, or is the word `#` among tags without prefixes.
    """
    if len(cells) != layout.width:
        return False
    is_hashtag = cells[0][1:2].isalnum() and " " not in cells[0]
    is_sign = cells[0] == "#" and "=" not in cells and not layout.tagged  # `# text = OK` is none
    is_sign = is_sign and (layout.tabs or within or _is_alike(cells[-1], layout.tags))
    return is_hashtag or is_sign or _is_tag(cells[-1]) or cells[-1] in layout.tags


def _is_alike(cell: str, tags: Collection[str]) -> bool:
    """Whether a cell is in capitals without digits, such as `SYM`, and all `tags` are in capitals."""
    return not any(each.isdecimal() for each in cell) and all(each == each.upper() for each in (cell, *tags))


def _is_tag(cell: str) -> bool:
    return cell == OUTSIDE or PREFIXED.fullmatch(cell) is not None


def _line_fault(line: str, cells: Sequence[str], layout: Layout) -> str:
    if "\r" in line.strip(BLANKS):
        return "holds a carriage return between columns; save the file with line feeds at the ends of lines"
    if not cells[0]:
        return "has no word in its first column"
    if len(cells) == 1:
        split = "; columns are separated by tabs in this file" if layout.tabs else ""
        return f"has one column ({cells[0]!r}); a token and its tag are needed{split}"
    if len(cells) == layout.width:
        return ""
    hint = "" if layout.tabs else "; a word that holds a blank needs tabs between columns"
    return f"has {len(cells)} columns, and most lines of the file have {layout.width}{hint}"


def _span_fault(cell: str, inside: str) -> str:
    """Why `cell` is no part of a span in brackets; `inside` is the label of the span that is open."""
    label = cell.strip("(*)")
    if not SPAN.fullmatch(cell) or (label and inside):
        return f"has {cell!r} in its last column, and a span cannot be within another; write (x* or (x*), *, and *) at its end"
    if cell.endswith(")") and not label and not inside:
        return f"has {cell!r} in its last column, and no span is open there; open one by (x*"
    return ""


@dataclass
class _Columns:
    """What lines of one number of columns hold."""

    lines: int = 0
    outside: Counter[int] = field(default_factory=Counter)
    """By column in how many lines it is `O`."""
    prefixed: Counter[int] = field(default_factory=Counter)
    """By column in how many lines it is a tag with a prefix."""
    numbers: int = 0
    """In how many lines the first column is a whole number."""
    spans: Counter[int] = field(default_factory=Counter)
    """By column in how many lines it is a part of a span in brackets."""
    opening: dict[int, str] = field(default_factory=dict)
    """By column the first that opens such a span."""
    last: set[str] = field(default_factory=set)
    """What is in the last column."""

    def add(self, cells: Sequence[str]) -> None:
        """Count a line."""
        self.lines += 1
        for at, cell in enumerate(cells):
            if cell == OUTSIDE:
                self.outside[at] += 1
            elif cell[1:2] == "-" and _is_tag(cell):
                self.prefixed[at] += 1
            elif cell.startswith(("(", "*")) and SPAN.fullmatch(cell):
                self.spans[at] += 1
                if cell[0] == "(":
                    self.opening.setdefault(at, cell)
        self.numbers += cells[0].isdecimal()
        self.last.add(cells[-1])


def layout_of(lines: Lines, *, has_header: bool = True) -> Layout:
    """The layout of a file, whose first line may name its columns; `lines` reads its lines anew at each call."""
    words = (line for line in lines() if line.strip(BLANKS) and not line.startswith((DOCUMENT, *COMMENTS)))
    with_tabs = Counter("\t" in line.strip(BLANKS) for line in words)
    tabs = with_tabs[True] >= with_tabs[False] and with_tabs[True] > 0
    header, header_fault = _header_of(lines(), tabs=tabs) if has_header else ("", "")
    by_width: dict[int, _Columns] = {}
    for line in lines():
        if (
            not (header and line == header)
            and not line.startswith((DOCUMENT, *COMMENTS))
            and (cells := _cells(line, tabs=tabs))
        ):
            by_width.setdefault(len(cells), _Columns()).add(cells)
    if header and any(_cells(header, tabs=tabs)[-1] in found.last for found in by_width.values()):
        return layout_of(lines, has_header=False)  # it ends in a tag of the file, and so is a word
    width = max(by_width, key=lambda each: by_width[each].lines, default=2)
    most = by_width.get(width, _Columns())
    brackets = {cell[:1] for cell in most.last} == {"(", "*"}
    tagged = sum(found.outside[last - 1] + found.prefixed[last - 1] for last, found in by_width.items() if last > 1)
    return Layout(
        tabs,
        width,
        frozenset(most.last),
        len(by_width) == 1,
        brackets or 2 * tagged > sum(found.lines for found in by_width.values()),
        brackets,
        header,
        header_fault or _order_fault(most, width),
    )


def _header_of(lines: Iterator[str], *, tabs: bool) -> tuple[str, str]:
    """The line that names the columns, before the first word, and why it puts words or tags elsewhere than it must; both may be empty."""
    for line in lines:
        cells = _cells(line, tabs=tabs)
        names = [re.sub(r"[\s-]+", "_", cell.lstrip("#").strip("\"'").casefold()) for cell in cells]
        words = [place for place, name in enumerate(names) if WORDS.fullmatch(name)]
        tags = [place for form in (ENTITY_TAGS, TAGS) for place, name in enumerate(names) if form.fullmatch(name)]
        if words and tags and all(map(NAME.fullmatch, names)) and not any(map(_is_tag, cells)):
            at = next((place for place in words if names[place] not in ("text", "sentence")), words[0])
            last = max((place for place in tags if ENTITY_TAGS.fullmatch(names[place])), default=tags[-1])
            if at != last:
                return line, "" if at == 0 and last == len(names) - 1 else (
                    f"has a header by which words are in column {at + 1} ({names[at]}) of {len(names)} and tags in column {last + 1} "
                    f"({names[last]}); put the words into the first column, their tags into the last, and a blank line behind each text"
                )
        if cells and not line.startswith((DOCUMENT, *COMMENTS)):
            break
    return "", ""


def _order_fault(found: _Columns, width: int) -> str:
    """Why words or tags are in other columns than the first and the last; empty if they may be there."""
    last = width - 1
    if width > 2 and found.lines > 1 and found.numbers >= SHARE * found.lines:
        return "has numbers in its first column, and no words; put the words into the first column, and their tags into the last"
    if found.outside[last] or found.prefixed[last]:
        return ""
    # OntoNotes ends in clusters of mentions, such as (12), which are no names of tags.
    no_names = not any(character.isalpha() for cell in found.last for character in cell)
    for at in range(last):
        if at and at in found.opening and found.spans[at] == found.lines and no_names:
            return (
                f"has spans in brackets such as {found.opening[at]!r} in column {at + 1} of {width}, and {min(found.last)!r} in its last; "
                "put the words into the first column, and their tags into the last"
            )
        only_tags = found.prefixed[at] and found.outside[at] + found.prefixed[at] == found.lines
        if only_tags or (at and found.outside[at] >= found.lines / 3):
            return (
                f"has no tag in its last column, which holds {min(found.last)!r}, and tags in column {at + 1} of {width}; "
                "put the words into the first column, and their tags into the last"
            )
    return ""
