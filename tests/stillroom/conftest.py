"""Small models to profile, and profiles of them, each made once."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import QUICK, stillroom
from lookup_bundles import INTENTS, VOCABULARY, intent_table, write_bundle, write_tokenizer

from stillroom.cli import app, guarded

TASK = "text-classification"
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
    """Models of one task; both bundles and the file answer by the words `fly`, `love` and `refund`."""

    fast: Path  # a bundle of 1 layer
    copied: Path  # the same bundle in another place
    slow: Path  # a bundle of 48 layers
    checkpoint: Path  # a BERT of random weights
    file: Path  # the fast bundle's graph, its tokenizer and a configuration beside it


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    fast, slow = (
        write_bundle(folder / name, intent_table(), layers=layers, task=TASK, labels=INTENTS)
        for name, layers in (("fast", 1), ("slow", 48))
    )
    copied = shutil.copytree(fast, folder / "elsewhere" / "fast")
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(fast / "onnx" / "model.onnx", alone)
    write_tokenizer(alone)
    (alone / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return Models(fast, copied, slow, _checkpoint(folder / "checkpoint"), alone / "model.onnx")


def _checkpoint(folder: Path) -> Path:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    # Weights so large that it does not say the same of every text.
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


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 labelled texts to train on, and 50 to test."""
    folder = tmp_path_factory.mktemp("splits")
    write_lines(folder / "train.jsonl", intents(60, seed=0))
    write_lines(folder / "test.jsonl", intents(50, seed=1))
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40 labelled pairs of texts; in half of them the second one tells the intent."""
    rows = intents(40, seed=2)
    given = [
        {**row, "text": "i please it", "text_pair": row["text"]} if number % 2 else {**row, "text_pair": "it"}
        for number, row in enumerate(rows)
    ]
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", given)


class Profiled(NamedTuple):
    """What `stillroom profile` ended in."""

    code: int
    out: Path
    said: str  # on stderr
    document: dict[str, Any]  # of report.json
    printed: str  # on stdout


def _profiled(out: Path, *arguments: str | Path) -> Profiled:
    done = stillroom("profile", *arguments, "--out", out, *QUICK)
    assert done.returncode in (0, 3), done.stderr
    document = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return Profiled(done.returncode, out, " ".join(done.stderr.split()), document, done.stdout)


@pytest.fixture(scope="session")
def earlier(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """The fast bundle alone, without data."""
    return _profiled(tmp_path_factory.mktemp("earlier") / "timings", models.fast)


@pytest.fixture(scope="session")
def together(models: Models, splits: Path, earlier: Profiled, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A copy of that bundle, the checkpoint and the file on a folder of splits, against the bundle of before."""
    given = (models.copied, models.checkpoint, models.file, "--data", splits)
    asked = ("--budget-ms", "60000", "--percentile", "90", "--price-per-core-hour", "0.05", "--json")
    out = tmp_path_factory.mktemp("together") / "timings"
    return _profiled(out, *given, *asked, "--against", earlier.out / "report.json")


@pytest.fixture(scope="session")
def slower(models: Models, pairs: Path, earlier: Profiled, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """The slow bundle on pairs of texts, against the fast one of before."""
    out = tmp_path_factory.mktemp("slower") / "timings"
    return _profiled(out, models.slow, "--data", pairs, "--against", earlier.out / "report.json")


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """`refused(ARGUMENTS)`: the message of a `stillroom profile` that exits with 2 and writes nothing."""

    def call(*arguments: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["stillroom", "profile", *map(str, arguments)])
        code = guarded(app)
        captured = capfd.readouterr()
        assert (code, captured.out) == (2, ""), captured.err
        assert "Traceback" not in captured.err
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return " ".join(captured.err.split())

    return call
