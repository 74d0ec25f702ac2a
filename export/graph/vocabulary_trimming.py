"""Trims a vocabulary to given texts: the word embeddings are about half of a small encoder's parameters.

The tokens of those texts, the special tokens, and all single characters and bytes are kept, so that other text can still
be tokenised. The given texts are tokenised exactly as before: WordPiece takes the longest piece, Unigram the likeliest
split, and neither gains a piece; BPE keeps the merges that make the kept tokens, in their order. This is checked on every
text before anything is written.

A vocabulary of a given size keeps the tokens that these texts need most often; it splits their rarer words into smaller pieces.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.models.configurations import POSITIONS_FROM_PADDING
from export.graph.exporter import load_answering_model, quiet
from serve.errors import BadInput

SHOWN = 20
NO_TOKENS = "the texts to trim the vocabulary to have no tokens; give texts like those that will be served."
AT_ONCE = 10_000  # texts that are tokenised together
FEW = 10  # ids before that of padding that are kept for its sake


@dataclass(frozen=True)
class Trimmed:
    """What was kept, and the effect on held-out texts."""

    tokens: int
    """Tokens in the vocabulary before trimming."""
    kept: int
    rows_bytes: int
    """float32 bytes of the removed embedding rows."""
    texts: int
    """Held-out texts."""
    texts_split_otherwise: int
    """Held-out texts whose tokens changed."""
    read: int
    """Tokens of the held-out texts before trimming."""
    read_now: int
    """Their tokens after it."""
    unknown_before: int
    unknown: int
    """Unknown tokens in the held-out texts after trimming."""
    newly_unknown: tuple[str, ...]
    """Up to 20 pieces of held-out text that became unknown."""

    def counts(self) -> dict[str, int]:
        """What may be passed on with the model: everything but the pieces of text."""
        return {name: value for name, value in asdict(self).items() if name != "newly_unknown"}

    def told(self) -> str:
        """What was trimmed, and what it does to the held-out texts, as a sentence."""
        lost = f" ({', '.join(map(repr, self.newly_unknown))})" if self.newly_unknown else ""
        return (
            f"vocabulary: {self.kept:,} of {self.tokens:,} tokens kept; unknown tokens in the validation texts: "
            f"{self.unknown_before:,} before, {self.unknown:,} now{lost}; texts that are tokenised differently: "
            f"{self.texts_split_otherwise:,} of {self.texts:,}; all have {self.read_now / max(1, self.read):.2f} times their tokens"
        )


@dataclass(frozen=True)
class Trimming:
    """A tokenizer trimmed to some texts, before any model is."""

    before: dict[str, Any]
    """`tokenizer.json` as it was."""
    after: dict[str, Any]
    new_ids: dict[int, int]
    """The new id of each token that is kept."""


def trim_vocabulary(checkpoint: Path, texts: Sequence[str], held_out: Sequence[str], size: int = 0) -> Trimmed:
    """Trim the vocabulary of the classifier in folder `checkpoint`, in place, to `texts`; report on `held_out`.

    With a `size` at most so many tokens are kept, see `trimming_to`.

    BadInput when this tokenizer cannot be trimmed, no text has a token, or trimming would change a text's tokens.
    """
    file = checkpoint / "tokenizer.json"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    document = json.loads(file.read_text(encoding="utf-8"))
    trimming = trimming_to(texts, document, str(file), pad_id=int(config.get("pad_token_id") or 0), size=size)
    removed = _trim_model(checkpoint, trimming.new_ids)
    file.write_text(json.dumps(trimming.after, ensure_ascii=False, indent=2), encoding="utf-8")
    config_file, new_ids = checkpoint / "tokenizer_config.json", trimming.new_ids
    tokenizer_config = json.loads(config_file.read_text(encoding="utf-8"))
    if "added_tokens_decoder" in tokenizer_config:
        listed = {int(index): token for index, token in tokenizer_config["added_tokens_decoder"].items()}
        kept = {str(new_ids[index]): token for index, token in listed.items() if index in new_ids}
        tokenizer_config["added_tokens_decoder"] = kept
        config_file.write_text(json.dumps(tokenizer_config, ensure_ascii=False, indent=2), encoding="utf-8")
    return _report(trimming, held_out, removed)


def trimming_to(texts: Sequence[str], document: dict[str, Any], named: str, *, pad_id: int, size: int = 0) -> Trimming:
    """The tokenizer `document`, called `named` in messages, trimmed to `texts`.

    Unused ids before that of padding stay where they are few, because some families number positions from it. With a `size`, at most
    so many tokens are kept, those that the texts need most often; their other words are split into these.

    BadInput as for `trim_vocabulary`, and when `size` has no room for the special tokens and the single characters.
    """
    needed = always_kept(document, named, pad_id=pad_id, size=size)
    merges = None
    if size:
        keep, merges = _most_needed(document, needed, texts, size)
    else:
        encodings = _plain(Tokenizer.from_str(json.dumps(document))).encode_batch(list(texts))
        used = {index for encoding in encodings for index in encoding.ids}
        if not used:
            raise BadInput(NO_TOKENS)
        keep = needed | used
        if document["model"]["type"] == "BPE":
            tokens = {token for encoding in encodings for token in encoding.tokens}
            ranked = _merges_in(document["model"])
            rank = {pair: order for order, pair in enumerate(ranked)}
            orders = {order for token in tokens for order in _merges_of(token, rank, document["model"])}
            merges = [ranked[order] for order in sorted(orders)]
            keep |= _ids_in(merges, document["model"])
    new_ids = {old: new for new, old in enumerate(sorted(keep))}
    trimmed = _trimmed_document(document, new_ids, merges)
    if not size:
        now = _plain(Tokenizer.from_str(json.dumps(trimmed))).encode_batch(list(texts))
        moved = [text for text, a, b in zip(texts, encodings, now, strict=True) if a.tokens != b.tokens]
        if moved:
            raise BadInput(
                f"The trimmed tokenizer would give other tokens for {len(moved)} of the {len(texts)} texts that the vocabulary is "
                f"trimmed to; the first is {moved[0][:80]!r}. Leave the vocabulary whole."
            )
    return Trimming(document, trimmed, new_ids)


def always_kept(document: dict[str, Any], named: str, *, pad_id: int, size: int = 0) -> set[int]:
    """The ids that always stay: special tokens, single characters and bytes, and few unused ones before that of padding.

    BadInput when a vocabulary of `size` tokens has no room for them, or this tokenizer cannot be trimmed.
    """
    kind = document["model"].get("type")
    if kind not in ("WordPiece", "BPE", "Unigram"):
        raise BadInput(f"{named} is a {kind} tokenizer; only WordPiece, BPE and Unigram vocabularies can be trimmed.")
    model, pieces = document["model"], _pieces(document["model"])
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    spelled = {  # can spell any text
        index
        for token, index in pieces
        if len(token.removeprefix(prefix).removesuffix(suffix).removeprefix("▁")) <= 1
        or (token.startswith("<0x") and len(token) == 6)
    }
    unknown = model.get("unk_id") if kind == "Unigram" else model["vocab"].get(model.get("unk_token"))
    needed = (
        ({index for _, index in pieces} & set(range(pad_id + 1 if pad_id < FEW else 0)))
        | {token["id"] for token in document.get("added_tokens", [])}
        | spelled
        | ({unknown} - {None})
    )
    if size and len(needed) > size:
        raise BadInput(
            f"{named}: a vocabulary of {size:,} tokens has no room for the {len(needed):,} special tokens and single characters, which "
            "always stay. Give more."
        )
    return needed


def _most_needed(
    document: dict[str, Any], needed: set[int], texts: Sequence[str], size: int
) -> tuple[set[int], list[tuple[str, str]] | None]:
    """The ids of at most `size` tokens, `needed` ones among them, and for BPE the merges that make them.

    The rarest of the tokens that the texts use go, a part at a time; what then spells their words is counted anew, so that pieces of
    many rare words come in. Only the texts that had one of them are read again.
    """
    bpe = document["model"]["type"] == "BPE"
    pieces = dict(_pieces(document["model"]))
    tokens = {index: token for token, index in pieces.items()}
    kept = set(pieces.values()) | needed
    ids: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(texts)
    counts: Counter[int] = Counter()
    changed = list(range(len(texts)))
    while True:
        merges = None
        if bpe:
            there = {token for token, index in pieces.items() if index in kept}
            pairs = _merges_in(document["model"])
            merges = [pair for pair in pairs if there.issuperset(pair) and "".join(pair) in there]
        old_ids = np.array(sorted(kept))
        trimmed = _trimmed_document(document, {int(old): new for new, old in enumerate(old_ids)}, merges)
        tokenizer = _plain(Tokenizer.from_str(json.dumps(trimmed)))
        for start in range(0, len(changed), AT_ONCE):
            chosen = changed[start : start + AT_ONCE]
            for i, encoding in zip(chosen, tokenizer.encode_batch([texts[i] for i in chosen]), strict=True):
                counts.subtract(ids[i].tolist())
                ids[i] = old_ids[np.array(encoding.ids, dtype=np.int64)]
                counts.update(ids[i].tolist())
        uses = Counter({index: count for index, count in counts.items() if count > 0})
        if not uses:
            raise BadInput(NO_TOKENS)
        if merges is not None:
            rank = {pair: order for order, pair in enumerate(merges)}
            made: set[int] = set()
            for index, count in list(uses.items()):
                orders = _merges_of(tokens.get(index, ""), rank, document["model"])
                made |= orders
                # A piece that frequent tokens are merged from is as frequent as they are.
                for piece in _ids_in([merges[order] for order in orders], document["model"]) - {index}:
                    uses[piece] += count
            merges = [merges[order] for order in sorted(made)]
        keep = needed | set(uses)
        if len(keep) <= size:
            return keep, merges
        rarest = sorted(keep - needed, key=lambda index: (uses[index], -index))
        gone = set(rarest[: min(len(keep) - size, max(1, len(rarest) // 5))])
        kept -= gone
        removed = np.array(sorted(gone))
        # Without a merge, BPE may split any text that has one of its pieces in another way.
        changed = [i for i in range(len(texts)) if bpe or np.isin(ids[i], removed).any()]


def _ids_in(merges: Iterable[tuple[str, str]], model: dict[str, Any]) -> set[int]:
    """The ids of what `merges` join, and of what they make."""
    vocabulary = model["vocab"]
    return {vocabulary[piece] for pair in merges for piece in (*pair, "".join(pair))}


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _pieces(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Every token of the vocabulary with its id."""
    if model["type"] == "Unigram":
        return [(token, index) for index, (token, _) in enumerate(model["vocab"])]
    return list(model["vocab"].items())


