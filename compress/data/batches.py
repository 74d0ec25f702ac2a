"""Padded batches of tokenised texts: collating, cutting into parts, moving to a device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compress.data.encoded import IGNORED, Encoded
from compress.data.sampler import Sampler
from compress.distributed import ProcessShare

BATCH_TOKENS = 2_048  # padded tokens of a prediction batch: enough for the matrix units, and small enough for the cache


class Weights(NamedTuple):
    """The weights of means over a batch, or a part of one: what it has of texts, texts with rows, rows and labelled rows, divided by what
    a batch has, or has on average (`TaskText`)."""

    texts: float = 1.0
    asked: float = 1.0
    rows: float = 1.0
    labelled: float = 1.0


WHOLE = Weights()


@dataclass(frozen=True)
class Batch:
    """Padded inputs `(batch, tokens)` and flat rows: `row_index` into `(batch * tokens)`, or with `whole_texts` into
    `(batch)`.

    The attention mask is 0 for padding, otherwise the number of the token's text within its row, from 1 on: it is 1 unless texts
    are packed (`compress.data.sampler`). Packed inputs have `position_ids`, which begin at 0 in each text.
    """

    inputs: dict[str, Tensor]
    row_index: Tensor
    targets: Tensor
    soft: Tensor | None = None
    whole_texts: bool = False
    weights: Weights = WHOLE
    # The teacher's cached activations by part and layer, (batch, tokens, width); None if there is no cache.
    teacher_activations: dict[tuple[str, int], Tensor] | None = None
    # Whether no row has padding and none is packed, where that is known; models then need no mask.
    full: bool = False
    # Whether the mask tells the source from the target that is generated of it (`compress.data.text_pairs`).
    generates: bool = False


def are_numbers(targets: Tensor) -> bool:
    """Whether `targets` are numbers, float (rows,), and not labels."""
    return targets.ndim == 1 and targets.is_floating_point()


def are_spans(targets: Tensor) -> bool:
    """Whether `targets` are those of questions, int (rows, 3); see `compress.data.encoded.Encoded`."""
    return targets.ndim == 2 and not targets.is_floating_point()


def labelled_rows(targets: Tensor) -> Tensor:
    """Which of `targets`, as `compress.losses.outputs.label_loss` takes them, carry a label; a bool for each.

    Of questions it is the row of each window in which its answer starts.
    """
    if are_spans(targets):
        return targets[:, 1] == 1
    return ~targets.isnan() if are_numbers(targets) else targets != IGNORED


def rows_that_count(targets: Tensor) -> Tensor:
    """Which rows a mean over rows is divided by, a bool for each: all, or of questions the first of each window."""
    return targets[:, 0] == 1 if are_spans(targets) else torch.ones(len(targets), dtype=torch.bool)


def part_of(batch: Batch, share: ProcessShare) -> Batch:
    """The rows of `batch` in `share`. Means over the parts, times their weights, add up to the mean over the whole batch.

    An empty part holds the first row with weight 0, so that every part gives gradients to the same parameters.
    """
    if share.of == 1:
        return batch
    rows, width = batch.inputs["input_ids"].shape
    first, last = share.bounds(rows)
    empty = first == last
    if empty:
        first, last = 0, 1
    rows_a_text = 1 if batch.whole_texts else width
    inside = (batch.row_index >= first * rows_a_text) & (batch.row_index < last * rows_a_text)
    mask, labelled = batch.inputs["attention_mask"], labelled_rows(batch.targets)
    counts = rows_that_count(batch.targets)
    texts = mask.amax(dim=1)  # (rows,), of each row
    asked = batch.row_index  # (texts with rows,), the row of each
    if not batch.whole_texts:
        asked = text_of_row(mask, asked).unique() // (width + 1)  # type: ignore[no-untyped-call]

    def weight(part: Tensor, whole: Tensor, of_batch: float) -> float:
        return 0.0 if empty else of_batch * float(part.sum()) / max(1.0, float(whole.sum()))

    return replace(
        batch,
        inputs={name: value[first:last] for name, value in batch.inputs.items()},
        row_index=batch.row_index[inside] - first * rows_a_text,
        targets=batch.targets[inside],
        soft=None if batch.soft is None else batch.soft[inside],
        teacher_activations=None
        if batch.teacher_activations is None
        else {part: value[first:last] for part, value in batch.teacher_activations.items()},
        weights=Weights(
            weight(texts[first:last], texts, batch.weights.texts),
            weight((asked >= first) & (asked < last), torch.ones_like(asked), batch.weights.asked),
            weight(inside & counts, counts, batch.weights.rows),
            weight(labelled[inside], labelled, batch.weights.labelled),
        ),
    )


def text_of_row(mask: Tensor, row_index: Tensor) -> Tensor:
    """A number for each of `row_index`, (rows,), which is the same for rows of one text; `mask` is that of `Batch`."""
    width = mask.shape[1]
    return row_index // width * (width + 1) + mask.flatten()[row_index]


def text_shares(mask: Tensor, row_index: Tensor) -> Tensor:
    """The share of each of `row_index` in a mean over the rows of a text, then over texts, float64 (rows,); `mask` is that of `Batch`."""
    text = text_of_row(mask, row_index)
    counts = torch.zeros(mask.numel() + len(mask), dtype=torch.float64, device=mask.device)
    counts.index_add_(0, text, torch.ones_like(text, dtype=counts.dtype))
    return 1 / (counts[text] * (counts > 0).sum())


@dataclass(frozen=True)
class TaskText:
    """Batches of a task's texts for `compress.training.stage`.

    The sums over a batch are divided by what a batch holds on average, so that a word of a short text counts as one of a long text, which
    comes with long ones, and a text of a small batch as any other.
    """

    texts: Encoded
    batch: int
    seed: int
    others: Sequence[np.ndarray] = ()
    """The token ids of the validation texts."""
    soft: Sequence[np.ndarray] | None = None
    """A teacher's logits (rows, labels) of each text."""
    counts: np.ndarray | None = None
    """How often each text is read in an epoch, (texts,), if not once."""
    labelled: int = 0
    """Of how many texts, the first, each step has a fixed number; 0 if all are of one kind."""

    @cached_property
    def sampler(self) -> Sampler:
        """Chooses the texts of each step."""
        lengths = np.array([len(ids) for ids in self.texts.ids])
        return Sampler(lengths, self.batch, self.seed, self.counts, self.labelled, even=True)

    @property
    def pad_id(self) -> int:
        """The id that fills padding."""
        return self.texts.pad_id

    @property
    def ids(self) -> list[np.ndarray]:
        """All token ids that occur."""
        return [*self.texts.ids, *self.others]

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a step, on average."""
        return float(self.sampler.lengths.sum()) / self.sampler.steps_per_epoch

    def at(self, step: int) -> Batch:
        """The batch of one step."""
        chosen, (held, usual) = self.sampler.at(step), self._held
        texts, rows, labelled = (held[:, chosen].sum(axis=1) / usual).tolist()
        batch = collate(self.texts, chosen.tolist(), soft=self.soft)
        return replace(batch, weights=Weights(texts, texts, rows, labelled))

    @cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each text itself, its rows that count and those with a label, (3, texts); and of a step on average, (3,)."""
        targets = torch.from_numpy(np.concatenate(self.texts.targets))
        owners = np.repeat(np.arange(len(self.texts)), [len(rows) for rows in self.texts.rows])
        known = labelled_rows(targets).reshape(len(targets), -1).any(dim=1)
        held = [
            np.bincount(owners, rows.numpy(), len(self.texts)) for rows in (rows_that_count(targets), known)
        ]  # fmt: skip
        found = np.stack([np.ones(len(self.texts)), *held])
        return found, np.maximum(found @ self.sampler.reads, np.finfo(np.float64).tiny)


