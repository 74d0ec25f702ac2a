"""Entities with offsets: their forms, blanks at their ends, and texts of their own that contradict the offsets."""

from pathlib import Path
from typing import Any

import pytest
from data_files import TOKENS, faults, lines_of, written

from compress.data.examples import Entity
from compress.data.labelled_files import read_examples
from compress.data.teacher_labels import read_teacher_labels

TEXT = "🙂 Ms Kéller lives in Graz"
KELLER = Entity(5, 11, "person")
OWN = {"start": 5, "end": 11, "label": "person", "text": "Kéller"}
LISTS = {"start": [21, 5], "end": [25, 11], "label": ["city", "person"], "note": "by hand"}


def read(path: Path, *rows: Any) -> list[list[Entity]]:
    """The entities of each row of a file of JSON lines."""
    return [[*(each.entities or ())] for each in read_examples(written(path, lines_of(*rows)), TOKENS)]


def test_blanks_at_the_ends_of_an_entity_are_cut_off_in_data_and_in_a_teachers_answers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for start, end in ((5, 11), (5, 12), (4, 11), (4, 12)):
        given = {"start": start, "end": end, "label": "person", "score": 0.9}
        assert read(path, {"text": TEXT, "entities": [given]}) == [[KELLER]]
        (answer,) = read_teacher_labels([path], TOKENS).answers.values()
        assert answer.spans == ((KELLER, 0.9),)


@pytest.mark.parametrize(
    ("places", "looks"),
    [
        ({"end": 10}, "its end looks inclusive"),
        ({"end": 10, "in": "🙂 Ms Kéllers"}, "its end looks inclusive"),
        ({"start": 6, "end": 12}, "UTF-16"),
        ({"start": 8, "end": 15}, "bytes of UTF-8"),
        ({"start": 6, "end": 12, "in": "Ms   Kéller lives"}, "counted from 1"),
        ({"start": 6, "end": 11, "in": "Ms   Kéller lives"}, "counted from 1 with an inclusive end"),
        ({"start": 0, "end": 2}, "the text has it at 5"),
        ({"start": 24, "end": 40, "text": "nowhere"}, "'nowhere'; offsets count code points"),
    ],
)
def test_offsets_that_contradict_their_text_say_how(tmp_path: Path, places: dict[str, Any], looks: str) -> None:
    row = {"text": places.pop("in", TEXT), "entities": [OWN | places]}
    ((line, reason),) = faults(written(tmp_path / "a.jsonl", lines_of(row)), TOKENS)
    assert (line, looks in reason) == (1, True), reason


@pytest.mark.parametrize("name", ["word", "value", "mention", "surface"])
def test_an_entitys_own_text_is_compared_under_other_names(tmp_path: Path, name: str) -> None:
    row = {"text": "Anna is", "entities": [{"start": 0, "end": 3, "label": "person", name: "Anna"}]}
    ((_, reason),) = faults(written(tmp_path / "a.jsonl", lines_of(row)), TOKENS)
    assert f"its own `{name}` is 'Anna'; its end looks inclusive" in reason


@pytest.mark.parametrize("own", ["Kéller", " kéller ", "Ke\u0301ller", "", None])
def test_an_entitys_own_text_may_differ_in_blanks_capitals_and_composed_letters(tmp_path: Path, own: Any) -> None:
    assert read(tmp_path / "a.jsonl", {"text": TEXT, "entities": [OWN | {"text": own}]}) == [[KELLER]]


@pytest.mark.parametrize(
    ("text", "end", "form"),
    [
        ("Ana is", 3, {"word": "Q42"}),
        ("Ana is", 3, {"surface": "an ##na"}),
        ("NY is not New York state", 2, {"name": "New York"}),
        ("ten of 10 people", 3, {"value": "10"}),
        ("7pm", 3, {"value": "7"}),
    ],
)
def test_a_normal_form_of_an_entity_is_not_compared(tmp_path: Path, text: str, end: int, form: dict[str, str]) -> None:
    row = {"text": text, "entities": [{"start": 0, "end": end, "label": "x"} | form]}
    assert read(tmp_path / "a.jsonl", row) == [[Entity(0, end, "x")]]


def test_entities_as_one_object_of_lists_are_read(tmp_path: Path) -> None:
    empty = {"start": [], "end": [], "label": []}
    found = read(tmp_path / "a.jsonl", {"text": TEXT, "entities": LISTS}, {"text": TEXT, "entities": empty})
    assert found == [[KELLER, Entity(21, 25, "city")], []]
    for odd in ({"end": [25]}, {"end": 25}):
        row = {"text": TEXT, "entities": LISTS | odd}
        ((_, reason),) = faults(written(tmp_path / "a.jsonl", lines_of(row)), TOKENS)
        assert "lists of equal length" in reason


def test_rows_of_prodigy_are_read_by_their_spans_and_have_no_entity_without_them(tmp_path: Path) -> None:
    words = [{"text": "Ana", "start": 0, "end": 3, "id": 0}, {"text": "is", "start": 4, "end": 6, "id": 1}]
    row = {"text": "Ana is", "tokens": words, "answer": "accept"}
    span = {"start": 0, "end": 3, "token_start": 0, "token_end": 0, "label": "person"}
    found = read(tmp_path / "a.jsonl", row | {"spans": [span]}, row, row | {"answer": "ignore"}, row | {"spans": None})
    assert found == [[Entity(0, 3, "person")], [], []]


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
    assert read(tmp_path / "a.jsonl", {"text": "Ana is"} | row) == [[Entity(0, 3, "person")]]


def test_a_pair_of_a_text_and_its_entities_is_read_as_spacy_writes_it(tmp_path: Path) -> None:
    pair, found = ["Ana is", {"entities": [[0, 3, "person"]]}], [Entity(0, 3, "person")]
    assert read(tmp_path / "a.jsonl", pair) == [found]
    assert read(tmp_path / "a.json", [pair, pair]) == [found, found]
