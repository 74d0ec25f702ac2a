"""`stillroom transfer` with a tiny teacher: the table, what is chosen by it, the curves, what a second call repeats, and bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_task import examples, relations, write_rows, write_splits

from compress.data.splits import read_splits
from compress.evaluation.metrics import ACCURACY
from compress.runs import task_stages
from compress.runs.resumable_stages import Workdir
from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput
from serve.options import make
from stillroom import transfer
from stillroom.report.transfer_page import sentences
from stillroom.verbs.transfer import Transferring, show_transfer, training
from stillroom.verbs.transfer.tasks import named_task, open_tasks
from stillroom.verbs.transfer.training import Cell, best_source, chosen_texts, label_counts

SETTINGS: dict[str, Any] = {
    "student": "layers=2,hidden=32,heads=4,ffn=64", "seeds": 2, "labels": (10, 500), "teacher_epochs": 8,
    "teacher_learning_rate": 5e-3, "source_steps": 20, "target_steps": 12, "target_learning_rate": 5e-3, "threads": 1, "batch": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages with intents and entities, and messages with a relation; some of the latter's train stand in the former's test."""
    folder = tmp_path_factory.mktemp("tasks")
    write_splits(folder / "messages", examples, (120, 40, 40))
    write_splits(folder / "ways", relations, (120, 40, 20))
    return folder


@pytest.fixture(scope="module")
def given(shallow_teacher: Path, data: Path) -> dict[str, Any]:
    return SETTINGS | {
        "teacher": str(shallow_teacher),
        "sources": (f"entities=token-classification:{data / 'messages'}", f"text-classification:{data / 'ways'}"),
        "targets": (f"intents=text-classification:{data / 'messages'}",),
    }


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "found"


@pytest.fixture(scope="module")
def found(given: dict[str, Any], out: Path) -> dict[str, Any]:
    return transfer(**given, out=str(out))


@pytest.fixture
def copied(found: dict[str, Any], out: Path, tmp_path: Path) -> Path:
    """Where another transfer finds a copy of what that one has trained."""
    shutil.copytree(out.with_name("found.work"), tmp_path / "again.work")
    return tmp_path / "again"


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("this was finished")

    monkeypatch.setattr(task_stages, "on_task", refused)
    monkeypatch.setattr(training, "run_method", refused)


def test_the_source_with_the_best_mean_on_validation_is_chosen(found: dict[str, Any]) -> None:
    rows = {row["source"]: row for row in found["table"]}
    assert set(rows) == {None, "entities", "ways"}
    on_validation = {name: row["mean"]["validation"]["value"] for name, row in rows.items() if name}
    assert on_validation[found["chosen"]] == max(on_validation.values())
    for row in rows.values():
        (cell,) = row["cells"].values()
        assert len(cell["seeds"]) == 2
        assert cell["test"]["value"] == pytest.approx(sum(cell["seeds"]) / 2)
        assert row["mean"]["test"]["value"] == pytest.approx(cell["test"]["value"])
    chosen, alone = rows[found["chosen"]], rows[None]
    assert len({row["cells"]["intents"]["test"]["value"] for row in rows.values()}) > 1, "the students differ"
    apart = chosen["mean"]["test"]["value"] - alone["mean"]["test"]["value"]
    assert chosen["minus_none"]["value"] == pytest.approx(apart)
    assert alone["minus_chosen"]["value"] == pytest.approx(-apart)
    assert chosen["minus_chosen"] is None


def test_a_curve_has_each_number_of_labels_and_all_of_them(found: dict[str, Any]) -> None:
    (curve,) = found["curves"]
    points = curve["points"]
    assert [point["labels"] for point in points] == [10, 120]  # of 500 there are not so many
    assert [point["all"] for point in points] == [False, True]
    last, row = points[-1], next(row for row in found["table"] if row["source"] == found["chosen"])
    assert last["with_source"]["seeds"] == row["cells"]["intents"]["seeds"]
    for point in points:
        seeds = np.subtract(point["with_source"]["seeds"], point["without"]["seeds"])
        assert point["difference"]["value"] == pytest.approx(seeds.mean())
        assert point["difference"]["seeds"] == pytest.approx(seeds)
    assert [each["labels"] for each in found["mean_differences"]] == [10, None]


