"""Models that several files of this folder use, each made once."""

import shutil
from pathlib import Path

import pytest

import stillroom as face
from serve.files import locked


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 lines of plain text."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(f"please refund the lamp from Oslo {i}" for i in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def classifier(shared_folder: Path, shallow_teacher: Path, task_data: Path) -> Path:
    """A tiny model that knows the intents of the task, made by the first process that needs it."""
    out = shared_folder / "classifier"
    with locked(shared_folder / "classifier.lock"):
        if not out.exists():
            face.finetune(
                str(shallow_teacher), "text-classification", str(task_data), out,
                epochs=4, patience=0, learning_rate=5e-3, batch=8, threads=1,
            )  # fmt: skip
    return out


@pytest.fixture(scope="session")
def random_classifier(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path) -> Path:
    """A checkpoint with a head for the same intents that was made without this project: random weights, right labels."""
    from transformers import AutoModelForSequenceClassification

    folder = Path(shutil.copytree(shallow_teacher, tmp_path_factory.mktemp("ckpt") / "classifier"))
    labels = dict(enumerate(["praise", "refund", "status"]))
    names = {name: number for number, name in labels.items()}
    model = AutoModelForSequenceClassification.from_pretrained(folder, id2label=labels, label2id=names)
    model.save_pretrained(folder)
    return folder
