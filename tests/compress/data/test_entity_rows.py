"""Entities with offsets: their form, blanks at their ends, and texts of their own that contradict the offsets."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.data.examples import Entity, Example
from compress.data.labelled_files import read_examples
from compress.data.row_faults import BadRows
from compress.data.teacher_labels import read_teacher_labels
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION

TEXT = "🙂 Ms Kéller lives in Graz"
OWN = {"start": 5, "end": 11, "label": "person", "text": "Kéller"}


def read(folder: Path, entities: Any, text: str = TEXT) -> list[Example]:
    path = folder / "train.jsonl"
    path.write_text(json.dumps({"text": text, "entities": entities}) + "\n", encoding="utf-8")
    return read_examples(path, TOKEN_CLASSIFICATION)


def test_blanks_at_the_ends_of_an_entity_are_cut_off_in_data_and_in_a_teachers_answers(tmp_path: Path) -> None:
    for start, end in ((5, 11), (5, 12), (4, 11), (4, 12)):
        given = [{"start": start, "end": end, "label": "person", "score": 0.9}]
        (example,) = read(tmp_path, given)
        assert example.entities == (Entity(5, 11, "person"),)
        (answer,) = read_teacher_labels([tmp_path / "train.jsonl"], TOKEN_CLASSIFICATION).answers.values()
        assert answer.spans == ((Entity(5, 11, "person"), 0.9),)
    with pytest.raises(BadRows, match="covers only whitespace"):
        read(tmp_path, [{"start": 4, "end": 5, "label": "person"}])


@pytest.mark.parametrize(
    ("places", "looks"),
    [
        ({"end": 10}, "its end looks inclusive"),
        ({"start": 6, "end": 12}, "UTF-16"),
        ({"start": 8, "end": 15}, "bytes of UTF-8"),
        ({"start": 6, "end": 12, "text": "Kéller", "in": "Ms   Kéller lives"}, "counted from 1"),
        ({"start": 6, "end": 11, "in": "Ms   Kéller lives"}, "counted from 1 with an inclusive end"),
        ({"start": 0, "end": 2}, "the text has it at 5"),
        ({"start": 24, "end": 40, "text": "nowhere"}, "but its own `text` is 'nowhere'; offsets count code points"),
    ],
)
def test_offsets_that_contradict_an_entitys_own_text_say_what_they_look_like(
    tmp_path: Path, places: dict[str, Any], looks: str
) -> None:
    text = places.pop("in", TEXT)
    with pytest.raises(BadRows, match=rf"line 1: entity person at \d+\.\.\d+ is .*{looks}"):
        read(tmp_path, [OWN | places], text)


def test_an_entitys_own_text_may_differ_in_blanks_capitals_and_composed_letters(tmp_path: Path) -> None:
    for own in ("Kéller", " kéller ", "Ke\u0301ller", "", None):
        (example,) = read(tmp_path, [OWN | {"text": own}])
        assert example.entities == (Entity(5, 11, "person"),)


def test_the_parts_of_a_relation_are_held_to_their_own_text_too(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"text": "Rome is in Italy", "head": {"start": 0, "end": 3, "text": "Rome"}, "tail": {"start": 11, "end": 16}}
    path.write_text(json.dumps(row | {"label": "in"}), encoding="utf-8")
    with pytest.raises(
        BadRows, match=r"`head` at 0\.\.3 is 'Rom', but its own `text` is 'Rome'; its end looks inclusive"
    ):
        read_examples(path, TEXT_CLASSIFICATION)


def test_entities_as_one_object_of_lists_are_read(tmp_path: Path) -> None:
    lists = {"start": [21, 5], "end": [25, 11], "label": ["city", "person"], "note": "by hand"}
    (example,) = read(tmp_path, lists)
    assert example.entities == (Entity(5, 11, "person"), Entity(21, 25, "city"))
    assert read(tmp_path, {"start": [], "end": [], "label": []})[0].entities == ()
    for odd in ({"end": [25]}, {"end": 25}):
        with pytest.raises(BadRows, match="`start`, `end` and `label` are lists of equal length in it"):
            read(tmp_path, lists | odd)