def test_the_document_the_page_and_the_terminal_agree_and_hold_no_text(
    found: dict[str, Any], out: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads((out / "transfer.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps({key: value for key, value in found.items() if key != "report"}))
    page = (out / "transfer.html").read_text(encoding="utf-8")
    assert "<svg" in page
    show_transfer(found)
    shown = " ".join(capsys.readouterr().out.split())
    for sentence in sentences(found):
        assert sentence in shown
        assert sentence.replace("'", "&#39;") in page
    for file in (data / "messages" / "test.jsonl", data / "ways" / "train.jsonl"):
        assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["text"] not in page
    assert str(data) not in json.dumps(kept)


def test_the_student_of_the_chosen_source_is_kept_as_a_checkpoint(found: dict[str, Any]) -> None:
    checkpoint = Path(found["checkpoint"])
    assert checkpoint.parent.name == f"source-{found['chosen']}-seed-0"
    lineage = json.loads((checkpoint / "lineage.json").read_text(encoding="utf-8"))
    assert lineage["method"] == "xtremedistil-transfer"
    assert {path.name for path in checkpoint.parent.iterdir()} == {"student", "stage.json"}, "its stages are removed"


@pytest.mark.usefixtures("no_training")
def test_the_same_call_again_trains_nothing(found: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    assert transfer(**given, out=str(out)) | {"machine": None} == found | {"machine": None}


@pytest.mark.usefixtures("no_training")
def test_minutes_that_are_over_leave_out_points_and_more_of_them_add_these(
    found: dict[str, Any], given: dict[str, Any], copied: Path
) -> None:
    """The trainings of the first call are read; `most_minutes` counts what they took."""

    def points(document: dict[str, Any]) -> int:
        return sum(len(point["without"]["seeds"]) for curve in document["curves"] for point in curve["points"])

    minutes = sum(found["seconds"].values()) / 60
    short = transfer(**given, out=str(copied), most_minutes=0.9 * minutes)
    assert points(short) < points(found)
    assert short["table"] == found["table"]
    with pytest.raises(BadInput, match="--most-minutes 1e-06 were over before one seed of the table"):
        transfer(**given, out=str(copied), most_minutes=1e-6)


def test_another_number_of_labels_trains_only_its_points(
    found: dict[str, Any], given: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    real = task_stages.on_task

    def counted(*given: Any, **more: Any) -> Any:
        trained.append(given[5])
        return real(*given, **more)

    monkeypatch.setattr(task_stages, "on_task", counted)
    more = transfer(**given | {"labels": (10, 90)}, out=str(copied))
    starts = ("no source", found["chosen"])
    assert trained == [f"{start} -> intents, 90 labels, seed {seed}" for seed in range(2) for start in starts]
    assert [point for point in more["curves"][0]["points"] if point["labels"] != 90] == found["curves"][0]["points"]


@pytest.mark.usefixtures("no_training")
def test_only_whole_seeds_count_where_the_minutes_end_within_the_table(
    found: dict[str, Any], given: dict[str, Any], copied: Path
) -> None:
    def of_the_first_seed(folder: str) -> bool:
        return folder.startswith("teacher-") or folder.endswith(("labels=all,seed=0", "-seed-0"))

    stages = {path.parent.name: json.loads(path.read_bytes()) for path in copied.parent.glob("again.work/*/stage.json")}
    seconds = sum(stage["seconds"] for folder, stage in stages.items() if of_the_first_seed(folder))
    one = transfer(**given, out=str(copied), most_minutes=(seconds + 1e-4) / 60)
    assert one["seeds"] == 1
    first = {row["source"]: row["cells"]["intents"]["seeds"][:1] for row in found["table"]}
    assert {row["source"]: row["cells"]["intents"]["seeds"] for row in one["table"]} == first
    assert [[point["all"] for point in curve["points"]] for curve in one["curves"]] == [[True]]


def test_a_transfer_that_was_stopped_goes_on_to_the_same_scores(
    found: dict[str, Any], given: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in copied.parent.glob("again.work/*seed?1"):  # as if only the first seed were there
        shutil.rmtree(folder)
    real, calls = task_stages.make_start, list[Path]()

    def stopped(folder: Path, *given: Any) -> None:
        calls.append(folder)
        if len(calls) == 5:
            (folder / "model.safetensors").write_bytes(b"half of it")
            raise KeyboardInterrupt
        real(folder, *given)

    monkeypatch.setattr(task_stages, "make_start", stopped)
    with pytest.raises(KeyboardInterrupt):
        transfer(**given, out=str(copied))
    again = transfer(**given, out=str(copied))
    assert len(calls) == 3 + 2 + 1  # of the table and a point, the fifth of which began again
    assert again["table"] == found["table"]
    assert again["curves"] == found["curves"]


def test_texts_on_which_a_target_is_scored_are_left_out_of_a_source(
    given: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    scored = [row for seed, count in ((1, 40), (2, 40)) for row in examples(count, seed)]
    leaking = write_splits(tmp_path / "leaking", examples, (30, 30, 10))
    mixed = [{**row, "label": str(i % 2)} for i, row in enumerate([*scored[30:50], *examples(60, 9)])]
    write_rows(leaking / "train.jsonl", mixed)
    changed = given | {"out": str(tmp_path / "out"), "sources": (f"text-classification:{leaking}",)}
    tasks = open_tasks(make(Transferring, changed), tmp_path / "out", Workdir(tmp_path / "out.work"))
    held = {
        example.text
        for split in ("validation", "test")
        for example in getattr(read_splits(str(data / "messages"), TEXT_CLASSIFICATION), split)
    }
    assert tasks.left_out == {"leaking": 20}
    assert len(tasks.sources["leaking"].splits.train) == 60
    assert not {example.text for example in tasks.sources["leaking"].splits.train} & held


def test_fewer_labels_are_among_more_and_another_seed_draws_others() -> None:
    ten, fifty = chosen_texts(200, 10, 3), chosen_texts(200, 50, 3)
    assert ten
    assert fifty
    assert len(set(ten)) == 10
    assert set(ten) < set(fifty)
    assert chosen_texts(200, 10, 4) != ten
    assert chosen_texts(200, None, 3) is None


def test_a_student_with_few_labels_reads_these_alone_and_keeps_its_last_weights(
    given: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in copied.parent.glob("again.work/target-*"):
        shutil.rmtree(folder)
    read: dict[str, tuple[list[int] | None, int]] = {}
    real = task_stages.on_task

    def seen(model: Any, folder: Path, inputs: Any, steps: int, rate: float, what: str, **more: Any) -> Any:
        read[what] = more["chosen"], more["validate_every"]
        return real(model, folder, inputs, steps, rate, what, **more)

    monkeypatch.setattr(task_stages, "on_task", seen)
    transfer(**given | {"seeds": 1, "labels": (10,)}, out=str(copied))
    few = {what: chosen for what, (chosen, _) in read.items() if "10 labels" in what}
    assert len(few) == 2
    assert set(map(tuple, few.values())) == {tuple(chosen_texts(120, 10, 0) or ())}  # type: ignore[arg-type]
    assert all(chosen is None for what, (chosen, _) in read.items() if "all labels" in what)
    assert {every for _, every in read.values()} == {given["target_steps"]}


def test_the_choice_reads_validation_and_not_test() -> None:
    def counted(validation: int, test: int) -> dict[str, np.ndarray]:
        return {
            name: np.array([[float(i < right), 1, 1] for i in range(10)])
            for name, right in (("validation", validation), ("test", test))
        }

    cells = {
        Cell("a", "t", 0): counted(9, 1), Cell("a", "u", 0): counted(2, 1),
        Cell("b", "t", 0): counted(6, 9), Cell("b", "u", 0): counted(6, 9), Cell(None, "t", 0): counted(10, 10),
    }  # fmt: skip
    metrics = {"t": ACCURACY, "u": ACCURACY}
    assert best_source(["a", "b"], metrics, cells) == "b", "5.5 of ten against 6 on average"
    cells[Cell("a", "u", 0)] = counted(4, 0)
    assert best_source(["a", "b"], metrics, cells) == "a"


MESSAGES = "{data}/messages"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no task": ({"sources": (MESSAGES,)}, r"--source .*messages is not \[NAME=\]TASK:DATA"),
    "an unknown task": ({"sources": (f"ner:{MESSAGES}",)}, "ner is no task. Give one of token-classification, text"),
    "questions": ({"targets": (f"question-answering:{MESSAGES}",)}, "question-answering is not transferred"),
    "numbers": ({"sources": (f"text-regression:{MESSAGES}",)}, "text-regression is not transferred"),
    "the source itself": ({"sources": (f"a=text-classification:{MESSAGES}",)}, "--target intents has the labelled texts of --source a"),
    "two of a name": ({"sources": (f"intents=token-classification:{MESSAGES}",)}, "Two tasks are called intents"),
    "a name that is no folder's": ({"sources": (f"a/b=token-classification:{MESSAGES}",)}, "'a/b' cannot be a name"),
    "no labels": ({"sources": ("text-classification:{data}/bare",)}, r"--source bare: "),
    "another number of heads": ({"student": "layers=1,hidden=16,heads=2,ffn=32"}, "heads"),
    "an unknown student": ({"student": "3x999"}, "--student '3x999' is not known"),
    "all at once": ({"sources": ("ner:here", "text-classification:{data}/nowhere"), "targets": (f"text-classification:{MESSAGES}", "x")},
                    "(?s)3 faults.*ner is no task.*--target x is not.*--source nowhere: "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_told_before_any_training(fault: str, given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    (data / "bare").mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        write_rows(data / "bare" / f"{split}.jsonl", [{"text": f"a text {i}"} for i in range(5)])
    changes, message = FAULTS[fault]
    named = {
        name: tuple(each.format(data=data) for each in value) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    with pytest.raises(BadInput, match=message):
        transfer(**given | named, out=str(tmp_path / "out"))
    assert not (tmp_path / "out.work").exists()


def test_a_name_is_the_last_part_of_the_data_unless_one_is_given() -> None:
    assert named_task("text-classification:a/b/snips", "--source") == ("snips", "text-classification", "a/b/snips")
    assert named_task("x=token-classification:a=b:c", "--target") == ("x", "token-classification", "a=b:c")


def test_a_source_that_its_teacher_cannot_learn_is_named(given: dict[str, Any], tmp_path: Path) -> None:
    def noise(count: int, seed: int) -> list[dict[str, object]]:
        return [{**row, "label": str(i % 2)} for i, row in enumerate(examples(count, seed))]

    folder = write_splits(tmp_path / "noise", noise, (60, 40, 10))
    with pytest.raises(BadInput, match="--source noise: The teacher is not shown to be better than chance"):
        transfer(**given | {"sources": (f"text-classification:{folder}",)}, out=str(tmp_path / "out"))


def test_a_number_of_labels_counts_once_and_only_where_there_are_more_texts() -> None:
    given = {"teacher": "t", "sources": ("a",), "targets": ("b",), "out": "o", "labels": (50, 5, 5, 200)}
    assert label_counts(make(Transferring, given), 200) == [5, 50]
