"""Generates the demo's labelled data: support messages with an intent and entities, the same for the same seed.

A message is a list of pieces, each a text with or without an entity label. Noise changes pieces, and offsets are counted
when the pieces are joined at the end, so offsets always match the text.
"""

import json
import random
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypedDict

from serve.errors import BadInput
from serve.files import replacing
from stillroom.inputs.sample_texts.values import SLOTS, Share


class Phrases(NamedTuple):
    """A list of `phrases.toml`, which explains the grammar.

    `everywhere` is for all splits, `dealt` for unlabelled text; of `dealt` position 1 modulo 3 for validation, 2 for test.
    """

    everywhere: tuple[str, ...]
    dealt: tuple[str, ...]


_TABLES = tomllib.loads(files(__package__).joinpath("phrases.toml").read_text(encoding="utf-8"))


INTENTS: dict[str, Phrases] = {
    name: Phrases(tuple(table["everywhere"]), tuple(table["dealt"])) for name, table in _TABLES["intents"].items()
}
DETAILS = Phrases(tuple(_TABLES["details"]["everywhere"]), tuple(_TABLES["details"]["dealt"]))
GREETINGS: list[str] = _TABLES["greetings"]
CLOSINGS: list[str] = _TABLES["closings"]
EMOJI: list[str] = _TABLES["emoji"]

# Unlabelled messages are the shop's unlabelled inbox: its values are those of validation and test as well as its own.
# The training split has none of them.
INBOX: tuple[Share, ...] = ("unlabelled", "validation", "test")
# Which of the dealt phrases a split uses.
OWN: dict[Share, slice] = {"unlabelled": slice(None), "validation": slice(1, None, 3), "test": slice(2, None, 3)}
INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")
# After this many repeated messages in a row, the grammar counts as used up.
MAX_REPEATS = 1_000


class Piece(NamedTuple):
    """A stretch of a message: an entity of `label`, or plain text where `label` is None."""

    text: str
    label: str | None = None


class Entity(TypedDict):
    """The position of an entity: code points of the text, end exclusive."""

    start: int
    end: int
    label: str


class Message(TypedDict):
    """One row of the data: `label` is the intent."""

    text: str
    label: str
    entities: list[Entity]


def write_support_messages(
    folder: Path, *, train: int = 1_500, validation: int = 300, test: int = 400, unlabelled: int = 2_000, seed: int = 0
) -> None:
    """Write `train.jsonl`, `validation.jsonl`, `test.jsonl` and `unlabelled.txt` (a text a line) into `folder`.

    The numbers are rows. The same arguments give the same bytes. No text is in two files, and no name, number, date or
    amount is in two labelled files. Validation and test each have phrases that no other labelled file has; unlabelled text
    has all phrases, with values of these two and its own. Existing files are replaced, each in one step.

    Raises `BadInput` for a number of rows below 1, or more rows than there are different messages.
    """
    sizes: dict[Share, int] = {"test": test, "validation": validation, "train": train, "unlabelled": unlabelled}
    for share, rows in sizes.items():
        if rows < 1:
            raise BadInput(
                f"{share}={rows}: this number of rows must be at least 1; ask for 1 row or more.", field=share
            )
    seen: set[str] = set()
    # Test comes first, so that it does not change with the number of training rows.
    messages = {share: support_messages(share, rows, seed, seen) for share, rows in sizes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for share, rows_of_share in messages.items():
        if share == "unlabelled":
            _write(folder / "unlabelled.txt", (" ".join(row["text"].split()) for row in rows_of_share))
        else:
            _write(folder / f"{share}.jsonl", (json.dumps(row, ensure_ascii=False) for row in rows_of_share))


def support_messages(share: Share, rows: int, seed: int, seen: set[str]) -> list[Message]:
    """`rows` different messages of one split; the keys of their texts are not in `seen`, and are added to it.

    Raises `BadInput` when `MAX_REPEATS` messages in a row repeat earlier ones.
    """
    rng = random.Random(f"support messages, {share}, seed {seed}")
    messages: list[Message] = []
    repeats = 0
    while len(messages) < rows:
        intent = rng.choice(list(INTENTS))
        values = rng.choice(INBOX) if share == "unlabelled" else share
        message = _join(_with_noise(_pieces(_template(intent, share, rng), values, rng), rng), intent)
        key = _key(message["text"])
        if key not in seen:
            seen.add(key)
            messages.append(message)
            repeats = 0
        elif (repeats := repeats + 1) == MAX_REPEATS:
            raise BadInput(
                f"{share}={rows}: the demo's grammar has only {len(messages)} different messages; ask for {len(messages)} "
                "rows or fewer.",
                field=share,
            )
    return messages


def _key(text: str) -> str:
    """A key that is equal for texts that differ only in case, accents, spaces, emoji or punctuation."""
    return " ".join(re.findall(r"\w+", _without_accents(text).casefold()))


def _without_accents(text: str) -> str:
    return "".join(mark for mark in unicodedata.normalize("NFD", text) if unicodedata.category(mark) != "Mn")


def _template(intent: str, share: Share, rng: random.Random) -> str:
    """A whole message before its slots are filled: greeting, the intent's phrase, up to two details, closing."""
    parts = [_phrase(INTENTS[intent], share, rng)]
    for _ in range(rng.choices([0, 1, 2], weights=[4, 4, 2])[0]):
        # Three in four details follow the intent's phrase, the others precede it.
        parts.insert(len(parts) if rng.random() < 0.75 else 0, _phrase(DETAILS, share, rng))
    if rng.random() < 0.35:
        parts.insert(0, rng.choice(GREETINGS))
    if rng.random() < 0.3:
        parts.append(rng.choice(CLOSINGS))
    return " ".join(parts)


def _phrase(phrases: Phrases, share: Share, rng: random.Random) -> str:
    """One phrase with its choices made; outside the training split, three in ten are phrases that training never has."""
    options = phrases.everywhere
    if share in OWN and rng.random() < 0.3:
        options = phrases.dealt[OWN[share]]
    phrase = rng.choice(options)
    while "[" in phrase:
        phrase = INNERMOST_CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), phrase)
    return re.sub(r" +", " ", phrase)


