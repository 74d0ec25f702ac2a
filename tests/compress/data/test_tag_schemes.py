"""Tags that are in no scheme are faults of the rows they stand in, and no new labels."""

import json
from pathlib import Path

import pytest

from compress.data.examples import Entity
from compress.data.labelled_files import read_examples
from compress.data.row_fields import BadRows
from compress.data.splits import read_splits
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION


def rows(path: Path, *tags: str) -> Path:
    """A file with a row for each of `tags`, which stand with blanks between them."""
    listed = [{"tokens": ["w"] * len(row.split()), "tags": row.split()} for row in tags]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    return path


def faults(path: Path) -> list[tuple[int | None, str]]:
    """Line and reason of each fault of the file."""
    with pytest.raises(BadRows) as caught:
        read_examples(path, TOKEN_CLASSIFICATION)
    assert all(fault.file == str(path) for fault in caught.value.faults)
    return [(fault.line, fault.reason) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        pytest.param("B_city", "(write B-city)", id="another-separator"),
        pytest.param("b-city", "(write B-city)", id="a-small-letter"),
        pytest.param("X-city", "'X-city'", id="a-prefix-of-no-scheme"),
        pytest.param("city", "'city'", id="no-prefix"),
    ],
)
def test_a_tag_without_a_prefix_is_a_fault_wherever_other_rows_have_one(tmp_path: Path, tag: str, reason: str) -> None:
    ((line, said),) = faults(rows(tmp_path / "train.jsonl", "B-city I-city O", "O O", f"O {tag}", "B-city"))
    assert line == 3
    assert f"has the tag {tag!r} without a prefix, but in 2 other rows tags have a prefix" in said
    assert reason in said


@pytest.mark.parametrize("tag", ["B- city", "I-\tcity", "U-\u00a0city"])
def test_space_between_a_prefix_and_its_label_is_a_fault(tmp_path: Path, tag: str) -> None:
    row = {"tokens": ["in", "Lisbon"], "tags": ["O", tag]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert faults(tmp_path / "train.jsonl") == [
        (1, f"`tags` holds {tag!r}, whose label begins with space; remove the space")
    ]


def test_a_tag_without_a_prefix_is_found_in_whichever_split_it_stands(tmp_path: Path) -> None:
    for name, tag in (("train", "B-city"), ("validation", "B_city"), ("test", "B-city")):
        rows(tmp_path / f"{name}.jsonl", f"{tag} O", "O B-city")
    with pytest.raises(
        BadRows, match=r"validation\.jsonl, line 1: has the tag 'B_city' without a prefix, but in 5 other rows"
    ) as caught:
        read_splits(str(tmp_path), TOKEN_CLASSIFICATION)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    "tags",
    [
        ("city O", "city person", "E-mail E-mail"),
        ("NAME E-MAIL", "O E-MAIL"),
        ("DNA", "RNA O", "O B-cell"),
        ("E-MAIL", "I-PHONE O"),
    ],
)
def test_labels_are_names_where_some_have_no_prefix_and_no_two_prefixes_stand_before_one(
    tmp_path: Path, tags: tuple[str, ...]
) -> None:
    read = read_examples(rows(tmp_path / "train.jsonl", *tags), TOKEN_CLASSIFICATION)
    assert {entity.label for each in read for entity in each.entities or ()} == {*" ".join(tags).split()} - {"O"}
    assert all(len(each.entities or ()) == len({*row.split()} - {"O"}) for each, row in zip(read, tags, strict=True))


def test_labels_are_named_by_the_tags_of_all_splits(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        rows(tmp_path / f"{name}.jsonl", "NAME O" if name == "test" else "O L-SHAPE", "O S-BAHN")
    assert read_splits(str(tmp_path), TOKEN_CLASSIFICATION).labels(TOKEN_CLASSIFICATION) == ("L-SHAPE", "S-BAHN")


def test_a_prefix_that_fewer_labels_have_is_a_fault_if_it_stands_in_a_scheme(tmp_path: Path) -> None:
    ((line, said),) = faults(rows(tmp_path / "train.jsonl", "city O", "city person", "B-mail I-mail"))
    assert (line, "a prefix and the label 'mail', but in 2 other rows tags have none" in said) == (3, True)


@pytest.mark.parametrize(
    "tags",
    [
        ("B_city I_city", "O B_person"), ("b-city i-city", "O b-city"), ("b:city O",), ("city-B city-I", "O name-B"), ("city_b O",),
        ("B_city I_city person", "B_city O"),
    ],
)  # fmt: skip
def test_tags_that_are_all_spelt_in_another_way_are_faults_and_no_labels(tmp_path: Path, tags: tuple[str, ...]) -> None:
    found = faults(rows(tmp_path / "train.jsonl", *tags, "O O"))
    assert [line for line, _ in found] == [*range(1, len(tags) + 1)]
    assert all("a prefix in another spelling" in reason for _, reason in found)


@pytest.mark.parametrize("tags", ["B I O", "b i", "B E S O", "B O"])
def test_prefixes_without_a_label_are_faults_that_say_so(tmp_path: Path, tags: str) -> None:
    ((line, said),) = faults(rows(tmp_path / "train.jsonl", "O O", tags))
    assert (line, f"has the tag {tags[0]!r}, a prefix without a label" in said) == (2, True)


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ("B-x E-x B-x O", "has the tag 'B-x' with no E-x to end its entity"),
        ("B-x L-x I-x O", "has the tag 'I-x' with no L-x to end its entity"),
        ("S-x O U-x", "has tags with S, U; E and S belong to BIOES, L and U to BILOU"),
        ("B-x o", "has the tag 'o'; the tag outside entities is the capital letter O"),
        ("B-", "has the tag 'B-', a prefix without a label"),
        ("B-x I-x X-x", "has the tag 'X-x' among others with a prefix, such as 'B-x'"),
    ],
)
def test_a_row_that_mixes_schemes_is_a_fault(tmp_path: Path, tags: str, reason: str) -> None:
    ((line, said),) = faults(rows(tmp_path / "train.jsonl", "O O", tags))
    assert line == 2
    assert reason in said


