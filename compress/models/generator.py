"""Generates texts from texts, by a checkpoint of `finetune --task text2text-generation`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.data.batches import batches_by_length, padded
from compress.data.corpus import masking_of
from compress.data.encoded import pad_id_of
from compress.data.text_pairs import encoded_sources
from compress.models.beam_search import beam_search
from compress.models.families import FAMILIES
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.unilm import check_generates, is_generator, next_logits, read_sources, target_tokens_of
from serve.errors import BadInput

BATCH_TOKENS = 4_096  # of the sources read at once, times the beams: their keys and values are held
MOST_BEAMS = 64


class Generator:
    """Generates a text from each text.

    Args:
        checkpoint: a folder that `finetune --task text2text-generation` wrote, or a Hub name.
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one.
        revision: branch, tag or commit of a Hub model.

    Raises:
        BadInput: it cannot be opened, or was not trained to generate.
    """

    def __init__(self, checkpoint: Path | str, *, device: str = "auto", revision: str = "") -> None:
        opened = open_model(str(checkpoint), role="MODEL", wanted="a checkpoint that generates", revision=revision)
        check_generates(opened)
        if not is_generator(opened.config):
            raise BadInput(
                f"MODEL {checkpoint} was not trained to generate text. Train it: stillroom finetune --model {checkpoint} "
                "--task text2text-generation ..."
            )
        on_gpu = device != "cpu" and torch.cuda.is_available()
        self.model = load_encoder(opened, seed=0, vocabulary=True).eval().to("cuda" if on_gpu else "cpu")
        self.tokenizer = open_tokenizer(opened)
        self.target_tokens = target_tokens_of(opened.config)
        self.source_tokens = opened.max_length - self.target_tokens

    def __call__(
        self, texts: Sequence[str], *, beams: int = 5, length_penalty: float = 1.0, most_tokens: int = 0
    ) -> list[str]:
        """The text that is generated from each of `texts`.

        Args:
            texts: longer ones than the model takes are cut.
            beams: targets under way in the search for the likeliest; 1 takes the likeliest token each time.
            length_penalty: power of the length by which sums of log-probabilities are divided, see `compress.models.beam_search`.
            most_tokens: of a generated text; 0 is what the model was trained on, which is also the most.

        Raises:
            BadInput: an empty text, or a number out of its range.
        """
        faults = [f"texts[{i}] is empty" for i, text in enumerate(texts) if not text.strip()][:5]
        faults += [f"beams is {beams}; 1 to {MOST_BEAMS} are needed"] * (not 1 <= beams <= MOST_BEAMS)
        faults += [f"length_penalty is {length_penalty}; 0 to 10 is needed"] * (not 0 <= length_penalty <= 10)
        faults += [f"most_tokens is {most_tokens}; at most {self.target_tokens} were trained"] * (
            not 0 <= most_tokens <= self.target_tokens
        )
        if faults:
            raise BadInput(f"Nothing was generated: {'; '.join(faults)}.")
        sources = encoded_sources(texts, self.tokenizer, self.source_tokens)
        return generated(
            self.model,
            self.tokenizer,
            sources,
            beams=beams,
            power=length_penalty,
            longest=most_tokens or self.target_tokens,
        )


def generated(
    model: Any, tokenizer: Tokenizer, sources: Sequence[np.ndarray], *, beams: int, power: float, longest: int,
    advance: Callable[[int], None] | None = None,
) -> list[str]:  # fmt: skip
    """The text that `model` generates from each of `sources`, token ids with special tokens (tokens,) each.

    `beams`, `power` and `longest` are those of `compress.models.beam_search`; `advance(texts)` is called after each batch.
    """
    family, device = FAMILIES[model.config.model_type], next(model.parameters()).device
    mask_id, pad_id = masking_of(tokenizer, model.config.vocab_size).mask_id, pad_id_of(tokenizer)
    out = [""] * len(sources)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for chosen in batches_by_length([len(ids) for ids in sources], max(1, BATCH_TOKENS // beams)):
            ids = torch.from_numpy(padded([sources[i] for i in chosen], pad_id)).to(device)
            there = torch.from_numpy(padded([np.ones_like(sources[i]) for i in chosen], 0) > 0).to(device)
            kept = read_sources(model, family, ids, there, beams)

            def next_token(last: Tensor | None, origins: Tensor | None, kept: Any = kept) -> Tensor:
                if origins is not None:
                    kept.reorder(origins)
                logits = next_logits(model, family, kept, last, mask_id)
                logits[:, mask_id] = float("-inf")  # is never a token of a text
                return logits.log_softmax(dim=-1)

            end_id = int(sources[chosen[0]][-1])
            targets = beam_search(next_token, len(chosen), beams=beams, end_id=end_id, longest=longest, power=power)
            for i, text in zip(chosen, tokenizer.decode_batch(targets), strict=True):
                out[i] = text
            if advance:
                advance(len(chosen))
    model.train(was_training)
    return out
