"""Which texts `profile` times, scores and calibrates on."""

from collections import Counter
from pathlib import Path

import pytest
from lookup_bundles import city_table, write_bundle
from small_profiles import TASK, Models, intents
from small_task import write_rows

from compress.data.columns import Columns
from compress.data.texts import read_texts
from serve.errors import BadInput
from stillroom.verbs.profile.models import task_of
from stillroom.verbs.profile.texts import CALIBRATION_TEXTS, TIMED_TEXTS, given_texts


def sorted_rows(count: int) -> list[dict[str, str]]:
    """Texts sorted by label."""
    return sorted(intents(count, seed=3), key=lambda row: row["label"])


def test_texts_without_labels_of_the_task_are_timed_and_it_is_said_why_there_is_no_metric(tmp_path: Path) -> None:
    plain = tmp_path / "lines.txt"
    plain.write_text("fly to rome\n\nrefund it\n", encoding="utf-8")
    bare = write_rows(tmp_path / "bare.jsonl", [{"text": "fly to rome"}, {"text": "refund it"}])
    for file, why in ((plain, "No metric: lines.txt is plain text"), (bare, "No metric: bare.jsonl has no labels for")):
        given = given_texts(str(file), TASK)
        assert given.texts == given.calibration == ["fly to rome", "refund it"]
        assert given.examples is None
        (note,) = given.notes
        assert note.startswith(why)


def test_labels_that_cannot_be_read_are_bad_input_and_not_left_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "labelled.jsonl", [{"text": "fly to rome", "label": "book"}, {"text": "refund it"}])
    with pytest.raises(BadInput, match="line 2: has no `label`"):
        given_texts(str(file), TASK)
    bare = write_rows(tmp_path / "bare.jsonl", [{"text": "fly to rome"}, {"text": "refund it"}])
    with pytest.raises(BadInput, match="no `kind`"):
        given_texts(str(bare), TASK, Columns(label="kind"))


def test_of_a_folder_test_is_timed_and_train_calibrates(splits: Path) -> None:
    given = given_texts(str(splits), TASK)
    assert given.texts == read_texts(splits / "test.jsonl")
    assert given.calibration == read_texts(splits / "train.jsonl")
    assert given.examples is not None
    assert (len(given.examples), given.source, given.calibrated_apart) == (50, "test.jsonl", True)
    alone = given_texts(str(splits / "test.jsonl"), TASK)
    assert (alone.texts, alone.calibration, alone.calibrated_apart) == (given.texts, given.texts, False)


def test_a_folder_of_tags_or_relations_is_timed_and_calibrated_on_its_texts(tmp_path: Path) -> None:
    (tmp_path / "tags").mkdir()
    row = {"text": "from Oslo", "head": {"start": 0, "end": 4}, "tail": {"start": 5, "end": 9}, "label": "begins"}
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [row])
        (tmp_path / "tags" / f"{name}.conll").write_text("fly O\nto O\nRome B-city\n\n", encoding="utf-8")
    for folder, task, text in (
        (tmp_path, TASK, "[E1] from [/E1] [E2] Oslo [/E2]"),
        (tmp_path / "tags", "token-classification", "fly to Rome"),
    ):
        given = given_texts(str(folder), task)
        assert given.texts == given.calibration == [text]
        assert given.notes == []


def test_of_a_file_sorted_by_label_every_label_is_timed_and_calibrates(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "sorted.jsonl", sorted_rows(3 * TIMED_TEXTS))
    given = given_texts(str(file), TASK)
    drawn = given.drawn(0)
    assert given.examples is not None
    label_of = dict(zip(given.texts, [example.label for example in given.examples], strict=True))
    for chosen in (drawn.texts[:64], drawn.texts[:TIMED_TEXTS], drawn.calibration):
        shares = Counter(label_of[text] for text in chosen)
        assert len(shares) == 3
        assert min(shares.values()) > len(chosen) / 6
    assert len(drawn.calibration) == CALIBRATION_TEXTS
    assert sorted(map(str, drawn.texts)) == sorted(map(str, given.texts))
    assert drawn.texts == given.drawn(0).texts != given.drawn(1).texts
    assert drawn.as_in_the_file(drawn.texts) == given.texts


def test_models_of_two_tasks_are_timed_on_the_texts_alone(models: Models, splits: Path, tmp_path: Path) -> None:
    cities = write_bundle(tmp_path / "cities", city_table())
    tasks = [task_of(model) for model in (models.fast, models.checkpoint, models.file, cities, tmp_path)]
    assert tasks == [TASK, TASK, TASK, "token-classification", None]
    given = given_texts(str(splits), None)
    assert (len(given.texts), given.examples) == (50, None)
    assert given.notes == ["The models do not share one task, so there is no metric."]
