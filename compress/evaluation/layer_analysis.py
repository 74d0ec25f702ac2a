"""How a student's layers differ from its teacher's: the divergence of their attention, and how well they tell kinds of phrases apart.

Divergence is of attentions, their means over heads, and relations. The second is the analysis of MiniLM, section 4.4 and table 10, which
follows Jawahar et al. 2019: spans of CoNLL-2000 chunks and spans that are no chunk are clustered by k-means, and normalised mutual
information says how well clusters and labels agree.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from compress.data.examples import Example
from serve.text.spans import words

UNLABELLED = ""  # the label of spans that are no entity
LONGEST_UNLABELLED = 5  # words; 99 of 100 chunks of the CoNLL-2000 test set are no longer
STARTS = 10  # of k-means; the best is taken


class Span(NamedTuple):
    """A run of words of one text: the indices of its first and last token (inclusive), and its label."""

    text: int
    first_token: int
    last_token: int
    label: str


def choose_spans(
    examples: Sequence[Example], encodings: Sequence[Encoding], *, labelled: int, unlabelled: int, seed: int
) -> list[Span]:
    """At most so many spans of entities and so many of other runs of words, drawn with `seed`.

    A span's place in the draw is a hash of its text, its place in it, and `seed`, so the order of texts changes nothing. Entities
    that a tokenizer's limit has cut off are left out. Other spans are runs of one to `LONGEST_UNLABELLED` words.
    """
    drawn: dict[bool, list[tuple[bytes, Span]]] = {True: [], False: []}
    for number, (example, encoding) in enumerate(zip(examples, encodings, strict=True)):
        for span in _spans_of(number, example, encoding):
            place = f"{seed} {span.first_token} {span.last_token} {example.text}"
            key = hashlib.sha256(place.encode("utf-8", "surrogatepass")).digest()
            drawn[span.label != UNLABELLED].append((key, span))
    return [
        span
        for which, most in ((True, labelled), (False, unlabelled))
        for _, span in sorted(drawn[which], key=lambda pair: pair[0])[:most]
    ]


def _spans_of(number: int, example: Example, encoding: Encoding) -> Iterator[Span]:
    """Every entity of a text, then every other run of words."""
    found = words(example.text, encoding.offsets, encoding.word_ids)
    taken = set()
    for entity in example.entities or ():
        inside = [word for word in found if word.start < entity.end and entity.start < word.end]
        if not inside or inside[-1].end < entity.end:  # cut off
            continue
        place = (inside[0].first_token, inside[-1].last_token)
        taken.add(place)
        yield Span(number, *place, entity.label)
    for first in range(len(found)):
        for last in range(first, min(first + LONGEST_UNLABELLED, len(found))):
            place = (found[first].first_token, found[last].last_token)
            if place not in taken:
                yield Span(number, *place, UNLABELLED)


def span_vectors(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The vectors of spans, (spans, 4 width): first and last token, their product and their difference (Jawahar et al. 2019).

    Args:
        first: (spans, width), the vectors of the first tokens.
        last: (spans, width), the vectors of the last tokens.
    """
    return np.concatenate([first, last, first * last, first - last], axis=1)


def cluster_agreement(vectors: np.ndarray, labels: Sequence[str], seed: int) -> float:
    """Normalised mutual information, 0 to 1, of `labels` and the clusters of k-means, with as many clusters as there are labels.

    The mutual information is divided by the arithmetic mean of both entropies. K-means takes the best of `STARTS` starts drawn
    with `seed`; the order of spans changes which clusters it finds, so give them in one order.

    Args:
        vectors: (spans, width).
        labels: of each span; at least two kinds.
        seed: of k-means.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import normalized_mutual_info_score

    clusters = KMeans(len(set(labels)), n_init=STARTS, random_state=seed).fit_predict(vectors)
    return float(normalized_mutual_info_score(labels, clusters))


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """`KL(teacher || student)` in nats of each head, mean over queries (MiniLM, section 3.1, without its mean over heads): (heads,).

    It is computed in float64. A key to which the student gives nothing, or less than float32 can hold, counts as if it got
    float32's smallest normal number, so the divergence is never infinite.

    Args:
        teacher: (heads, queries, keys), each row a distribution over keys. Padding is not part of it.
        student: of the same shape; it may be another model's attention, mean over heads, or relation.
    """
    least = torch.finfo(torch.float32).tiny
    theirs, ours = teacher.double(), student.double().clamp(min=least)
    each = torch.where(theirs > 0, theirs * (theirs.clamp(min=least).log() - ours.log()), torch.zeros_like(theirs))
    return each.sum(dim=-1).mean(dim=-1)


def mean_divergence(teacher: Tensor, student: Tensor) -> float:
    """The divergence of the two attentions after each is averaged over its heads, whose numbers may differ.

    Args:
        teacher: (heads, queries, keys).
        student: (its own heads, queries, keys).
    """
    theirs, ours = (each.double().mean(dim=0, keepdim=True) for each in (teacher, student))
    return float(divergence(theirs, ours)[0])
