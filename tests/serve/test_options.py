"""Settings that are stated once: what is given is read, checked and told in one message."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from serve.errors import BadInput
from serve.options import Settings, again, check, described, group, make, options_of, rule_faults, setting
from serve.text.answers import AnswerOptions
from serve.wording import all_of, counted, one_of


@dataclass(frozen=True)
class Water:
    """A group."""

    degrees: int = setting(90, help="Of Celsius.", at_least=60, at_most=100)


@dataclass(frozen=True)
class Tea:
    """Settings of every kind."""

    out: Path = setting(help="The cup.")
    kind: Literal["green", "black"] = setting("green", help="Of leaves.")
    minutes: float = setting(3.0, help="It draws.", above=0)
    cups: int | None = setting(None, help="To fill.", at_least=1, shown="as many as there are")
    guests: tuple[str, ...] = setting((), help="Who comes.", flag="--guest")
    extras: tuple[Literal["milk", "sugar"], ...] = setting((), help="What goes in.")
    sizes: tuple[int, ...] = setting((1, 2), help="Of cups.", at_least=1)
    iced: bool = setting(False, help="Cold.")
    schedule: str = setting("", help="Of the day.", choices=("early", "late"))
    water: Water = group(Water, panel="Water")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Heat:
    """A group whose settings must fit each other."""

    first: int = setting(90, help="Of Celsius.")
    last: int = setting(100, help="Of Celsius.")

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise BadInput(f"--first is {self.first}, above --last.")


@dataclass(frozen=True)
class Bread:
    """Settings beside such a group."""

    loaves: int = setting(1, help="To bake.", at_least=1)
    heat: Heat = group(Heat)


def test_what_is_given_becomes_what_the_setting_holds() -> None:
    made = make(
        Tea, {"out": "cup", "minutes": 5, "cups": 2, "guests": ["a,b", "c"], "extras": "milk, sugar", "sizes": "3,4"}
    )
    assert made == Tea(Path("cup"), "green", 5.0, 2, ("a,b", "c"), ("milk", "sugar"), (3, 4))
    assert make(Tea, {"out": Path("cup"), "extras": ["sugar", "milk,sugar"]}).extras == ("sugar", "milk")
    assert make(Tea, {"out": "cup", "degrees": 70}).water == Water(70)


def test_the_default_may_be_given_though_the_choices_leave_it_out() -> None:
    assert make(Tea, {"out": "cup", "schedule": ""}).schedule == ""


def test_all_that_is_wrong_comes_in_one_message() -> None:
    wrong = {
        "kind": "blac", "minutes": float("nan"), "cups": 0, "guests": [3], "extras": "milk,salt", "sizes": "1,x", "iced": "yes",
        "degrees": 101, "cup": 1, "schedule": "never",
    }  # fmt: skip
    with pytest.raises(BadInput) as raised:
        make(Tea, wrong, verb="brew")
    assert raised.value.message.splitlines() == [
        "11 settings are wrong.",
        "1. cup is not a setting (did you mean cups?).",
        "2. --out is needed.",
        "3. --kind is 'blac' (did you mean black?); give one of green, black.",
        "4. --minutes is nan; give a number above 0.",
        "5. --cups is 0; give a whole number from 1.",
        "6. --guest is 3; give a text.",
        "7. --extras is 'salt'; give some of milk, sugar.",
        "8. --sizes is '1,x'; give a whole number from 1.",
        "9. --iced is 'yes'; give true or false.",
        "10. --schedule is 'never'; give one of early, late.",
        "11. --degrees is 101; give a whole number from 60 to 100.",
        "`stillroom brew --help` says what each setting is for.",
    ]


def test_settings_of_a_group_that_do_not_fit_each_other_are_told_among_the_others() -> None:
    with pytest.raises(BadInput) as raised:
        make(Bread, {"loaves": 0, "first": 200})
    assert [line.partition(" is ")[0] for line in raised.value.message.splitlines()[1:]] == [
        "1. --loaves",
        "2. --first",
    ]
    assert ".." not in raised.value.message


@pytest.mark.parametrize(("name", "value"), [("extras", ","), ("sizes", {"small": 1})])
def test_a_list_of_nothing_or_of_something_else_is_told(name: str, value: object) -> None:
    with pytest.raises(BadInput, match=f"--{name}"):
        make(Tea, {"out": "cup", name: value})


def test_settings_made_in_python_are_checked_as_well() -> None:
    with pytest.raises(BadInput, match=r"--cups is 0; give a whole number from 1\."):
        Tea(Path("cup"), cups=0)
    with pytest.raises(BadInput, match="--kind is 'red'"):
        Tea(Path("cup"), kind="red")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="--degrees is 5"):
        Tea(Path("cup"), water=Water(5))


def test_help_says_choices_defaults_and_ranges() -> None:
    shown = {option.flag: (described(option), option.default_shown, option.range) for option in options_of(Tea)}
    assert shown == {
        "--out": ("The cup.", "", ""),
        "--kind": ("Of leaves. One of green, black.", "green", ""),
        "--minutes": ("It draws.", "3", "above 0"),
        "--cups": ("To fill.", "as many as there are", "from 1"),
        "--guest": ("Who comes. May be given again.", "", ""),
        "--extras": ("What goes in. Some of milk, sugar.", "", ""),
        "--sizes": ("Of cups.", "1,2", "from 1"),
        "--iced": ("Cold.", "no", ""),
        "--schedule": ("Of the day. One of early, late.", "", ""),
        "--degrees": ("Of Celsius.", "90", "from 60 to 100"),
    }
    json.dumps(shown)


def test_a_path_that_may_be_a_url_keeps_it_as_it_is() -> None:
    @dataclass(frozen=True)
    class Place:
        place: Path | str = setting(help="Where.")

        def __post_init__(self) -> None:
            check(self)

    assert make(Place, {"place": "s3://bucket/a//b/"}).place == "s3://bucket/a//b/"
    assert make(Place, {"place": "a/b/"}).place == Path("a/b")
    with pytest.raises(BadInput, match="--place is 7; give a path"):
        make(Place, {"place": 7})


def test_a_setting_of_another_class_keeps_what_is_not_changed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Leaves(Settings):
        grams: float = setting(2.5, help="Weight of the leaves.", above=0, at_most=50, panel="Leaves")

    @dataclass(frozen=True, kw_only=True)
    class Pot(Settings):
        cups: int = setting(2, help="Cups.", at_least=1)
        grams: float = again(Leaves, "grams", 5.0, help="Leaves for all cups.")
        layout: ClassVar = {"Pot": "grams cups"}

    grams, cups = options_of(Pot)
    assert (grams.name, cups.name) == ("grams", "cups")
    assert (grams.default, grams.help, grams.range, grams.panel) == (
        5.0,
        "Leaves for all cups.",
        "above 0 to 50",
        "Pot",
    )
    assert Leaves().grams == 2.5
    with pytest.raises(BadInput, match=r"--grams is 60; give a number above 0 to 50"):
        Pot(grams=60)


def test_numbers_of_numpy_are_numbers() -> None:
    options = AnswerOptions(top_k=np.int64(3), min_score=np.float32(0.5))  # type: ignore[arg-type]
    assert (options.top_k, type(options.top_k), options.min_score) == (3, int, 0.5)
    assert AnswerOptions(truncate=np.bool_(True)).truncate is True  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^min_score is 10,000,.*; give a number from 0 to 1$"):
        AnswerOptions(min_score=10**400)
    with pytest.raises(BadInput, match=r"^top_k is 3\.0; give a whole number from 1 to 1,000,000$"):
        AnswerOptions(top_k=3.0)  # type: ignore[arg-type]


def test_settings_that_need_or_exclude_each_other_are_told() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Brew(Settings):
        hot: bool = setting(False, help="With hot water.")
        ice: int = setting(0, help="Cubes of ice.", at_least=0, excludes="hot")
        sugar: str = setting("", help="Kind of sugar.", needs="spoon|tongs")
        spoon: bool = setting(False, help="With a spoon.")
        tongs: bool = setting(False, help="With tongs.")

    assert rule_faults(Brew(hot=True, spoon=True)) == rule_faults(Brew(ice=2, sugar="brown", tongs=True)) == []
    assert rule_faults(Brew(hot=True, ice=2, sugar="brown")) == [
        "--ice and --hot are both given. Leave one of them out.",
        "--sugar needs --spoon or --tongs. Give one of them too, or leave --sugar out.",
    ]


@dataclass(frozen=True)
class Places(Settings):
    """What names places, and what does not."""

    out: str = setting("", help="A folder.", metavar="FOLDER")
    key: Path | None = setting(None, help="A file.")
    files: tuple[str, ...] = setting((), help="Files.", metavar="FILE")
    label: str = setting("", help="A label.", metavar="NAME")


@dataclass(frozen=True)
class NeedsPlace(Settings):
    """What cannot be left out."""

    place: str = setting(help="A folder.", metavar="FOLDER")


def test_the_home_folder_is_expanded_wherever_a_place_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    given = {"out": "~/m", "key": Path("~/k"), "files": ["~/a", "b~"], "label": "~/m"}
    expanded = ("/home/ada/m", Path("/home/ada/k"), ("/home/ada/a", "b~"), "~/m")
    for made in (make(Places, given), Places(**given)):
        assert (made.out, made.key, made.files, made.label) == expanded
    assert make(Places, {"out": "~"}).out == "/home/ada"
    assert make(Places, {"out": "s3://~/m"}).out == "s3://~/m"


@pytest.mark.parametrize("given", ["a.txt", Path("a.txt"), ("a.txt",), {"a.txt"}, iter(["a.txt"])])
def test_one_file_in_place_of_a_list_is_a_list_of_it(given: Any) -> None:
    assert make(Places, {"files": given}).files == ("a.txt",)


def test_an_empty_text_is_not_given_where_one_is_needed() -> None:
    with pytest.raises(BadInput, match="--place is needed"):
        make(NeedsPlace, {"place": ""})


@pytest.mark.parametrize("given", [{"a.txt": 1}, b"a.txt", object()], ids=["a table", "bytes", "an object"])
def test_what_is_no_list_is_told(given: Any) -> None:
    with pytest.raises(BadInput, match=r"--files is .*; give a list"):
        make(Places, {"files": given})


def test_lists_have_commas_and_a_word_before_the_last_name() -> None:
    assert [all_of("abc"[:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert one_of(("json", "csv", 3)) == "json, csv or 3"


def test_a_count_has_the_form_that_fits_it() -> None:
    assert [counted(count, "text") for count in (0, 1, 2000)] == ["0 texts", "1 text", "2,000 texts"]
    assert [counted(count, "process is", "processes are") for count in (1, 2)] == ["1 process is", "2 processes are"]
