"""Generates in-domain text from the labelled texts, for the teacher to label.

On its own training texts a teacher is nearly certain, so its soft labels add little to the labels. On new text they show how
it ranks labels of which it is unsure.
"""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from compress.data.examples import Example
from serve.text.spans import words

# Tang et al. 2019, "Distilling task-specific knowledge from BERT into simple neural networks" give p_mask.
MASKED_SHARE = 0.1
# Share of entities that are replaced by another mention of the same label (Dai and Adel 2020, "mention replacement").
SWAPPED_SHARE = 0.7
# Most generated texts: labelling more would take longer than training a student on them.
MOST_TEXTS = 200_000


def augmented(examples: Sequence[Example], tokenizer: Tokenizer, copies: int, seed: int) -> list[Example]:
    """Unlabelled variations of `examples`: entities are replaced by others of their label, and words are masked.

    The head and the tail of a relation do not change.

    Args:
        examples: labelled texts; only their own mentions replace entities.
        tokenizer: splits words and has the mask token; without one no word is masked.
        copies: attempts per text; repeats of an example or another attempt are dropped, so there may be fewer.
        seed: the same arguments give the same texts.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    mask = next((token for token in ("[MASK]", "<mask>") if tokenizer.token_to_id(token) is not None), None)
    rng = random.Random(seed)
    mentions: dict[str, list[str]] = {}
    for example in examples:
        for entity in example.entities or ():
            mentions.setdefault(entity.label, []).append(example.text[entity.start : entity.end])
    seen = {example.text_or_pair for example in examples}
    made: list[Example] = []
    # In random order, so that texts from the whole file are used before `MOST_TEXTS` is reached.
    for _ in range(copies):
        for example in rng.sample(examples, len(examples)):
            if len(made) == MOST_TEXTS:
                return made
            if example.head is not None:
                new = _varied_about(example, tokenizer, mask, rng)
            else:
                text = _varied(example, mentions, tokenizer, mask, rng)
                new = Example(text, example.text_pair and _masked(example.text_pair, tokenizer, mask, rng))
            if new.text_or_pair not in seen:
                seen.add(new.text_or_pair)
                made.append(new)
    return made


def _varied(
    example: Example, mentions: dict[str, list[str]], tokenizer: Tokenizer, mask: str | None, rng: random.Random
) -> str:
    parts: list[str] = []
    at = 0
    for entity in example.entities or ():
        parts.append(_masked(example.text[at : entity.start], tokenizer, mask, rng))
        own = example.text[entity.start : entity.end]
        parts.append(rng.choice(mentions[entity.label]) if rng.random() < SWAPPED_SHARE else own)
        at = entity.end
    parts.append(_masked(example.text[at:], tokenizer, mask, rng))
    return "".join(parts)


def _varied_about(example: Example, tokenizer: Tokenizer, mask: str | None, rng: random.Random) -> Example:
    """`example` with words masked outside its head and tail."""
    places: dict[str, tuple[int, int]] = {}
    text, at = "", 0
    for name in sorted(("head", "tail"), key=lambda name: getattr(example, name)):
        start, end = getattr(example, name)
        text += _masked(example.text[at:start], tokenizer, mask, rng)
        places[name] = (len(text), len(text) + end - start)
        text += example.text[start:end]
        at = end
    return Example(text + _masked(example.text[at:], tokenizer, mask, rng), head=places["head"], tail=places["tail"])


def _masked(text: str, tokenizer: Tokenizer, mask: str | None, rng: random.Random) -> str:
    """`text` with some words replaced by the mask token."""
    if mask is None or not text.strip():
        return text
    encoding = tokenizer.encode(text, add_special_tokens=False)
    parts: list[str] = []
    at = 0
    for word in words(text, encoding.offsets, encoding.word_ids):
        if rng.random() < MASKED_SHARE:
            parts += [text[at : word.start], mask]
            at = word.end
    return "".join([*parts, text[at:]])
