"""The figures of a comparison: how far attentions and relations are apart, what clusters of spans say, where answers differ.

And the texts whose attention the page shows.
"""

import base64
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding
from torch import Tensor

from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.evaluation.layer_analysis import (
    UNLABELLED,
    Span,
    choose_spans,
    cluster_agreement,
    divergence,
    mean_divergence,
    span_vectors,
)
from compress.evaluation.metrics import Prediction
from compress.models.attention_reading import Reader, TextRead, read_text, relation_heads
from compress.tasks import TEXT_CLASSIFICATION
from stillroom.console import bar
from stillroom.verbs.explain import Explaining
from stillroom.verbs.explain.inputs import Inputs, LayerPair

LISTED = 20  # texts that differ most, and texts whose answers differ
SHOWN_TOKENS = 48  # of a text on the page, which grows with their square


class PairFigures(NamedTuple):
    """One pair of layers on one text, in nats; `heads` is empty where the numbers of heads differ."""

    attention: float
    heads: list[float]
    relation: float


class TextFigures(NamedTuple):
    """One text: each pair of layers, and what both models answer, if they do."""

    pairs: list[PairFigures]
    answers: tuple[Prediction, Prediction] | None

    @property
    def attention(self) -> float:
        """The divergence of attention, mean over the pairs of layers."""
        return math.fsum(pair.attention for pair in self.pairs) / len(self.pairs)


class SpanEnds:
    """The hidden vectors of the first and last tokens of chosen spans, of every layer of one model: (spans, width) each."""

    def __init__(self, reader: Reader, spans: Sequence[Span]) -> None:
        self.of_text: dict[int, list[int]] = {}
        for row, span in enumerate(spans):
            self.of_text.setdefault(span.text, []).append(row)
        self.spans = spans
        shape = (reader.layers, len(spans), reader.width)
        self.first, self.last = (np.empty(shape, dtype=np.float32) for _ in range(2))

    def take(self, text: int, read: TextRead) -> None:
        """Keep the vectors of the spans of `text`."""
        rows = self.of_text.get(text, [])
        for layer in range(len(self.first) if rows else 0):
            hidden = read.hidden(layer + 1).numpy()
            self.first[layer, rows] = hidden[[self.spans[row].first_token for row in rows]]
            self.last[layer, rows] = hidden[[self.spans[row].last_token for row in rows]]


def encoded_for(inputs: Inputs, examples: Sequence[Example], max_length: int) -> tuple[Encoded, Encoded]:
    """`examples` cut at `max_length`, with the labels of the teacher's head, and with those of the student's."""
    inputs.tokenizer.enable_truncation(max_length)
    task = inputs.task or TEXT_CLASSIFICATION
    theirs, ours = (model.head_for(task) or () if inputs.task else () for model in (inputs.teacher, inputs.student))
    encoded = task.encode(examples, inputs.tokenizer, theirs)
    return encoded, dataclasses.replace(encoded, labels=ours)


def document_of(
    given: Explaining, inputs: Inputs, teacher: Reader, student: Reader
) -> tuple[dict[str, Any], list[TextFigures]]:
    """The document, and the figures of each text."""
    encoded = encoded_for(inputs, inputs.examples, inputs.max_length)
    spans = _spans(given, inputs, encoded[0])
    ends = [SpanEnds(reader, spans) for reader in (teacher, student)]
    heads = relation_heads(teacher, student)
    figures = []
    with bar("reading texts with both models") as advance:
        for i in range(len(inputs.examples)):
            reads = [read_text(reader, of, i) for reader, of in zip((teacher, student), encoded, strict=True)]
            for kept, read in zip(ends, reads, strict=True):
                kept.take(i, read)
            answers: list[Prediction] = []
            for of, read in zip(encoded, reads, strict=True) if inputs.task else ():
                one = of.take([i])
                answers += of.task.predictions(one, [read.logits.numpy()[one.rows[0]]])
            pairs = [_pair_figures(pair, reads[0], reads[1], heads) for pair in inputs.pairs]
            figures.append(TextFigures(pairs, (answers[0], answers[1]) if answers else None))
            advance(i + 1, len(inputs.examples))
    by_difference = sorted(range(len(figures)), key=lambda i: -figures[i].attention)
    return {
        **{
            name: {"name": opened.public_name, "layers": reader.layers, "heads": reader.heads, "width": reader.width}
            for name, opened, reader in (("teacher", inputs.teacher, teacher), ("student", inputs.student, student))
        },
        "texts": len(figures),
        "texts_in_data": inputs.texts_in_data,
        "tokens": sum(map(len, encoded[0].ids)),
        "truncated": encoded[0].truncated,
        "max_length": inputs.max_length,
        "relation_heads": heads,
        "layers": [_means(pair, [text.pairs[i] for text in figures]) for i, pair in enumerate(inputs.pairs)],
        "span_clusters": _clusters(given.seed, inputs, spans, ends),
        "answers": _all_answers(inputs, figures, by_difference),
        "most_different": [_text(inputs, figures, i) for i in by_difference[:LISTED]],
        "settings": dataclasses.asdict(given),
    }, figures


