"""Generate the demo's labelled data: support messages with an intent and entities, the same for the same seed.

A message is a list of pieces, text with or without an entity label. Noise acts on pieces, and offsets are counted when
the pieces are joined at the very end, so an offset cannot disagree with the text, however noisy.
"""

import json
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

from serve.bundle.replaced_files import replacing
from serve.errors import BadInput
from stillroom.inputs.sample_texts.phrases import CLOSINGS, DETAILS, EMOJI, GREETINGS, INTENTS, Phrases
from stillroom.inputs.sample_texts.values import SLOTS, Share

# Unlabelled messages are the shop's inbox, which nobody has labelled: its products, its customers and the ways they put
# things are those of validation and test as much as others. The training split knows none of them.
INBOX: tuple[Share, ...] = ("unlabelled", "validation", "test")
# Which of the dealt phrases a split says.
OWN: dict[Share, slice] = {"unlabelled": slice(None), "validation": slice(1, None, 3), "test": slice(2, None, 3)}
INNERMOST_CHOICE = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")
# How often a new message may be one that was already written before we say that the grammar is used up.
MAX_REPEATS = 1_000


class Piece(NamedTuple):
    """A stretch of a message: an entity of `label`, or plain text where `label` is None."""

    text: str
    label: str | None = None


class Entity(TypedDict):
    """Where an entity stands: code points of the text, end exclusive."""

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

    The numbers are rows. The same arguments give the same bytes. No text stands in two of the files, and no name,
    number, date or amount in two of those with labels. Validation and test each say things in ways that no other
    labelled text does; unlabelled text, the inbox, says things in every way, with values of those two and its own.
    Files of these names are replaced, each in one step.

    Raises `BadInput` for a number of rows below 1, or more rows than there are different messages.
    """
    sizes: dict[Share, int] = {"test": test, "validation": validation, "train": train, "unlabelled": unlabelled}
    for share, rows in sizes.items():
        if rows < 1:
            raise BadInput(
                f"{share}={rows}: a number of rows, 1 or more, is needed; ask for at least one.", field=share
            )
    seen: set[str] = set()
    # Test comes first, so that it stays the same when somebody asks for more training rows.
    messages = {share: support_messages(share, rows, seed, seen) for share, rows in sizes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for share, rows_of_share in messages.items():
        if share == "unlabelled":
            _write(folder / "unlabelled.txt", (" ".join(row["text"].split()) for row in rows_of_share))
        else:
            _write(folder / f"{share}.jsonl", (json.dumps(row, ensure_ascii=False) for row in rows_of_share))


def support_messages(share: Share, rows: int, seed: int, seen: set[str]) -> list[Message]:
    """`rows` different messages of one split; the keys of their texts are added to `seen`, and none repeats one in it.

    Raises `BadInput` when `MAX_REPEATS` messages in a row had been seen before.
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
                f"{share}={rows} rows were asked for, and the demo's grammar gave only {len(messages)} different "
                f"messages; ask for {len(messages)} or fewer.",
                field=share,
            )
    return messages


def _key(text: str) -> str:
    """What two texts share that differ in case, accents, spaces, emoji or punctuation only."""
    return " ".join(re.findall(r"\w+", _without_accents(text).casefold()))


def _without_accents(text: str) -> str:
    return "".join(mark for mark in unicodedata.normalize("NFD", text) if unicodedata.category(mark) != "Mn")


def _template(intent: str, share: Share, rng: random.Random) -> str:
    """A whole message before its slots are filled: greeting, the intent's phrase, up to two details, closing."""
    parts = [_phrase(INTENTS[intent], share, rng)]
    for _ in range(rng.choices([0, 1, 2], weights=[4, 4, 2])[0]):
        # A detail mostly follows the matter, and now and then comes before it.
        parts.insert(len(parts) if rng.random() < 0.75 else 0, _phrase(DETAILS, share, rng))
    if rng.random() < 0.35:
        parts.insert(0, rng.choice(GREETINGS))
    if rng.random() < 0.3:
        parts.append(rng.choice(CLOSINGS))
    return " ".join(parts)


def _phrase(phrases: Phrases, share: Share, rng: random.Random) -> str:
    """One phrase with its choices made; three in ten are those that training never says, in all splits but it."""
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
        if position % 2 == 0:  # re.split puts what it captured, the slots' names, at the odd places
            pieces.append(Piece(part))
            continue
        label, draw = SLOTS[part]
        value = draw(rng, share)
        pieces += [Piece(value.before), Piece(value.text, label)]
    return [piece for piece in pieces if piece.text]


def _with_noise(pieces: list[Piece], rng: random.Random) -> list[Piece]:
    """The pieces as people type them: typos, lost accents and punctuation, odd case and spaces, an emoji."""
    if rng.random() < 0.35:
        # A value is copied with more care than a word is typed.
        pieces = [Piece(_with_typos(text, 0.02 if label else 0.06, rng), label) for text, label in pieces]
    if rng.random() < 0.15:
        pieces = [Piece(_without_accents(text), label) for text, label in pieces]
    if rng.random() < 0.15:
        # Two entities with nothing but a comma between them keep it.
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
        # A space before it: glued to a word, an emoji makes one unknown token of both in most vocabularies.
        pieces = [*pieces, Piece(" " + rng.choice(EMOJI))]
    # Noise may have emptied a piece of mere punctuation.
    return [piece for piece in pieces if piece.text]


def _with_typos(text: str, rate: float, rng: random.Random) -> str:
    """`text` with a letter swapped, dropped or doubled inside a share `rate` of its words of four letters or more."""
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
