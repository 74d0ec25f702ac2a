"""Turns words with one tag each into text with entities, and finds tags that belong to no scheme.

A tag is `O`, or a prefix and a label (`B-city`), or in the IO scheme a label alone. Whether `B_city` is a label or a
misspelt `B-city` depends on the other tags: first those of its row, then those of all rows.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from compress.data.examples import Entity, Example
from compress.data.fields import checked, label_of
from compress.data.row_faults import Fault
from serve.text.labels import OUTSIDE, split_tag

PREFIXED = re.compile(r"[BIESLU]-.", re.DOTALL)
NO_LABEL = re.compile(r"[BIESLU]-")
# A prefix in another case, or with another separator or none, and perhaps without a label.
MISSPELT = re.compile(r"([BIESLUbieslu])(?:[-_:/.|](.*))?", re.DOTALL)
A_TAG = "a tag is O, or a label after B-, I-, E-, S-, L- or U-"

Scheme = Literal["BIO", "BIOES", ""]


class RowTags(NamedTuple):
    """The tags of a row and the scheme that follows from them."""

    tags: frozenset[str]
    """Without `O`."""
    scheme: Scheme
    """The only scheme that they fit; empty if they fit both, or have no prefix."""


@dataclass
class TagRows:
    """The tags of the rows of one file, to check that they are in one scheme."""

    file: str
    lines: list[int | None] = field(default_factory=list)
    of_lines: list[RowTags] = field(default_factory=list)
    _seen: dict[RowTags, RowTags] = field(default_factory=dict)

    def add(self, line: int | None, tags: Sequence[str]) -> None:
        """Add the tags of one row, which `from_tags` has checked."""
        distinct = frozenset(tags)
        scheme: Scheme = "BIOES" if _has_ends(distinct) else "BIO" if _unended(tags) else ""
        found = RowTags(distinct - {OUTSIDE}, scheme)
        self.lines.append(line)
        self.of_lines.append(self._seen.setdefault(found, found))  # many rows share few sets of tags

    @property
    def rows(self) -> Iterator[tuple[int | None, RowTags]]:
        """The line and tags of each row."""
        return zip(self.lines, self.of_lines, strict=True)


def from_tags(tokens: object, tags: object, names: tuple[str, str] = ("tokens", "tags")) -> Example:
    """The example whose text is `tokens` joined by spaces, with entities read from `tags` (BIO, IOB2, BIOES or IO).

    An `I-x` that follows no `B-x` begins an entity. `names` are those of the fields.

    Raises:
        ValueError: not two lists of strings of equal length, or tags that fit no single scheme.
    """
    if not isinstance(tokens, list) or not isinstance(tags, list) or not tokens:
        raise ValueError(f"needs `{names[0]}` and `{names[1]}` as two non-empty lists of strings")
    if {*map(type, tokens)} != {str} or "" in tokens:
        raise ValueError(f"`{names[0]}` holds something that is not a non-empty string")
    text = checked(" ".join(tokens), names[0])
    if {*map(type, tags)} != {str}:
        for tag in tags:
            label_of(tag, names[1])
    elif reason := _wrong_together(frozenset(tags), names[1]) or _mixed_ends(tags):
        raise ValueError(reason)
    if len(tokens) != len(tags):
        raise ValueError(f"has {len(tokens)} tokens but {len(tags)} tags")
    entities: list[Entity] = []
    position, open_entity = 0, False
    for token, tag in zip(tokens, tags, strict=True):
        end = position + len(token)
        if tag == OUTSIDE:
            open_entity = False
        else:
            prefix, label = split_tag(tag)
            if prefix in "IE" and open_entity and entities[-1].label == label:
                entities[-1] = Entity(entities[-1].start, end, label)
                open_entity = prefix != "E"
            else:
                entities.append(Entity(position, end, label))
                open_entity = prefix not in "SE"
        position = end + 1
    return Example(text, entities=tuple(entities))


@lru_cache(maxsize=4096)  # many rows share few sets of tags
def _wrong_together(tags: frozenset[str], name: str) -> str | None:
    """Why the tags of a row, in the field `name`, fit no scheme in any order; None if they may fit one."""
    found = sorted(tags - {OUTSIDE})
    for tag in found:
        label_of(tag, name)
        if PREFIXED.match(tag) and tag[2:].lstrip() != tag[2:]:
            return f"`{name}` holds {tag!r}, whose label begins with space; remove the space"
    if outside := {"o", "0"} & tags:
        return f"has the tag {min(outside)!r}; the tag outside entities is the capital letter O"
    prefixed = [tag for tag in found if PREFIXED.match(tag)]
    if odd := [tag for tag in found if not PREFIXED.match(tag)] if prefixed else []:
        return f"has the tag {odd[0]!r} among others with a prefix{_meant(odd[0])}; {A_TAG}"
    if bare := [tag for tag in found if NO_LABEL.fullmatch(tag)]:
        return f"has the tag {bare[0]!r}, a prefix without a label; {A_TAG}"
    letters = {tag[0] for tag in prefixed}
    if letters & set("ES") and letters & set("LU"):
        return f"has tags with {', '.join(sorted(letters))}; E and S belong to BIOES, L and U to BILOU; use one scheme"
    return None


@lru_cache(maxsize=4096)
def _has_ends(tags: frozenset[str]) -> bool:
    """Whether tags mark the end of an entity, as BIOES and BILOU do and BIO does not."""
    return any(tag[:2] in ("E-", "S-", "L-", "U-") for tag in tags)


def _mixed_ends(tags: Sequence[str]) -> str | None:
    """Why the tags of a row fit no scheme, if some entities have an end tag and others have not; otherwise None."""
    if not _has_ends(frozenset(tags)) or not (unended := _unended(tags)):
        return None
    last, alone = ("L", "U") if any(tag[:2] in ("L-", "U-") for tag in tags) else ("E", "S")
    label = unended[2:]
    return (
        f"has the tag {unended!r} with no {last}-{label} to end its entity, while other entities of the row have an end; "
        f"an entity of one word is {alone}-{label}"
    )


def _meant(tag: str) -> str:
    found = MISSPELT.fullmatch(tag)
    return f" (write {found[1].upper()}-{found[2]})" if found and found[2] else ""


def _unended(tags: Sequence[str]) -> str | None:
    """The first `B-x` or `I-x` that no tag of the same entity follows."""
    for tag, after in pairwise([*tags, OUTSIDE]):
        if (
            tag != OUTSIDE
            and tag[:2] in ("B-", "I-")
            and not (after[:2] in ("I-", "E-", "L-") and after[2:] == tag[2:])
        ):
            return tag
    return None


def scheme_faults(files: Sequence[TagRows]) -> list[Fault]:
    """Rows whose tags are in another scheme than those of most rows, or in none.

    Either all files have prefixes or none has. All rows of a file are in BIO, or all in BIOES. The minority is at fault.
    """
    faults = _fewer(
        [(file.file, line, row) for file in files for line, row in file.rows if row.tags],
        lambda row: any(map(PREFIXED.match, row.tags)),
        _without_prefix,
        _with_prefix,
    )
    for file in files:
        faults += _fewer(
            [(file.file, line, row) for line, row in file.rows if row.scheme],
            lambda row: row.scheme == "BIOES",
            lambda row, others: (
                f"has an entity without an E- or S- tag, unlike {_rows(others)} of the file; write BIO or BIOES in all"
            ),
            lambda row, others: (
                f"has an E-, S-, L- or U- tag, unlike entities in {_rows(others)} of the file; write BIO or BIOES in all"
            ),
        )
    return faults or _misspelt_everywhere(files)


Reason = Callable[[RowTags, int], str]


def _fewer(
    rows: Sequence[tuple[str, int | None, RowTags]], has: Callable[[RowTags], bool], hasnt: Reason, has_it: Reason
) -> list[Fault]:
    """A fault for each row of the minority, if only some rows have a property; on a tie, for each row without it."""
    sides: dict[bool, list[tuple[str, int | None, RowTags]]] = {True: [], False: []}
    for row in rows:
        sides[has(row[2])].append(row)
    if not all(sides.values()):
        return []
    fewer = len(sides[True]) < len(sides[False])
    reason = has_it if fewer else hasnt
    return [Fault(file, line, reason(row, len(sides[not fewer]))) for file, line, row in sides[fewer]]


def _rows(count: int) -> str:
    return "1 other row" if count == 1 else f"{count} other rows"


def _without_prefix(row: RowTags, others: int) -> str:
    tag = min(row.tags)
    return f"has the tag {tag!r} without a prefix, but in {_rows(others)} tags have a prefix{_meant(tag)}; {A_TAG}"


def _with_prefix(row: RowTags, others: int) -> str:
    tag = min(row.tags)
    return f"has the tag {tag!r}, a prefix and the label {tag[2:]!r}, but in {_rows(others)} tags have none; use prefixes in all or none"


def _misspelt_everywhere(files: Sequence[TagRows]) -> list[Fault]:
    """Rows of files in which no tag has a prefix, but all look like a misspelt one: `B_city`, `b-city`."""
    tags = {tag for file in files for _, row in file.rows for tag in row.tags}
    found = [MISSPELT.fullmatch(tag) for tag in tags]
    if any(map(PREFIXED.match, tags)) or not all(found) or not any(match[1] in "Bb" for match in found if match):
        return []
    return [
        Fault(
            file.file,
            line,
            f"has the tag {min(row.tags)!r}, a prefix in another spelling{_meant(min(row.tags))}; {A_TAG}",
        )
        for file in files
        for line, row in file.rows
        if row.tags
    ]
