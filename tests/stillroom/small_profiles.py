"""Small models to profile, the command that profiles them in a second, and what it ended in."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from in_process import command
from lookup_bundles import INTENTS, VOCABULARY, write_tokenizer

TASK = "text-classification"
QUICK = ("--seconds", "0.2", "--batches", "1", "--lengths", "8", "--threads", "1")
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "id2label": {str(i): intent for i, intent in enumerate(INTENTS)},
    "label2id": {intent: i for i, intent in enumerate(INTENTS)},
}


class Models(NamedTuple):
    """Models of one task; all but the checkpoint answer by the words `fly`, `love` and `refund`."""

    fast: Path  # a bundle of 1 layer
    copied: Path  # the same bundle in another place
    slow: Path  # a bundle of 48 layers
    several: Path  # a bundle by which any number of labels may apply
    checkpoint: Path  # a BERT of random weights
    file: Path  # the fast bundle's graph, its tokenizer and a configuration beside it


def write_checkpoint(folder: Path) -> Path:
    """A BERT of one layer and random weights, so large that it does not say the same of every text."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig.from_dict({**CONFIG, "initializer_range": 0.5})
    BertForSequenceClassification(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def intents(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts whose intent one word tells, but for one in ten, labelled with another."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        intent = chance.randrange(3)
        words = [("fly", "love", "refund")[intent], *chance.choices(["rome", "to", "i", "it"], k=chance.randint(1, 9))]
        chance.shuffle(words)
        rows.append({"text": " ".join(words), "label": INTENTS[(intent + (number % 10 == 0)) % 3]})
    return rows


class Profiled(NamedTuple):
    """What `stillroom profile` ended in."""

    code: int
    out: Path
    said: str  # on stderr
    document: dict[str, Any]  # of report.json
    printed: str  # on stdout


def profiled(out: Path, *arguments: str | Path) -> Profiled:
    """`stillroom profile ARGUMENTS --out OUT`, which writes a report."""
    done = command("profile", *arguments, "--out", out, *QUICK)
    assert done.code in (0, 3), done.said
    document = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Profiled(done.code, out, done.said, document, done.out)