def collate(
    encoded: Encoded,
    chosen: Sequence[int],
    *,
    soft: Sequence[np.ndarray] | None = None,
    remap: np.ndarray | None = None,
) -> Batch:
    """The texts `chosen` as one batch, padded to the longest; `remap` maps token ids to rows of narrowed embeddings."""
    ids = padded([encoded.ids[i] for i in chosen], encoded.pad_id)
    mask = padded([np.ones_like(encoded.ids[i]) for i in chosen], 0)
    types = padded([encoded.encodings[i].type_ids for i in chosen], 0)
    a_text = ids.shape[1] if encoded.task.per_token else 1
    flat = [encoded.rows[i] + row * a_text for row, i in enumerate(chosen)]
    if remap is not None:
        ids = remap[ids]
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return Batch(
        {name: torch.from_numpy(value) for name, value in inputs.items()},
        torch.from_numpy(np.concatenate(flat)),
        torch.from_numpy(np.concatenate([encoded.targets[i] for i in chosen])),
        None if soft is None else torch.from_numpy(np.concatenate([soft[i] for i in chosen]).astype(np.float32)),
        not encoded.task.per_token,
    )


def inputs_for(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """`inputs` as the forward of `model` takes them."""
    if getattr(model.config, "type_vocab_size", 0) < 2:
        # Families without segments (DistilBERT) or with one kind (RoBERTa) take no segment ids.
        return {name: value for name, value in inputs.items() if name != "token_type_ids"}
    return inputs


def rows_of(model: Any, batch: Batch) -> Tensor:
    """The model's logits on the rows of `batch`, (rows, labels)."""
    logits: Tensor = model(**inputs_for(model, batch.inputs)).logits
    return logits.reshape(-1, logits.shape[-1])[batch.row_index]


def padded(rows: Sequence[Any], fill: int) -> np.ndarray:
    """Rows of integers of any length as (rows, longest), int64, with `fill` after the end of each row."""
    found = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


def batches_by_length(lengths: Sequence[int] | np.ndarray, budget: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """All texts, longest first, in batches of at most `budget` padded tokens and similar lengths, so that little is padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch`, which is on the CPU, with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    activations = batch.teacher_activations
    return replace(
        batch,
        inputs={name: moved(value, device) for name, value in batch.inputs.items()},
        teacher_activations=None
        if activations is None
        else {part: moved(x, device) for part, x in activations.items()},
        row_index=moved(batch.row_index, device),
        targets=moved(batch.targets, device),
        soft=None if batch.soft is None else moved(batch.soft, device),
        full="position_ids" not in batch.inputs and bool((batch.inputs["attention_mask"] > 0).all()),
    )


def moved(value: Tensor, device: torch.device) -> Tensor:
    """`value`, which is on the CPU, on `device`. A GPU fetches it from pinned memory, while this process goes on."""
    return value if device.type == "cpu" else value.contiguous().pin_memory().to(device, non_blocking=True)
