"""Sentence vectors of any encoder that transformers has without code of its own, and an encoder with its pooling as one module."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from compress.losses.vectors import pooled
from compress.models.sentence_pooling import SentencePooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.data.batches import batches_by_length, inputs_for, moved, padded
from compress.data.examples import Example
from compress.models.answering import cut_tokenizer
from compress.models.configurations import loading_config, quiet, usual_length
from compress.models.pretrained import open_config_only
from compress.models.sentence_pooling import max_tokens_in, pooling_in
from compress.models.tokenizer_files import fast_tokenizer
from compress.models.weight_checks import check_weights
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
        max_length: the longest text in tokens; 0 for what its folder says, or else what it can read, at most `usual_length`.

    Raises:
        BadInput: no such folder or name; a model that decodes too; files missing or damaged, pickled weights only, a tokenizer without
            character offsets, or a length that it cannot read.
    """
    from transformers import AutoModel

    named = f"{role} {name}"
    folder, config = open_config_only(name, role, "a transformers folder of an encoder", revision)
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
    tokenizer.model_max_length = max(max_length, max_tokens_in(folder, usual_length(folder)))
    backend, length = cut_tokenizer(name, folder, model, tokenizer, max_length)
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


class Vectors(NamedTuple):
    """What `SentenceModel` gives: the vectors (texts, width), by the name that every head's output has, and what they are made of."""

    logits: Tensor
    last_hidden_state: Tensor
    """(texts, tokens, width)."""

    @property
    def sentence_embedding(self) -> Tensor:
        """The vectors, by the name that sentence-transformers gives them."""
        return self.logits


class SentenceModel(nn.Module):
    """The `encoder` whose last hidden states become vectors as `how` says."""

    def __init__(self, encoder: "PreTrainedModel", how: SentencePooling) -> None:
        super().__init__()
        self.model = encoder
        self.how = how
        self.config = encoder.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        return_dict: bool = True,
    ) -> Vectors:
        """The vectors of `input_ids` (texts, tokens)."""
        segments: dict[str, Any] = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        states = self.model(
            input_ids=input_ids, attention_mask=attention_mask, **segments, return_dict=return_dict
        ).last_hidden_state
        vectors = pooled(states, attention_mask, self.how.pooling)
        return Vectors(nn.functional.normalize(vectors, dim=-1) if self.how.normalised else vectors, states)


def load_sentence_model(how: SentencePooling, folder: Path, **settings: Any) -> SentenceModel:
    """The encoder in `folder`, in evaluation mode; `settings` are those of `from_pretrained`."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(
        folder, config=loading_config(folder), local_files_only=True, use_safetensors=True, **settings
    )
    return SentenceModel(encoder, how).eval()
