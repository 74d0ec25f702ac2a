"""`compress` as a library: the example in the docs works where the rest of stillroom is not there, and prints nothing by itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

# A process in which the other packages and the console are not there.
ALONE = "import sys; sys.modules.update(dict.fromkeys(['stillroom', 'export', 'latency', 'rich', 'click']))\n"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_example_in_the_docs_distils_and_fine_tunes_alone(
    tmp_path: Path, tiny_teacher: Path, task_data: Path
) -> None:
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    shutil.copytree(task_data, tmp_path / "data")
    (tmp_path / "corpus.txt").write_text("the kettle is lovely\nwhere is my lamp\n" * 20, encoding="utf-8")
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from compress .*?)```", page, re.DOTALL)
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("student", "classifier"):
        assert {"config.json", "model.safetensors", "lineage.json"} <= {
            file.name for file in (tmp_path / name).iterdir()
        }
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


def test_importing_the_library_loads_no_torch() -> None:
    code = "import compress; assert sorted(compress.__all__) == compress.__all__; sys.exit('torch' in sys.modules)"
    assert run(code, ROOT).returncode == 0


def test_what_the_library_does_not_have_is_named() -> None:
    done = run("import compress; compress.distil", ROOT)
    assert "compress has no 'distil'; it has Distillation, Event, FineTuning, distill, finetune" in done.stderr
