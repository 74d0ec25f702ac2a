"""A subset stands for the whole file, however the file is sorted."""

from compress.data.sampler import subset


def test_a_file_sorted_by_label_gives_rows_of_every_label() -> None:
    rows = [(label, i) for label in range(4) for i in range(250)]
    assert {label for label, _ in subset(rows, 100)} == {0, 1, 2, 3}


def test_rows_keep_their_order_and_none_comes_twice() -> None:
    found = subset(range(1000), 100)
    assert found == sorted(set(found))
    assert len(found) == 100


def test_the_same_seed_draws_the_same_rows_and_another_seed_draws_others() -> None:
    assert subset(range(1000), 100, seed=1) == subset(range(1000), 100, seed=1) != subset(range(1000), 100, seed=2)


def test_a_short_file_is_taken_whole() -> None:
    assert subset("abc", 5) == ["a", "b", "c"]
