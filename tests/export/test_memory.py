"""A process that answers texts of all lengths for a long time takes no more memory than its largest run."""

import random
import time
from pathlib import Path

import psutil
import pytest
from small_checkpoints import WORDS, write_checkpoint

import stillroom
from serve.model.pipeline import Pipeline
from serve.text.inputs import TextWork

MINUTES = 10
# The largest run of the model takes a few; a run of a whole batch would take 300.
MOST_GROWTH_BYTES = 64 * 2**20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shapes_that_are_answered(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", positions=512)
    (tmp_path / "texts.txt").write_text("\n".join(WORDS))
    stillroom.export(checkpoint, tmp_path / "bundle", texts=[str(tmp_path / "texts.txt")], latency_seconds=0.0)
    pipeline, chance, process = Pipeline(tmp_path / "bundle", threads=1), random.Random(0), psutil.Process()
    began_s, before, most = time.monotonic(), process.memory_info().rss, 0
    while time.monotonic() - began_s < 60 * MINUTES:
        words = [5_000] if chance.random() < 0.02 else [chance.randint(1, 512) for _ in range(chance.randint(1, 64))]
        works = [TextWork(" ".join(chance.choices(WORDS, k=count))) for count in words]
        assert sum(len(answers) for answers, _ in pipeline.answered(works)) == len(works)
        most = max(most, process.memory_info().rss)
    assert most - before < MOST_GROWTH_BYTES
