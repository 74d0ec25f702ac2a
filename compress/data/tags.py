"""Words with one tag each, as text with entities at offsets."""

import re

from compress.data.examples import Entity, Example
from compress.data.fields import whole_characters
from serve.text.labels import OUTSIDE, split_tag

# A capital and a dash, as prefixes are written, that no tag scheme has; or a prefix with no label.
KNOWN_PREFIX = re.compile(r"[BIESLU]-")
STRANGE_PREFIX = re.compile(r"(?![BIESLU]-)[A-Z]-|[BIESLU]-$")


def from_tags(tokens: object, tags: object) -> Example:
    """The example whose text is `tokens` joined by spaces, with entities read from `tags` (BIO, IOB2, BIOES or IO).

    Raises:
        ValueError: not two lists of strings of equal length.
    """
    if not isinstance(tokens, list) or not isinstance(tags, list) or not tokens:
        raise ValueError("`tokens` and `tags` are two non-empty lists of strings")
    if not all(isinstance(item, str) and item for item in [*tokens, *tags]):
        raise ValueError("`tokens` and `tags` hold something that is not a non-empty string")
    for item in (*tokens, *tags):
        whole_characters(item, "tokens")
    odd = [tag for tag in tags if STRANGE_PREFIX.match(tag)]
    # Where nothing else has a prefix, a capital and a dash may be how a label begins (`T-cell`).
    if odd and any(KNOWN_PREFIX.match(tag) for tag in tags):
        raise ValueError(
            f"has the tag {odd[0]!r} among others with a prefix; a tag is O, or a label after B-, I-, E-, S-, L- or U-"
        )
    if len(tokens) != len(tags):
        raise ValueError(f"has {len(tokens)} tokens but {len(tags)} tags")
    entities: list[Entity] = []
    position, open_entity = 0, False
    for token, tag in zip(tokens, tags, strict=True):
        prefix, label = split_tag(tag)
        end = position + len(token)
        if prefix == OUTSIDE:
            open_entity = False
        elif prefix in "IE" and open_entity and entities[-1].label == label:
            entities[-1] = Entity(entities[-1].start, end, label)
            open_entity = prefix != "E"
        else:
            entities.append(Entity(position, end, label))
            open_entity = prefix not in "SE"
        position = end + 1
    return Example(" ".join(tokens), entities=tuple(entities))
