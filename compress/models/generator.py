"""Generates texts from texts by beam search, with a checkpoint of `finetune --task text2text-generation`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.data.batches import batches_by_length, padded
from compress.data.corpus import masking_of
from compress.data.encoded import pad_id_of
from compress.data.examples import GENERATION, GENERATOR
from compress.data.text_pairs import encoded_sources, end_id_of
from compress.models.pretrained import Opened, has_vocabulary_head, load_encoder, open_model, open_tokenizer
from compress.models.unilm import next_logits, read_sources
from serve.errors import BadInput
from serve.text.inputs import as_texts, require_unicode

# Families whose layers `compress.models.unilm` can compute: a norm after each half, and positions in the embeddings.
FAMILIES_THAT_GENERATE = ("bert", "roberta", "xlm-roberta")
# Of one search: tokens of the sources times the beams, whose keys and values are held; and logits.
BATCH_TOKENS, BATCH_LOGITS = 4_096, 2**25
MOST_BEAMS, HIGHEST_PENALTY = 64, 10.0
FEWEST_SOURCE_TOKENS, FEWEST_TARGET_TOKENS = 8, 2


class Generator:
    """Generates a text from each text.

    Args:
        checkpoint: a folder that `finetune --task text2text-generation` wrote, or a Hub name.
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one.
        revision: branch, tag or commit of a Hub model.

    Raises:
        BadInput: it cannot be opened, was not trained to generate, or there is no such device.
    """

    def __init__(self, checkpoint: Path | str, *, device: str = "auto", revision: str = "") -> None:
        there = torch.cuda.is_available()
        if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not there):
            raise BadInput(f"device is {device!r}; give cpu or auto{', or cuda' if there else ': torch finds no GPU'}.")
        opened = open_model(str(checkpoint), role="MODEL", wanted="a checkpoint that generates", revision=revision)
        check_generates(opened)
        self.tokens, self.target_tokens = lengths_of(opened)
        self.model = (
            load_encoder(opened, seed=0, vocabulary=True).eval().to("cuda" if there and device != "cpu" else "cpu")
        )
        self.tokenizer = open_tokenizer(opened)

    def __call__(
        self, text: str | list[str], *, beams: int = 5, length_penalty: float = 1.0, most_tokens: int = 0
    ) -> list[str]:
        """The text that is generated from each text.

        Args:
            text: one or several; longer ones than the model was trained on are cut.
            beams: targets under way in the search for the likeliest; 1 takes the likeliest token each time.
            length_penalty: power of the length by which sums of log-probabilities are divided, see `compress.models.generator`.
            most_tokens: of a generated text; 0 is what the model was trained on, which is also the most.

        Raises:
            BadInput: something else than texts, an empty one, or a number out of its range.
        """
        texts = as_texts(text)
        for index, each in enumerate(texts):
            require_unicode(each, "text", index, len(texts))
        faults = [f"text[{index}] is empty" for index, each in enumerate(texts) if not each.strip()][:5]
        faults += [f"beams is {beams}; 1 to {MOST_BEAMS} are needed"] * (not 1 <= beams <= MOST_BEAMS)
        faults += [f"length_penalty is {length_penalty}; 0 to {HIGHEST_PENALTY:g} is needed"] * (
            not 0 <= length_penalty <= HIGHEST_PENALTY
        )
        faults += [f"most_tokens is {most_tokens}; at most {self.target_tokens} were trained"] * (
            not 0 <= most_tokens <= self.target_tokens
        )
        if faults:
            raise BadInput(f"Nothing was generated: {'; '.join(faults)}.")
        sources = encoded_sources(texts, self.tokenizer, self.tokens - self.target_tokens)
        longest = most_tokens or self.target_tokens
        return generated(self.model, self.tokenizer, sources, beams=beams, power=length_penalty, longest=longest)


def check_family(opened: Opened) -> None:
    """Check that `opened` is of a family that can generate. Raises BadInput: it is not."""
    if opened.config.model_type not in FAMILIES_THAT_GENERATE:
        raise BadInput(
            f"{opened.role} {opened.name} is a {opened.config.model_type} model, which cannot generate text here. Give one of "
            f"{', '.join(FAMILIES_THAT_GENERATE)}."
        )


def check_generates(opened: Opened) -> None:
    """Check that `opened` was trained to generate. Raises BadInput: it was not."""
    check_family(opened)
    if not (has_vocabulary_head(opened) and isinstance(getattr(opened.config, GENERATOR, None), dict)):
        raise BadInput(
            f"{opened.role} {opened.name} was not trained to generate text. Train it: stillroom finetune --model {opened.name} "
            f"--task {GENERATION} ..."
        )


def lengths_of(opened: Opened) -> tuple[int, int]:
    """The most tokens of text and target together that the generator `opened` was trained on, and those of a target.

    Raises BadInput: its configuration holds no such numbers.
    """
    settings = getattr(opened.config, GENERATOR)
    tokens, target_tokens = settings.get("tokens"), settings.get("target_tokens")
    if not (
        type(tokens) is int
        and type(target_tokens) is int
        and fits(tokens, target_tokens)
        and tokens <= opened.most_tokens
    ):
        raise BadInput(
            f"{opened.role} {opened.name}: `{GENERATOR}` in its config.json is {settings}; `tokens` (at most {opened.most_tokens}) and "
            "`target_tokens` are needed. Copy the folder again."
        )
    return tokens, target_tokens


def fits(tokens: int, target_tokens: int) -> bool:
    """Whether targets of `target_tokens` leave room for a text in `tokens`."""
    return FEWEST_TARGET_TOKENS <= target_tokens <= tokens - FEWEST_SOURCE_TOKENS


def generated(
    model: Any, tokenizer: Tokenizer, sources: Sequence[np.ndarray], *, beams: int, power: float, longest: int
) -> list[str]:
    """The text that `model` generates from each of `sources`, token ids with special tokens (tokens,) each.

    `beams`, `power` and `longest` are those of `compress.models.generator`.
    """
    device = next(model.parameters()).device
    words = int(model.config.vocab_size)
    mask_id, pad_id, end_id = masking_of(tokenizer, words).mask_id, pad_id_of(tokenizer), end_id_of(tokenizer)
    out = [""] * len(sources)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for chosen in _batches([len(ids) for ids in sources], beams, words):
                ids = torch.from_numpy(padded([sources[i] for i in chosen], pad_id)).to(device)
                there = torch.from_numpy(padded([np.ones_like(sources[i]) for i in chosen], 0) > 0).to(device)
                next_token = _next_token(model, ids, there, beams, mask_id)
                targets = beam_search(next_token, len(chosen), beams=beams, end_id=end_id, longest=longest, power=power)
                for i, text in zip(chosen, tokenizer.decode_batch(targets), strict=True):
                    out[i] = text
    finally:
        model.train(was_training)
    return out


def _batches(lengths: Sequence[int], beams: int, words: int) -> list[list[int]]:
    """The texts of each search, so that neither keys and values nor logits take too much memory."""
    most = max(1, BATCH_LOGITS // (words * beams))
    by_length = batches_by_length(lengths, max(1, BATCH_TOKENS // beams))
    return [batch[first : first + most] for batch in by_length for first in range(0, len(batch), most)]


def _next_token(
    model: Any, ids: Tensor, of_source: Tensor, beams: int, mask_id: int
) -> Callable[[Tensor | None, Tensor | None], Tensor]:
    """What `beam_search` asks for the next tokens of targets of the sources `ids`."""
    kept = read_sources(model, ids, of_source, beams)

    def next_token(last: Tensor | None, origins: Tensor | None) -> Tensor:
        if origins is not None:
            kept.reorder(origins)
        logits = next_logits(model, kept, last, mask_id)
        logits[:, mask_id] = float("-inf")  # it is never a token of a text
        return logits.log_softmax(dim=-1)

    return next_token


# Gives the log-probabilities (texts * beams, vocabulary) of the next token from the last ones (texts * beams,), and from the rows that
# they go on from, (texts * beams,); both are None for the first token.
NextToken = Callable[[Tensor | None, Tensor | None], Tensor]


def length_penalty(tokens: int, power: float) -> float:
    """What a sum of log-probabilities of `tokens` tokens is divided by: `((5 + tokens) / 6) ** power` (Wu et al. 2016, eq. 14)."""
    return float(((5 + tokens) / 6) ** power)


def beam_search(
    next_token: NextToken, texts: int, *, beams: int, end_id: int, longest: int, power: float
) -> list[list[int]]:
    """The likeliest target that was found for each text: its token ids, without the one that ends it.

    A text is done when no target under way can be better than its best finished one; with one beam, at the first end.

    Args:
        next_token: the model; its rows are the beams of the first text, then those of the second.
        texts: how many.
        beams: targets under way for each text; 1 takes the likeliest token each time.
        end_id: the token that ends a target.
        longest: most tokens of a target, the one that ends it included.
        power: of the length penalty, 0 or more; a higher one prefers longer targets.
    """
    best_of: list[tuple[float, list[int]]] = [
        (float("-inf"), [])
    ] * texts  # the score and the tokens of finished targets
    done = [False] * texts
    log_probs = next_token(None, None)
    device = log_probs.device
    under_way: list[list[int]] = [[] for _ in range(texts * beams)]
    # All beams of a text begin alike, so only its first counts.
    sums = torch.full((texts, beams), float("-inf"), dtype=torch.float64, device=device)
    sums[:, 0] = 0
    for length in range(1, longest + 1):
        best, rows, tokens = _best(sums, log_probs)
        going: list[tuple[float, int, int]] = []  # the sum, the row it goes on from, the token
        for text, candidates in enumerate(_rows_of(best, rows, tokens)):
            ends, goes_on = _apart(candidates, beams, end_id, last=length == longest)
            scored = [(total / length_penalty(length, power), row, token) for total, row, token in ends]
            for score, row, token in () if done[text] else scored:
                if score > best_of[text][0]:
                    best_of[text] = score, under_way[row] + [token] * (token != end_id)
            # Sums only fall, and the penalty of a longer target divides by more.
            bound = goes_on[0][0] / length_penalty(longest, power)
            done[text] = done[text] or bound <= best_of[text][0] or (beams == 1 and bool(ends))
            going += goes_on
        if length == longest or all(done):
            break
        sums = torch.tensor([total for total, _, _ in going], dtype=torch.float64, device=device).view(texts, beams)
        origins, last = (torch.tensor([each[i] for each in going], device=device) for i in (1, 2))
        under_way = [[*under_way[row], token] for _, row, token in going]
        log_probs = next_token(last, origins)
    return [target for _, target in best_of]


def _best(sums: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest sums of a text's beams and their next tokens, twice as many as beams, of which at most half are ends.

    `sums` is (texts, beams), `log_probs` (texts * beams, vocabulary). Gives the sums, the rows that they go on from, and the tokens,
    (texts, 2 * beams) each, largest first. Each row is narrowed first, because a vocabulary in float64 takes gigabytes.
    """
    texts, beams = sums.shape
    of_row, tokens = log_probs.topk(min(2 * beams, log_probs.shape[1]), dim=1)
    totals = (sums[:, :, None] + of_row.double().view(texts, beams, -1)).flatten(1)
    best, places = totals.topk(min(2 * beams, totals.shape[1]), dim=1)
    rows = places // of_row.shape[1] + torch.arange(texts, device=sums.device)[:, None] * beams
    return best, rows, tokens.view(texts, -1).gather(1, places)


def _rows_of(*tensors: Tensor) -> Iterable[list[tuple[float, int, int]]]:
    """The rows of tensors of one shape, side by side as numbers."""
    return (list(zip(*columns, strict=True)) for columns in zip(*(tensor.tolist() for tensor in tensors), strict=True))


def _apart(
    candidates: list[tuple[float, int, int]], beams: int, end_id: int, *, last: bool
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]]:
    """The candidates of one text that end, and the `beams` that go on, best first; after the `last` token all end.

    A candidate counts only while fewer than `beams` better ones go on.
    """
    ends: list[tuple[float, int, int]] = []
    goes_on: list[tuple[float, int, int]] = []
    for each in candidates:
        if len(goes_on) == beams:
            break
        if each[2] != end_id:
            goes_on.append(each)
        if (each[2] == end_id or last) and each[0] > float("-inf"):
            ends.append(each)
    return ends, goes_on
