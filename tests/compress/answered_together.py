"""A teacher's answers that several processes compute, each its share: soft labels and a cache. See `nodes_together.py`."""

import json
from pathlib import Path

import numpy as np
from encoders import VOCABULARY, encoder
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.data.corpus import tokenised
from compress.models.activations import Part
from compress.runs.open_task import open_task
from compress.runs.soft_labels import make_soft_labels
from compress.runs.task_inputs import TaskInputs
from compress.settings import TaskSettings
from compress.training import teacher_cache as caches


def teacher_answers(folder: Path) -> None:
    """The soft labels of a teacher and the cache of another one, of which each process computes its share."""
    (folder / "soft").mkdir()
    make_soft_labels(folder / "soft", task_inputs(folder), folder.parent / "tuned")
    cache = thirty_pieces(folder)
    (folder / "about.json").write_text(json.dumps(cache.about))


def task_inputs(folder: Path) -> TaskInputs:
    shared = folder.parent
    shape = "layers=2,hidden=32,heads=4,ffn=32"
    settings = TaskSettings(
        task="text-classification",
        student=shape,
        teacher=str(shared / "teacher"),
        data=str(shared / "data"),
        threads=1,
        augment=1,
        folds=2,
        device="cpu",
    )
    return open_task(settings, folder / "out")


def thirty_pieces(folder: Path) -> caches.TeacherCache:
    """A cache of pieces of 1 to 13 tokens, in rounds and batches of a few."""
    caches.ROUND, caches.POSITIONS = 50, 30
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    drawn = np.random.default_rng(0)
    texts = [" ".join(map(str, drawn.integers(5, VOCABULARY, 1 + 5 * i % 13))) for i in range(30)]
    pieces = tokenised(texts, words, 16, folder / "corpus", fingerprint="thirty")
    parts = [Part("hidden", 4), Part("keys", 3)]
    return caches.teacher_cache(
        folder / "cache",
        lambda: encoder("bert"),
        pieces,
        parts,
        pad_id=0,
        precision="fp32",
        identity={},
        device="cpu",
    )
