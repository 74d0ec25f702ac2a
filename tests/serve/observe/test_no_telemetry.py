"""Nothing phones home, onnxruntime included."""

import os
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def test_onnxruntime_is_told_to_report_nothing_before_it_is_loaded(entities_bundle: Path, tmp_path: Path) -> None:
    # What would stop it by itself is left out: it looks for the names that continuous integration sets.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = f"from serve import Pipeline; Pipeline({str(entities_bundle)!r})('Ms Keller moved to Graz')"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, check=True)
    # Where it does report, it keeps an identifier and a queue of events here.
    assert not list((tmp_path / ".cache").rglob("*"))


def test_whoever_wants_the_reports_may_have_them() -> None:
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    code = "import os, serve; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == "0"
