"""What `evaluate` says of a bundle: the metric, and each label's scores, on a file or on a split of a folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_task import write_rows

import stillroom
from serve.bundle.runtimes import gpu_lacks
from serve.errors import BadInput
from stillroom.verbs.evaluate import show_evaluation

ROWS: list[dict[str, object]] = [
    {"text": "please fly", "label": "book"},
    {"text": "fly to rome", "label": "book"},
    {"text": "love it", "label": "praise"},
    {"text": "fly fly", "label": "praise"},
    {"text": "refund it", "label": "refund"},
]


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """A folder whose test split is answered in part, and whose validation split is answered rightly."""
    folder = tmp_path / "splits"
    folder.mkdir()
    write_rows(folder / "test.jsonl", ROWS)
    write_rows(folder / "validation.jsonl", ROWS[:3])
    return folder


def table_rows(document: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The rows of the tables that end `evaluate`, without their headers."""
    show_evaluation(document)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_each_label_has_its_precision_recall_and_f1(
    intents: Path, splits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = stillroom.evaluate(str(intents), splits / "test.jsonl")
    assert document["value"] == 0.8
    book, praise, refund = document["labels"]
    assert book == {"label": "book", "precision": pytest.approx(2 / 3), "recall": 1.0, "f1": 0.8, "support": 2}
    assert praise == {"label": "praise", "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "support": 2}
    assert refund == {"label": "refund", "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    assert {"model", "variant", "task", "metric", "value", "examples"} <= json.loads(json.dumps(document)).keys()
    assert table_rows(document, capfd) == [
        ["book", "0.6667", "1.0000", "0.8000", "2"],
        ["praise", "1.0000", "0.5000", "0.6667", "2"],
        ["refund", "1.0000", "1.0000", "1.0000", "1"],
    ]


def test_rows_that_name_their_language_are_scored_by_it(
    intents: Path, splits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = ["en", "en", "it", "it", ""]
    rows = [row | {"language": name} for row, name in zip(ROWS, named, strict=True)]
    document = stillroom.evaluate(str(intents), write_rows(tmp_path / "named.jsonl", rows))
    assert [(row["language"], row["value"], row["examples"]) for row in document["languages"]] == [
        ("", 1.0, 1), ("en", 1.0, 2), ("it", 0.5, 2),
    ]  # fmt: skip
    assert document["mean_of_languages"] == pytest.approx(2.5 / 3)
    assert document["value"] == 0.8
    assert [row[:2] for row in table_rows(document, capfd)[-3:]] == [
        ["not named", "1.0000"], ["en", "1.0000"], ["it", "0.5000"],
    ]  # fmt: skip
    # One language is no comparison, and a column of that name that holds other things is not ours.
    for other in ("en", 3, None, ["en", "it"]):
        rows = [row | {"language": other} for row in ROWS]
        assert "languages" not in stillroom.evaluate(str(intents), write_rows(tmp_path / "other.jsonl", rows))


def test_entities_are_scored_by_their_label(plain: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"text": "to rome", "entities": [{"start": 3, "end": 7, "label": "city"}]},
        {"text": "to warm", "entities": [{"start": 3, "end": 7, "label": "weather"}]},
    ]
    document = stillroom.evaluate(str(plain), write_rows(tmp_path / "test.jsonl", rows))
    found = [(row["label"], row["f1"], row["support"]) for row in document["labels"]]
    assert found == [("city", 1.0, 1), ("weather", 0.0, 1)]
    assert document["unknown_labels"] == ["weather"]


def test_blanks_at_the_ends_of_entities_change_no_score_and_ends_within_words_are_told(
    plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:

    def scored(start: int, end: int, label: str = "city") -> dict[str, Any]:
        row: dict[str, object] = {"text": "to rome to", "entities": [{"start": start, "end": end, "label": label}]}
        return stillroom.evaluate(str(plain), write_rows(tmp_path / "test.jsonl", [row]))

    assert [scored(*place)["value"] for place in ((3, 7), (3, 8), (2, 8))] == [1.0, 1.0, 1.0]
    assert scored(2, 8)["warnings"] == []
    inclusive = scored(3, 6, "B-city")
    assert inclusive["value"] == 0.0
    show_evaluation(inclusive)
    printed = " ".join(capfd.readouterr().err.split())
    assert "warning: 1 entity in test.jsonl begins or ends inside a word" in printed
    assert "with an `end` of 1 more" in printed
    assert "prefix of a tag: B-city" in printed


def test_a_folder_of_splits_is_scored_on_test_or_the_split_that_is_named(intents: Path, splits: Path) -> None:
    whole, file = (stillroom.evaluate(str(intents), data) for data in (splits, splits / "test.jsonl"))
    assert whole == file
    validation = stillroom.evaluate(str(intents), splits, split="validation")
    assert (validation["examples"], validation["value"]) == (3, 1.0)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ("", {"split": "train"}, "has no file train"),
        ("", {"split": "dev"}, r"--split is 'dev'; give one of train, validation, test"),
        ("test.jsonl", {"split": "validation"}, r"--split is validation, and --data .*test\.jsonl is one file"),
        ("none.jsonl", {}, r"none\.jsonl is not a file"),
        ("", {"variant": "int8"}, r"give one of 'fp32'"),
        ("", {"task": "token-classification"}, r"--task is token-classification, but .* text-class"),
        ("", {"task": "tokens"}, r"--task is 'tokens'; give one of"),
        ("", {"revision": "v2"}, "--revision v2"),
        ("", {"splits": "test"}, r"splits is not a setting .did you mean split"),
        ("twice", {}, r"holds test\.csv and test\.jsonl; test needs exactly one file"),
        pytest.param("", {"device": "cuda"}, "--device is cuda, but onnxruntime's CUDAExecutionProvider",
                     marks=pytest.mark.skipif(not gpu_lacks(), reason="onnxruntime runs on a GPU here")),
    ],
)  # fmt: skip
def test_data_and_settings_that_cannot_be_scored_are_refused(
    intents: Path, splits: Path, given: str, settings: dict[str, Any], message: str
) -> None:
    shutil.copytree(splits, splits / "twice")
    (splits / "twice" / "test.csv").write_text("text,label\nplease fly,book\n", encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        stillroom.evaluate(str(intents), splits / given, **settings)


def test_a_split_that_a_saved_data_set_does_not_have_is_not_made_up(intents: Path, tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_dict({"text": [f"please fly {i}" for i in range(20)], "label": ["book"] * 20})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(BadInput, match="has no validation split"):
        stillroom.evaluate(str(intents), tmp_path / "saved", split="validation")


@pytest.mark.gpu
@pytest.mark.skipif(bool(gpu_lacks()), reason=gpu_lacks())
def test_a_bundle_has_the_scores_of_the_cpu_on_a_gpu(intents: Path, splits: Path) -> None:
    expected, actual = (stillroom.evaluate(str(intents), splits, device=device) for device in ("cpu", "cuda"))
    assert actual == expected
