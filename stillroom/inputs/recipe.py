"""Every setting of a run in one place: read from a TOML file, overridden by flags, written back resolved."""

import dataclasses
import difflib
import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from compress.engine.task_settings import TaskSettings, typed
from serve.errors import BadInput

# What a reader looks for first in a recipe.
FIRST = ("teacher", "task", "data", "out", "student", "name")


@dataclass(frozen=True)
class Recipe(TaskSettings):
    """The settings of `stillroom run`. Those without a default must be given."""

    out: str = ""  # the bundle to write
    name: str = ""  # what the server calls the model; the name of `out` unless given
    undistilled: bool = True  # train the same student on labels only too, to compare with
    teacher_gate: float = 0.97  # least share of the teacher's metric that the shipped variant keeps, on validation
    gate: float = 0.99  # least share of the fp32 metric that int8 keeps, on validation
    keep_right: float = (
        0.95  # share of right answers that abstaining keeps, where no text is out of scope; 0 never abstains
    )
    max_minutes: float = 0.0  # fit the training to this many minutes; 0 is no limit
    latency_seconds: float = 60.0  # for timing teacher and student, in all
    license: str = ""  # of the model, which its teacher's decides: a short name that the Hub knows, such as apache-2.0
    data_license: str = ""  # of the data that it learns from
    language: str = ""  # of the texts: a code that the Hub knows, such as en

    def faults(self) -> list[str]:
        """What is out of its range, a line each."""
        faults = super().faults()
        for name in ("gate", "teacher_gate", "keep_right"):
            if not 0 <= getattr(self, name) <= 1:
                faults.append(f"`{name}` is {getattr(self, name)}; a share between 0 and 1 is needed")
        for name in ("max_minutes", "latency_seconds"):
            if not getattr(self, name) >= 0:
                faults.append(f"`{name}` is {getattr(self, name)}; it cannot be below 0")
        return faults

    @property
    def model_name(self) -> str:
        """What the server calls the model."""
        return self.name or Path(os.path.abspath(self.out)).name


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        BadInput: no such file, not TOML, a key that is not a setting, or a value of the wrong type.
    """
    if not path.is_file():
        raise BadInput(f"The recipe {path} is not a file. Give a TOML file of settings, or the settings as flags.")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"The recipe {path} is not TOML: {error}.") from None
    known = {field.name for field in fields(Recipe)}
    unknown = [key for key in found if key not in known]
    if unknown:
        raise BadInput(
            f"The recipe {path} has {', '.join(map(_with_nearest, unknown))}; no such setting. Settings are: {', '.join(sorted(known))}."
        )
    return found


def resolve(settings: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """The recipe of a file's `settings` overridden by `flags` that are not None.

    Raises:
        BadInput: a setting that must be given is not, has the wrong type, or is out of its range.
    """
    unknown = [name for name in (*settings, *flags) if name not in Recipe.__dataclass_fields__]
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: no such setting. Settings are {', '.join(Recipe.__dataclass_fields__)}.")
    merged = settings | {name: value for name, value in flags.items() if value is not None}
    recipe, faults = typed(Recipe, merged)
    faults += [f"--{name} is needed" for name in ("teacher", "task", "data", "out") if not getattr(recipe, name)]
    faults += recipe.faults()
    if faults:
        raise BadInput("; ".join(faults) + ". `stillroom run --help` says what each setting is for.")
    return recipe


def _with_nearest(unknown: str) -> str:
    near = difflib.get_close_matches(unknown, [field.name for field in fields(Recipe)], n=1)
    return f"{unknown} (did you mean {near[0]}?)" if near else unknown


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML, every setting spelled out, so that it runs again as it ran."""
    import tomli_w

    everything = dataclasses.asdict(recipe)
    ordered = {name: everything[name] for name in (*FIRST, *everything)}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in ordered.items()}
    return tomli_w.dumps(values)


def listed(text: str) -> tuple[str, ...]:
    """The names in `text`, with commas between them, each once.

    >>> listed("fp32, int8,fp32")
    ('fp32', 'int8')
    """
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
