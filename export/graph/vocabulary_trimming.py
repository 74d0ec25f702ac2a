"""A vocabulary trimmed to the texts at hand: the table of words is half of a small encoder.

Kept are the tokens that those texts are split into, the special ones, and all single characters and bytes, so that
another text can still be spelled. The texts themselves are split exactly as before: WordPiece takes the longest piece
that there is, Unigram the likeliest way, and neither gains a piece; of BPE the merges that lead to the kept tokens stay, in
their order. That is checked on every text before anything is written.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from export.graph.exporter import POSITIONS_FROM_PADDING, load_classifier, quiet
from serve.errors import BadInput

SHOWN = 20


@dataclass(frozen=True)
class Trimmed:
    """What was kept, and what it does to texts that trimming did not see."""

    tokens: int
    """Tokens of the vocabulary before."""
    kept: int
    rows_bytes: int
    """float32 bytes that the checkpoint lost."""
    texts: int
    """Held-out texts."""
    texts_split_otherwise: int
    """Of these, texts that are split into other tokens than before."""
    read: int
    """Tokens of the held-out texts, before."""
    unknown_before: int
    unknown: int
    """Unknown tokens among them, before and now."""
    newly_unknown: tuple[str, ...]
    """Some of the pieces of held-out text that became unknown."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "newly_unknown": list(self.newly_unknown)}


