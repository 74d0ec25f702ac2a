"""Turns words with one tag each into text with entities, and finds tags that belong to no scheme.

A tag is `O`, or a prefix and a label (`B-city`), or in the IO scheme a label alone. Whether `E-MAIL` is a label or the end of a `MAIL`,
and whether `B_city` is a label or a misspelt `B-city`, depends on all tags of a data set or a model (`serve.text.labels.are_names`).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from compress.data.examples import Entity, Example
from compress.data.row_fields import Fault, checked, label_of
from serve.text.labels import OUTSIDE, PREFIXED, are_names, split_tag, with_prefixes
from serve.text.spans import tag_runs
from serve.wording import counted

NO_LABEL = re.compile(r"[BIESLU]-")
SEVERAL = re.compile(r"\s*[|,;]\s*")
# A prefix in another case, with another separator, or behind the label; and one without a separator. M and W are of BMES and BMEWO.
MISSPELT = (re.compile(r"(?P<prefix>[BIESLUMW])[-_:/.| –—−](?P<label>.+)", re.DOTALL | re.IGNORECASE),
            re.compile(r"(?P<label>.+)[-_:/.| –—−](?P<prefix>[BIESLUMW])", re.DOTALL | re.IGNORECASE))  # fmt: skip
JOINED = re.compile(r"(?P<prefix>[BI])(?P<label>[A-Z]+)")
SAME_PREFIX = {"M": "I", "W": "S"}
A_TAG = "a tag is O, or a label after B-, I-, E-, S-, L- or U-"

Scheme = Literal["BIO", "BIOES", ""]


class RowTags(NamedTuple):
    """The tags of a row and the scheme that follows from them."""

    tags: frozenset[str]
    """Without `O`."""
    scheme: Scheme
    """The only scheme that they fit; empty if they fit both, or have no prefix."""
    wrong: str
    """Why they fit no scheme if they have prefixes; empty if they do."""


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
        found = RowTags(distinct - {OUTSIDE}, scheme, _wrong_together(distinct) or _mixed_ends(tags) or "")
        self.lines.append(line)
        self.of_lines.append(self._seen.setdefault(found, found))  # many rows share few sets of tags

    @property
    def rows(self) -> Iterator[tuple[int | None, RowTags]]:
        """The line and tags of each row."""
        return zip(self.lines, self.of_lines, strict=True)


def from_tags(tokens: object, tags: object, names: tuple[str, str] = ("tokens", "tags")) -> Example:
    """The example whose text is `tokens` joined by spaces, with entities read from `tags` (BIO, IOB2, BIOES or IO).

    An `I-x` that follows no `B-x` begins an entity. Blanks at the ends of an entity are not part of it. `names` are those of the
    fields. Raises ValueError: not two lists of strings of equal length, a tag that is in no scheme, or an entity of blanks.
    """
    if not isinstance(tokens, list) or not isinstance(tags, list) or not tokens:
        raise ValueError(f"needs `{names[0]}` and `{names[1]}` as two non-empty lists of strings")
    if {*map(type, tokens)} != {str} or "" in tokens:
        raise ValueError(f"`{names[0]}` holds something that is not a non-empty string")
    text = checked(" ".join(tokens), names[0])
    if not text.strip():
        raise ValueError(f"`{names[0]}` holds only blanks")
    if {*map(type, tags)} != {str}:
        for tag in tags:
            label_of(tag, names[1])
    elif reason := _wrong_alone(frozenset(tags), names[1]):
        raise ValueError(reason)
    if len(tokens) != len(tags):
        raise ValueError(f"has {len(tokens)} tokens but {len(tags)} tags")
    starts, inner, position = [], [], 0
    for token in tokens:
        starts.append(position)
        if " " in token:
            inner += [position + at for at, character in enumerate(token) if character == " "]
        position += len(token) + 1
    entities = [
        _entity(text, starts[first], starts[last] + len(tokens[last]), label, names)
        for first, last, label in tag_runs(tags)
    ]
    return Example(text, entities=tuple(entities), blanks_in_words=tuple(inner))


def _entity(text: str, start: int, end: int, label: str, names: tuple[str, str]) -> Entity:
    there = text[start:end]
    if not there.strip():
        raise ValueError(f"`{names[1]}` makes an entity {label} of `{names[0]}` that hold only blanks; tag them O")
    return Entity(end - len(there.lstrip()), start + len(there.rstrip()), label)


@lru_cache(maxsize=4096)  # many rows share few sets of tags
def _wrong_alone(tags: frozenset[str], name: str) -> str | None:
    """Why one of the tags of a row, in the field `name`, is in no scheme; None if each may be in one."""
    for tag in sorted(tags - {OUTSIDE}):
        label_of(tag, name)
        if PREFIXED.fullmatch(tag) and tag[2:].lstrip() != tag[2:]:
            return f"`{name}` holds {tag!r}, whose label begins with space; remove the space"
        parts = SEVERAL.split(tag)
        if parts[1:] and all(part == OUTSIDE or PREFIXED.fullmatch(part) for part in parts):
            return f"`{name}` holds {tag!r}, which is several tags; one tag a word is needed, so choose one"
        if NO_LABEL.fullmatch(tag):
            return f"has the tag {tag!r}, a prefix without a label; {A_TAG}"
    if outside := {"o", "0"} & tags:
        return f"has the tag {min(outside)!r}; the tag outside entities is the capital letter O"
    return None


@lru_cache(maxsize=4096)
def _wrong_together(tags: frozenset[str]) -> str | None:
    """Why tags with prefixes fit no scheme in any order; None if they may fit one."""
    prefixed = sorted(tag for tag in tags if PREFIXED.fullmatch(tag))
    if odd := sorted(tags - {OUTSIDE, *prefixed}) if prefixed else []:
        meant = (
            _meant(odd[0])
            or f" (write {prefixed[0][0]}-{odd[0]}, or O if it is outside; remove a line that names columns)"
        )
        if not _meant(odd[0]) and odd[0][1:2] == "-" and odd[0][2:] in {tag[2:] for tag in prefixed}:
            meant = f" (write {'O' if odd[0][0] in 'Oo' else f'I-{odd[0][2:]} inside an entity'})"
        return f"has the tag {odd[0]!r} among others with a prefix, such as {prefixed[0]!r}{meant}; {A_TAG}"
    letters = {tag[0] for tag in prefixed}
    if letters & set("ES") and letters & set("LU"):
        return f"has tags with {', '.join(sorted(letters))}; E and S belong to BIOES, L and U to BILOU; use one scheme"
    return None


def tags_fault(tags: Collection[str], name: str) -> str | None:
    """Why all the tags of a model, in the field `name`, are in no scheme; None if they are in one.

    The rules are those for rows, except for tags that `with_prefixes` reads as others, and that `0` is a label among labels
    without letters, such as punctuation. Raises ValueError: a tag is no label; the message describes it.
    """
    distinct = frozenset(tags)
    no_letters = not any(character.isalpha() for tag in distinct - {OUTSIDE} for character in tag)
    if wrong := _wrong_alone(distinct - {"0"} if no_letters else distinct, name):
        return wrong
    if are_names(distinct):
        return next(iter(_misspelt(distinct).values()), None)
    return _wrong_together(frozenset(with_prefixes(tuple(distinct))))


def names_of(files: Sequence["TagRows"]) -> dict[str, str]:
    """By label as `from_tags` reads it the tag that is its name, if the tags of `files` are names of labels; else empty."""
    tags = {tag for file in files for _, row in file.rows for tag in row.tags}
    return {split_tag(tag)[1]: tag for tag in tags} if any(map(PREFIXED.fullmatch, tags)) and are_names(tags) else {}


def with_names(example: Example, names: Mapping[str, str]) -> Example:
    """`example` as `from_tags` made it, with `names` in place of labels; neighbours of one label are one entity."""
    if example.blanks_in_words is None:  # it was given by offsets
        return example
    found: list[Entity] = []
    for entity in example.entities or ():
        label = names[entity.label]
        if found and found[-1].label == label and not example.text[found[-1].end : entity.start].strip():
            found[-1] = Entity(found[-1].start, entity.end, label)
        else:
            found.append(Entity(entity.start, entity.end, label))
    return replace(example, entities=tuple(found))


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
    found = next((match for form in MISSPELT if (match := form.fullmatch(tag))), None)
    return f" (write {_prefix(found)}-{found['label']})" if found else ""


def _prefix(found: re.Match[str]) -> str:
    letter = found["prefix"].upper()
    return SAME_PREFIX.get(letter, letter)


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
    rows = [(file.file, line, row) for file in files for line, row in file.rows if row.tags]
    tags = frozenset[str]().union(*{row.tags for _, _, row in rows})
    if are_names(tags):
        why = _misspelt(tags)
        return [Fault(file, line, why[min(odd)]) for file, line, row in rows if (odd := row.tags & why.keys())]
    faults = [Fault(file, line, row.wrong) for file, line, row in rows if row.wrong]
    faults += _fewer(
        [each for each in rows if not each[2].wrong],
        lambda row: any(map(PREFIXED.fullmatch, row.tags)),
        _without_prefix,
        _with_prefix,
    )
    for file in files:
        faults += _fewer(
            [(file.file, line, row) for line, row in file.rows if row.scheme and not row.wrong],
            lambda row: row.scheme == "BIOES",
            lambda row, others: (
                f"has an entity without an E- or S- tag, unlike {_rows(others)} of the file; write BIO or BIOES in all"
            ),
            lambda row, others: (
                f"has an E-, S-, L- or U- tag, unlike entities in {_rows(others)} of the file; write BIO or BIOES in all"
            ),
        )
    return faults


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
    return counted(count, "other row")


def _without_prefix(row: RowTags, others: int) -> str:
    tag = min(row.tags)
    return f"has the tag {tag!r} without a prefix, but in {_rows(others)} tags have a prefix{_meant(tag)}; {A_TAG}"


def _with_prefix(row: RowTags, others: int) -> str:
    tag = min(row.tags)
    return f"has the tag {tag!r}, a prefix and the label {tag[2:]!r}, but in {_rows(others)} tags have none; use prefixes in all or none"


def _misspelt(tags: Collection[str]) -> dict[str, str]:
    """By tag why it is a prefix in another spelling: `B_city`, `b-city`, `city-B`, `B`; `tags` are all there are, and none has a prefix.

    They are if some begin and go on with one label; or if all tags are spelt so, without blanks, and one of them begins an entity, or all
    have the `i-` of several labels before them.
    """
    bare = [tag for tag in sorted(tags) if tag != OUTSIDE and not PREFIXED.fullmatch(tag)]
    if bare and all(tag.upper() in "BIESLU" for tag in bare) and {"B", "b"} & {*bare}:
        return {tag: f"has the tag {tag!r}, a prefix without a label; {A_TAG}" for tag in bare}
    for form in (*MISSPELT, JOINED):
        found = {tag: match for tag in bare if (match := form.fullmatch(tag))}
        parts = {(_prefix(match), match["label"]) for match in found.values()}
        begun = {label for prefix, label in parts if prefix == "B"}
        all_so = form is not JOINED and len(found) == len(bare) and not any(" " in tag for tag in bare)
        only_inside = form is MISSPELT[0] and len(parts) > 1 and {prefix for prefix, _ in parts} == {"I"}
        if (all_so and (begun or only_inside)) or any(("I", label) in parts for label in begun):
            return {
                tag: f"has the tag {tag!r}, a prefix in another spelling (write {_prefix(match)}-{match['label']}); {A_TAG}"
                for tag, match in found.items()
            }
    return {}
