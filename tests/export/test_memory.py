"""A process that answers texts of all lengths for a long time takes no more memory than after its first minute."""

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
MOST_GROWTH_BYTES = 16 * 2**20  # runs of whole batches, instead of 256 tokens, grow by hundreds


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shapes_that_are_answered(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", positions=512)
    (tmp_path / "texts.txt").write_text("\n".join(WORDS))
    stillroom.export(checkpoint, tmp_path / "bundle", texts=[str(tmp_path / "texts.txt")], latency_seconds=0.0)
    pipeline, chance, process = Pipeline(tmp_path / "bundle", threads=1), random.Random(0), psutil.Process()
    began_s, after_a_minute, most = time.monotonic(), 0, 0
    while (spent_s := time.monotonic() - began_s) < 60 * MINUTES:
        words = [5_000] if chance.random() < 0.02 else [chance.randint(1, 512) for _ in range(chance.randint(1, 64))]
        works = [TextWork(" ".join(chance.choices(WORDS, k=count))) for count in words]
        assert sum(len(answers) for answers, _ in pipeline.answered(works)) == len(works)
        if spent_s < 60:
            after_a_minute = max(after_a_minute, process.memory_info().rss)
        most = max(most, process.memory_info().rss)
    assert most - after_a_minute < MOST_GROWTH_BYTES
