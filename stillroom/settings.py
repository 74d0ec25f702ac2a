"""Settings that several verbs of stillroom have, each stated once; those of trainings are in `compress.settings`."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from compress.settings import ALL_CORES
from export.settings import PROMISE_DATA
from serve.options import Settings, setting

CARD = "Model card"
Sampler = Literal["tpe", "controller"]
# Of the short trainings that find a student, in `search` and in `run --student auto`.
MOST_TRIALS, TRIAL_STEPS, MOST_MINUTES, SOFT_WEIGHT = 24, 200, 60.0, 0.5


@dataclass(frozen=True, kw_only=True)
class ModelCard(Settings):
    """What a model card states and no file of the model does: licences and language, as the Hub's metadata names them."""

    license: str = setting(
        "", help="Licence of the model: a short name that the Hub knows, such as apache-2.0.", panel=CARD
    )
    data_license: str = setting("", help="Licence of the data that it learned from.", panel=CARD)
    language: str = setting("", help="Language of the texts: a code that the Hub knows, such as en.", panel=CARD)


@dataclass(frozen=True, kw_only=True)
class LatencyBudget(Settings):
    """How fast a student must be on this machine."""

    budget_ms: float = setting(help="Milliseconds that one call of the int8 student may take on this machine.", above=0)
    percentile: Literal[50, 99] = setting(
        50,
        help="Percentile of the latency that --budget-ms bounds; 99 needs a machine without other work.",
        metavar="N",
    )
    tokens: int = setting(
        0, help="Tokens of the text of that call.", at_least=0, at_most=2048,
        shown="the length that 95 of 100 texts of validation stay within",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeveralTrainings(Settings):
    """How many trainings there are, and how long they may take."""

    seeds: int = setting(3, help="Trainings of each row of the table.", at_least=1, at_most=1000)
    most_minutes: float = setting(MOST_MINUTES, help="No training begins after so many minutes of them.", above=0)


@dataclass(frozen=True, kw_only=True)
class BundleChecks(Settings):
    """What a bundle is judged on when it is made; `export.settings.VariantSettings` has those of each variant."""

    teacher_gate: float = setting(
        0.97, help="Least share of the teacher's metric for the student to ship.", at_least=0, at_most=1
    )
    promise_data: str = setting("", help=PROMISE_DATA, metavar="FILE", shown="validation", needs="promises")
    latency_seconds: float = setting(
        20.0, help="Seconds for timing all variants and runtimes together; 0 skips it.", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class Timing(Settings):
    """How models are timed."""

    threads: int = setting(0, help="Threads of one model call.", at_least=0, shown=ALL_CORES)


def shared(given: Settings, *mix_ins: Any) -> dict[str, Any]:
    """The settings that `given` has of `mix_ins`, by name."""
    return {each.name: getattr(given, each.name) for kind in mix_ins for each in fields(kind)}
