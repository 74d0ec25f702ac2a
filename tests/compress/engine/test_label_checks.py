"""What is said of labels that are no fault, and that a person should look at."""

from collections.abc import Sequence
from dataclasses import replace

from compress.data.examples import Entity, Example, Splits
from compress.data.tags import from_tags
from compress.engine.label_checks import label_warnings

TEXT, TOKENS = "text-classification", "token-classification"


def examples(*labels: str | tuple[str, ...]) -> list[Example]:
    return [Example(f"text {i}", label=label) for i, label in enumerate(labels)]


def warnings(train: Sequence[str], validation: Sequence[str], test: Sequence[str]) -> list[str]:
    return label_warnings(Splits(examples(*train), examples(*validation), examples(*test)), TEXT)


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
    entities = [Example("ab", entities=(Entity(0, 1, "x"), Entity(1, 2, label))) for label in ("X", "x")]
    (said,) = label_warnings(Splits(entities, entities, entities), TOKENS)
    assert "X (3) and x (9)" in said
    lists = examples(("x", "y"), (), ("X",))
    (said,) = label_warnings(Splits(lists, lists, lists), TEXT)
    assert "X (3) and x (3)" in said


def test_words_none_of_which_is_outside_of_entities_are_told() -> None:
    all_named, outside = from_tags(["a", "b c"], ["NOUN", "VERB"]), from_tags(["a", "b"], ["NOUN", "O"])
    splits = Splits([all_named] * 2, [all_named], [all_named])
    (said,) = label_warnings(splits, TOKENS)
    assert said.startswith("No tag in train is O, so every word is in an entity.")
    assert label_warnings(replace(splits, train=[all_named, outside]), TOKENS) == []
    whole = [Example("ab", entities=(Entity(0, 2, "x"),))]
    assert label_warnings(Splits(whole, whole, whole), TOKENS) == []  # no word of it was given
