from serve.wording import all_of, counted, one_of


def test_lists_have_commas_and_a_word_before_the_last_name() -> None:
    assert [all_of("abc"[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert one_of(("json", "csv", 3)) == "json, csv or 3"


def test_a_count_has_the_form_that_fits_it() -> None:
    assert [counted(count, "text") for count in (0, 1, 2000)] == ["0 texts", "1 text", "2,000 texts"]
    assert [counted(count, "process is", "processes are") for count in (1, 2)] == ["1 process is", "2 processes are"]
