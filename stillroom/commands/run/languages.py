"""The scores of each language, and the languages in which the student is behind."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from compress.data.examples import Example
from compress.evaluation.metrics import Metric, Prediction


def per_language(
    metric: Metric, examples: Sequence[Example], gold: list[Prediction], said: dict[str, list[Prediction]]
) -> list[dict[str, Any]]:
    """The scores of the texts of each language; empty where fewer than two are named."""
    languages = [example.language for example in examples]
    tables = {
        name: metric.by_language(languages, gold, said[name]) for name in ("teacher", "student", "int8") if name in said
    }
    counted = Counter(example.language for example in examples)
    return [
        {
            "language": language,
            "texts": counted[language],
            **{
                name: tables[name][language].value if name in tables else None
                for name in ("teacher", "student", "int8")
            },
        }
        for language in tables["int8"]
    ]


def behind_in_languages(
    metric: Metric,
    examples: Sequence[Example],
    gold: list[Prediction],
    said: dict[str, list[Prediction]],
    gates: dict[str, float],
) -> list[str]:
    """A warning for each language in which int8 misses a gate over `teacher` or `fp32` that it may pass over all texts together.

    The paired bootstrap must support that it is behind: few texts of a language can fall below a gate by chance.
    """
    found = []
    for language in metric.by_language([example.language for example in examples], gold, said["int8"]):
        chosen = [i for i, example in enumerate(examples) if example.language == language]
        right, ours = [gold[i] for i in chosen], [said["int8"][i] for i in chosen]
        for name, needed in gates.items():
            theirs = [said[name][i] for i in chosen] if name in said else []
            of_theirs = metric.score(right, theirs).value if theirs else 0.0
            share = metric.score(right, ours).value / of_theirs if of_theirs else 1.0
            if share < needed and metric.difference(right, ours, theirs).high < 0:
                found.append(
                    f"In {language or 'texts without a language'} int8 keeps {share:.4f} of {name}'s score on {len(chosen):,} texts of "
                    f"test; over all languages together {needed:g} is asked."
                )
    return found
