"""What is said of labels that are no fault, and that a person should look at."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from compress.data.examples import Entity, Example, Splits
from compress.data.label_checks import label_warnings
from compress.data.tags import from_tags
from compress.tasks import TEXT_CLASSIFICATION, TEXT_REGRESSION, TOKEN_CLASSIFICATION


def examples(*labels: str | tuple[str, ...]) -> list[Example]:
    return [Example(f"text {i} of {label}", label=label) for i, label in enumerate(labels)]


def warnings(train: Sequence[str], validation: Sequence[str], test: Sequence[str]) -> list[str]:
    return label_warnings(Splits(examples(*train), examples(*validation), examples(*test)), TEXT_CLASSIFICATION)


def test_labels_that_differ_in_capitals_blanks_or_dashes_alone_are_told_with_their_counts() -> None:
    both = ["order status", "City", "city"]
    (said,) = warnings([*both, "city", "order_status", "Refund"], [*both, "order_status"], ["Refund"])
    assert said.startswith("Some labels differ only in capitals, blanks or dashes")
    assert "City (2) and city (3); order status (2) and order_status (2)." in said
    assert warnings(["a", "b"], ["a"], ["b"]) == []


def test_a_rare_label_among_frequent_ones_is_told_with_the_one_it_may_be() -> None:
    known = ["city", "person", "zebra", "ctiy"]
    (said,) = warnings(["city"] * 50 + ["person"] * 40 + ["zebra"] * 2 + ["ctiy"], known, known)
    assert said == (
        "Train has fewer than 3 examples of some labels, too few to learn: ctiy (1; city misspelt?), zebra (2)."
    )
    assert warnings(["city"] * 3 + ["person"] * 2 + ["zebra"], known[:3], known[:3]) == []  # all are rare
    assert warnings(["city"] * 50 + ["person"] * 40 + ["zebra"] * 3, known[:3], known[:3]) == []


def test_a_label_that_only_one_split_has_is_told() -> None:
    assert warnings(["a", "b", "c"], ["a", "d"], ["b", "e"]) == [
        "validation has labels that train lacks: d. Every model gets them wrong.",
        "test has labels that train lacks: e. Every model gets them wrong.",
        "Only train has the labels c: no score measures how well they are learned.",
    ]


def test_labels_of_entities_and_of_lists_are_looked_at_as_well() -> None:
    entities = [Example(f"ab {label}", entities=(Entity(0, 1, "x"), Entity(1, 2, label))) for label in ("X", "x")]
    (said,) = label_warnings(Splits(entities, entities, entities), TOKEN_CLASSIFICATION)
    assert "X (3) and x (9)" in said
    lists = examples(("x", "y"), (), ("X",))
    (said,) = label_warnings(Splits(lists, lists, lists), TEXT_CLASSIFICATION)
    assert "X (3) and x (3)" in said


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("city", "city\u200b", r"'city' (2) and 'city\u200b'"),
        ("city", "\ufeffcity", r"'city' (2)"),
        ("city", "ci\u00adty", r"'city' (2)"),
        ("city", "\uff43ity", r"'city' (2)"),
        ("caf\u00e9", "cafe\u0301", "how letters are composed"),
        ("a-b", "a\u2013b", "kind of a dash"),
        ("a b", "a\u00a0b", r"a b (2) and 'a\xa0b' (2)"),
        ("1", "1.0", "'1' (2) and '1.0' (2)"),
    ],
)
def test_labels_that_look_the_same_are_told_with_what_cannot_be_seen(one: str, other: str, told: str) -> None:
    (said,) = warnings([one, other], [one], [other])
    assert told in said
    assert ascii(other)[1:-1] in said


def test_other_numbers_are_other_labels() -> None:
    assert warnings(["1", "10"], ["1"], ["10"]) == []
    assert warnings(["10121000", "10121005"], ["10121000"], ["10121005"]) == []


@pytest.mark.parametrize(
    "labels",
    [
        ("a,b", "a", "b"),
        ("a|b", "b|c", "c|a"),
        ("red; blue", "red", "blue"),
        ("sport, politics", "sport"),
        ("['a', 'b']", "c"),
        ("('a', 'b')", "c"),
        ("[1 0]", "[0 1]"),
        ("[]", "[a, b]"),
    ],
)
def test_several_labels_in_one_cell_are_told(labels: tuple[str, ...]) -> None:
    (said,) = warnings(labels, labels, labels)
    assert "look like a list of several in one cell" in said
    assert labels[0] in said


def test_a_label_with_a_comma_of_its_own_is_none_of_several() -> None:
    labels = ["Cause-Effect(e1,e2)", "Cause-Effect(e2,e1)", "Food, fresh", "Toys", "[PER]", "n/a"]
    assert warnings(labels, labels, labels) == []


def test_a_text_with_two_labels_is_told_without_the_text() -> None:
    rows = [Example("secret words", label="pos"), Example(" secret words ", label="neg"), Example("other", label="pos")]
    (said,) = label_warnings(Splits(rows, rows, rows), TEXT_CLASSIFICATION)
    assert "1 text stands in the data with different labels (neg and pos)" in said
    assert "secret" not in said
    twice = [Example("a b", entities=(Entity(0, 1, name),)) for name in ("x", "y")]
    (said,) = label_warnings(Splits(twice, twice, twice), TOKEN_CLASSIFICATION)
    assert "1 text stands in the data with different labels:" in said


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (("B-person", "I-person"), True),
        (("B-person", "person"), True),
        (("B-person", "B-city"), True),
        (("B_person", "I_person"), True),
        (("I-city", "I-name"), True),
        (("b-city", "b-name"), True),
        (("E-mail", "mail", "S-Bahn", "U-Bahn"), False),
        (("B-52", "plane"), False),
    ],
)
def test_labels_of_entities_that_are_tags_are_told(labels: tuple[str, ...], told: bool) -> None:
    rows = [Example(f"ab {label}", entities=(Entity(0, 2, label),)) for label in labels]
    said = label_warnings(Splits(rows, rows, rows), TOKEN_CLASSIFICATION)
    assert [("begin with the prefix of a tag" in each) for each in said] == [True] * told


def test_words_none_of_which_is_outside_of_entities_are_told() -> None:
    all_named, outside = from_tags(["a", "b c"], ["NOUN", "VERB"]), from_tags(["a", "b"], ["NOUN", "O"])
    splits = Splits([all_named] * 2, [all_named], [all_named])
    (said,) = label_warnings(splits, TOKEN_CLASSIFICATION)
    assert said.startswith("No tag in train is O, so every word is in an entity.")
    assert label_warnings(replace(splits, train=[all_named, outside]), TOKEN_CLASSIFICATION) == []
    whole = [Example("ab", entities=(Entity(0, 2, "x"),))]
    assert label_warnings(Splits(whole, whole, whole), TOKEN_CLASSIFICATION) == []  # no word of it was given


def test_labels_that_stand_for_a_missing_value_are_told() -> None:
    (said,) = warnings(["nan", "None", "city"], ["nan", "None"], ["city"])
    assert said.startswith("Some labels are what programs write where there is none")
    assert "None, nan." in said
    assert warnings(["none", "city"], ["none"], ["city"]) == []


def test_a_split_whose_texts_all_have_one_answer_is_told() -> None:
    (said,) = warnings(["a", "b", "b"], ["b", "b"], ["a", "b"])
    assert said.startswith("All texts of validation have one label (b): ")
    assert warnings(["a", "a"], ["a", "a"], ["a", "a"]) == []  # train has no other
    scores = [Example(f"text {i}", label=float(i)) for i in range(3)]
    same = [replace(example, label=2.0) for example in scores]
    (said,) = label_warnings(Splits(scores, scores, same), TEXT_REGRESSION)
    assert said.startswith("All texts of test have one number: ")
    entities = [Example("ab x", entities=(Entity(0, 2, "x"),)), Example("ab", entities=())]
    bare = [replace(example, entities=()) for example in entities]
    assert any("no entity" in each for each in label_warnings(Splits(entities, bare, entities), TOKEN_CLASSIFICATION))
