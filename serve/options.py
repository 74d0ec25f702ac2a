"""Settings as data: a field of a frozen dataclass states the type, default, unit, range, choices and help of one setting.

Command lines, recipes, checks and the docs' reference page are made from it. It imports nothing heavy, so `--help` is fast.

>>> @dataclass(frozen=True)
... class Tea:
...     kind: Literal["green", "black"] = setting("green", help="Kind of leaves.")
...     minutes: float = setting(3.0, help="Minutes to brew.", above=0)
>>> make(Tea, {"minutes": 5})
Tea(kind='green', minutes=5.0)
"""

import difflib
import math
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from serve.errors import BadInput

Kind = TypeVar("Kind")

KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
}


def setting(
    default: Any = MISSING,
    *,
    help: str,
    choices: tuple[str, ...] = (),
    suggested: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    shown: str | None = None,
    flag: str = "",
    metavar: str = "",
    panel: str = "",
    needs: str = "",
    excludes: str = "",
) -> Any:
    """A field of a settings dataclass that is an option. An option without a default is required.

    Args:
        default: the value if none is given.
        help: one line, with the unit.
        choices: all allowed values, if the type is not a `Literal` that lists them.
        suggested: values that shells complete; others are allowed too.
        at_least: the smallest number allowed; `above`: the number must be larger than this; `at_most`: the largest allowed.
        shown: the default as help shows it, if the value itself explains nothing ("automatic" for 0).
        flag: the name on the command line, if it is not made from the field's name.
        metavar: the placeholder for the value in help.
        panel: the heading in help under which the option is listed.
        needs: names of settings that must be given with it, with a space between; `a|b` is either of two. See `rule_faults`.
        excludes: names of settings that may not be given with it.
    """
    about = {
        "help": help, "choices": choices, "suggested": suggested, "at_least": at_least, "above": above,
        "at_most": at_most, "shown": shown, "flag": flag, "metavar": metavar, "panel": panel, "needs": needs,
        "excludes": excludes,
    }  # fmt: skip
    return field(default=default, metadata={"setting": about})


def again(kind: Any, name: str, default: Any = ..., **about: Any) -> Any:
    """The setting `name` of the settings dataclass `kind`, for another one: with its own default, or other arguments of `setting`."""
    stated = next(each for each in fields(kind) if each.name == name)
    return field(
        default=stated.default if default is ... else default,
        metadata={"setting": stated.metadata["setting"] | about},
    )


def group(kind: type, *, panel: str = "") -> Any:
    """A field that holds another settings dataclass, each field an option; `panel` is the heading of options without one."""
    return field(default_factory=kind, metadata={"group": kind, "panel": panel})


