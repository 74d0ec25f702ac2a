import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from serve.bundle.manifest import SCHEMA_VERSION, canonical_json, digest, sha256_file


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose files are whole, which nothing here can run, and whose words would break a careless table."""
    folder = tmp_path / "odd"
    (folder / "onnx").mkdir(parents=True)
    Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))  # noqa: S106
    (folder / "onnx" / "model_quantized.onnx").write_bytes(b"never opened")
    files = ("tokenizer.json", "onnx/model_quantized.onnx")
    manifest: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "name": "[/b] odd",
        "task": "text-classification",
        "labels": ["yes", "no"],
        "max_length": 32,
        "default_variant": "int8",
        "variants": {
            "int8": {"file": files[1], "scheme": "static", "runtime": "onnxruntime", "cpu": ["a_processor_of_2040"]}
            | {"temperature": 1.2345, "abstain_below": 0.4321}
        },
        "files": {f: {"sha256": sha256_file(folder / f), "bytes": (folder / f).stat().st_size} for f in files},
        "inputs": ["input_ids"],
        "lineage": {"teacher": "[/b]"},
        "metrics": {"metric": "accuracy", "test": {"[/i]": {"value": "high", "low": 0, "high": 1}}},
        "parity": {"int8": {"largest": None}},
        "cpu": [],
    }
    (folder / "manifest.json").write_bytes(canonical_json({**manifest, "digest": digest(manifest)}))
    return folder


def test_a_bundle_that_cannot_run_here_is_explained_all_the_same(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stillroom", "inspect", str(bundle)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "every file verified" in shown
    assert (
        "Here nothing answers: variant 'int8' of '[/b] odd' needs a processor with one of a_processor_of_2040" in shown
    )
    assert "1.2345" in shown
    assert "0.4321" in shown
    told = subprocess.run(
        [sys.executable, "-m", "stillroom", "inspect", str(bundle), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(told.stdout)["verified"] is True
