"""An encoder with its pooling as one module, whose `logits` are the vector of each text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from compress.losses.vectors import pooled
from compress.models.configurations import loading_config
from compress.models.sentence_pooling import SentencePooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Vectors(NamedTuple):
    """What `SentenceModel` gives: the vectors (texts, width), by the name that every head's output has."""

    logits: Tensor


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
        return Vectors(nn.functional.normalize(vectors, dim=-1) if self.how.normalised else vectors)


def load_sentence_model(how: SentencePooling, folder: Path, **settings: Any) -> SentenceModel:
    """The encoder in `folder`, in evaluation mode; `settings` are those of `from_pretrained`."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(
        folder, config=loading_config(folder), local_files_only=True, use_safetensors=True, **settings
    )
    return SentenceModel(encoder, how).eval()
