"""Entities with offsets: their form, blanks at their ends, and texts of their own that contradict the offsets."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.data.examples import Entity, Example
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
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


def rows_read(path: Path, *rows: Any) -> list[list[Entity]]:
    """The entities of each row of a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [[*(each.entities or ())] for each in read_examples(path, TOKEN_CLASSIFICATION)]


def test_rows_of_prodigy_are_read_by_their_spans_and_have_no_entity_without_them(tmp_path: Path) -> None:
    words = [{"text": "Ana", "start": 0, "end": 3, "id": 0}, {"text": "is", "start": 4, "end": 6, "id": 1}]
    row = {"text": "Ana is", "tokens": words, "answer": "accept"}
    span = {"start": 0, "end": 3, "token_start": 0, "token_end": 0, "label": "person"}
    assert rows_read(
        tmp_path / "a.jsonl", row | {"spans": [span]}, row, row | {"answer": "ignore"}, row | {"spans": None}
    ) == [
        [Entity(0, 3, "person")],
        [],
        [],
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"label": [[0, 3, "person"]]},  # doccano
        {"entities": [{"id": 1, "label": "person", "start_offset": 0, "end_offset": 3}], "relations": []},
        {"label": [{"start": 0, "end": 3, "text": "Ana", "labels": ["person"]}]},  # Label Studio
        {"entities": [{"entity_group": "person", "word": "Ana", "start": 0, "end": 3}]},  # transformers
        {"entities": [{"entity": "person", "value": "Ana", "start": 0, "end": 3}]},  # Rasa
        {"entities": [[0, 3, "person"]]},
        {"entities": [[0, 3, "person", "Ana"]]},
    ],
)
def test_entities_are_read_as_other_tools_write_them(tmp_path: Path, row: dict[str, Any]) -> None:
    assert rows_read(tmp_path / "a.jsonl", {"text": "Ana is"} | row) == [[Entity(0, 3, "person")]]


def test_a_pair_of_a_text_and_its_entities_is_read_as_spacy_writes_it(tmp_path: Path) -> None:
    pair = ["Ana is", {"entities": [[0, 3, "person"]]}]
    assert rows_read(tmp_path / "a.jsonl", pair) == rows_read(tmp_path / "a.json", [pair, pair])[:1]


def test_a_task_of_label_studio_says_how_to_export_it(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match="is a task of Label Studio; export the project as JSON-MIN"):
        rows_read(tmp_path / "a.jsonl", {"data": {"text": "Ana is"}, "annotations": [{"result": []}]})


@pytest.mark.parametrize("name", ["word", "value", "mention", "surface"])
def test_an_entitys_own_text_is_compared_under_other_names_unless_it_is_a_normal_form(
    tmp_path: Path, name: str
) -> None:
    entity = {"start": 0, "end": 3, "label": "person"}
    with pytest.raises(BadRows, match=f"its own `{name}` is 'Anna'; its end looks inclusive, add 1"):
        rows_read(tmp_path / "a.jsonl", {"text": "Anna is", "entities": [entity | {name: "Anna"}]})
    for form in ("Q42", "an ##na", "ana"):
        assert rows_read(tmp_path / "a.jsonl", {"text": "Ana is", "entities": [entity | {name: form}]})


def test_inceptions_table_is_told_by_its_format_and_not_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("#FORMAT=WebAnno TSV 3.3\n\n#Text=Ana\n1-1\t0-3\tAna\tperson\n", encoding="utf-8")
    with pytest.raises(BadRows, match="is WebAnno TSV of INCEpTION; export the documents as CoNLL 2002"):
        read_examples(tmp_path / "a.tsv", TOKEN_CLASSIFICATION)


@pytest.mark.parametrize(
    ("text", "end", "form"),
    [
        ("NY is not New York state", 2, {"name": "New York"}),
        ("ten of 10 people", 3, {"value": "10"}),
        ("7pm", 3, {"value": "7"}),
    ],
)
def test_a_value_that_says_what_an_entity_means_is_not_held_to_its_text(
    tmp_path: Path, text: str, end: int, form: dict[str, str]
) -> None:
    row = {"text": text, "entities": [{"start": 0, "end": end, "label": "x"} | form]}
    assert rows_read(tmp_path / "a.jsonl", row) == [[Entity(0, end, "x")]]
