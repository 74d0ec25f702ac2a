"""An encoder that generates text by UniLM's sequence-to-sequence mask (Dong et al. 2019, section 2.3).

Tokens of the source see all of the source; tokens of the target see the source, the target before them and themselves. The next token
is what the masked-language-model head says of a mask token at its place. Once a token is chosen its keys and values no longer change,
so they are kept, and each further token costs one pass over two tokens: the last one and the mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.data.text_pairs import SOURCE, TARGET
from compress.losses.vectors import split_heads
from compress.models.activations import Unprojected, read
from compress.models.configurations import first_position
from compress.models.families import encoder_of, family_in, layers_of, linear


def sees(kinds: Tensor) -> Tensor:
    """Which token sees which: bool (batch, tokens, tokens), a row for each token that looks.

    `kinds` (batch, tokens) is `SOURCE`, `TARGET`, or 0 for padding, which sees itself alone: a softmax over nothing gives NaN.
    """
    here = torch.arange(kinds.shape[1], device=kinds.device)
    before = here[None, :] <= here[:, None]  # (tokens, tokens)
    source, target = kinds == SOURCE, kinds == TARGET
    of_target = target[:, :, None] & target[:, None, :] & before
    return (
        ((kinds > 0)[:, :, None] & source[:, None, :])
        | of_target
        | torch.eye(len(here), dtype=torch.bool, device=kinds.device)
    )


def asked_words(model: Any, inputs: dict[str, Tensor], rows: Tensor) -> Unprojected:
    """What the logits of the tokens `rows`, indices into (batch * tokens), are made from; `inputs` are those of `MaskedTargets`."""
    dtype = next(model.parameters()).dtype
    hidden = ~sees(inputs["attention_mask"])[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)
    given = inputs | {"attention_mask": mask, "position_ids": inputs["position_ids"] + first_position(model.config)}
    if model.config.type_vocab_size < 2:
        given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
    words = read(model, given, (), output=True, rows=rows).words
    assert words
    return words


@dataclass
class Kept:
    """Keys and values of each layer: of the sources (texts, heads, tokens, head_dim), and of the targets so far (texts * beams, ...)."""

    sources: list[tuple[Tensor, Tensor]]
    of_source: Tensor  # bool (texts, tokens): False in padding
    targets: list[tuple[Tensor, Tensor]]
    length: int = 0  # tokens of the targets so far

    def reorder(self, rows: Tensor) -> None:
        """Let row `i` of the targets go on from row `rows[i]`, which is of the same text."""
        self.targets = [(keys[rows], values[rows]) for keys, values in self.targets]


def read_sources(model: Any, ids: Tensor, of_source: Tensor, beams: int) -> Kept:
    """Keys and values of the sources `ids` (texts, tokens); `of_source` is False in padding. Each text will have `beams` targets."""
    found: list[tuple[Tensor, Tensor]] = []
    visible = of_source[:, None, None, :]

    def attend(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found.append((keys, values))
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)

    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    _hidden_states(model, ids, torch.zeros_like(ids), positions, attend)
    rows = len(ids) * beams
    nothing = [(keys.new_zeros(rows, keys.shape[1], 0, keys.shape[3]),) * 2 for keys, _ in found]
    return Kept(found, of_source, nothing)


def next_logits(model: Any, kept: Kept, last: Tensor | None, mask_id: int) -> Tensor:
    """The logits (texts * beams, vocabulary) of the token after `last` (texts * beams,), whose keys and values `kept` gets.

    `last` is None for the first token of the targets.
    """
    rows, texts = len(kept.targets[0][0]), len(kept.of_source)
    device = kept.of_source.device
    asked = torch.full((rows, 1), mask_id, device=device)
    ids = asked if last is None else torch.cat([last[:, None], asked], dim=1)  # (rows, 1 or 2)
    new = ids.shape[1]
    lengths = kept.of_source.sum(dim=1).repeat_interleave(rows // texts)  # sources have no gap before their targets
    positions = lengths[:, None] + kept.length + torch.arange(new, device=device)
    kinds = torch.ones_like(ids) if model.config.type_vocab_size > 1 else torch.zeros_like(ids)
    updated: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (source_keys, source_values), (old_keys, old_values) = kept.sources[layer], kept.targets[layer]
        keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        if last is not None:
            updated.append((keys[:, :, :-1], values[:, :, :-1]))  # those of the mask are not kept
        return _attention(queries, (source_keys, source_values), kept.of_source, keys, values)

    hidden = _hidden_states(model, ids, kinds, positions, attend)
    if last is not None:
        kept.targets, kept.length = updated, kept.length + 1
    head = model.cls if hasattr(model, "cls") else model.lm_head
    logits: Tensor = head(hidden[:, -1])
    return logits


def _attention(
    queries: Tensor, source: tuple[Tensor, Tensor], of_source: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Attention of `queries` (texts * beams, heads, new, head_dim) over the source, once for all beams of a text, and over the target.

    `keys` and `values` (texts * beams, heads, target, head_dim) end with those of the new tokens, each of which sees those up to its own.
    """
    rows, heads, new, width = queries.shape
    texts = len(of_source)
    scaled = queries / width**0.5
    of_text = (
        scaled.view(texts, -1, heads, new, width).transpose(1, 2).reshape(texts, heads, -1, width)
    )  # beams * new side by side
    to_source = (of_text @ source[0].transpose(-1, -2)).masked_fill(~of_source[:, None, None, :], float("-inf"))
    to_source = (
        to_source.view(texts, heads, -1, new, to_source.shape[-1]).transpose(1, 2).flatten(0, 1)
    )  # (rows, heads, new, source)
    to_target = scaled @ keys.transpose(-1, -2)  # (rows, heads, new, target)
    if new > 1:
        to_target[:, :, 0, -1] = float("-inf")  # the last token does not see the mask after it
    shares = torch.cat([to_source, to_target], dim=-1).softmax(dim=-1)
    on_source, on_target = torch.split(shares, [to_source.shape[-1], to_target.shape[-1]], dim=-1)
    of_text = on_source.reshape(texts, -1, heads, new, on_source.shape[-1]).transpose(1, 2).flatten(2, 3)
    from_source = (
        (of_text @ source[1]).view(texts, heads, -1, new, width).transpose(1, 2).reshape(rows, heads, new, width)
    )
    context: Tensor = from_source + on_target @ values
    return context


def _hidden_states(model: Any, ids: Tensor, kinds: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """The output of the last layer, (rows, tokens, width); `attend(layer, queries, keys, values)` gives each layer's context."""
    encoder, family = encoder_of(model), family_in(model)
    heads = int(model.config.num_attention_heads)
    embeddings: Any = encoder.embeddings
    hidden: Tensor = embeddings(
        input_ids=ids, token_type_ids=kinds, position_ids=positions + first_position(model.config)
    )
    for number, layer in enumerate(layers_of(model)):
        parts = (split_heads(linear(layer, path)(hidden), heads) for path in (family.query, family.key, family.value))
        context: Tensor = attend(number, *parts)
        block: Any = layer
        attended = block.attention.output(context.transpose(1, 2).flatten(2), hidden)
        hidden = block.output(block.intermediate(attended), attended)
    return hidden