def _pieces(template: str, share: Share, rng: random.Random) -> list[Piece]:
    """The template with its slots filled from the split's own values."""
    pieces: list[Piece] = []
    for position, part in enumerate(SLOT.split(template)):
        if position % 2 == 0:  # re.split puts the captured slot names at odd positions
            pieces.append(Piece(part))
            continue
        label, draw = SLOTS[part]
        value = draw(rng, share)
        pieces += [Piece(value.before), Piece(value.text, label)]
    return [piece for piece in pieces if piece.text]


def _with_noise(pieces: list[Piece], rng: random.Random) -> list[Piece]:
    """The pieces with noise as in typed text: typos, lost accents and punctuation, other case and spaces, an emoji."""
    if rng.random() < 0.35:
        # Values have fewer typos than other words.
        pieces = [Piece(_with_typos(text, 0.02 if label else 0.06, rng), label) for text, label in pieces]
    if rng.random() < 0.15:
        pieces = [Piece(_without_accents(text), label) for text, label in pieces]
    if rng.random() < 0.15:
        # A comma that alone separates two entities is kept.
        pieces = [
            Piece(re.sub(r"(?<=\w)[.,!?]+(?= |$)", "", text) if not label else text, label) for text, label in pieces
        ]
    if rng.random() < 0.06:
        pieces = [
            Piece(text if label else re.sub(r"(?<=[.!?]) ", rng.choice(["\n", "  "]), text), label)
            for text, label in pieces
        ]
    case = rng.random()
    if case < 0.18:
        pieces = [Piece(text.lower(), label) for text, label in pieces]
    elif case < 0.2:
        pieces = [Piece(text.upper(), label) for text, label in pieces]
    if rng.random() < 0.1:
        # With a space before it: most vocabularies make one unknown token of a word and an adjoining emoji.
        pieces = [*pieces, Piece(" " + rng.choice(EMOJI))]
    # Noise may have emptied a piece of punctuation.
    return [piece for piece in pieces if piece.text]


def _with_typos(text: str, rate: float, rng: random.Random) -> str:
    """`text` with a letter swapped, dropped or doubled in a share `rate` of its words of four letters or more."""
    return re.sub(r"[^\W\d_]{4,}", lambda word: _misspelt(word[0], rng) if rng.random() < rate else word[0], text)


def _misspelt(word: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(word) - 1)  # first and last letters are seldom mistyped
    swapped, dropped, doubled = word[at + 1] + word[at], "", word[at] * 2
    kind = rng.choice(["swap", "drop", "double"])
    if kind == "swap":
        return word[:at] + swapped + word[at + 2 :]
    return word[:at] + (dropped if kind == "drop" else doubled) + word[at + 1 :]


def _join(pieces: Iterable[Piece], intent: str) -> Message:
    text = ""
    entities: list[Entity] = []
    for piece in pieces:
        if piece.label:
            entities.append({"start": len(text), "end": len(text) + len(piece.text), "label": piece.label})
        text += piece.text
    return {"text": text, "label": intent, "entities": entities}


def _write(target: Path, lines: Iterator[str]) -> None:
    """Write `lines` to `target`, in one step."""
    with replacing(target) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
