"""Every verb that reads rows is told what their columns are called."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_task import examples, make_teacher

from compress.data.columns import Columns, columns_of
from compress.runs.distill import distill
from compress.runs.finetune import finetune
from compress.runs.open_task import open_task
from compress.settings import TaskSettings
from serve.errors import BadInput
from stillroom import evaluate, export, load
from stillroom.verbs.compare import compare
from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.texts import given_texts

TASK = "text-classification"
STUDENT = "layers=2,hidden=32,heads=4,ffn=32"
GIVEN = {"text_column": "Body", "label_column": "Kind"}


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Splits whose columns are called Body and Kind, and more text in such a file."""
    folder = tmp_path_factory.mktemp("renamed")
    for seed, name in enumerate(("train", "dev", "test", "more")):
        rows = [f"{row['text']};{row['label']}\n" for row in examples(30, seed)]
        (folder / f"{name}.csv").write_text("Body;Kind\n" + "".join(rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with a head for the labels of the small task."""
    from transformers import AutoModelForSequenceClassification

    folder = make_teacher(tmp_path_factory.mktemp("checkpoint") / "classifier")
    labels = dict(enumerate(("praise", "refund", "status")))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, id2label=labels, label2id={label: i for i, label in labels.items()}
    )
    model.save_pretrained(folder)
    return folder


def test_data_and_unlabelled_text_are_read_by_the_columns_of_the_settings(
    tiny_teacher: Path, renamed: Path, tmp_path: Path
) -> None:
    more = (str(renamed / "more.csv"),)
    settings = TaskSettings(
        teacher=str(tiny_teacher), task=TASK, data=str(renamed), student=STUDENT, unlabelled=more, **GIVEN
    )
    inputs = open_task(settings, tmp_path / "out")
    assert [e.text for e in inputs.splits.train] == [row["text"] for row in examples(30, 0)]
    assert [e.label for e in inputs.splits.validation] == [row["label"] for row in examples(30, 1)]
    assert inputs.unlabelled == [row["text"] for row in examples(30, 3)]


def test_a_model_is_scored_and_timed_on_columns_of_other_names(classifier: Path, renamed: Path) -> None:
    columns = columns_of(Profiling(**GIVEN))
    assert columns == Columns(text="Body", label="Kind")
    assert evaluate(str(classifier), renamed / "dev.csv", **GIVEN)["examples"] == 30
    given = given_texts(str(renamed), TASK, columns)
    assert (len(given.texts), len(given.calibration), len(given.examples or ())) == (30, 30, 30)


@pytest.mark.parametrize("verb", ["run", "finetune", "compare", "export", "distill", "load"])
def test_each_verb_names_the_columns_that_it_was_given_where_they_are_not(
    tiny_teacher: Path, classifier: Path, renamed: Path, tmp_path: Path, verb: str
) -> None:
    wrong = GIVEN | {"text_column": "Words"}
    teacher, data, out, more = str(tiny_teacher), str(renamed), tmp_path / "out", renamed / "more.csv"
    named: dict[str, Any] = {"teacher": teacher, "task": TASK, "data": data, **wrong}
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: open_task(TaskSettings(student=STUDENT, **named), out),
        "finetune": lambda: finetune(teacher, TASK, data, out, **wrong),
        "compare": lambda: compare(out=str(out), methods=("labels",), students=(STUDENT,), **named),
        "export": lambda: export(classifier, out, data, **wrong),
        "distill": lambda: distill(teacher, [more], out, student=STUDENT, text_column="Words"),
        "load": lambda: load("http://127.0.0.1:9/v1/classify", more, text_column="Words"),
    }
    with pytest.raises(BadInput) as caught:
        calls[verb]()
    needed = "Words is needed" if verb in ("distill", "load") else "Words and Kind are needed"
    assert f"has the columns Body, Kind; {needed}. Rename columns, or give --text-column" in str(caught.value)
