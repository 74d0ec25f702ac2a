"""The scores of a run: gates on validation, then test, once; by label and language, and the texts that models answer differently."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.encoded import Encoded
from compress.data.examples import Example, clusters_of
from compress.evaluation.metrics import Acceptable, Metric, Prediction
from compress.evaluation.numbers import as_numbers, distinguishable
from compress.evaluation.predictions import row_logits
from compress.runs.hardware import device_here
from compress.runs.task_stages import load_stage
from export.packing.builder import Scores, scores_on_test
from export.precision.int8_search import with_intervals
from stillroom.inputs.preflight import RunInputs
from stillroom.verbs.run.report import MODELS, TRAINED, model_report_of

SHOWN = 40  # disagreements


def make_scores(folder: Path, inputs: RunInputs, folders: dict[str, Path]) -> None:
    """Scores on validation, then on test, which is read only here. If a gate or parity is missed, test is not read."""
    task, metric = inputs.task, inputs.task.metric
    ours = inputs.read_by(folders["student"])

    chosen: dict[str, float] = {}  # by model: the score from which it answers a question, chosen on validation

    def answers(split: str, logits: dict[str, list[np.ndarray]]) -> dict[str, list[Prediction]]:
        readers = {"teacher": inputs}
        if "undistilled" in folders:
            readers["undistilled"] = inputs.read_by(folders["undistilled"])
        said = {}
        for name, rows in logits.items():
            encoded: Encoded = getattr(readers.get(name, ours), split)
            if split == "validation":
                encoded = task.with_threshold(encoded, inputs.splits.validation, rows)
                chosen[name] = encoded.answer_from
            # The graphs are the student's.
            encoded = replace(encoded, answer_from=chosen[name if name in chosen else "student"])
            said[name] = task.predictions(encoded, rows)
        return said

    def scored(split: str, said: dict[str, list[Prediction]]) -> Scores:
        examples = getattr(inputs.splits, split)
        gold, clusters = [task.gold_of(example) for example in examples], clusters_of(examples)
        return with_intervals(
            {name: metric.score(gold, said[name], clusters=clusters) for name in TRAINED if name in said}
        )

    on_validation = answers("validation", _logits(inputs, folders, "validation"))
    document: dict[str, Any] = {"validation": scored("validation", on_validation)}
    model_report = model_report_of(inputs, folders, document)
    if not model_report.missed:
        test, graph_logits = scores_on_test(model_report.variants, ours.split("test"), inputs.recipe.threads)
        said = answers("test", _logits(inputs, folders, "test") | graph_logits)
        gold, clusters = [task.gold_of(example) for example in inputs.splits.test], clusters_of(inputs.splits.test)
        document |= {
            "test": scored("test", said),
            "graphs": asdict(test),
            "differences": _differences(metric, gold, said, clusters),
            "per_label": _per_label(metric, gold, said),
        }
        if metric.further:
            document[metric.further] = further_rows(metric, gold, said, clusters)
        if languages := per_language(metric, inputs.splits.test, gold, said):
            document["per_language"] = languages
            gates = {"teacher": inputs.recipe.teacher_gate, "fp32": inputs.recipe.gate}
            document["language_warnings"] = behind_in_languages(metric, inputs.splits.test, gold, said, gates)
        if "teacher" in said:
            document |= disagreements(inputs.splits.test, gold, said["teacher"], said["int8"], "test")
    (folder / "scores.json").write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _logits(inputs: RunInputs, folders: dict[str, Path], split: str) -> dict[str, list[np.ndarray]]:
    """The logits of every trained model of the run for the rows of `split`; of a file of answers if it has all of its texts."""
    encoded: Encoded = getattr(inputs, split)
    held_out = inputs.splits.held_out and inputs.splits.answered and split == "validation"  # its labels are the answers
    asked = inputs.answers if not held_out else None
    answers = asked.logits(encoded, getattr(inputs.splits, split)) if asked else [None]
    there = [logits for logits in answers if logits is not None]
    found = {"teacher": there} if len(there) == len(answers) else {}
    present = [name for name in TRAINED if name in folders]
    return found | {
        name: row_logits(
            load_stage(folders[name], inputs).to(device_here(inputs.recipe.device)),
            getattr(inputs.read_by(folders[name]), split),
        )
        for name in present
    }


def _differences(
    metric: Metric, gold: list[Prediction], said: dict[str, list[Prediction]], clusters: np.ndarray
) -> list[dict[str, Any]]:
    """How far pairs of models are apart on test, and whether these two models differ by the paired bootstrap."""
    pairs = [("student", "undistilled"), ("int8", "undistilled"), ("int8", "teacher"), ("int8", "fp32")]
    found = []
    for a, b in pairs:
        if a in said and b in said:
            d = metric.difference(gold, said[a], said[b], clusters=clusters)
            differ = not d.low <= 0 <= d.high
            found.append({"a": a, "b": b, "difference": d.value, "low": d.low, "high": d.high, "differ": differ})
    return found


def _per_label(metric: Metric, gold: list[Prediction], said: dict[str, list[Prediction]]) -> list[dict[str, Any]]:
    tables = {
        name: metric.per_label(gold, said[name]) if name in said else {} for name in ("teacher", "student", "int8")
    }
    labels = sorted({label for scored in tables.values() for label in scored})
    return [
        {
            "label": label,
            "support": max(scored.get(label, {"support": 0})["support"] for scored in tables.values()),
            **{name: scored[label]["f1"] if label in scored else None for name, scored in tables.items()},
        }
        for label in labels
    ]


def further_rows(
    metric: Metric, gold: list[Prediction], said: dict[str, list[Prediction]], clusters: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """For each model its name and its scores beside the metric, each with value, low and high."""
    models = [name for name in MODELS if name in said]
    return [
        {"name": name, **with_intervals(metric.further_scores(gold, said[name], clusters=clusters))} for name in models
    ]


def per_language(
    metric: Metric, examples: Sequence[Example], gold: list[Prediction], said: dict[str, list[Prediction]]
) -> list[dict[str, Any]]:
    """The scores of the texts of each language; empty where fewer than two are named."""
    models = ("teacher", "student", "int8")
    languages = [example.language for example in examples]
    clusters = clusters_of(examples)
    tables = {name: metric.by_language(languages, gold, said[name], clusters) for name in models if name in said}
    counted = Counter(languages)
    return [
        {"language": language, "texts": counted[language]}
        | {name: tables[name][language].value if name in tables else None for name in models}
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
            clusters = clusters_of([examples[i] for i in chosen])
            if share < needed and metric.difference(right, ours, theirs, clusters=clusters).high < 0:
                found.append(
                    f"In {language or 'texts without a language'} int8 keeps {share:.4f} of {name}'s score on {len(chosen):,} texts of "
                    f"test; over all languages together {needed:g} is asked."
                )
    return found


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
    rows = []
    for i in differing[:SHOWN]:
        example = examples[i]
        read = f"{example.text} | {example.text_pair}" if example.text_pair else example.text_read
        answers = {"teacher": teacher[i], "student": student[i], "gold": gold[i]}
        rows.append({"text": read} | {name: _spelled(example.text, answer) for name, answer in answers.items()})
    counted = {"count": len(differing), "texts": len(gold), "split": split, "shown": len(rows)}
    return {"disagreeing": counted, "disagreements": rows}


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
