"""A task's metric, its bootstrap interval, and the paired interval of a difference. No torch.

A metric counts each text on its own and is a function of the summed counts, so that resamples of texts are sums of rows. Texts of one
cluster, such as the questions of a context, are drawn together (`compress.data.examples.clusters_of`).
Entities: micro F1 over exact spans (start, end and label must match), the CoNLL shared task's measure. Where the text came as words, a span
that a model finds counts as the words that it touches, so that scores are those of published words whatever the model's tokens.
Classes: accuracy; if any number of labels may apply to a text, micro F1 over pairs of a text and a label.
The metrics of numbers, vectors and answers to questions are in `numbers`, `vectors` and `questions`. How far the logits of two models are
apart is told by `distance`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from compress.data.encoded import Encoded
from serve.text.answers import softmax
from serve.text.spans import Span, decode_spans, words


class Acceptable(NamedTuple):
    """The texts that each answer a question, none if it has no answer, and the language by whose rules they are compared.

    Without a language the rules are SQuAD's; a code such as `de` stands for MLQA's of that language.
    """

    texts: tuple[str, ...]
    language: str = ""


# A model's answer to one text: its set of (start, end, label), its class, the set of labels that apply, its number, its vector, or the
# answer to a question, which is empty for none. What is right for a question is `Acceptable`.
Prediction = frozenset[tuple[int, int, str]] | str | frozenset[str] | float | np.ndarray | Acceptable
Answers = Sequence[Prediction]
RESAMPLES = 2_000


@dataclass(frozen=True)
class Score:
    """A metric's value with its 95 % bootstrap interval over texts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class Gain(Score):
    """The mean difference of pairs of trainings, with its interval over draws, seeds and texts."""

    supported: bool
    """Whether there are several pairs, the lower end is above 0, and so is the mean of each draw."""
    seeds: list[float]
    """The difference of each pair, draw after draw."""


