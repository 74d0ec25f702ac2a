"""Settings stated once: a field of a frozen dataclass says its type, default, unit, range, choices and line of help.

Command lines, recipes, checks and the reference page of the docs are made from that. Imports nothing heavy: `stillroom --help` reads it.

>>> @dataclass(frozen=True)
... class Tea:
...     kind: Literal["green", "black"] = setting("green", help="Of leaves.")
...     minutes: float = setting(3.0, help="It draws.", above=0)
>>> make(Tea, {"minutes": 5})
Tea(kind='green', minutes=5.0)
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from serve.errors import BadInput

Settings = TypeVar("Settings")

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
) -> Any:
    """A field of a settings dataclass that is an option; without a default it must be given.

    Args:
        default: its value where nothing is given.
        help: one line, with the unit.
        choices: all that it may be, where the type is not a `Literal` that says so.
        suggested: names that shells complete, though others may be given.
        at_least: the least number that it may be; `above`: it must be larger than this; `at_most`: the largest.
        shown: what help says the default is, where the value does not say it ("automatic" for 0).
        flag: its spelling on the command line, where it is not the field's name.
        metavar: what stands for its value in help.
        panel: under which heading help lists it.
    """
    about = {
        "help": help, "choices": choices, "suggested": suggested, "at_least": at_least, "above": above,
        "at_most": at_most, "shown": shown, "flag": flag, "metavar": metavar, "panel": panel,
    }  # fmt: skip
    return field(default=default, metadata={"setting": about})


def group(kind: type, *, panel: str = "") -> Any:
    """A field that holds settings of its own, each of them an option; `panel` is the heading of those without one."""
    return field(default_factory=kind, metadata={"group": kind, "panel": panel})


@dataclass(frozen=True)
class Option:
    """One setting, as every reader of a settings dataclass sees it."""

    name: str
    within: str
    """The field that holds the group of this one; empty for none."""
    kind: type
    """Of one value: int, float, str, bool or Path."""
    several: bool
    """Whether it holds any number of values."""
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

    @property
    def listed(self) -> bool:
        """Whether its values may stand in one argument with commas between them: closed choices and numbers."""
        return self.several and (bool(self.choices) or self.kind in (int, float))

    @property
    def default_shown(self) -> str:
        """What help says of the default; empty where there is nothing to say."""
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
        """What numbers it may be, such as "from 0"; empty where any."""
        low = f"from {_plain(self.at_least)}" if self.at_least is not None else ""
        low = low or (f"above {_plain(self.above)}" if self.above is not None else "")
        high = f"to {_plain(self.at_most)}" if self.at_most is not None else ""
        return f"{low} {high}".strip()

    def value_in(self, settings: Any) -> Any:
        """What `settings` says of it."""
        return getattr(getattr(settings, self.within) if self.within else settings, self.name)


@cache
def options_of(kind: Any) -> tuple[Option, ...]:
    """Every option of a settings dataclass, those of groups after the others."""
    own = _settings_of(kind, "", "")
    for each in fields(kind):
        if holder := each.metadata.get("group"):
            own += _settings_of(holder, each.name, each.metadata["panel"])
    return tuple(own)


def _settings_of(holder: Any, within: str, panel: str) -> list[Option]:
    return [_option(holder, each, within, panel) for each in fields(holder) if "setting" in each.metadata]


def _option(holder: type, each: "Field[Any]", within: str, panel: str) -> Option:
    kind, optional, several, about = get_type_hints(holder)[each.name], False, False, dict(each.metadata["setting"])
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
    return Option(each.name, within, kind, several, optional, required, None if required else each.default, **about)


def make(kind: type[Settings], values: Mapping[str, Any], *, verb: str = "") -> Settings:
    """Settings of `kind` with `values`, by name, in place of the defaults; None is what was not given.

    Raises:
        BadInput: a name is not known, a setting that must be given is not, or a value cannot be; all of it in one message,
            which names the help of `verb`.
    """
    own, faults = _read(kind, values)
    if faults:
        raise BadInput(
            _all_of(faults) + (f"\n`stillroom {verb} --help` says what each setting is for." if verb else "")
        )
    return kind(**own)


def _all_of(faults: list[str]) -> str:
    if len(faults) == 1:
        return f"{faults[0]}."
    return f"{len(faults)} settings are wrong.\n" + "\n".join(f"{i}. {fault}." for i, fault in enumerate(faults, 1))


def _read(kind: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments of `kind`, and what is wrong with `values`, a line each."""
    known = {option.name: option for option in options_of(kind)}
    plain = {each.name for each in fields(kind)} - set(known)
    faults = [unknown_setting(name, known) for name in values if name not in known and name not in plain]
    own: dict[str, Any] = {name: values[name] for name in plain & set(values) if values[name] is not None}
    inner: dict[str, dict[str, Any]] = {}
    for option in known.values():
        value = values.get(option.name)
        if value is None or (option.several and value in ((), [])):
            if option.required:
                faults.append(f"{option.flag} is needed")
            continue
        try:
            # The default may be given as well, though nothing else like it may: an empty name, where choices name the others.
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
    """What to say of a setting that is none of `known`: its nearest, or all of them."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{name} is no setting" + (
        f" (did you mean {near[0]}?)" if near else f"; the settings are {', '.join(sorted(known))}"
    )


def check(settings: Any) -> None:
    """Hold every option of `settings` to its type, choices and range; a list becomes a tuple, a path's text a path.

    Called by a frozen settings dataclass when it is made, so that one made in Python is checked as one of a command line is.

    Raises:
        BadInput: one does not fit; all that do not in one message.
    """
    kind: Any = type(settings)
    faults = []
    for option in options_of(kind):
        value = option.value_in(settings)
        if option.required and option.several and not value:
            faults.append(f"{option.flag} is needed")
            continue
        # The default stands, though it may be none of what can be given: 0 for automatic.
        if (value is None and option.optional) or (value == option.default and type(value) is type(option.default)):
            continue
        holder = getattr(settings, option.within) if option.within else settings
        try:
            object.__setattr__(holder, option.name, _typed(option, value))
        except ValueError as fault:
            faults.append(str(fault))
    if faults:
        raise BadInput(_all_of(faults))


def _typed(option: Option, value: Any) -> Any:
    """`value` as the setting holds it. ValueError says why it cannot be."""
    if not option.several:
        return _one(option, value)
    parts = [value] if isinstance(value, str | Path | int | float) else value
    if not isinstance(parts, list | tuple):
        raise ValueError(f"{option.flag} is {value!r}; give a list")
    if option.listed:
        parts = [part for each in parts for part in (_parts(option, each) if isinstance(each, str) else [each])]
        parts = list(dict.fromkeys(parts))
        if not parts:
            raise ValueError(f"{option.flag} names nothing; give {_needed(option)}")
    return tuple(_one(option, part) for part in parts)


def _parts(option: Option, text: str) -> list[Any]:
    """What stands between the commas of `text`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [option.kind(part) for part in parts]
    except ValueError:
        raise ValueError(f"{option.flag} is {text!r}; give {_needed(option)}") from None