def _merges_in(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE model, by rank."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(pair[0], pair[1]) for pair in pairs]


def _merges_of(token: str, rank: dict[tuple[str, str], int], model: dict[str, Any]) -> set[int]:
    """The ranks of the merges that make `token` (Sennrich et al. 2016, section 3.2); none if it is not made by merging.

    The merges inside a token have the same order in a text as in the token alone, since no merge crosses its ends.
    """
    suffix = model.get("end_of_word_suffix") or ""
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
    return made if pieces == [token] else set()  # added tokens, single bytes and the unknown token are not


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
    """Keep the rows `new_ids` of the word embeddings, write the checkpoint, and return the bytes removed."""
    import torch

    from compress.models.sentence_encoder import SentenceModel

    found = load_answering_model(checkpoint)
    model = found.model if isinstance(found, SentenceModel) else found
    config = model.config
    check_padding(config, new_ids, str(checkpoint))
    table = model.get_input_embeddings()
    old = table.weight.data
    if max(new_ids) >= len(old):
        raise BadInput(
            f"{checkpoint}: its tokenizer has a token with id {max(new_ids)}, but its model has embeddings for ids up to "
            f"{len(old) - 1}; give the model and the tokenizer that were trained together."
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


def check_padding(config: Any, new_ids: dict[int, int], named: str) -> None:
    """Check that padding keeps its id where a model of `config` numbers positions from it. BadInput if it does not."""
    padding = getattr(config, "pad_token_id", None)
    if config.model_type in POSITIONS_FROM_PADDING and padding is not None and new_ids.get(padding) != padding:
        raise BadInput(
            f"{named}: {config.model_type} models number positions from the padding token's id, and trimming would "
            f"change that id from {padding} to {new_ids.get(padding)}; leave the vocabulary whole."
        )


def _report(trimming: Trimming, held_out: Sequence[str], removed: int) -> Trimmed:
    document = trimming.before
    before, after = (_plain(Tokenizer.from_str(json.dumps(each))) for each in (document, trimming.after))
    unknown = document["model"].get("unk_token")
    if document["model"]["type"] == "Unigram" and document["model"].get("unk_id") is not None:
        unknown = document["model"]["vocab"][document["model"]["unk_id"]][0]
    # Compared by id: a Unigram tokenizer gives an unknown piece as its own text.
    old_id, new_id = (tokenizer.token_to_id(unknown) if unknown else None for tokenizer in (before, after))
    otherwise = unknown_before = unknown_now = read = read_now = 0
    lost: dict[str, None] = {}
    encoded = (tokenizer.encode_batch(list(held_out)) for tokenizer in (before, after))
    for text, old, new in zip(held_out, *encoded, strict=True):
        read += len(old)
        read_now += len(new)
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
        kept=len(trimming.new_ids),
        rows_bytes=removed,
        texts=len(held_out),
        texts_split_otherwise=otherwise,
        read=read,
        read_now=read_now,
        unknown_before=unknown_before,
        unknown=unknown_now,
        newly_unknown=tuple(lost)[:SHOWN],
    )
