"""Warnings about texts, entities and answers of one split or file that a model cannot get right, once they are tokenised."""

from collections.abc import Sequence

from compress.data.encoded import Encoded
from compress.data.examples import Example
from serve.text.questions import MOST_ANSWER_TOKENS
from serve.text.spans import words
from serve.wording import counted


def text_warnings(encoded: Encoded, examples: Sequence[Example], max_length: int, where: str) -> list[str]:
    """One sentence for each kind of warning about `examples` of the split or file `where`, which `encoded` has with `max_length` tokens."""
    found: list[str] = []
    if encoded.truncated:
        found.append(
            f"{encoded.truncated} of {counted(len(encoded), 'text')} in {where} {'is' if encoded.truncated == 1 else 'are'} "
            f"longer than {max_length} tokens: training and scoring ignore the rest."
        )
    return found + encoded.task.text_warnings(encoded, examples, where)


def inside_words(encoded: Encoded, examples: Sequence[Example], where: str) -> list[str]:
    """A warning about entities that begin or end inside a word, which no model can match exactly."""
    lost = one_further = 0
    for example, text, encoding in zip(examples, encoded.texts, encoded.encodings, strict=True):
        found = words(text, encoding.offsets, encoding.word_ids)
        starts, ends = {word.start for word in found}, {word.end for word in found}
        reach = max(ends, default=0)
        inside = [e for e in example.entities or () if (e.start not in starts or e.end not in ends) and e.end <= reach]
        lost += len(inside)
        one_further += sum(e.start in starts and e.end + 1 in ends for e in inside)
    if not lost:
        return []
    entities = counted(lost, f"entity in {where} begins or ends", f"entities in {where} begin or end")
    inclusive = " Most would match with an `end` of 1 more: it is exclusive." if 2 * one_further > lost else ""
    return [f"{entities} inside a word: models label whole words and cannot match them exactly.{inclusive}"]


def lost_answers(encoded: Encoded, examples: Sequence[Example], where: str) -> list[str]:
    """A warning about answers that no decoder can find: they are too long, or begin or end inside a word that a window cuts."""
    assert encoded.owners is not None
    held = {
        int(owner)
        for owner, rows in zip(encoded.owners, encoded.targets, strict=True)
        if rows[1:, 1].any() and rows[1:, 2].argmax() - rows[1:, 1].argmax() < MOST_ANSWER_TOKENS
    }
    lost = sum(bool(example.answers) and place not in held for place, example in enumerate(examples))
    if not lost:
        return []
    return [
        f"{counted(lost, f'answer in {where} is', f'answers in {where} are')} in no window whole, or longer than "
        f"{MOST_ANSWER_TOKENS} tokens, and cannot be found."
    ]