def _one(option: Option, value: Any) -> Any:
    if option.kind is float and type(value) is int:
        value = float(value)
    if option.kind is Path and isinstance(value, str):
        value = Path(value)
    if option.kind is str and isinstance(value, Path):
        value = str(value)
    right = isinstance(value, Path) if option.kind is Path else type(value) is option.kind
    if not right:
        raise ValueError(f"{option.flag} is {value!r}; give {_needed(option)}")
    if option.choices and value not in option.choices:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in option.choices], n=1, cutoff=0.7)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{option.flag} is {value!r}{meant}; give {_needed(option)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not _in_range(option, value):
        raise ValueError(f"{option.flag} is {_plain(value)}; give {_needed(option)}")
    return value


def _in_range(option: Option, value: float) -> bool:
    return (
        math.isfinite(value)
        and (option.at_least is None or value >= option.at_least)
        and (option.above is None or value > option.above)
        and (option.at_most is None or value <= option.at_most)
    )


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _needed(option: Option) -> str:
    if option.choices:
        return ("some of " if option.several else "one of ") + ", ".join(str(choice) for choice in option.choices)
    return f"{KINDS[option.kind]} {option.range}".strip()


def described(option: Option) -> str:
    """Its help, with its choices, or with whether it may be given again."""
    if option.choices:
        listed = ", ".join(str(choice) for choice in option.choices)
        return f"{option.help} {'Some' if option.several else 'One'} of {listed}."
    if option.several and not option.listed:
        return f"{option.help} May be given again."
    return option.help
