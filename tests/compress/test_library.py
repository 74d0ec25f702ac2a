"""`compress` as a library: the example in the docs works where the rest of stillroom is not there, and prints nothing by itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from small_task import examples, write_splits

# A process in which the other packages and the console are not there.
ALONE = "import sys; sys.modules.update(dict.fromkeys(['stillroom', 'export', 'latency', 'rich', 'click']))\n"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_example_in_the_docs_distils_and_fine_tunes_alone(tmp_path: Path, tiny_teacher: Path) -> None:
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    write_splits(tmp_path / "data", examples, (32, 16, 8))
    (tmp_path / "corpus.txt").write_text("the kettle is lovely\nwhere is my lamp\n" * 20, encoding="utf-8")
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from compress .*?)```", page, re.DOTALL)
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("student", "classifier"):
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert {"config.json", "model.safetensors", "lineage.json"} <= files
    # `print` was given as the callback, and heard of each training.
    assert re.search(r"^minilmv2: \d+/\d+, loss \d", done.stdout, re.MULTILINE)
    assert re.search(r"^fine-tuning: \d+/\d+, loss \d", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_without_a_callback_nothing_is_printed(tmp_path: Path, tiny_teacher: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the kettle is lovely\nwhere is my lamp\n" * 20, encoding="utf-8")
    shape = "layers=2,hidden=32,heads=4,ffn=32"
    code = f"import compress; compress.distill({str(tiny_teacher)!r}, ['corpus.txt'], 'student', student={shape!r}, batch=8)"
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "student" / "model.safetensors").is_file()


def test_importing_the_library_loads_no_torch_and_what_it_does_not_have_is_named() -> None:
    done = run("import compress; assert 'torch' not in sys.modules; compress.distil", ROOT)
    assert "compress has no 'distil'; it has Distillation, Event, FineTuning, distill, finetune" in done.stderr
