"""A model of the Hub is opened at the revision that is asked for, by whoever the environment says asks."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from repository import ROOT
from test_hub import COMMIT, Hub

import stillroom
from compress.models.pretrained import open_model
from serve.errors import BadInput
from stillroom.verbs.compare import compare

ASK = """
import sys
from compress.models.pretrained import open_model
from serve.errors import BadInput
for revision in sys.argv[1:]:
    try:
        print(open_model("some/teacher", revision=revision).revision)
    except BadInput as fault:
        print(fault)
"""


@pytest.fixture
def hub(tiny_teacher: Path) -> Iterator[Hub]:
    with Hub() as server:
        server.folders = {"some/teacher": tiny_teacher}
        server.revisions |= {"v2", COMMIT}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_model_of_the_hub_is_opened_at_the_revision_that_is_given(hub: Hub, tmp_path: Path) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_TOKEN": "hf_mine",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK, "v2", "v3"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    commit, refused = done.stdout.splitlines()
    assert commit == COMMIT
    assert "a model that can be read from the Hub (the Hub has no revision v3 of that name)" in refused
    assert "/api/models/some/teacher/revision/v2" in hub.asked
    assert hub.tokens == {"Bearer hf_mine"}


def test_a_folder_has_no_revision(tiny_teacher: Path) -> None:
    with pytest.raises(BadInput, match=r"--revision is v2, but --teacher .* is a local folder; .* Leave it out\."):
        open_model(str(tiny_teacher), revision="v2")
    assert open_model(str(tiny_teacher)).revision is None


def test_every_verb_refuses_a_revision_of_a_folder(tiny_teacher: Path, task_data: Path, tmp_path: Path) -> None:
    teacher, data, out, task = str(tiny_teacher), str(task_data), tmp_path / "out", "text-classification"
    text = task_data / "train.jsonl"
    calls: list[Callable[[], object]] = [
        lambda: stillroom.run(teacher=teacher, task=task, data=data, out=out, revision="v2"),
        lambda: stillroom.finetune(teacher, task, data, out, revision="v2"),
        lambda: stillroom.distill(teacher, [text], out, revision="v2"),
        lambda: stillroom.export(teacher, out, data, revision="v2"),
        lambda: stillroom.evaluate(teacher, data, revision="v2"),
        lambda: compare(
            teacher=teacher,
            task=task,
            data=data,
            out=str(out),
            methods=("minilm",),
            corpus=(str(text),),
            revision="v2",
        ),
    ]
    for call in calls:
        with pytest.raises(BadInput, match=r"--revision is v2, but .* is a local folder"):
            call()
    assert list(tmp_path.iterdir()) == []
