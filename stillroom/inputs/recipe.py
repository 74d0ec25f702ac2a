"""The settings of a run: read from a TOML file, overridden by flags, and written with every value."""

import dataclasses
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.models.shapes import STUDENTS
from compress.settings import AUTO, MACHINE, OWN_SHAPE, SHAPES, STUDENT, WHAT, TaskSettings
from export.settings import GATE, KEPT_RIGHT, PROMISE_CONFIDENCE, PROMISE_DATA, PROMISES
from serve.errors import BadInput
from serve.options import make, options_of, setting
from stillroom.settings.model_card import OfCard
from stillroom.settings.search import BUDGET, BUDGET_MS, MOST_MINUTES, PERCENTILE, TOKENS, USUAL_TOKENS

# The settings at the top of a written recipe.
FIRST = ("teacher", "task", "data", "out", "student", "name")


GATES = "Gates and probabilities"


@dataclass(frozen=True, kw_only=True)
class Recipe(OfCard, TaskSettings):
    """The settings of `stillroom run`."""

    out: str = setting(metavar="FOLDER", help="The bundle to write; stages are kept in OUT.work.", panel=WHAT)
    name: str = setting("", help="What the server calls the model.", shown="the name of --out", panel=WHAT)
    student: str = setting(
        "", help=f"{SHAPES} auto finds the one that learns best within --budget-ms.", suggested=(AUTO, *STUDENTS), metavar="SHAPE",
        shown=OWN_SHAPE, panel=WHAT,
    )  # fmt: skip
    undistilled: bool = setting(
        True,
        help="Also train the same student on labels alone; the better of the two on validation ships.",
        panel=STUDENT,
    )
    keep_words_of: tuple[str, ...] = setting(
        (),
        help="Text whose words the vocabulary keeps beside those of the task's own texts; the rest is trimmed.",
        metavar="FILE",
        shown="the whole vocabulary",
        panel=STUDENT,
    )
    vocabulary_size: int = setting(
        0, help="Most tokens of the student's vocabulary: those that the task's texts and --keep-words-of need most often. It is trimmed "
        "before training.", at_least=0, shown="the whole vocabulary", panel=STUDENT,
    )  # fmt: skip
    teacher_gate: float = setting(
        0.97, help="Least share of the teacher's metric for the student to ship.", at_least=0, at_most=1, panel=GATES
    )
    gate: float = setting(
        GATE, help="Least share of the fp32 metric that int8 keeps.", at_least=0, at_most=1, panel=GATES
    )
    keep_right: float = setting(
        KEPT_RIGHT,
        help="Share of right answers to keep when the model may abstain, if no text is out of scope; 0 means it never abstains.",
        at_least=0,
        at_most=1,
        panel=GATES,
    )
    promises: tuple[str, ...] = setting((), help=PROMISES, metavar="PROMISE", flag="--promise", panel=GATES)
    promise_data: str = setting("", help=PROMISE_DATA, metavar="FILE", shown="validation", panel=GATES)
    promise_confidence: float = setting(0.95, help=PROMISE_CONFIDENCE, at_least=0.5, at_most=0.9999, panel=GATES)
    max_minutes: float = setting(
        0.0, help="Fit the training to this many minutes.", at_least=0, shown="no limit", panel=MACHINE
    )
    budget_ms: float | None = setting(
        None, help=f"{BUDGET_MS} A student that is slower does not ship; with --student auto, the best that meets it is found.",
        above=0, panel=BUDGET,
    )  # fmt: skip
    percentile: Literal[50, 99] = setting(50, help=PERCENTILE, metavar="N", panel=BUDGET)
    tokens: int = setting(0, help=TOKENS, at_least=0, at_most=512, shown=USUAL_TOKENS, panel=BUDGET)
    search_minutes: float = setting(
        MOST_MINUTES, help="Minutes of short trainings for --student auto.", above=0, panel=BUDGET
    )
    latency_seconds: float = setting(60.0, help="Seconds for timing all models together.", at_least=0, panel=MACHINE)

    @property
    def model_name(self) -> str:
        """What the server calls the model."""
        return self.name or Path(os.path.abspath(self.out)).name


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, by their names in Python. The file may also use the names of the flags.

    Raises:
        BadInput: no such file, or not TOML.
    """
    if not path.is_file():
        raise BadInput(f"The recipe {path} is not a file. Give a TOML file of settings, or the settings as flags.")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"The recipe {path} is not TOML: {error}.") from None
    names = {option.flag.removeprefix("--"): option.name for option in options_of(Recipe)}
    return {names.get(key.replace("_", "-"), key): value for key, value in found.items()}


def resolve(settings: dict[str, Any], flags: dict[str, Any]) -> Recipe:
    """The recipe of a file's `settings`, overridden by those `flags` that are not None.

    Raises:
        BadInput: a required setting is missing, or a setting has the wrong type or is out of range.
    """
    given = settings | {name: value for name, value in flags.items() if value is not None}
    return make(Recipe, given, verb="run", needed=() if given.get("teacher_labels") else ("teacher",))


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML with every setting, so that the run can be repeated."""
    import tomli_w

    everything = dataclasses.asdict(recipe)
    ordered = {name: everything[name] for name in (*FIRST, *everything)}
    # What was left to stillroom stays out: TOML has no null.
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in ordered.items() if v not in (None, {})}
    return tomli_w.dumps(values)
