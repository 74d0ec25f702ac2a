"""A checkpoint as other people's folders hold it, to be changed by a test."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path) -> Path:
    """A checkpoint with a head for the task's intents, of random weights."""
    from transformers import AutoModelForSequenceClassification

    folder = shutil.copytree(tiny_teacher, tmp_path_factory.mktemp("whole") / "classifier")
    labels = dict(enumerate(["praise", "refund", "status"]))
    AutoModelForSequenceClassification.from_pretrained(
        folder, id2label=labels, label2id={v: k for k, v in labels.items()}
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(whole, tmp_path / "classifier")


@pytest.fixture
def change_json(checkpoint: Path) -> Callable[..., None]:
    """Changes keys of a JSON file of `checkpoint`; None takes a key out."""

    def change(file: str, **values: object) -> None:
        path = checkpoint / file
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept = {key: value for key, value in (said | values).items() if value is not None}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept), encoding="utf-8")

    return change