def test_of_rows_in_two_schemes_the_fewer_are_faults(tmp_path: Path) -> None:
    ((line, reason),) = faults(rows(tmp_path / "a.jsonl", "B-x E-x", "S-x O", "B-x O", "O O"))
    assert (line, "without an E- or S- tag, unlike 2 other rows of the file" in reason) == (3, True)
    ((line, reason),) = faults(rows(tmp_path / "a.jsonl", "B-x I-x", "B-y O", "O S-x"))
    assert (line, "has an E-, S-, L- or U- tag, unlike entities in 2 other rows" in reason) == (3, True)


def test_what_is_in_a_scheme_or_readable_in_one_way_stays_as_it_was_read(tmp_path: Path) -> None:
    for tags in (["B-x I-x L-x U-y O"], ["I-x E-x O E-x"], ["O T-cell", "cell-line O"], ["I-x O I-x"]):
        assert len(read_examples(rows(tmp_path / "a.jsonl", *tags), TOKEN_CLASSIFICATION)) == len(tags)
    (read,) = read_examples(rows(tmp_path / "a.jsonl", "B-x I-y"), TOKEN_CLASSIFICATION)
    assert read.entities == (Entity(0, 1, "x"), Entity(2, 3, "y"))


def test_a_tag_or_a_label_with_space_around_it_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"tokens": ["a"], "tags": ["B-city "]}\n', encoding="utf-8")
    assert faults(path) == [(1, "`tags` holds 'B-city ', which begins or ends with space; remove the space")]
    path.write_text('{"text": "ab", "entities": [{"start": 0, "end": 1, "label": " x"}]}\n', encoding="utf-8")
    assert faults(path) == [(1, "`label` holds ' x', which begins or ends with space; remove the space")]
    path.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": ["x "]}\n', encoding="utf-8")
    with pytest.raises(BadRows, match=r"train\.jsonl, line 2: `label` holds 'x ', which begins or ends with space"):
        read_examples(path, TEXT_CLASSIFICATION)


def test_numbers_for_tags_are_a_fault_that_asks_for_names(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"tokens": ["a", "b"], "ner_tags": [0, 1]}\n' * 3, encoding="utf-8")
    with pytest.raises(BadRows) as caught:
        read_examples(path, TOKEN_CLASSIFICATION)
    assert "train.jsonl, lines 1, 2, 3: `ner_tags` holds a number, but the file has no names" in str(caught.value)
    assert "write the label as a string" in str(caught.value)


@pytest.mark.parametrize("tag", ["B-ORG|B-LOC", "B-city,B-org", "O|O", "B-a;I-b", "B-city, O"])
def test_several_tags_in_one_cell_are_a_fault_that_asks_for_one_a_word(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"tokens": ["a", "b"], "tags": ["O", tag]}) + "\n", encoding="utf-8")
    assert faults(path) == [
        (1, f"`tags` holds {tag!r}, which is several tags; one tag a word is needed, so choose one")
    ]


def test_a_label_with_a_separator_is_one_tag(tmp_path: Path) -> None:
    labels = ("a|b", "O,b", "R/D")
    read = read_examples(rows(tmp_path / "a.jsonl", *(f"B-{label} O" for label in labels)), TOKEN_CLASSIFICATION)
    assert [entity.label for each in read for entity in each.entities or ()] == [*labels]


@pytest.mark.parametrize(
    ("tags", "write"),
    [
        (("B-x M-x E-x", "S-y O"), "'M-x' among others with a prefix, such as 'B-x' (write I-x)"),
        (("B-x I-x", "W-y"), "(write S-y)"),
        (("B-x C-x O",), "(write I-x inside an entity)"),
        (("B-x O-x",), "(write O)"),
        (("i-x O", "i-y"), "(write I-x)"),
        (("I_x O I_y",), "(write I-x)"),
        (("x-B x-M x-E", "y-S"), "(write B-x)"),
        (("B–x I–x O",), "(write B-x)"),
        (("BX IX O",), "(write B-X)"),
    ],
)
def test_tags_of_other_schemes_and_spellings_are_faults_that_say_what_to_write(
    tmp_path: Path, tags: tuple[str, ...], write: str
) -> None:
    assert any(write in reason for _, reason in faults(rows(tmp_path / "train.jsonl", *tags)))


def test_labels_that_only_look_like_tags_are_read(tmp_path: Path) -> None:
    for tags in (("BANK O", "BIRD"), ("i-phone O",), ("e-mail", "i-phone"), ("type-I", "grade-I O")):
        assert len(read_examples(rows(tmp_path / "a.jsonl", *tags), TOKEN_CLASSIFICATION)) == len(tags)
