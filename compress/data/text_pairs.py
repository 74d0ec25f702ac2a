"""Texts with the texts to generate from them: the splits of a folder, and batches with masked targets.

A row of a batch is the source with its special tokens, then the target and the token that ends it. The target's tokens are masked at
random (Dong et al. 2019, "UniLM", sections 2.4 and 2.5); which of them depends on the seed and the step alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.data.batches import Batch, padded
from compress.data.columns import USUAL, Columns
from compress.data.corpus import MASKED_SHARE, RANDOM_SHARE, Masking
from compress.data.encoded import IGNORED
from compress.data.examples import SPLITS, Example, Splits
from compress.data.file_formats import SUFFIXES, rows_in, suffix_of
from compress.data.row_fields import BadRows, Fault, UnreadableFrom, note, text_of
from compress.data.sampler import Sampler
from compress.data.splits import split_files, splits_of, what_is_in
from compress.input_errors import Faults
from serve.errors import BadInput

CHOSEN_SHARE = 0.7  # of a target's tokens (UniLM, sections 3.1 and 3.3)
# In the attention mask of a batch: padding is 0.
SOURCE, TARGET = 1, 2


def read_pair_splits(data: str, columns: Columns = USUAL, target: str = "target", *, seed: int = 0) -> Splits:
    """The splits under the folder `data`, as `compress.data.splits.read_splits` reads them; a tenth of train is held out where there
    is no validation file. The `text_pair` of an example is the text that is to be generated from it.

    Raises BadInput: no such folder, a split is missing or has two files. BadRows: rows have faults, all of which it lists, or a
    split is empty.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise BadInput(
            f"--data {data} is not a folder. Give one with train, validation and test files ({', '.join(SUFFIXES[:-1])}), whose rows "
            f"have `{columns.text}` and `{target}`."
        )
    faults = Faults()
    files = {split: faults.check(partial(split_files, folder, split)) or [] for split in SPLITS}
    faults.raise_if_any()
    if missing := [split for split in ("train", "test") if not files[split]]:
        raise BadInput(
            f"--data {data} has no {' and no '.join(missing)} split. Add a file {missing[0]}.jsonl, or one that ends in "
            f"{', '.join(SUFFIXES[1:-2])} or {SUFFIXES[-2]}.{what_is_in(folder)}"
        )
    bad: list[Fault] = []
    found = {
        split: [pair for file in parts for pair in _pairs_in(file, columns, target, bad)]
        for split, parts in files.items()
        if parts
    }
    if bad:
        raise BadRows(bad)
    return splits_of(found, data, seed)


def read_pairs(file: Path, columns: Columns = USUAL, target: str = "target") -> list[Example]:
    """The pairs of one file, by its suffix.

    Raises BadInput: no such file, or an unknown suffix. BadRows: rows have faults, all of which it lists, or there are none.
    """
    bad: list[Fault] = []
    found = _pairs_in(file, columns, target, bad)
    if bad:
        raise BadRows(bad)
    return found


def _pairs_in(file: Path, columns: Columns, target: str, bad: list[Fault]) -> list[Example]:
    """The pairs of a file; `bad` gets the faults of its rows, and an empty file is one."""
    if not file.is_file() or suffix_of(file) not in SUFFIXES or suffix_of(file) == ".conll":
        raise BadInput(
            f"{file} is no file of rows. Give one that ends in {', '.join(SUFFIXES[:-2])} or {SUFFIXES[-2]}."
        )
    found: list[Example] = []
    before = len(bad)
    try:
        for line, row in rows_in(file, suffix_of(file), columns, None, bad):
            try:
                found.append(_pair_of(row, columns, target))
            except ValueError as reason:
                note(bad, Fault(str(file), line, str(reason)))
    except UnreadableFrom as error:
        bad += error.faults
    if not found and len(bad) == before:
        bad.append(Fault(str(file), None, "is empty: it holds no rows"))
    return found


def _pair_of(row: object, columns: Columns, target: str) -> Example:
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with fields")
    for name, flag in ((columns.text, "--text-column"), (target, "--target-column")):
        if name not in row:
            raise ValueError(
                f"has no `{name}` (its fields: {', '.join(map(str, row))}); rename fields, or give {flag} NAME"
            )
    return Example(text_of(row, columns.text), text_of(row, target))


class TokenPair(NamedTuple):
    """Token ids of a source with its special tokens, and of a target with the token that ends it, both (tokens,)."""

    source: np.ndarray
    target: np.ndarray


