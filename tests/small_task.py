"""A small task and a tiny teacher for it, made by code."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

CITIES = ("Lisbon", "Porto", "Ghent", "Turin", "Basel", "Oslo")
ITEMS = ("kettle", "lamp", "radio", "chair")
FRAMES = (
    ("where is my {item} sent to {city}", "status"),
    ("the parcel for {city} with the {item} is late", "status"),
    ("please refund the {item}", "refund"),
    ("i want my money back for that {item} from {city}", "refund"),
    ("thank you {city} team the {item} is great", "praise"),
    ("the {item} is lovely", "praise"),
)

# What is thought of an item, and how much so.
OPINIONS = {"awful": -2.0, "dull": -1.0, "plain": 0.0, "nice": 1.0, "superb": 2.0}
WEIGHTS = {"": 1.0, "very ": 1.5, "slightly ": 0.5}


def examples(count: int, seed: int) -> list[dict[str, object]]:
    """Messages with an intent and the places of their items and cities."""
    chance = random.Random(seed)
    rows: list[dict[str, object]] = []
    for number in range(count):
        frame, label = chance.choice(FRAMES)
        values = {"item": chance.choice(ITEMS), "city": chance.choice(CITIES)}
        text, entities = "", []
        for piece in frame.split(" "):
            text += " " if text else ""
            name = piece.strip("{}")
            if piece.startswith("{"):
                entities.append({"start": len(text), "end": len(text) + len(values[name]), "label": name})
                text += values[name]
            else:
                text += piece
        rows.append({"text": f"{text} {number + 1000 * seed}", "label": label, "entities": entities})
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_splits(
    folder: Path, rows: Callable[[int, int], list[dict[str, object]]], counts: Sequence[int] = (240, 40, 60)
) -> Path:
    """`folder` with train, validation and test of what `rows(count, seed)` makes, so many rows each."""
    folder.mkdir(exist_ok=True)
    for seed, (name, count) in enumerate(zip(("train", "validation", "test"), counts, strict=True)):
        write_rows(folder / f"{name}.jsonl", rows(count, seed))
    return folder


def make_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of the task's words and all ASCII characters, as `save_pretrained` lays it out."""
    from transformers import BertTokenizerFast

    words = {word.lower() for frame, _ in FRAMES for word in frame.split() if not word.startswith("{")}
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    thought = {*OPINIONS, *(how.strip() for how in WEIGHTS if how)}
    vocabulary += sorted((words | thought | {w.lower() for w in CITIES + ITEMS}) - set(characters))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), vocab_file=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)


def make_teacher(folder: Path, **changes: object) -> Path:
    """A tiny BERT encoder in `folder`; `changes` override its configuration."""
    import torch
    from transformers import BertConfig, BertModel

    make_tokenizer(folder)
    size = len((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    settings = {
        "vocab_size": size,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        # BERT's 0.02 is for a width of 768. In one of 32 next to nothing of a text would come through four layers, and
        # whether the first epochs learn anything would hang on how a processor rounds.
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(**(settings | changes))).save_pretrained(folder)
    return folder


def with_label_lists(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The same messages, labelled with all that applies to them: whether they speak of a city, whether they ask for money."""
    return [
        {
            "text": row["text"],
            "label": [
                name for name in ("refund", "city") if name == row["label"] or f"'{name}'" in str(row["entities"])
            ],
        }
        for row in rows
    ]


def relations(count: int, seed: int) -> list[dict[str, object]]:
    """Messages about a way between two cities, asked of one or the other: where it begins, or where it ends."""
    chance = random.Random(seed)
    rows: list[dict[str, object]] = []
    for number in range(count):
        origin, goal = chance.sample(CITIES, 2)
        text = f"send the {chance.choice(ITEMS)} from {origin} to {goal} {number + 1000 * seed}"
        places = [{"start": text.index(city), "end": text.index(city) + len(city)} for city in (origin, goal)]
        turned = chance.random() < 0.5
        head, tail = places[::-1] if turned else places
        rows.append({"text": text, "head": head, "tail": tail, "label": "ends at" if turned else "begins at"})
    return rows


def questions(count: int, seed: int) -> list[dict[str, object]]:
    """Questions about messages: where something is sent to, which some messages do not say, and what it is."""
    chance = random.Random(seed)
    rows: list[dict[str, object]] = []
    for row in examples(count, seed):
        entities = {each["label"]: each for each in row["entities"]}  # type: ignore[attr-defined]
        wanted, question = chance.choice([("city", "where is it sent to"), ("item", "my money back for that")])
        places = [entities[wanted]] if wanted in entities else []
        answers = [
            {"text": str(row["text"])[each["start"] : each["end"]], "answer_start": each["start"]} for each in places
        ]
        rows.append({"question": question, "context": row["text"], "answers": answers})
    return rows


def ratings(count: int, seed: int) -> list[dict[str, object]]:
    """Opinions of two things, with the sum of what is thought of both in hundreds as their number."""
    chance = random.Random(seed)
    rows: list[dict[str, object]] = []
    for number in range(count):
        said, total = [], 0.0
        for item in chance.sample(ITEMS, 2):
            how, opinion = chance.choice(list(WEIGHTS)), chance.choice(list(OPINIONS))
            said.append(f"the {item} is {how}{opinion}")
            total += WEIGHTS[how] * OPINIONS[opinion]
        rows.append({"text": f"{' and '.join(said)} {number + 1000 * seed}", "label": 100 * total})
    return rows
