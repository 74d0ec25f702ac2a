import pytest

from serve.text.labels import bio_tags, entity_labels, split_tag


def test_tags_come_in_one_order_whatever_the_labels_order() -> None:
    assert bio_tags(["city", "airline", "city"]) == ("O", "B-airline", "I-airline", "B-city", "I-city")
    assert bio_tags([]) == ("O",)


@pytest.mark.parametrize(
    ("tag", "parts"),
    [
        ("O", ("O", "")),
        ("B-city", ("B", "city")),
        ("B-order-date", ("B", "order-date")),
        ("L-city", ("E", "city")),
        ("U-city", ("S", "city")),
        ("city", ("I", "city")),
        ("first-name", ("I", "first-name")),
    ],
)
def test_a_tag_is_a_prefix_and_a_label(tag: str, parts: tuple[str, str]) -> None:
    assert split_tag(tag) == parts


def test_the_labels_of_tags_are_sorted_and_each_once() -> None:
    assert entity_labels(["O", "I-city", "B-city", "name"]) == ("city", "name")
