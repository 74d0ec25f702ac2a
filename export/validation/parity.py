"""Compares the answers of two runtimes to the same texts, at other shapes than the export used."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from compress.models.configurations import loading_config
from compress.models.heads import CLASSES, TOKENS, head_of, is_multi_label
from export.graph.exporter import graph_inputs, load_answering_model
from export.settings import ATOL, Precision
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput
from serve.model.session import Session, padded
from serve.text.labels import applies
from serve.text.tokenizer import load_tokenizer

# By how much two logits may differ, absolute and relative: float16 has an 11-bit mantissa, and errors add up over layers.
# int8 has a gate on the task metric instead; its tolerance only decides what counts as a tie.
TOLERANCES: dict[Precision, tuple[float, float]] = {"fp32": (ATOL, 1e-5), "fp16": (3e-2, 1e-2), "int8": (1e-4, 1e-5)}

BATCHES = (1, 3, 17)

SHAPES = 7
"""How many texts of fixed lengths are added to the given texts."""

# The most texts in a batch of `company_differences`.
MOST_TOGETHER = 32

Text = str | tuple[str, str]
"""A text, or a pair of texts."""

Runner = Callable[[Sequence[Encoding]], list[np.ndarray]]
"""Logits of each text: (tokens, labels) or (labels,)."""


@dataclass(frozen=True)
class Worst:
    """Where the largest difference is."""

    batch: int
    padded_tokens: int
    """Length of the batch's longest text, to which the others were padded."""
    tokens: int
    """Length of the text itself."""
    row: int
    """The text's index in its batch."""


@dataclass(frozen=True)
class Parity:
    """How far a candidate's logits are from a reference's, over all positions of all texts in all batch sizes."""

    precision: Precision
    runtime: Runtime
    absolute_tolerance: float
    relative_tolerance: float
    """A difference of absolute + relative * |reference| is tolerated. For int8 both only decide what is a tie. The absolute part for
    numbers and vectors is that of `TOLERANCES` times their standard deviation."""
    batches: tuple[int, ...]
    texts: int
    shortest_tokens: int
    longest_tokens: int
    positions: int
    """Positions compared, once for each batch size: tokens in token classification, else texts."""
    largest: float
    largest_at: Worst
    p999: float
    """The 99.9th percentile of the positions' largest differences."""
    beyond_tolerance: int
    """Positions that differ by more than the tolerance."""
    labels_changed: int
    """Positions whose first label changed, or (multi-label) the set of labels that apply; without ties."""
    ties: int
    """Positions whose label changed where the reference's logits of the two labels are equal within the tolerance, or
    (multi-label) the reference's logits of the changed labels are 0 within it."""
    labels_changed_per_10k: float
    company_texts: int
    company_differences: int
    """Texts whose logits from the candidate are not the same bits alone and in a random batch."""
    company_largest: float
    passed: bool


def graph_parity(
    checkpoint: Path,
    onnx_file: Path,
    texts: Sequence[Text],
    max_length: int,
    *,
    runtime: Runtime = "onnxruntime",
    atol: float = TOLERANCES["fp32"][0],
    company_texts: int = 128,
    threads: int | None = None,
    seed: int = 0,
) -> Parity:
    """Compare the float32 graph `onnx_file` in `runtime` with the torch model in folder `checkpoint`.

    The reference runs each text alone in torch, without padding. The candidate gets the texts in batches of 1, 3 and 17, in
    an order that mixes lengths, padded to the longest of each batch. Seven texts of 1 to `max_length` tokens, made from the
    given ones, are added. It passes when no position is beyond the tolerance (`atol` is its absolute part) and no label
    changed except in ties. Whether the batch changes bits is reported, but does not fail: float32 sums may be ordered by
    shape. Give `texts` like those that will be served; all are used. BadInput when none has a token.
    """
    import torch

    model = load_answering_model(checkpoint)
    inputs = graph_inputs(model)

    def in_torch(batch: Sequence[Encoding]) -> list[np.ndarray]:
        """One text at a time, so that the reference has no padding."""
        answers = []
        with torch.no_grad():
            for encoding in batch:
                feeds = padded([encoding], inputs, len(encoding))
                tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}  # (1, tokens)
                answers.append(model(**tensors, return_dict=True).logits[0].numpy())
        return answers

    return _compare(
        "fp32",
        (atol, TOLERANCES["fp32"][1]),
        runtime,
        in_torch,
        Session(onnx_file, threads, runtime, max_length).run,
        shapes_of(texts, load_tokenizer(checkpoint, max_length), max_length),
        loading_config(checkpoint),
        company_texts=company_texts,
        seed=seed,
    )