def _pair_figures(pair: LayerPair, teacher: TextRead, student: TextRead, heads: int) -> PairFigures:
    """How far one layer of the student is from one of the teacher on a text; values are compared in `heads` relation heads."""
    theirs, ours = teacher.attention(pair.teacher), student.attention(pair.student)
    relations = divergence(teacher.value_relation(pair.teacher, heads), student.value_relation(pair.student, heads))
    by_head = divergence(theirs, ours).tolist() if len(theirs) == len(ours) else []
    return PairFigures(mean_divergence(theirs, ours), by_head, float(relations.mean()))


def _means(pair: LayerPair, figures: Sequence[PairFigures]) -> dict[str, Any]:
    """Means over texts. `fsum` rounds once, so the order of texts changes nothing."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    by_head = [mean(head) for head in zip(*(text.heads for text in figures), strict=True)]
    return {
        "teacher_layer": pair.teacher,
        "student_layer": pair.student,
        "attention": mean([text.attention for text in figures]),
        "attention_by_head": by_head or None,
        "value_relation": mean([text.relation for text in figures]),
    }


def _spans(given: Explaining, inputs: Inputs, encoded: Encoded) -> list[Span]:
    """The spans to cluster; none where their labels are fewer than two."""
    if not inputs.has_spans:
        return []
    spans = choose_spans(
        inputs.examples, encoded.encodings, labelled=given.spans, unlabelled=given.unlabelled_spans, seed=given.seed
    )
    return spans if len({span.label for span in spans}) > 1 else []


def _clusters(seed: int, inputs: Inputs, spans: Sequence[Span], ends: Sequence[SpanEnds]) -> dict[str, Any]:
    if not spans:
        few = "its spans have fewer than two labels" if inputs.has_spans else "it has no entities and no tags"
        return {"left_out": f"the data gives no clusters of spans: {few}"}
    layers = [(model, layer) for model, each in enumerate(ends) for layer in range(len(each.first))]
    agreements: tuple[list[float], list[float]] = ([], [])
    with bar("clustering spans, layer by layer") as advance:
        for done, (model, layer) in enumerate(layers, 1):
            vectors = span_vectors(ends[model].first[layer], ends[model].last[layer])
            agreements[model].append(cluster_agreement(vectors, [span.label for span in spans], seed))
            advance(done, len(layers))
    labels = sorted({span.label for span in spans} - {UNLABELLED})
    unlabelled = sum(span.label == UNLABELLED for span in spans)
    return {
        "spans": len(spans) - unlabelled,
        "unlabelled_spans": unlabelled,
        "labels": labels,
        "clusters": len(labels) + bool(unlabelled),
        "teacher": agreements[0],
        "student": agreements[1],
    }


def _all_answers(inputs: Inputs, figures: Sequence[TextFigures], by_difference: Sequence[int]) -> dict[str, Any]:
    if not inputs.task:
        return {"left_out": f"answers are not compared: {inputs.why_no_answers}"}
    numbers = {
        i: abs(of.answers[0] - of.answers[1])
        for i, of in enumerate(figures)
        if of.answers and isinstance(of.answers[0], float) and isinstance(of.answers[1], float)
    }
    if numbers:
        farthest = sorted(numbers, key=lambda i: -numbers[i])[:LISTED]
        return {
            "task": inputs.task.name,
            "mean_difference": math.fsum(numbers.values()) / len(numbers),
            "differing": [_text(inputs, figures, i) for i in farthest],
        }
    apart = [i for i in by_difference if (both := figures[i].answers) and both[0] != both[1]]
    differing = [_text(inputs, figures, i) for i in apart[:LISTED]]
    return {"task": inputs.task.name, "differing_texts": len(apart), "differing": differing}


def _text(inputs: Inputs, figures: Sequence[TextFigures], i: int) -> dict[str, Any]:
    """A text with its divergence, and both answers, if there are any."""
    example, found = inputs.examples[i], figures[i]
    row: dict[str, Any] = {"text": example.text_read, "attention": found.attention}
    if example.text_pair:
        row["text_pair"] = example.text_pair
    if found.answers:
        row |= {f"{name}_answer": _as_json(of) for name, of in zip(("teacher", "student"), found.answers, strict=True)}
    return row


def _as_json(answer: Prediction) -> Any:
    """A class; a number; a sorted list of labels; or a sorted list of `[start, end, label]`."""
    if isinstance(answer, str | float):
        return answer
    return sorted(item if isinstance(item, str) else list(item) for item in answer)


def shown_texts(
    inputs: Inputs, teacher: Reader, student: Reader, figures: Sequence[TextFigures], most: int
) -> list[dict[str, Any]]:
    """At most so many texts: half of them those whose attention differs most, the others the first of the data.

    Texts longer than `SHOWN_TOKENS` are cut there and read again, so what is shown is a whole attention. Each is
    `{text, attention, cut, tokens, pairs}`. A pair has the `attention` of the shown tokens, `token`, whose attention differs most,
    and `weights`: for each model one string per head, base64 of (tokens, tokens) bytes, 255 for an attention of 1.
    """
    apart = sorted(range(len(figures)), key=lambda i: -figures[i].attention)[: -(-most // 2)]
    chosen = list(dict.fromkeys([*apart, *range(len(figures))]))[:most]
    examples = [inputs.examples[i] for i in chosen]
    encoded = encoded_for(inputs, examples, min(inputs.max_length, SHOWN_TOKENS))
    found = []
    for row, i in enumerate(chosen):
        reads = [read_text(reader, of, row) for reader, of in zip((teacher, student), encoded, strict=True)]
        encoding = encoded[0].encodings[row]
        found.append(
            {
                "text": examples[row].text_read,
                "attention": figures[i].attention,
                "cut": bool(encoding.overflowing),
                "tokens": _pieces(encoding, (examples[row].text_read, examples[row].text_pair or "")),
                "pairs": [_shown_pair(pair, *reads) for pair in inputs.pairs],
            }
        )
    return found


def _shown_pair(pair: LayerPair, teacher: TextRead, student: TextRead) -> dict[str, Any]:
    theirs, ours = teacher.attention(pair.teacher), student.attention(pair.student)

    def weights(attention: Tensor) -> list[str]:
        return [base64.b64encode(head.tobytes()).decode() for head in (attention * 255).round().byte().numpy()]

    # One query at a time, so that each has a divergence of its own.
    by_token = divergence(theirs.mean(dim=0).unsqueeze(1), ours.mean(dim=0).unsqueeze(1))
    return {
        "teacher_layer": pair.teacher,
        "student_layer": pair.student,
        "attention": mean_divergence(theirs, ours),
        "token": int(by_token.argmax()),
        "weights": {"teacher": weights(theirs), "student": weights(ours)},
    }


def _pieces(encoding: Encoding, texts: tuple[str, str]) -> list[str]:
    """Each token as the piece of text that it stands for; a special token by its name."""
    return [
        token if sequence is None or start == end else texts[sequence][start:end]
        for token, sequence, (start, end) in zip(encoding.tokens, encoding.sequence_ids, encoding.offsets, strict=True)
    ]
