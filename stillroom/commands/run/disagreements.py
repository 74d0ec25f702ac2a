"""The texts that teacher and shipped student answer differently, for the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.data.examples import Example
from compress.evaluation.metrics import Acceptable, Prediction
from compress.evaluation.numbers import as_numbers, distinguishable

SHOWN = 40


def disagreements(
    examples: Sequence[Example],
    gold: Sequence[Prediction],
    teacher: Sequence[Prediction],
    student: Sequence[Prediction],
    split: str,
) -> dict[str, Any]:
    """`disagreeing`, how many of the texts of `split` there are, and `disagreements`, the first `SHOWN` with their answers.

    Numbers differ where they can be told apart, and those that are furthest apart come first.
    """
    if gold and isinstance(gold[0], float):
        ours, theirs = as_numbers(student), as_numbers(teacher)
        apart = distinguishable(theirs, ours)
        order = np.argsort(-np.abs(theirs - ours), kind="stable").tolist()
        differing = [i for i in order if apart[i]]
    else:
        differing = [i for i in range(len(gold)) if teacher[i] != student[i]]
    rows = [
        {
            "text": _read(examples[i]),
            "teacher": _spelled(examples[i].text, teacher[i]),
            "student": _spelled(examples[i].text, student[i]),
            "gold": _spelled(examples[i].text, gold[i]),
        }
        for i in differing[:SHOWN]
    ]
    counted = {"count": len(differing), "texts": len(gold), "split": split, "shown": len(rows)}
    return {"disagreeing": counted, "disagreements": rows}


def _read(example: Example) -> str:
    return f"{example.text} | {example.text_pair}" if example.text_pair else example.text_read


def _spelled(text: str, answer: Prediction) -> str:
    if isinstance(answer, float):
        return f"{answer:.4g}"
    if isinstance(answer, Acceptable):
        return " or ".join(dict.fromkeys(answer.texts)) or "no answer"
    if isinstance(answer, str):
        return answer or "no answer"
    items: list[Any] = sorted(answer)
    said = [item if isinstance(item, str) else f"{item[2]}: {text[item[0] : item[1]]}" for item in items]
    return "; ".join(said) or "nothing"