def end_id_of(tokenizer: Tokenizer) -> int:
    """The id of the token that ends texts, and here targets. Raises BadInput: the tokenizer ends no text."""
    nothing = tokenizer.encode("")
    if not nothing.ids or not nothing.special_tokens_mask[-1]:
        raise BadInput(
            "The tokenizer adds no token to the end of a text, and generated texts need one to end. Give a model whose tokenizer does, as "
            "those of BERT ([SEP]) and RoBERTa (</s>)."
        )
    return nothing.ids[-1]


def encoded_sources(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[np.ndarray]:
    """The token ids of each text with its special tokens, cut to `longest` tokens."""
    tokenizer.enable_truncation(max_length=longest)
    return [np.array(each.ids, dtype=np.int64) for each in tokenizer.encode_batch(list(texts))]


def encoded_pairs(
    pairs: Sequence[Example], tokenizer: Tokenizer, longest: int, longest_target: int
) -> tuple[list[TokenPair], int]:
    """The tokens of each pair, and how many targets are cut.

    Targets have at most `longest_target` tokens with the one that ends them, sources the rest of `longest`. Special tokens that are
    written in a target are text.
    """
    sources = encoded_sources([pair.text for pair in pairs], tokenizer, longest - longest_target)
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    try:
        targets = tokenizer.encode_batch([pair.text_pair or "" for pair in pairs], add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = False
    end_id = end_id_of(tokenizer)
    encoded = [
        TokenPair(source, np.array([*target.ids[: longest_target - 1], end_id], dtype=np.int64))
        for source, target in zip(sources, targets, strict=True)
    ]
    return encoded, sum(len(target.ids) >= longest_target for target in targets)


@dataclass(frozen=True)
class MaskedTargets:
    """The batch of each step of a training: pairs of about equal length, tokens of whose targets are masked.

    `inputs` of a batch are `input_ids`, `attention_mask` (`SOURCE`, `TARGET`, or 0 for padding), `token_type_ids` and `position_ids`, all
    (batch, tokens); `row_index` are the masked tokens, `targets` their ids.
    """

    pairs: Sequence[TokenPair]
    batch: int
    seed: int
    masking: Masking
    pad_id: int

    @cached_property
    def sampler(self) -> Sampler:
        """Chooses the pairs of each step."""
        return Sampler(np.array([len(source) + len(target) for source, target in self.pairs]), self.batch, self.seed)

    @property
    def ids(self) -> list[np.ndarray]:
        """All token ids that occur."""
        return [np.concatenate(pair) for pair in self.pairs]

    def at(self, step: int) -> Batch:
        """The batch of one step."""
        chosen = [self.pairs[i] for i in self.sampler.at(step)]
        generator = np.random.default_rng([self.seed, step, 1])  # the sampler has the stream without 1
        ids = padded([np.concatenate(pair) for pair in chosen], self.pad_id)
        kinds = padded([np.repeat([SOURCE, TARGET], [len(pair.source), len(pair.target)]) for pair in chosen], 0)
        targets, shown = self._masked(ids, kinds == TARGET, generator)
        asked = targets.ravel() != IGNORED
        inputs = {
            "input_ids": shown, "attention_mask": kinds, "token_type_ids": (kinds == TARGET).astype(np.int64),
            "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
        }  # fmt: skip
        return Batch(
            {name: torch.from_numpy(value) for name, value in inputs.items()},
            torch.from_numpy(np.flatnonzero(asked)),
            torch.from_numpy(targets.ravel()[asked]),
            generates=True,
        )

    def _masked(
        self, ids: np.ndarray, is_target: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids to predict (`IGNORED` elsewhere) and the ids that the model reads, both (batch, tokens).

        Each token of a target is chosen with `CHOSEN_SHARE`, and one of each target at least. Of the chosen, 80 % become the mask token and
        10 % a random one.
        """
        drawn = np.where(is_target, generator.random(ids.shape), 2.0)
        chosen = is_target & (drawn <= np.maximum(CHOSEN_SHARE, drawn.min(axis=1, keepdims=True)))
        becomes = generator.random(ids.shape)
        shown = np.where(chosen & (becomes < MASKED_SHARE), self.masking.mask_id, ids)
        swapped = chosen & (becomes >= MASKED_SHARE) & (becomes < MASKED_SHARE + RANDOM_SHARE)
        shown = np.where(swapped, generator.integers(0, self.masking.size, ids.shape), shown)
        return np.where(chosen, ids, IGNORED), shown