def variant_parity(
    precision: Precision,
    checkpoint: Path,
    fp32_file: Path,
    onnx_file: Path,
    texts: Sequence[Text],
    max_length: int,
    *,
    runtime: Runtime = "onnxruntime",
    company_texts: int = 512,
    threads: int | None = None,
    seed: int = 0,
) -> Parity:
    """Compare `onnx_file` in `runtime` with `fp32_file` in onnxruntime; `checkpoint` has configuration and tokenizer.

    Texts and batches are those of `graph_parity`. int8 passes when the batch changes no bit of any answer. Rounding changes
    some labels; their number is reported here, and the gate on the task metric decides. Other precisions pass when no
    position is beyond their tolerance.
    """
    return _compare(
        precision,
        TOLERANCES[precision],
        runtime,
        Session(fp32_file, threads, max_length=max_length).run,
        Session(onnx_file, threads, runtime, max_length).run,
        shapes_of(texts, load_tokenizer(checkpoint, max_length), max_length),
        loading_config(checkpoint),
        company_texts=company_texts,
        seed=seed,
    )


def shapes_of(texts: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> list[Encoding]:
    """`texts` encoded, and `SHAPES` cuts and joins of them of 1 to `max_length` tokens. BadInput without a token."""
    speaking = [text for text in texts if len(tokenizer.encode_batch([text])[0])]
    if not speaking:
        raise BadInput(f"the {len(texts)} texts for parity have no tokens; give texts like those that will be served")
    encodings = tokenizer.encode_batch(speaking)
    lengths = (1, max_length, 2, max_length - 1, 3, max_length // 2, max_length // 4)
    assert len(lengths) == SHAPES
    for order, tokens in enumerate(max(1, length) for length in lengths):
        # Encodings are cut in place, so a new one is made each time.
        parts = tokenizer.encode_batch([speaking[order % len(speaking)]])
        while sum(len(part) for part in parts) < tokens:
            parts += tokenizer.encode_batch([speaking[(order + len(parts)) % len(speaking)]])
        joined = Encoding.merge(parts)
        joined.truncate(tokens)
        encodings.append(joined)
    return encodings


def _compare(
    precision: Precision,
    tolerance: tuple[float, float],
    runtime: Runtime,
    reference: Runner,
    candidate: Runner,
    encodings: Sequence[Encoding],
    config: Any,
    *,
    company_texts: int,
    seed: int,
) -> Parity:
    expected = [reference([encoding])[0] for encoding in encodings]
    labels, multi_label = head_of(config) in (TOKENS, CLASSES), is_multi_label(config)
    if not labels:  # numbers, vectors and the ends of answers are of any unit: a tolerance is a share of their spread
        spread = float(np.std(np.concatenate([np.ravel(each) for each in expected])))
        tolerance = (tolerance[0] * (spread or 1.0), tolerance[1])
    differences: list[np.ndarray] = []  # per text and batch size: the largest of each position, (positions,)
    largest, largest_at = -1.0, Worst(0, 0, 0, 0)
    beyond = changed = ties = 0
    for batch in BATCHES:
        # The order mixes lengths, but the cuts and joins stay together at the end: 1 token is padded to the maximum, and few
        # batches are that long.
        order = list(range(len(encodings) - SHAPES))
        random.Random(seed + batch).shuffle(order)
        order += range(len(encodings) - SHAPES, len(encodings))
        runs = [order[start : start + batch] for start in range(0, len(encodings), batch)]
        for members in itertools.chain.from_iterable(_in_memory(run, encodings) for run in runs):
            longest = max(len(encodings[index]) for index in members)
            actual = candidate([encodings[index] for index in members])
            for row, index in enumerate(members):
                difference, text_beyond, text_changed, text_ties = _compare_text(
                    expected[index], actual[row], tolerance, multi_label=multi_label, labels=labels
                )
                beyond, changed, ties = beyond + text_beyond, changed + text_changed, ties + text_ties
                differences.append(difference)
                if difference.max() > largest:
                    largest = float(difference.max())
                    largest_at = Worst(len(members), longest, len(encodings[index]), row)
    every = np.concatenate(differences)
    sample = random.Random(seed).sample(range(len(encodings)), min(company_texts, len(encodings)))
    moved, moved_by = company_differences(candidate, [encodings[index] for index in sample], seed=seed)
    passed = moved == 0 if precision == "int8" else beyond == 0 and (changed == 0 or precision != "fp32")
    return Parity(
        precision=precision,
        runtime=runtime,
        absolute_tolerance=tolerance[0],
        relative_tolerance=tolerance[1],
        batches=BATCHES,
        texts=len(encodings),
        shortest_tokens=min(len(encoding) for encoding in encodings),
        longest_tokens=max(len(encoding) for encoding in encodings),
        positions=len(every),
        largest=largest,
        largest_at=largest_at,
        p999=float(np.percentile(every, 99.9)),
        beyond_tolerance=beyond,
        labels_changed=changed,
        ties=ties,
        labels_changed_per_10k=changed / len(every) * 10_000,
        company_texts=len(sample),
        company_differences=moved,
        company_largest=moved_by,
        passed=passed,
    )


def _compare_text(
    expected: np.ndarray, actual: np.ndarray, tolerance: tuple[float, float], *, multi_label: bool, labels: bool = True
) -> tuple[np.ndarray, int, int, int]:
    """For one text: each position's largest difference, then the numbers beyond the tolerance, of changed labels, of ties."""
    expected, actual = np.atleast_2d(expected), np.atleast_2d(actual)  # (positions, labels)
    assert expected.shape == actual.shape, (expected.shape, actual.shape)
    difference = np.abs(expected - actual)
    tolerated = tolerance[0] + tolerance[1] * np.abs(expected)
    if not labels:
        differs = tie = np.zeros(len(expected), dtype=bool)
    elif multi_label:
        turned = applies(expected) != applies(actual)  # (positions, labels)
        differs = turned.any(axis=-1)
        tie = differs & (~turned | (np.abs(expected) <= tolerated)).all(axis=-1)
    else:
        first, theirs = expected.argmax(axis=-1), actual.argmax(axis=-1)
        rows = np.arange(len(expected))
        differs = first != theirs
        # Both logits may move by the tolerance, so two labels within twice that are a tie.
        tie = differs & (expected[rows, first] - expected[rows, theirs] <= 2 * tolerated[rows, first])
    beyond = (difference > tolerated).any(axis=-1)
    return difference.max(axis=-1), int(beyond.sum()), int((differs & ~tie).sum()), int(tie.sum())


def company_differences(run: Runner, encodings: Sequence[Encoding], *, seed: int = 0) -> tuple[int, float]:
    """How many texts get other bits alone than in random batches of up to 32, and the largest difference."""
    alone = [run([encoding])[0] for encoding in encodings]
    chance = random.Random(seed)
    order = list(range(len(encodings)))
    chance.shuffle(order)
    moved, largest = 0, 0.0
    while order:
        together = [order.pop() for _ in range(min(len(order), chance.randint(2, MOST_TOGETHER)))]
        for members in _in_memory(together, encodings):
            for index, logits in zip(members, run([encodings[index] for index in members]), strict=True):
                if logits.tobytes() != alone[index].tobytes():
                    moved += 1
                    largest = max(largest, float(np.abs(logits - alone[index]).max()))
    return moved, largest


def _in_memory(members: list[int], encodings: Sequence[Encoding]) -> list[list[int]]:
    """`members` in parts of two or more whose attention, padded, is no larger than that of `MOST_TOGETHER` texts of 512 tokens."""
    longest = max(len(encodings[index]) for index in members)
    rows = max(2, MOST_TOGETHER * 512**2 // longest**2)
    parts = [members[start : start + rows] for start in range(0, len(members), rows)]
    if len(parts) > 1 and len(parts[-1]) == 1:  # alone it would be in no company
        parts[-2] += parts.pop()
    return parts