def trim_vocabulary(checkpoint: Path, texts: Sequence[str], held_out: Sequence[str]) -> Trimmed:
    """Trim the vocabulary of the classifier in folder `checkpoint`, in place, to `texts`; report on `held_out` ones.

    BadInput when the tokenizer is of a kind that cannot be trimmed, or no text has a token.
    """
    file = checkpoint / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    kind = document["model"].get("type")
    if kind not in ("WordPiece", "BPE", "Unigram"):
        raise BadInput(f"{file} is a {kind} tokenizer; WordPiece, BPE and Unigram vocabularies can be trimmed.")
    before = _plain(Tokenizer.from_str(json.dumps(document)))
    encodings = before.encode_batch(list(texts))
    used = {index for encoding in encodings for index in encoding.ids}
    if not used:
        raise BadInput("the texts to keep the words of have no tokens; give texts like those that will be served.")
    keep = used | {token["id"] for token in document.get("added_tokens", [])} | _spelling(document["model"])
    merges = None
    if kind == "BPE":
        merges = _merges_used(document["model"], {token for encoding in encodings for token in encoding.tokens})
        vocabulary = document["model"]["vocab"]
        keep |= {vocabulary[piece] for pair in merges for piece in (*pair, "".join(pair))}
    new_ids = {old: new for new, old in enumerate(sorted(keep))}
    trimmed = _trimmed_document(document, new_ids, merges)
    after = _plain(Tokenizer.from_str(json.dumps(trimmed)))
    now = after.encode_batch(list(texts))
    moved = [text for text, a, b in zip(texts, encodings, now, strict=True) if a.tokens != b.tokens]
    if moved:
        raise BadInput(
            f"Trimmed, the tokenizer would split {len(moved)} of the {len(texts)} texts to keep the words of in another way, the "
            f"first of them {moved[0][:80]!r}; leave the vocabulary whole."
        )
    removed = _trim_model(checkpoint, new_ids)
    file.write_text(json.dumps(trimmed, ensure_ascii=False, indent=2), encoding="utf-8")
    _trim_config(checkpoint / "tokenizer_config.json", new_ids)
    return _report(document, before, after, held_out, len(new_ids), removed)


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _pieces(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Every token of the vocabulary with its id."""
    if model["type"] == "Unigram":
        return [(token, index) for index, (token, _) in enumerate(model["vocab"])]
    return list(model["vocab"].items())


def _spelling(model: dict[str, Any]) -> set[int]:
    """The tokens that any text can be spelled with, and the one for what cannot."""
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    spelled = {
        index
        for token, index in _pieces(model)
        if len(token.removeprefix(prefix).removesuffix(suffix).removeprefix("▁")) <= 1
        or (token.startswith("<0x") and len(token) == 6)
    }
    unknown = model.get("unk_id") if model["type"] == "Unigram" else model["vocab"].get(model.get("unk_token"))
    return spelled if unknown is None else spelled | {unknown}


def _merges_used(model: dict[str, Any], tokens: Iterable[str]) -> list[tuple[str, str]]:
    """The merges that make `tokens`, in the order in which they rank (Sennrich et al. 2016, 3.2).

    Wherever a token stands, the merges inside it are made in the order in which they are made of it alone: a pair of which
    only a half is inside it was never merged.
    """
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    rank = {pair: order for order, pair in enumerate(pairs)}
    suffix = model.get("end_of_word_suffix") or ""
    used: set[int] = set()
    for token in tokens:
        pieces = list(token.removesuffix(suffix))
        if pieces and token.endswith(suffix):
            pieces[-1] += suffix
        made: set[int] = set()
        while True:
            ranks = [rank.get(pair, len(rank)) for pair in pairwise(pieces)]
            best = min(ranks, default=len(rank))
            if best == len(rank):
                break
            made.add(best)
            at = ranks.index(best)
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        if pieces == [token]:  # others were not made by merging: added tokens, single bytes, the unknown
            used |= made
    return [(pairs[order][0], pairs[order][1]) for order in sorted(used)]


def _trimmed_document(
    document: dict[str, Any], new_ids: dict[int, int], merges: list[tuple[str, str]] | None
) -> dict[str, Any]:
    """`tokenizer.json` with the kept tokens under their new ids."""
    trimmed: dict[str, Any] = json.loads(json.dumps(document))
    model = trimmed["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [row for index, row in enumerate(model["vocab"]) if index in new_ids]
        if model.get("unk_id") is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        model["vocab"] = {token: new_ids[index] for token, index in model["vocab"].items() if index in new_ids}
    if merges is not None:
        as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
        model["merges"] = [" ".join(pair) if as_text else list(pair) for pair in merges]
    for token in trimmed.get("added_tokens", []):
        token["id"] = new_ids[token["id"]]
    trimmed["padding"] = trimmed["truncation"] = None
    _renumber(trimmed.get("post_processor"), new_ids)
    return trimmed


def _renumber(processor: dict[str, Any] | None, new_ids: dict[int, int]) -> None:
    """Give the special tokens of a post-processor their new ids, in place."""
    if not processor:
        return
    for part in processor.get("processors", []):
        _renumber(part, new_ids)
    for name in ("sep", "cls"):  # BertProcessing and RobertaProcessing: [token, id]
        if name in processor:
            processor[name][1] = new_ids[processor[name][1]]
    special = processor.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else []:
        token["ids"] = [new_ids[index] for index in token["ids"]]


def _trim_model(checkpoint: Path, new_ids: dict[int, int]) -> int:
    """Keep the rows of `new_ids` of the table of words, write the checkpoint, and return the bytes that it lost."""
    import torch

    model, _ = load_classifier(checkpoint)
    config = model.config
    padding = getattr(config, "pad_token_id", None)
    if config.model_type in POSITIONS_FROM_PADDING and padding is not None and new_ids.get(padding) != padding:
        raise BadInput(
            f"{checkpoint}: positions of {config.model_type} models are numbered from the padding's id, and trimming would "
            f"change it from {padding} to {new_ids.get(padding)}; leave the vocabulary whole."
        )
    table = model.get_input_embeddings()
    old = table.weight.data
    if max(new_ids) >= len(old):
        raise BadInput(
            f"{checkpoint}: its tokenizer has token {max(new_ids)}, and its model has words up to {len(old) - 1}; the two do not "
            "belong together."
        )
    table.weight = torch.nn.Parameter(old[torch.tensor(sorted(new_ids))].clone(), requires_grad=False)
    config.vocab_size = len(new_ids)
    for name in ("pad", "bos", "eos", "sep", "cls", "unk", "mask", "decoder_start"):
        value = getattr(config, f"{name}_token_id", None)
        if isinstance(value, int):
            setattr(config, f"{name}_token_id", new_ids.get(value))
    with quiet():
        model.save_pretrained(checkpoint)
    return int((len(old) - len(new_ids)) * old.shape[1] * 4)


def _trim_config(file: Path, new_ids: dict[int, int]) -> None:
    """Renumber the added tokens of `tokenizer_config.json`, where it lists them."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"]
        config["added_tokens_decoder"] = {
            str(new_ids[int(index)]): token for index, token in listed.items() if int(index) in new_ids
        }
        file.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _report(
    document: dict[str, Any], before: Tokenizer, after: Tokenizer, held_out: Sequence[str], kept: int, removed: int
) -> Trimmed:
    unknown = document["model"].get("unk_token")
    if document["model"]["type"] == "Unigram" and document["model"].get("unk_id") is not None:
        unknown = document["model"]["vocab"][document["model"]["unk_id"]][0]
    # By id: a Unigram model's token for what it does not know is the text itself.
    old_id, new_id = (tokenizer.token_to_id(unknown) if unknown else None for tokenizer in (before, after))
    otherwise = unknown_before = unknown_now = read = 0
    lost: dict[str, None] = {}
    encoded = (tokenizer.encode_batch(list(held_out)) for tokenizer in (before, after))
    for text, old, new in zip(held_out, *encoded, strict=True):
        read += len(old)
        known = {span for index, span in zip(old.ids, old.offsets, strict=True) if index == old_id}
        now = {span for index, span in zip(new.ids, new.offsets, strict=True) if index == new_id}
        otherwise += old.tokens != new.tokens or known != now
        unknown_before += old.ids.count(old_id) if old_id is not None else 0
        for index, (start, end) in zip(new.ids, new.offsets, strict=True):
            if index == new_id:
                unknown_now += 1
                if (start, end) not in known:
                    lost[text[start:end]] = None
    return Trimmed(
        tokens=len(_pieces(document["model"])),
        kept=kept,
        rows_bytes=removed,
        texts=len(held_out),
        texts_split_otherwise=otherwise,
        read=read,
        unknown_before=unknown_before,
        unknown=unknown_now,
        newly_unknown=tuple(lost)[:SHOWN],
    )
