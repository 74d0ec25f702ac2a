"""Doubts about the timings of a document: one sentence with advice, and every reason for it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from latency.measure.result_document import ProfileDocument
from latency.measure.statistics import FEW_SAMPLES, OTHER_LOAD, TIME_UP
from serve.wording import counted
from stillroom.report.formats import Table, percent, table


class Doubts(NamedTuple):
    """The sentence, and a row for each reason: the timing and the reason."""

    sentence: str
    reasons: Table


def doubts(document: ProfileDocument) -> Doubts | None:
    """The doubts about the timings of `document`, with advice; None where there are none."""
    timings: list[tuple[str, Any]] = [
        (f"{row['name']}, batch {row['batch']}, {row['tokens']} tokens", row) for row in document["candidates"]
    ]
    timings += [
        (f"{model['name']}, one text at a time", model["single_stream"])
        for model in document.get("models", [])
        if "single_stream" in model
    ]
    reasons = [(name, doubt) for name, timing in timings for doubt in timing["doubts"]]
    if not reasons:
        return None
    sentence = _sentence([timing for _, timing in timings], document["machine"].get("cores", 0))
    return Doubts(sentence, table(("timing", [name for name, _ in reasons]), ("reason", [said for _, said in reasons])))


def _sentence(timings: Sequence[Any], cores: int) -> str:
    """The reason that most timings share, and what to do for narrower intervals."""
    loaded = _with(timings, lambda doubt: doubt.startswith(OTHER_LOAD))
    short = _with(timings, lambda doubt: doubt.startswith((TIME_UP, FEW_SAMPLES)))
    unsteady = _with(timings, lambda doubt: not doubt.startswith((OTHER_LOAD, TIME_UP, FEW_SAMPLES)))
    causes = [
        (len(loaded), f"Other processes used {_used(loaded, cores)} of the cores during"),
        (len(unsteady), "Times varied by more than 10\N{NO-BREAK SPACE}% within"),
        (len(short), "The time was too short for"),
    ]
    count, cause = max(causes, key=lambda each: each[0])
    others = (
        "close other programs and run `stillroom profile` again" if loaded or unsteady else "run `stillroom profile`"
    )
    longer = " with a longer `--seconds`" if short else ""
    timed = f"{count} of {counted(len(timings), 'timing')}"
    return f"{cause} {timed}: {others}{longer} for narrower intervals."


def _with(timings: Sequence[Any], said: Callable[[str], bool]) -> list[Any]:
    return [timing for timing in timings if any(map(said, timing["doubts"]))]


def _used(loaded: Sequence[Any], cores: int) -> str:
    """The largest share of the cores that other processes used during one of `loaded`."""
    used = max((float(timing.get("conditions", {}).get("other_load_cores", 0)) for timing in loaded), default=0.0)
    return f"up to {percent(min(1.0, used / cores))}" if used and cores else "a part"