class Settings:
    """A settings dataclass: it checks its values when it is made. Settings that several classes share come from mix-ins."""

    layout: ClassVar[Mapping[str, str]] = {}
    """Headings of the help, each with the names of its settings, in order. Settings that it leaves out come after them."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Option:
    """One setting, read from its field. Attributes without a line here are those of `setting`."""

    name: str
    within: str
    """The field that holds the option's group; empty if it is in no group."""
    kind: type
    """The type of one value: int, float, str, bool or Path."""
    several: bool
    """Whether it holds a tuple of values."""
    urls: bool
    """Whether a path may be a URL, which stays text."""
    optional: bool
    """Whether it may be None."""
    required: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    suggested: tuple[str, ...]
    at_least: float | None
    above: float | None
    at_most: float | None
    shown: str | None
    flag: str
    """`--name`."""
    metavar: str
    panel: str
    needs: str
    excludes: str

    @property
    def listed(self) -> bool:
        """Whether one argument may give several values with commas between them: choices and numbers."""
        return self.several and (bool(self.choices) or self.kind in (int, float))

    @property
    def default_shown(self) -> str:
        """The default as help shows it; empty where there is nothing to show."""
        if self.shown is not None:
            return self.shown
        if self.required or self.default in (None, "", ()):
            return ""
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        if self.several:
            return ",".join(str(part) for part in self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def range(self) -> str:
        """The numbers allowed, such as "from 0"; empty where all are."""
        low = f"from {_plain(self.at_least)}" if self.at_least is not None else ""
        low = low or (f"above {_plain(self.above)}" if self.above is not None else "")
        high = f"to {_plain(self.at_most)}" if self.at_most is not None else ""
        return f"{low} {high}".strip()

    def value_in(self, settings: Any) -> Any:
        """The value of this option in `settings`."""
        return getattr(getattr(settings, self.within) if self.within else settings, self.name)


@cache
def options_of(kind: Any) -> tuple[Option, ...]:
    """Every option of a settings dataclass: those of its layout, the others of its own, then those of its groups."""
    own = _settings_of(kind, "", "")
    for each in fields(kind):
        if holder := each.metadata.get("group"):
            own += _settings_of(holder, each.name, each.metadata["panel"])
    named = {option.name: option for option in own}
    layout = getattr(kind, "layout", {})
    placed = [replace(named.pop(name), panel=panel) for panel, names in layout.items() for name in names.split()]
    return (*placed, *named.values())


def _settings_of(holder: Any, within: str, panel: str) -> list[Option]:
    return [_option(holder, each, within, panel) for each in fields(holder) if "setting" in each.metadata]


def _option(holder: type, each: "Field[Any]", within: str, panel: str) -> Option:
    kind, optional, several, about = get_type_hints(holder)[each.name], False, False, dict(each.metadata["setting"])
    urls = kind == Path | str
    if urls:
        kind = Path
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        optional = True
    if get_origin(kind) is tuple:
        kind, several = get_args(kind)[0], True
    if get_origin(kind) is Literal:
        about["choices"], kind = get_args(kind), type(get_args(kind)[0])
    required = each.default is MISSING
    about["flag"] = about["flag"] or "--" + each.name.replace("_", "-")
    about["panel"] = about["panel"] or panel
    return Option(
        each.name, within, kind, several, urls, optional, required, None if required else each.default, **about
    )


def make(kind: type[Kind], values: Mapping[str, Any], *, verb: str = "", needed: Container[str] = ()) -> Kind:
    """Settings of `kind` from `values`, by name. None, and a name that is missing, mean the default; not for those `needed`.

    Raises:
        BadInput: a name is unknown, a required setting is missing, or a value is not allowed. One message lists all faults,
            and refers to the help of `verb`.
    """
    own, faults = _read(kind, values, needed)
    if faults:
        raise BadInput(
            _all_of(faults) + (f"\n`stillroom {verb} --help` says what each setting is for." if verb else "")
        )
    return kind(**own)


def _all_of(faults: list[str]) -> str:
    if len(faults) == 1:
        return f"{faults[0]}."
    return f"{len(faults)} settings are wrong.\n" + "\n".join(f"{i}. {fault}." for i, fault in enumerate(faults, 1))


def _read(kind: type, values: Mapping[str, Any], needed: Container[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Arguments for `kind`, and the faults of `values`, a line each."""
    known = {option.name: option for option in options_of(kind)}
    plain = {each.name for each in fields(kind)} - set(known)
    faults = [unknown_setting(name, known) for name in values if name not in known and name not in plain]
    own: dict[str, Any] = {name: values[name] for name in plain & set(values) if values[name] is not None}
    tables = {name for name in own if get_origin(get_type_hints(kind)[name]) is dict}
    faults += [
        f"{name} is {own[name]!r}; give a table, as [{name}.NAME] begins one"
        for name in tables
        if not isinstance(own[name], Mapping)
    ]
    inner: dict[str, dict[str, Any]] = {}
    for option in known.values():
        value = values.get(option.name)
        if (
            value is None
            or (option.several and value in ((), []))
            or (option.required and isinstance(value, str) and not value)
        ):
            if option.required or option.name in needed:
                faults.append(f"{option.flag} is needed")
            continue
        try:
            # The default may always be given, even where it is not among the choices, such as an empty name.
            held = value if value == option.default and type(value) is type(option.default) else _typed(option, value)
            (inner.setdefault(option.within, {}) if option.within else own)[option.name] = held
        except ValueError as fault:
            faults.append(str(fault))
    holders = {each.name: each.metadata["group"] for each in fields(kind) if "group" in each.metadata}
    for name, given in inner.items():
        try:
            own[name] = holders[name](**given)
        except BadInput as fault:
            faults.append(fault.message.rstrip("."))
    return own, faults


def unknown_setting(name: str, known: Mapping[str, Any]) -> str:
    """The message for a setting that is not in `known`: it names the most similar one, or lists all."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{name} is not a setting" + (
        f" (did you mean {near[0]}?)" if near else f"; the settings are {', '.join(sorted(known))}"
    )


def check(settings: Any) -> None:
    """Checks the type, choices and range of every option of `settings`. Lists become tuples, and strings of paths become paths.

    A frozen settings dataclass calls it in `__post_init__`, so that settings made in Python get the checks of a command line.

    Raises:
        BadInput: a value is not allowed. One message lists all faults.
    """
    kind: Any = type(settings)
    if faults := faults_of(settings, options_of(kind)):
        raise BadInput(_all_of(list(faults.values())))


def faults_of(settings: Any, options: Iterable[Option]) -> dict[str, str]:
    """What is wrong with the values of `options` in `settings`, by their names. Right ones get their types, as `check` says."""
    faults = {}
    for option in options:
        value = getattr(settings, option.name) if not option.within else option.value_in(settings)
        if value is option.default and not option.required:
            continue
        if option.required and option.several and not value:
            faults[option.name] = f"{option.flag} is needed"
            continue
        # The default is accepted even where it is out of range, such as 0 for "automatic".
        if (value is None and option.optional) or (value == option.default and type(value) is type(option.default)):
            continue
        holder = getattr(settings, option.within) if option.within else settings
        try:
            object.__setattr__(holder, option.name, _typed(option, value))
        except ValueError as fault:
            faults[option.name] = str(fault)
    return faults


def rule_faults(settings: Any) -> list[str]:
    """Which given settings lack one that they need, or exclude each other; a setting is given if it is not its default."""
    kind: Any = type(settings)
    options = {option.name: option for option in options_of(kind)}
    given = {name for name, option in options.items() if option.value_in(settings) != option.default}
    faults = []
    for name in (name for name in options if name in given):
        flag = options[name].flag
        for either in options[name].needs.split():
            if not given & set(names := either.split("|")):
                flags = " or ".join(options[other].flag for other in names)
                faults.append(
                    f"{flag} needs {flags}. Give {'one of them' if names[1:] else 'that'} too, or leave {flag} out."
                )
        faults += [
            f"{flag} and {options[other].flag} are both given. Leave one of them out."
            for other in options[name].excludes.split()
            if other in given
        ]
    return faults


@cache
def fields_of(kind: Any) -> tuple[Option, ...]:
    """`options_of`, whose messages have the names of Python and of requests, not those of the command line."""
    return tuple(replace(option, flag=option.name) for option in options_of(kind))


def _typed(option: Option, value: Any) -> Any:
    """`value` in the type of the setting. ValueError says why it is not allowed."""
    if not option.several:
        return _one(option, value)
    parts = [value] if isinstance(value, str | Path | int | float) else value
    if not isinstance(parts, Iterable) or isinstance(parts, Mapping | bytes):
        raise ValueError(f"{option.flag} is {value!r}; give a list")
    parts = list(parts)
    if option.required and not parts:
        raise ValueError(f"{option.flag} is needed")
    if option.listed:
        parts = [part for each in parts for part in (_parts(option, each) if isinstance(each, str) else [each])]
        parts = list(dict.fromkeys(parts))
        if not parts:
            raise ValueError(f"{option.flag} is empty; give {_needed(option)}")
    return tuple(_one(option, part) for part in parts)


def _parts(option: Option, text: str) -> list[Any]:
    """The values between the commas of `text`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [option.kind(part) for part in parts]
    except ValueError:
        raise ValueError(f"{option.flag} is {text!r}; give {_needed(option)}") from None


def _one(option: Option, value: Any) -> Any:
    # As a shell expands it, which leaves it as it is after `=` and in a recipe. A label may begin so; its metavar is NAME.
    if (
        option.kind in (str, Path)
        and option.metavar != "NAME"
        and isinstance(value, str | Path)
        and str(value)[:1] == "~"
    ):
        value = type(value)(os.path.expanduser(value))
    if type(value) is not option.kind:
        if option.urls and isinstance(value, str) and "://" in value:
            return value
        value = _converted(option, value)
    if option.choices and value not in option.choices:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in option.choices], n=1, cutoff=0.7)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{option.flag} is {value!r}{meant}; give {_needed(option)}")
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not (
            (isinstance(value, int) or math.isfinite(value))  # an integer may be too large for a float
            and (option.at_least is None or value >= option.at_least)
            and (option.above is None or value > option.above)
            and (option.at_most is None or value <= option.at_most)
        )
    ):
        raise ValueError(f"{option.flag} is {_plain(value)}; give {_needed(option)}")
    return value


def _converted(option: Option, value: Any) -> Any:
    """`value` in the type of `option`: a value of numpy, a whole number as any number, a path as its text and the other way."""
    if option.kind is Path and isinstance(value, str | Path):
        return Path(value)
    if option.kind is str and isinstance(value, Path):
        return str(value)
    if option.kind is bool and type(value).__name__ in ("bool", "bool_"):  # of numpy
        return bool(value)
    is_number = isinstance(value, Integral) or (option.kind is float and isinstance(value, Real))
    if option.kind not in (int, float) or not is_number or isinstance(value, bool):
        raise ValueError(f"{option.flag} is {value!r}; give {_needed(option)}")
    try:
        return option.kind(value)
    except OverflowError:  # a whole number that no float holds
        raise ValueError(f"{option.flag} is {_plain(value)}; give {_needed(option)}") from None


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _needed(option: Option) -> str:
    if option.choices:
        return ("some of " if option.several else "one of ") + ", ".join(str(choice) for choice in option.choices)
    return f"{KINDS[option.kind]} {option.range}".strip()


def described(option: Option) -> str:
    """The help of `option`, followed by its choices or by "May be given again."."""
    if option.choices:
        listed = ", ".join(str(choice) for choice in option.choices)
        return f"{option.help} {'Some' if option.several else 'One'} of {listed}."
    if option.several and not option.listed:
        return f"{option.help} May be given again."
    return option.help
