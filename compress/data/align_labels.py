"""Carries the tags of a teacher's words to the words of another tokenizer, by their characters."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from compress.data.encoded import entities_at
from compress.data.examples import Entity
from serve.text.labels import OUTSIDE, split_tag

T = TypeVar("T", bound=Hashable)


class WordAnswer(NamedTuple):
    """A word, `text[start:end]`, and the probability of each of its tags; the rest goes to those that are not named."""

    start: int
    end: int
    tags: Mapping[str, float]


def align_labels(
    places: Sequence[tuple[int, int]], given: Sequence[WordAnswer]
) -> list[Mapping[tuple[str, str], float]] | None:
    """The tags of words at `places` from those of the teacher's words `given`, which may begin and end elsewhere.

    Each word takes the tags of the teacher's word with which it shares most characters, of equal ones the first. Where several
    words share one of the teacher's, the entity that it begins goes on in the second; a word that holds the beginning of an entity
    and more of it begins it. In IO, `I` after a word that is not of its label begins an entity. A word between two of the teacher's,
    which its tokenizer dropped, is inside the entity that goes on behind it, and otherwise outside.

    Args:
        places: (start, end) of each word, in order and without overlap.
        given: the teacher's words, in order and without overlap.

    Returns:
        For each word its probabilities by (`B` or `I`, label) and (`O`, ""); None where the teacher's words end before the last one.
    """
    if places and (not given or given[-1].end <= places[-1][0]):
        return None
    theirs = [_in_bio(word.tags) for word in given]
    likeliest = [max(tags, key=lambda tag: tags[tag]) for tags in theirs]
    begins = any(prefix == "B" for tags in theirs for prefix, _ in tags)  # not in IO
    best = _shared_most(places, given)
    found: list[Mapping[tuple[str, str], float]] = []
    last, before = -1, ""
    for first, index in best:
        if index < 0:
            found.append({(OUTSIDE, ""): 1.0})
            continue
        tags, (prefix, label) = theirs[index], likeliest[index]
        if index == last:
            tags = _moved(tags, "B", "I")
        elif prefix == "I" and (
            (label != before and not begins) or ("B", label) in likeliest[max(first, last + 1) : index]
        ):
            tags = _moved(tags, "I", "B", label)
        found.append(tags)
        last, before = index, label
    _close_gaps(found, [index for _, index in best])
    return found


def _shared_most(places: Sequence[tuple[int, int]], given: Sequence[WordAnswer]) -> list[tuple[int, int]]:
    """For each of `places` two indices of words of `given`: the first that it shares characters with, and that with most of them.

    Of equals it is the first; -1 stands for none.
    """
    found: list[tuple[int, int]] = []
    at = 0
    for start, end in places:
        while at < len(given) and given[at].end <= start:
            at += 1
        best, most = -1, 0
        for index in range(at, len(given)):
            if given[index].start >= end:
                break
            shared = min(end, given[index].end) - max(start, given[index].start)
            if shared > most:
                best, most = index, shared
        found.append((at, best))
    return found


def _close_gaps(tags: list[Mapping[tuple[str, str], float]], best: Sequence[int]) -> None:
    """Give words that share nothing with the teacher's (-1 in `best`) the `I` of the word behind them, where that goes on."""
    for row in range(len(tags) - 2, -1, -1):
        prefix, label = max(tags[row + 1], key=lambda tag: tags[row + 1][tag])
        if best[row] < 0 and prefix == "I":
            tags[row] = {("I", label): 1.0}


def words_of_entities(
    places: Sequence[tuple[int, int]], spans: Sequence[tuple[Entity, float]]
) -> tuple[WordAnswer, ...]:
    """The words at `places` with the tags of entities with these scores; what a score lacks to 1 is the probability of `O`."""
    found: list[WordAnswer] = []
    for (start, end), (at, prefix) in zip(places, entities_at(places, [entity for entity, _ in spans]), strict=True):
        entity, score = spans[at] if at >= 0 else (None, 0.0)
        tags = {OUTSIDE: 1.0 - score} | ({f"{prefix}-{entity.label}": score} if entity else {})
        found.append(WordAnswer(start, end, tags))
    return tuple(found)


def added_up(tags: Iterable[tuple[T, float]]) -> dict[T, float]:
    """The sum of the probabilities of each tag."""
    found: dict[T, float] = {}
    for tag, probability in tags:
        found[tag] = found.get(tag, 0.0) + probability
    return found


def _in_bio(tags: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """The probabilities by (`B`, label), (`I`, label) and (`O`, ""), of tags in BIO, BIOES or IO."""
    parts = ((*split_tag(tag), probability) for tag, probability in tags.items())
    return added_up((({"S": "B", "E": "I"}.get(prefix, prefix), label), each) for prefix, label, each in parts)


def _moved(
    tags: Mapping[tuple[str, str], float], source: str, target: str, label: str | None = None
) -> dict[tuple[str, str], float]:
    """`tags` with the probabilities of `source` given to `target`, of each label or of `label` alone."""
    return added_up(
        ((target if prefix == source and label in (None, of_label) else prefix, of_label), probability)
        for (prefix, of_label), probability in tags.items()
    )
