"""The task metric, its bootstrap interval, and the paired interval of a difference. No torch.

Entities: micro F1 over exact spans (start, end and label must match), the CoNLL shared task's measure. Where the text came as words, a span
that a model finds counts as the words that it touches, so that scores are those of published words whatever the model's tokens.
Classes: accuracy; if any number of labels may apply to a text, micro F1 over pairs of a text and a label.
Vectors: Spearman's rho between the similarities of texts by both models.
Answers to questions: the mean F1 of words, SQuAD's; `compress.evaluation.questions` has its definition and exact match.
Numbers: Pearson's r with the correct numbers; `compress.evaluation.numbers` has their other scores.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from compress.data.examples import Example, Task, number_of
from compress.evaluation.questions import Acceptable, exact, word_f1
from compress.evaluation.vectors import similarity_moments
from serve.tasks import Answer
from serve.tasks.feature_extraction import VectorAnswer
from serve.tasks.question_answering import QuestionAnswer
from serve.tasks.text_regression import NumberAnswer
from serve.tasks.token_classification import EntitiesAnswer

# A model's answer to one text: its set of (start, end, label), its class, the set of labels that apply, its number, its vector, or the
# answer to a question, which is empty for none. What is right for a question is `Acceptable`.
Prediction = frozenset[tuple[int, int, str]] | str | frozenset[str] | float | np.ndarray | Acceptable
RESAMPLES = 2_000
METRICS = {
    "token-classification": "entity_f1", "text-classification": "accuracy", "text-regression": "pearson",
    "question-answering": "answer_f1", "feature-extraction": "similarity_spearman",
}  # fmt: skip
# A variance of so small a share of the mean square is rounding: the numbers are equal.
NO_VARIANCE = 1e-12
FEWEST_NUMBERS = 10  # texts of a language, for a correlation of its own
MOMENTS = 6  # columns of the rows of numbers, see `counts`
MEANS = 2  # columns of the rows of questions


@dataclass(frozen=True)
class Score:
    """A metric's value with its 95 % bootstrap interval over texts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def metric_name(task: Task, *, multi_label: bool) -> str:
    """The name of a task's metric; with `multi_label` any number of labels may apply to a text."""
    return "micro_f1" if multi_label else METRICS[task]


def gold_of(example: Example, task: Task) -> Prediction:
    """The correct answer to `example`."""
    if task == "text-regression":
        return number_of(example)
    if task == "question-answering":
        return Acceptable(example.answer_texts, example.language)
    if task == "text-classification":
        return frozenset(example.label) if isinstance(example.label, tuple) else str(example.label or "")
    return frozenset((entity.start, entity.end, entity.label) for entity in example.entities or ())


def prediction_of(answer: Answer, example: Example, *, multi_label: bool) -> Prediction:
    """A server's answer to the text of `example` as a `Prediction`; spans are widened to the words of data that came as words."""
    if "entities" in answer:
        found = ((each["start"], each["end"], each["label"]) for each in cast(EntitiesAnswer, answer)["entities"])
        return widened(found, example.text, example.blanks_in_words)
    if "answer" in answer:
        found_answer = cast(QuestionAnswer, answer)["answer"]
        return found_answer["text"] if found_answer else ""
    if "score" in answer:
        return cast(NumberAnswer, answer)["score"]
    if "embedding" in answer:
        return np.asarray(cast(VectorAnswer, answer)["embedding"], dtype=np.float32)
    labels = answer["labels"]
    return frozenset(each["label"] for each in labels) if multi_label else labels[0]["label"]


def widened(
    spans: Iterable[tuple[int, int, str]], text: str, blanks_in_words: Sequence[int] | None
) -> frozenset[tuple[int, int, str]]:
    """The spans of `each_widened`, without those that have no word of their own."""
    return frozenset(span for span in each_widened(sorted(spans), text, blanks_in_words) if span)


