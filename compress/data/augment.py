"""More in-domain text, made from the labelled texts: the teacher labels it, and the student sees what train never said.

On the texts that it was fine-tuned on a teacher is nearly certain of everything, and its soft labels say little more than
the labels do; on text it has not seen they say how it ranks what it is unsure of.
"""

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from compress.data.examples import Example
from serve.text.spans import words

# Tang et al. 2019, "Distilling task-specific knowledge from BERT into simple neural networks" give p_mask.
MASKED_SHARE = 0.1
# Of entities that another mention of the same label takes the place of (Dai and Adel 2020, "mention replacement").
SWAPPED_SHARE = 0.7
# However much labelled text there is: labelling more would take longer than a student trains on it.
MOST_TEXTS = 200_000


def augmented(examples: Sequence[Example], tokenizer: Tokenizer, copies: int, seed: int) -> list[Example]:
    """Texts like those of `examples`, without labels: entities swapped for others of their label, words masked.

    The head and the tail of a relation stay as they are.

    Args:
        examples: labelled texts. Only mentions that stand in them are swapped in.
        tokenizer: says what a word is, and has the mask token; one that has none masks nothing.
        copies: attempts a text; what repeats an example or another attempt is dropped, so fewer may come of it.
        seed: the same arguments give the same texts.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    mask = mask_token_of(tokenizer)
    rng = random.Random(seed)
    mentions: dict[str, list[str]] = {}
    for example in examples:
        for entity in example.entities or ():
            mentions.setdefault(entity.label, []).append(example.text[entity.start : entity.end])
    seen = {example.text_or_pair for example in examples}
    made: list[Example] = []
    # In an order of its own: where there is an end to it, texts from all over the file shall have had their turn.
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


def mask_token_of(tokenizer: Tokenizer) -> str | None:
    """The token that stands for a word not shown, if the tokenizer has one."""
    return next((token for token in ("[MASK]", "<mask>") if tokenizer.token_to_id(token) is not None), None)


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
    """`example` with words masked outside of its head and tail."""
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
    """`text` with the mask token in the place of some words."""
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
