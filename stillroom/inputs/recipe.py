"""The settings of a run: read from a TOML file, overridden by flags, and written with every value."""

import dataclasses
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.models.shapes import STUDENTS
from compress.settings import AUTO, SHAPES, Output, TaskSettings
from export.settings import VariantSettings
from serve.errors import BadInput
from serve.options import again, make, options_of, setting
from stillroom.settings import MOST_MINUTES, BundleChecks, LatencyBudget, ModelCard

# The settings at the top of a written recipe.
FIRST = ("teacher", "task", "data", "out", "student", "name")


@dataclass(frozen=True, kw_only=True)
class Recipe(ModelCard, TaskSettings):
    """The settings of `stillroom run`."""

    out: str = again(Output, "out", help="The bundle to write; stages are kept in OUT.work.")
    name: str = setting("", help="What the server calls the model.", shown="the name of --out")
    student: str = again(
        TaskSettings, "student", help=f"{SHAPES} auto finds the one that learns best within --budget-ms.", suggested=(AUTO, *STUDENTS)
    )  # fmt: skip
    undistilled: bool = setting(
        True,
        help="Also train the same student on labels alone; the better of the two on validation ships.",
    )
    keep_words_of: tuple[str, ...] = setting(
        (),
        help="Text whose words the vocabulary keeps beside those of the task's own texts; the rest is trimmed.",
        metavar="FILE",
        shown="the whole vocabulary",
    )
    vocabulary_size: int = setting(
        0, help="Most tokens of the student's vocabulary: those that the task's texts and --keep-words-of need most often. It is trimmed "
        "before training.", at_least=0, shown="the whole vocabulary",
    )  # fmt: skip
    teacher_gate: float = again(BundleChecks, "teacher_gate")
    gate: float = again(VariantSettings, "gate", help="Least share of the fp32 metric that int8 keeps.")
    keep_right: float = again(
        VariantSettings, "keep_right",
        help="Share of right answers to keep when the model may abstain, if no text is out of scope; 0 means it never abstains.",
    )  # fmt: skip
    promises: tuple[str, ...] = again(VariantSettings, "promises")
    promise_data: str = again(BundleChecks, "promise_data")
    promise_confidence: float = again(VariantSettings, "promise_confidence")
    max_minutes: float = setting(0.0, help="Fit the training to this many minutes.", at_least=0, shown="no limit")
    budget_ms: float | None = again(
        LatencyBudget, "budget_ms", None, help="Milliseconds that one call of the int8 student may take on this machine. A student that is "
        "slower does not ship; with --student auto, the best that meets it is found.",
    )  # fmt: skip
    percentile: Literal[50, 99] = again(LatencyBudget, "percentile")
    tokens: int = again(LatencyBudget, "tokens")
    search_minutes: float = setting(MOST_MINUTES, help="Minutes of short trainings for --student auto.", above=0)
    latency_seconds: float = again(
        BundleChecks, "latency_seconds", 60.0, help="Seconds for timing all models together."
    )
    layout: ClassVar = {
        "What to make": "teacher revision task data student method out name",
        "Data": "corpus unlabelled teacher_labels augment max_length out_of_scope language_temperature class_weights",
        "Teacher": "new_head teacher_epochs teacher_patience teacher_learning_rate folds",
        "Student": "student_epochs student_learning_rate temperature soft_weight then start distill_tokens teacher_layer undistilled "
        "keep_words_of vocabulary_size",
        "Machine": "batch accumulate precision device threads seed trackers checkpoint_seconds max_minutes latency_seconds",
        "Gates and probabilities": "teacher_gate gate keep_right promises promise_data promise_confidence",
        "Budget": "budget_ms percentile tokens search_minutes",
    }

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
    in_order = (*FIRST, *(option.name for option in options_of(Recipe)), *everything)  # as in the help
    ordered = {name: everything[name] for name in in_order}
    # What was left to stillroom stays out: TOML has no null.
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in ordered.items() if v not in (None, {})}
    return tomli_w.dumps(values)