def each_widened(
    spans: Iterable[tuple[int, int, str]], text: str, blanks_in_words: Sequence[int] | None
) -> list[tuple[int, int, str] | None]:
    """Each of `spans` of `text`, (start, end, label), widened to the words that it touches; as it is if the text did not come as words.

    A word that two spans touch belongs to the first of them, so that each word has one tag, as in conlleval. A span that touches only
    words of the one before it is None.

    Args:
        spans: in order, of code points, without overlap, each with other characters than blanks at its ends.
        text: the words, joined by blanks.
        blanks_in_words: the blanks that are inside of words; None if the text did not come as words.
    """
    if blanks_in_words is None:
        return list(spans)
    found: list[tuple[int, int, str] | None] = []
    reached = 0
    for start, end, label in spans:
        before, after = text.rfind(" ", 0, start), text.find(" ", end)
        while before in blanks_in_words:
            before = text.rfind(" ", 0, before)
        while after in blanks_in_words:
            after = text.find(" ", after + 1)
        first, reached = max(before + 1, reached), after if after >= 0 else len(text)
        there = text[first:reached].strip()
        first = text.index(there, first) if there else first
        found.append((first, first + len(there), label) if there else None)
    return found


def counts(gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> np.ndarray:
    """Per text the numbers of correct, predicted and gold items, (texts, 3); a class is one item. ValueError if lengths differ.

    For numbers, per text the terms of the sums of Pearson's r, (texts, 6): 1, x, y, x^2, y^2, xy; for vectors those of the ranks of
    similarities. For questions (texts, 2): the F1, and 1.
    """
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} gold answers but {len(predicted)} predictions")
    if gold and isinstance(gold[0], np.ndarray):
        return similarity_moments(cast(Sequence[np.ndarray], gold), cast(Sequence[np.ndarray], predicted))
    if gold and isinstance(gold[0], float):
        x, y = (_centred(np.array(numbers, dtype=np.float64)) for numbers in (gold, predicted))
        return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=-1)
    if gold and isinstance(gold[0], Acceptable):
        return _means(word_f1, cast(Sequence[Acceptable], gold), predicted)
    rows = np.zeros((len(gold), 3))
    for row, theirs, ours in zip(rows, gold, predicted, strict=True):
        if isinstance(theirs, str | float) or isinstance(ours, str | float):
            row[:] = theirs == ours, 1, 1
        else:
            assert not isinstance(theirs, np.ndarray | Acceptable)
            assert not isinstance(ours, np.ndarray | Acceptable)
            row[:] = len(set(theirs) & set(ours)), len(ours), len(theirs)
    return rows


def metric_of(totals: np.ndarray) -> np.ndarray:
    """F1 from summed counts `(..., 3)`; 1 if there are no gold and no predicted items. With one item each it is accuracy.

    Of summed terms `(..., 6)` of numbers it is Pearson's r; 0 if either side has one number throughout. Of sums `(..., 2)` it is the mean.
    """
    if totals.shape[-1] == MEANS:
        return np.asarray(totals[..., 0] / np.maximum(totals[..., 1], 1))
    if totals.shape[-1] == MOMENTS:
        return pearson_of(totals)
    right, predicted, there = totals[..., 0], totals[..., 1], totals[..., 2]
    both = predicted + there
    return np.where(both > 0, 2 * right / np.maximum(both, 1), 1.0)


def _means(
    each: Callable[[Acceptable, str], float], gold: Sequence[Acceptable], predicted: Sequence[Prediction]
) -> np.ndarray:
    """The rows of a mean over questions, (texts, 2): its term, and 1. Of what was shuffled, the first right answer stands for all."""
    said = [next(iter(ours.texts), "") if isinstance(ours, Acceptable) else str(ours) for ours in predicted]
    return np.array([[each(theirs, ours), 1.0] for theirs, ours in zip(gold, said, strict=True)])


