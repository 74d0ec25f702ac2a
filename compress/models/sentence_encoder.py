"""Sentence vectors of any encoder that transformers has without code of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.data.batches import batches_by_length, inputs_for, moved, padded
from compress.data.examples import Example
from compress.losses.vectors import pooled
from compress.models.answering import cut_tokenizer
from compress.models.configurations import loading_config, quiet
from compress.models.pretrained import LONGEST_TEXT, check_weights, open_unread
from compress.models.sentence_pooling import SentencePooling, max_tokens_in, pooling_in
from compress.models.tokenizer_files import fast_tokenizer
from serve.errors import BadInput


@dataclass(frozen=True)
class SentenceEncoder:
    """An encoder with its tokenizer, cut to `max_length` tokens."""

    name: str
    folder: Path
    max_length: int
    pad_id: int
    model: Any
    tokenizer: Tokenizer
    how: SentencePooling


def open_encoder(name: str, *, role: str = "--encoder", revision: str = "", max_length: int = 0) -> SentenceEncoder:
    """The encoder in the folder `name`, or of that name on the Hub, without a head, in float32 on the CPU.

    Args:
        name: the folder or the name.
        role: the flag that named it.
        revision: a branch, tag or commit of the Hub's model; empty for its main branch.
        max_length: the longest text in tokens; 0 for what its folder says, or else what it can read, at most 512.

    Raises:
        BadInput: no such folder or name; a model that decodes too; files missing or damaged, pickled weights only, a tokenizer without
            character offsets, or a length that it cannot read.
    """
    from transformers import AutoModel

    named = f"{role} {name}"
    folder, config = open_unread(name, role, "a transformers folder of an encoder", revision)
    if config.is_encoder_decoder or config.model_type == "t5":
        raise BadInput(
            f"{named} is an encoder and decoder ({config.model_type}); an encoder alone is needed, such as BERT's kind."
        )
    check_weights(folder, config, named)
    tokenizer = fast_tokenizer(folder, named, config)
    with quiet():
        model = AutoModel.from_pretrained(
            folder, config=loading_config(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
    how = pooling_in(folder, named) or SentencePooling()
    # As in sentence-transformers, its own setting goes before that of the tokenizer.
    tokenizer.model_max_length = max(max_length, max_tokens_in(folder, LONGEST_TEXT))
    backend, length = cut_tokenizer(name, model, tokenizer, max_length)
    return SentenceEncoder(name, folder, length, int(config.pad_token_id or 0), model, backend, how)


def on_device(encoder: SentenceEncoder, device: torch.device) -> SentenceEncoder:
    """`encoder` with its weights on `device`."""
    return replace(encoder, model=encoder.model.to(device))


def sentence_vectors(
    encoder: SentenceEncoder, texts: Sequence[Example], advance: Callable[[int], None] | None = None
) -> np.ndarray:
    """The vectors of `texts`, (texts, width), float32, of length 1: their products are the cosines of the angles between them.

    A vector is the mean of the last hidden states of a text's tokens (Sentence-BERT, section 3), or that of the first token where the
    encoder's folder says so; the two texts of a pair are read together. `advance(texts)` is called after each batch.
    """
    asked = [(each.text_read, each.text_pair) if each.text_pair else each.text_read for each in texts]
    encodings = encoder.tokenizer.encode_batch(asked)
    device = next(encoder.model.parameters()).device
    found: np.ndarray = np.zeros((len(texts), encoder.model.config.hidden_size), dtype=np.float32)
    with torch.inference_mode():
        for chosen in batches_by_length([len(encoding.ids) for encoding in encodings]):
            rows = [encodings[i] for i in chosen]
            inputs = {
                "input_ids": padded([row.ids for row in rows], encoder.pad_id),
                "attention_mask": padded([row.attention_mask for row in rows], 0),
                "token_type_ids": padded([row.type_ids for row in rows], 0),
            }
            given = {name: moved(torch.from_numpy(value), device) for name, value in inputs.items()}
            states = encoder.model(**inputs_for(encoder.model, given))[0].float()
            vectors = pooled(states, given["attention_mask"], encoder.how.pooling)
            found[chosen] = torch.nn.functional.normalize(vectors, dim=-1).cpu().numpy()
            if advance:
                advance(len(chosen))
    return found