@dataclass(frozen=True)
class Metric(ABC):
    """A metric of answers to texts: `rows` counts each text, and `of` is its value from the summed counts."""

    name: str
    fewest_texts: int = 1
    """Of a language, for a score of its own."""
    further: str = ""
    """The key of `further_scores` in the report of a run; empty: the report has none. `evaluate` prints them whatever it is."""

    @abstractmethod
    def rows(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """What is summed over texts, (texts, columns), for as many predictions as gold answers."""

    @abstractmethod
    def of(self, sums: np.ndarray) -> np.ndarray:
        """The metric of summed rows (..., columns)."""

    def per_label(self, gold: Answers, predicted: Answers) -> dict[str, dict[str, Any]]:
        """For each label: precision, recall, f1 and support (how often it occurs in the gold); none where answers are no labels."""
        return {}

    def further_scores(
        self, gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None
    ) -> dict[str, Score]:
        """Other scores of the same answers, by name."""
        return {}

    def counts(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """`rows`. ValueError if lengths differ."""
        if len(gold) != len(predicted):
            raise ValueError(f"{len(gold)} gold answers but {len(predicted)} predictions")
        return self.rows(gold, predicted)

    def value(self, rows: np.ndarray) -> float:
        """The metric of the texts that `rows` are of."""
        return float(self.of(rows.sum(axis=0)))

    def score(self, gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None) -> Score:
        """The metric with its interval: percentile bootstrap over texts (Efron 1979), or over their `clusters`, the number of each's."""
        return self.interval_of(self.counts(gold, predicted), seed=seed, clusters=clusters)

    def interval_of(self, rows: np.ndarray, *, seed: int = 0, clusters: np.ndarray | None = None) -> Score:
        """The metric of the rows that `counts` gives, with its interval as in `score`."""
        return score_of(self.value(rows), self.of(_resampled([rows], seed, clusters)[0]))

    def difference(
        self, gold: Answers, a: Answers, b: Answers, *, seed: int = 0, clusters: np.ndarray | None = None
    ) -> Score:
        """The metric of `a` minus that of `b`, with its paired bootstrap interval: both are scored on the same resampled texts.

        These two models differ if the interval excludes 0; of the methods that trained them it says nothing, see `gain`.
        """
        rows_a, rows_b = self.counts(gold, a), self.counts(gold, b)
        resampled_a, resampled_b = _resampled([rows_a, rows_b], seed, clusters)
        value = self.of(rows_a.sum(axis=0)) - self.of(rows_b.sum(axis=0))
        return score_of(float(value), self.of(resampled_a) - self.of(resampled_b))

    def mean_score(
        self,
        rows: Sequence[np.ndarray],
        *,
        less: Sequence[np.ndarray] = (),
        seed: int = 0,
        clusters: np.ndarray | None = None,
    ) -> Score:
        """The mean metric of several trainings on the same texts, minus that of others, with its bootstrap interval.

        All trainings are scored on the same resampled texts, so the interval covers other texts, not other seeds.

        Args:
            rows: the result of `counts` for each training.
            less: the same for the trainings to subtract; empty for the mean itself.
            seed: of the resampling.
            clusters: the number of each text's, if not all are apart.
        """
        return score_of(*self.mean_metric(rows, less, seed, clusters))

    def mean_metric(
        self,
        rows: Sequence[np.ndarray],
        less: Sequence[np.ndarray],
        seed: int,
        clusters: np.ndarray | None = None,
    ) -> tuple[float, np.ndarray]:
        """The mean metric of `rows` minus that of `less`, and the same of each resample, (RESAMPLES,)."""
        resampled = [self.of(sums) for sums in _resampled([*rows, *less], seed, clusters)]
        whole = [self.value(one) for one in (*rows, *less)]

        def apart(values: Sequence[Any]) -> Any:
            mean = np.mean(values[: len(rows)], axis=0)
            return mean - np.mean(values[len(rows) :], axis=0) if less else mean

        return float(apart(whole)), np.asarray(apart(resampled))

    def chance(self, gold: Answers, predicted: Answers, constant: Iterable[Answers] = ()) -> float:
        """The highest metric that a model can reach without reading the text.

        It is the largest of the scores of `predicted` shuffled over the texts, which keeps the frequencies of answers, and of each
        list in `constant`, the answers of a model that gives every text the same one.
        """
        # Shuffled before shifting: in a file sorted by class the next text has the same label.
        order = np.random.default_rng(0).permutation(len(gold))
        strangers = [predicted[0]] * len(gold)
        for text, other in zip(order, np.roll(order, 1), strict=True):
            strangers[text] = predicted[other]
        return max(self.value(self.counts(gold, answers)) for answers in (strangers, *constant))

    def by_language(
        self, languages: Sequence[str], gold: Answers, predicted: Answers, clusters: np.ndarray | None = None
    ) -> dict[str, Score]:
        """The score of the texts of each of `languages` (one a text), sorted by name; empty where fewer than two are named.

        Texts without a language count under the empty name. A language needs `fewest_texts`: a correlation of two texts is 1 or -1.
        """
        places: dict[str, list[int]] = {}
        for i, language in enumerate(languages):
            places.setdefault(language, []).append(i)
        if len(set(places) - {""}) < 2:
            return {}
        return {
            language: self.score(
                [gold[i] for i in chosen],
                [predicted[i] for i in chosen],
                clusters=None if clusters is None else clusters[chosen],
            )
            for language, chosen in sorted(places.items())
            if len(chosen) >= self.fewest_texts
        }


class ItemF1(Metric):
    """Micro F1 over the items of answers: entities, labels that apply, or the one class of a text, of which it is the accuracy."""

    def rows(self, gold: Answers, predicted: Answers) -> np.ndarray:
        """Per text the numbers of correct, predicted and gold items, (texts, 3)."""
        found = np.zeros((len(gold), 3))
        for row, theirs, ours in zip(found, gold, predicted, strict=True):
            a, b = _items(theirs), _items(ours)
            row[:] = len(a & b), len(b), len(a)
        return found

    def of(self, sums: np.ndarray) -> np.ndarray:
        """F1 from summed counts `(..., 3)`; 1 if there are no gold and no predicted items."""
        right, predicted, there = sums[..., 0], sums[..., 1], sums[..., 2]
        both = predicted + there
        return np.where(both > 0, 2 * right / np.maximum(both, 1), 1.0)

    def per_label(self, gold: Answers, predicted: Answers) -> dict[str, dict[str, Any]]:
        """See `Metric.per_label`."""
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


def macro_f1(gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None) -> Score:
    """The mean over classes of their F1, of the classes that occur in the gold or the predictions: a rare one counts like any other.

    The interval is that of `Metric.score`.
    """
    labels, index = np.unique([*map(str, gold), *map(str, predicted)], return_inverse=True)
    theirs, ours = index.reshape(2, -1)  # (texts,)

    def of(weights: np.ndarray) -> float:
        """The score of texts that are there `weights` times, (texts,)."""
        right = np.bincount(theirs, weights * (theirs == ours), len(labels))
        both = np.bincount(theirs, weights, len(labels)) + np.bincount(ours, weights, len(labels))
        return float((2 * right / np.maximum(both, 1)).sum() / max(1, (both > 0).sum()))

    resampled = [of(drawn) for some in resamples(len(theirs), seed, clusters) for drawn in some]
    return score_of(of(np.ones(len(theirs))), np.array(resampled))


class Accuracy(ItemF1):
    """The share of texts whose class is right."""

    def further_scores(
        self, gold: Answers, predicted: Answers, *, seed: int = 0, clusters: np.ndarray | None = None
    ) -> dict[str, Score]:
        """`macro_f1`, to which each class counts alike."""
        return {"macro_f1": macro_f1(gold, predicted, seed=seed, clusters=clusters)}


ENTITY_F1, ACCURACY, MICRO_F1 = ItemF1("entity_f1"), Accuracy("accuracy"), ItemF1("micro_f1")


class Pairs(NamedTuple):
    """Trainings of a method on one task, and those without it that share draw, seed and start, in the same order."""

    metric: Metric
    ours: Sequence[np.ndarray]
    """The result of `counts` for each training."""
    theirs: Sequence[np.ndarray]
    clusters: np.ndarray | None = None


def gain(draws: Sequence[Sequence[Pairs]], *, seed: int = 0) -> Gain:
    """What a method is worth: the mean difference of its trainings and those without it, with a hierarchical bootstrap interval.

    Draws of the training texts are resampled, within each of them seeds, and the clusters of the texts that all are scored on (Davison and
    Hinkley, "Bootstrap methods and their application", 1997, section 3.8). The mean of a draw is over its tasks, whose seeds go together.

    Args:
        draws: of each draw the pairs of every task, with as many seeds; of a task with more the others are left out.
        seed: of the resampling.
    """
    generator = np.random.default_rng(seed)
    values: list[np.ndarray] = []  # of each draw (seeds,)
    over_texts: list[np.ndarray] = []  # of each draw (seeds, RESAMPLES)
    for tasks in draws:
        seeds = min(min(len(pairs.ours), len(pairs.theirs)) for pairs in tasks)
        found = []
        for i, (metric, ours, theirs, clusters) in enumerate(tasks):
            sums = _resampled([*ours[:seeds], *theirs[:seeds]], seed + i, clusters)
            both = [
                (metric.value(each), metric.of(drawn))
                for each, drawn in zip((*ours[:seeds], *theirs[:seeds]), sums, strict=True)
            ]
            found.append([(a[0] - b[0], a[1] - b[1]) for a, b in zip(both[:seeds], both[seeds:], strict=True)])
        values.append(np.mean([[value for value, _ in task] for task in found], axis=0))
        over_texts.append(np.mean([[drawn for _, drawn in task] for task in found], axis=0))
    total = np.zeros(RESAMPLES)
    for _ in draws:
        of_draw = [
            (generator.multinomial(len(each), np.full(len(each), 1 / len(each)), RESAMPLES).T * each).sum(axis=0)
            / len(each)
            for each in over_texts
        ]
        total += np.array(of_draw)[generator.integers(len(draws), size=RESAMPLES), np.arange(RESAMPLES)]
    means = [float(each.mean()) for each in values]
    interval = score_of(float(np.mean(means)), total / len(draws))
    several = sum(map(len, values)) > 1
    supported = several and interval.low > 0 and min(means) > 0
    return Gain(interval.value, interval.low, interval.high, supported, np.concatenate(values).tolist())


def mean_over_tasks(
    metrics: Sequence[Metric],
    tasks: Sequence[Sequence[np.ndarray]],
    *,
    clusters: Sequence[np.ndarray | None] | None = None,
    seed: int = 0,
) -> Score:
    """The mean over tasks of `Metric.mean_score`, with its bootstrap interval.

    The texts of each task are resampled apart from those of the others.

    Args:
        metrics: of each task.
        tasks: for each task what `mean_score` takes as `rows`.
        clusters: for each task what `mean_score` takes; none if all texts are apart.
        seed: of the resampling.
    """
    found = [
        metric.mean_metric(rows, (), seed + i, of_texts)
        for i, (metric, rows, of_texts) in enumerate(zip(metrics, tasks, clusters or len(tasks) * [None], strict=True))
    ]
    return score_of(
        float(np.mean([value for value, _ in found])), np.mean([resampled for _, resampled in found], axis=0)
    )


def score_of(value: float, resampled: np.ndarray) -> Score:
    """`value` with the 95 % interval of its resamples."""
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Score(value, float(low), float(high))


def _items(answer: Prediction) -> set[str | tuple[int, int, str]]:
    """The items of an answer: its entities, its labels, or its one class."""
    assert not isinstance(answer, float | np.ndarray | Acceptable)
    return {answer} if isinstance(answer, str) else set(answer)


def _label(item: str | tuple[int, int, str]) -> str:
    return item if isinstance(item, str) else item[-1]


def _resampled(rows: Sequence[np.ndarray], seed: int, clusters: np.ndarray | None = None) -> list[np.ndarray]:
    """Summed counts of each of `rows` (texts, columns) over the same resampled texts or clusters: (RESAMPLES, columns) each."""
    sums: list[list[np.ndarray]] = [[] for _ in rows]
    for weights in resamples(len(rows[0]), seed, clusters):
        for found, counted in zip(sums, rows, strict=True):
            found.append(weights @ counted)
    return [np.concatenate(found) for found in sums]


def resamples(texts: int, seed: int = 0, clusters: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """How often each of `texts` is drawn in each of `RESAMPLES` resamples: (100, texts), 100 at a time to limit memory.

    Texts of one number in `clusters` (texts,) are drawn together; if all are of one, there is nothing to draw, and each is drawn alone.
    """
    generator = np.random.default_rng(seed)
    of_text = (
        None if clusters is None or len(set(clusters.tolist())) == 1 else np.unique(clusters, return_inverse=True)[1]
    )
    number = texts if of_text is None else int(of_text.max(initial=-1)) + 1
    for _ in range(RESAMPLES // 100):
        drawn = generator.multinomial(number, np.full(number, 1 / number), size=100)
        yield drawn if of_text is None else drawn[:, of_text]


def distance(expected: np.ndarray, actual: np.ndarray, *, multi_label: bool) -> tuple[float, float]:
    """Mean divergence in nats, and the share of rows whose answer differs; logits (rows, labels).

    KL(p || q) = sum p (log p - log q) over the softmax of the labels. With `multi_label` it is the sum over labels, each
    with two outcomes. For one label a row, a constant added to all logits of a row does not matter.
    """
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    if multi_label:
        log_p, log_q = _log_both(expected), _log_both(actual)
        other = ((expected > 0) != (actual > 0)).any(axis=-1)
        divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=(-1, -2))
    else:
        log_p, log_q = _log_softmax(expected), _log_softmax(actual)
        other = expected.argmax(axis=-1) != actual.argmax(axis=-1)
        divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return float(divergences.mean()), float(other.mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    shares: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shares


def _log_both(logits: np.ndarray) -> np.ndarray:
    """Log probabilities that a label applies and that it does not, (..., labels, 2)."""
    return np.stack([-np.logaddexp(0, -logits), -np.logaddexp(0, logits)], axis=-1)


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


def scored_spans(encoded: Encoded, logits: Sequence[np.ndarray]) -> Iterator[list[Span]]:
    """The spans of each text with their scores, as serving finds them, from each text's `logits` (rows, labels)."""
    for text, encoding, starts, rows in zip(encoded.texts, encoded.encodings, encoded.rows, logits, strict=True):
        full = np.zeros((len(encoding.ids), len(encoded.labels)), dtype=np.float32)
        full[starts] = softmax(rows, rows.dtype)
        yield decode_spans(words(text, encoding.offsets, encoding.word_ids), full, encoded.labels)