def question_scores(gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> dict[str, Score]:
    """The scores of answers to questions beside their F1: `exact_match`, and the F1 where there is an answer and where there is none."""
    right = cast(Sequence[Acceptable], gold)
    found = {"exact_match": interval_of(_means(exact, right, predicted))}
    for name, there in (("f1_with_answer", True), ("f1_without_answer", False)):
        chosen = [i for i, each in enumerate(right) if bool(each.texts) is there]
        if chosen and len(chosen) < len(right):
            found[name] = interval_of(_means(word_f1, [right[i] for i in chosen], [predicted[i] for i in chosen]))
    return found


def pearson_of(sums: np.ndarray) -> np.ndarray:
    """Pearson's r from the sums `(..., 6)` of n, x, y, x^2, y^2 and xy; 0 where x or y does not vary."""
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    of_x, of_y = n * xx - x * x, n * yy - y * y
    varies = (of_x > NO_VARIANCE * n * xx) & (of_y > NO_VARIANCE * n * yy)
    product = np.where(varies, of_x * of_y, 1)
    found: np.ndarray = np.where(varies, np.clip((n * xy - x * y) / np.sqrt(product), -1, 1), 0.0)
    return found


def _centred(numbers: np.ndarray) -> np.ndarray:
    """`numbers` less their mean, so that their squares lose no digits; 0 throughout if all are equal."""
    if not len(numbers) or numbers.min() == numbers.max():
        return np.zeros(len(numbers))
    return np.asarray(numbers - numbers.mean())


def score(gold: Sequence[Prediction], predicted: Sequence[Prediction], *, seed: int = 0) -> Score:
    """The metric with its interval: percentile bootstrap over texts (Efron 1979)."""
    return interval_of(counts(gold, predicted), seed=seed)


def interval_of(rows: np.ndarray, *, seed: int = 0) -> Score:
    """The metric of the rows that `counts` gives, with its interval as in `score`."""
    low, high = np.quantile(metric_of(_resampled([rows], seed)[0]), (0.025, 0.975))
    return Score(float(metric_of(rows.sum(axis=0))), float(low), float(high))


def difference(gold: Sequence[Prediction], a: Sequence[Prediction], b: Sequence[Prediction], *, seed: int = 0) -> Score:
    """The metric of `a` minus that of `b`, with its paired bootstrap interval: both are scored on the same resampled texts.

    The data supports a difference if the interval excludes 0.
    """
    rows_a, rows_b = counts(gold, a), counts(gold, b)
    resampled_a, resampled_b = _resampled([rows_a, rows_b], seed)
    low, high = np.quantile(metric_of(resampled_a) - metric_of(resampled_b), (0.025, 0.975))
    value = metric_of(rows_a.sum(axis=0)) - metric_of(rows_b.sum(axis=0))
    return Score(float(value), float(low), float(high))


def mean_score(rows: Sequence[np.ndarray], *, less: Sequence[np.ndarray] = (), seed: int = 0) -> Score:
    """The mean metric of several trainings on the same texts, minus that of others, with its bootstrap interval.

    All trainings are scored on the same resampled texts, so the interval covers other texts, not other seeds.

    Args:
        rows: the result of `counts` for each training, (texts, 3) or (texts, 6).
        less: the same for the trainings to subtract; empty for the mean itself.
        seed: of the resampling.
    """
    return _score_of(*_mean_metric(rows, less, seed))


def mean_over_tasks(
    tasks: Sequence[Sequence[np.ndarray]], *, less: Sequence[Sequence[np.ndarray]] = (), seed: int = 0
) -> Score:
    """The mean over tasks of `mean_score`, minus that of other trainings, with its bootstrap interval.

    The texts of each task are resampled apart from those of the others.

    Args:
        tasks: for each task what `mean_score` takes as `rows`.
        less: for each task the trainings to subtract; empty for the mean itself.
        seed: of the resampling.
    """
    subtracted = less or [()] * len(tasks)
    found = [
        _mean_metric(rows, others, seed + i) for i, (rows, others) in enumerate(zip(tasks, subtracted, strict=True))
    ]
    return _score_of(
        float(np.mean([value for value, _ in found])), np.mean([resampled for _, resampled in found], axis=0)
    )


def _mean_metric(rows: Sequence[np.ndarray], less: Sequence[np.ndarray], seed: int) -> tuple[float, np.ndarray]:
    """The mean metric of `rows` minus that of `less`, and the same of each resample, (RESAMPLES,)."""
    resampled = [metric_of(sums) for sums in _resampled([*rows, *less], seed)]
    whole = [float(metric_of(one.sum(axis=0))) for one in (*rows, *less)]

    def apart(values: Sequence[Any]) -> Any:
        mean = np.mean(values[: len(rows)], axis=0)
        return mean - np.mean(values[len(rows) :], axis=0) if less else mean

    return float(apart(whole)), np.asarray(apart(resampled))


def _score_of(value: float, resampled: np.ndarray) -> Score:
    """`value` with the 95 % interval of its resamples."""
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Score(value, float(low), float(high))


def chance(
    gold: Sequence[Prediction], predicted: Sequence[Prediction], constant: Iterable[Sequence[Prediction]] = ()
) -> float:
    """The highest metric that a model can reach without reading the text.

    It is the largest of the scores of `predicted` shuffled over the texts, which keeps the frequencies of answers, and of each
    list in `constant`, the answers of a model that gives every text the same one.
    """
    # Shuffled before shifting: in a file sorted by class the next text has the same label.
    order = np.random.default_rng(0).permutation(len(gold))
    strangers = [predicted[0]] * len(gold)
    for text, other in zip(order, np.roll(order, 1), strict=True):
        strangers[text] = predicted[other]
    return max(float(metric_of(counts(gold, answers).sum(axis=0))) for answers in (strangers, *constant))


def per_label(gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """For each label: precision, recall, f1 and support (how often it occurs in the gold); none for numbers and vectors."""
    if gold and isinstance(gold[0], float | np.ndarray | Acceptable):
        return {}
    right: Counter[str] = Counter()
    said: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for theirs, ours in zip(gold, predicted, strict=True):
        a, b = _items(theirs), _items(ours)
        right.update(map(_label, a & b))
        said.update(map(_label, b))
        there.update(map(_label, a))
    return {
        label: {
            "precision": right[label] / said[label] if said[label] else 0.0,
            "recall": right[label] / there[label] if there[label] else 0.0,
            "f1": 2 * right[label] / (said[label] + there[label]),
            "support": there[label],
        }
        for label in sorted(said.keys() | there.keys())
    }


def by_language(
    examples: Sequence[Example], gold: Sequence[Prediction], predicted: Sequence[Prediction]
) -> dict[str, Score]:
    """The score of the texts of each language, sorted by its name; empty where fewer than two are named.

    Texts without a language count under the empty name. For numbers a language needs `FEWEST_NUMBERS` texts: a correlation of two is
    1 or -1, whatever they are.
    """
    places: dict[str, list[int]] = {}
    for i, example in enumerate(examples):
        places.setdefault(example.language, []).append(i)
    if len(set(places) - {""}) < 2:
        return {}
    return {
        language: score([gold[i] for i in chosen], [predicted[i] for i in chosen])
        for language, chosen in sorted(places.items())
        if len(chosen) >= FEWEST_NUMBERS or not isinstance(gold[chosen[0]], float | np.ndarray)
    }


def _items(answer: Prediction) -> set[str | tuple[int, int, str]]:
    """The items of an answer that is no number and no vector: its entities, its labels, or its one class."""
    assert not isinstance(answer, float | np.ndarray | Acceptable)
    return {answer} if isinstance(answer, str) else set(answer)


def _label(item: str | tuple[int, int, str]) -> str:
    return item if isinstance(item, str) else item[-1]


def _resampled(rows: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Summed counts of each of `rows` (texts, columns) over the same resampled texts: (RESAMPLES, columns) each."""
    sums: list[list[np.ndarray]] = [[] for _ in rows]
    for weights in resamples(len(rows[0]), seed):
        for found, counted in zip(sums, rows, strict=True):
            found.append(weights @ counted)
    return [np.concatenate(found) for found in sums]


def resamples(texts: int, seed: int = 0) -> Iterator[np.ndarray]:
    """How often each of `texts` is drawn in each of `RESAMPLES` resamples: (100, texts), 100 at a time to limit memory."""
    generator = np.random.default_rng(seed)
    for _ in range(RESAMPLES // 100):
        yield generator.multinomial(texts, np.full(texts, 1 / texts), size=100)
