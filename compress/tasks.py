"""From text to rows of numbers and back: tokenised examples, padded batches, and what logits say of a text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from compress.examples import Example, Task
from compress.losses import IGNORED
from compress.order import Order
from compress.processes import Share
from compress.scores import Prediction
from serve.labels import applies, split_tag
from serve.spans import Word, decode_spans, words

BATCH_TOKENS = (
    2_048  # padded tokens of a batch when only predicting: large enough for the matrix units, small enough for cache
)


@dataclass(frozen=True)
class Encoded:
    """Tokenised texts and, where labels are known, the target of each row.

    A row is what gets one answer: a whole text, or the first token of a word. `rows[i]` are its token positions in text
    `i` (position 0 alone for a whole text, whose answer is pooled), `targets[i]` the label index of each.
    """

    task: Task
    labels: tuple[str, ...]
    texts: list[str]
    encodings: list[Encoding]
    ids: list[np.ndarray]
    rows: list[np.ndarray]
    targets: list[np.ndarray]
    truncated: int
    pad_id: int
    # Whether any number of labels may apply to a text: its targets are then (1, labels), 1 for each that does.
    multi_label: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "Encoded":
        return Encoded(
            self.task,
            self.labels,
            self.texts[part],
            self.encodings[part],
            self.ids[part],
            self.rows[part],
            self.targets[part],
            sum(bool(e.overflowing) for e in self.encodings[part]),
            self.pad_id,
            self.multi_label,
        )

    def __add__(self, other: "Encoded") -> "Encoded":
        return Encoded(
            self.task,
            self.labels,
            self.texts + other.texts,
            self.encodings + other.encodings,
            self.ids + other.ids,
            self.rows + other.rows,
            self.targets + other.targets,
            self.truncated + other.truncated,
            self.pad_id,
            self.multi_label,
        )


class Weights(NamedTuple):
    """What means over a part of a batch count for: its share of the whole batch's texts, real tokens, rows and labelled rows."""

    texts: float = 1.0
    tokens: float = 1.0
    rows: float = 1.0
    labelled: float = 1.0


WHOLE = Weights()


@dataclass(frozen=True)
class Batch:
    """Padded inputs `(batch, tokens)` and flat rows: `row_index` into `(batch * tokens)`, or into `(batch)` where a row is a
    whole text (`whole_texts`)."""

    inputs: dict[str, Tensor]
    row_index: Tensor
    targets: Tensor
    soft: Tensor | None = None
    whole_texts: bool = False
    weights: Weights = WHOLE
    # What the teacher computes of it, by part and layer, (batch, tokens, width), where that was kept and it need not be asked.
    taught: dict[tuple[str, int], Tensor] | None = None


def part_of(batch: Batch, share: Share) -> Batch:
    """The texts of `batch` that are in `share`: means over each part, times its weights, add up to the mean over the whole.

    A part of no text is the first one at no weight: every part then has gradients of the same parameters.
    """
    if share.of == 1:
        return batch
    texts, width = batch.inputs["input_ids"].shape
    first, last = share.bounds(texts)
    empty = first == last
    if empty:
        first, last = 0, 1
    rows_a_text = 1 if batch.whole_texts else width
    inside = (batch.row_index >= first * rows_a_text) & (batch.row_index < last * rows_a_text)
    real, labelled = batch.inputs["attention_mask"], batch.targets != IGNORED

    def weight(part: Tensor, whole: Tensor) -> float:
        return 0.0 if empty else float(part.sum()) / max(1.0, float(whole.sum()))

    return replace(
        batch,
        inputs={name: value[first:last] for name, value in batch.inputs.items()},
        row_index=batch.row_index[inside] - first * rows_a_text,
        targets=batch.targets[inside],
        soft=None if batch.soft is None else batch.soft[inside],
        taught=None if batch.taught is None else {part: value[first:last] for part, value in batch.taught.items()},
        weights=Weights(
            0.0 if empty else (last - first) / texts,
            weight(real[first:last], real),
            weight(inside, torch.ones_like(inside)),
            weight(labelled[inside], labelled),
        ),
    )


def encode(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    task: Task,
    labels: Sequence[str],
    *,
    multi_label: bool = False,
) -> Encoded:
    """Tokenise `examples`; `labels` are classes or tags by index. A label that is not among them carries no target.

    `multi_label` says that any number of labels may apply to a text.
    """
    index = {label: i for i, label in enumerate(labels)}
    encodings: list[Encoding] = tokenizer.encode_batch([example.text_or_pair for example in examples])
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for example, encoding in zip(examples, encodings, strict=True):
        if task == "text-classification":
            rows.append(np.zeros(1, dtype=np.int64))
            if multi_label:
                targets.append(_several(example, index))
            else:
                known = index.get(example.label, IGNORED) if isinstance(example.label, str) else IGNORED
                targets.append(np.array([known], dtype=np.int64))
        else:
            found = words(example.text, encoding.offsets, encoding.word_ids)
            rows.append(np.array([word.first_token for word in found], dtype=np.int64))
            targets.append(_tags(example, found, index))
    return Encoded(
        task,
        tuple(labels),
        [e.text for e in examples],
        encodings,
        [np.array(e.ids, dtype=np.int64) for e in encodings],
        rows,
        targets,
        sum(bool(e.overflowing) for e in encodings),
        pad_id_of(tokenizer),
        multi_label,
    )


@dataclass(frozen=True)
class TaskText:
    """Batches of a task's texts for `compress.distill`; `others` are texts that a look at validation reads."""

    texts: Encoded
    batch: int
    seed: int
    others: Sequence[np.ndarray] = ()

    @cached_property
    def order(self) -> Order:
        """Which texts each step sees."""
        return Order(np.array([len(ids) for ids in self.texts.ids]), self.batch, self.seed)

    @property
    def pad_id(self) -> int:
        """What fills padded positions."""
        return self.texts.pad_id

    @property
    def ids(self) -> list[np.ndarray]:
        """All token ids that occur."""
        return [*self.texts.ids, *self.others]

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of a step, on average."""
        return float(self.order.lengths.sum()) / self.order.steps_per_epoch

    def at(self, step: int) -> Batch:
        """The batch of one step."""
        return collate(self.texts, self.order.at(step).tolist())


def pad_id_of(tokenizer: Tokenizer) -> int:
    """The id that fills padded positions; they are masked, so where a tokenizer has no such token 0 serves."""
    for token in ("[PAD]", "<pad>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    return 0


def _several(example: Example, index: dict[str, int]) -> np.ndarray:
    """Which labels apply, (1, labels): 1 for each that does, `IGNORED` for all when it is not known."""
    applies = np.full((1, len(index)), IGNORED if example.label is None else 0, dtype=np.float32)
    applies[0, [index[name] for name in example.label or () if name in index]] = 1
    return applies


def _tags(example: Example, found: Sequence[Word], index: dict[str, int]) -> np.ndarray:
    """The tag of each word: that of the entity its characters touch; `B` on the first word of an entity."""
    if example.entities is None:
        return np.full(len(found), IGNORED, dtype=np.int64)
    tags = np.full(len(found), index.get("O", IGNORED), dtype=np.int64)
    at, opened = 0, -1
    for row, word in enumerate(found):
        while at < len(example.entities) and example.entities[at].end <= word.start:
            at += 1
        if at < len(example.entities) and example.entities[at].start < word.end:
            prefix = "I" if opened == at else "B"
            tags[row] = index.get(f"{prefix}-{example.entities[at].label}", IGNORED)
            opened = at
    return tags


def collate(
    encoded: Encoded,
    chosen: Sequence[int],
    *,
    soft: Sequence[np.ndarray] | None = None,
    remap: np.ndarray | None = None,
) -> Batch:
    """The texts `chosen` as one batch, padded to its longest; `remap` gives each token id its row in a narrowed embedding."""
    ids = padded([encoded.ids[i] for i in chosen], encoded.pad_id)
    mask = padded([np.ones_like(encoded.ids[i]) for i in chosen], 0)
    types = padded([encoded.encodings[i].type_ids for i in chosen], 0)
    a_text = ids.shape[1] if encoded.task == "token-classification" else 1
    flat = [encoded.rows[i] + row * a_text for row, i in enumerate(chosen)]
    if remap is not None:
        ids = remap[ids]
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return Batch(
        {name: torch.from_numpy(value) for name, value in inputs.items()},
        torch.from_numpy(np.concatenate(flat)),
        torch.from_numpy(np.concatenate([encoded.targets[i] for i in chosen])),
        None if soft is None else torch.from_numpy(np.concatenate([soft[i] for i in chosen]).astype(np.float32)),
        encoded.task == "text-classification",
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
    """Rows of whole numbers, each of its own length, as (rows, longest), int64: `fill` stands where a row has ended."""
    found = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


def batches_by_length(lengths: Sequence[int] | np.ndarray, budget: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """All texts, longest first, in batches of at most `budget` padded tokens: short with short, so little is padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def row_logits(
    model: Any, encoded: Encoded, *, remap: np.ndarray | None = None, advance: Any = None
) -> list[np.ndarray]:
    """The logits of each text's rows, (rows, labels) a text, in order; `advance(texts)` is told of progress."""
    out: list[np.ndarray] = [np.empty(0)] * len(encoded)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for chosen in batches_by_length([len(ids) for ids in encoded.ids]):
            batch = to_device(collate(encoded, chosen, remap=remap), device)
            logits = rows_of(model, batch).float().cpu().numpy()
            ends = np.cumsum([len(encoded.rows[i]) for i in chosen])
            for i, rows in zip(chosen, np.split(logits, ends[:-1]), strict=True):
                out[i] = rows
            if advance:
                advance(len(chosen))
    model.train(was_training)
    return out


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    soft = None if batch.soft is None else batch.soft.to(device)
    inputs = {name: value.to(device) for name, value in batch.inputs.items()}
    taught = None if batch.taught is None else {part: value.to(device) for part, value in batch.taught.items()}
    return replace(
        batch,
        inputs=inputs,
        taught=taught,
        row_index=batch.row_index.to(device),
        targets=batch.targets.to(device),
        soft=soft,
    )


def predictions(encoded: Encoded, logits: Sequence[np.ndarray]) -> list[Prediction]:
    """What `logits` (rows, labels) a text say: the class, the labels that apply, or the spans that serving would answer with."""
    if encoded.multi_label:
        return [frozenset(encoded.labels[i] for i in np.flatnonzero(applies(rows[0]))) for rows in logits]
    if encoded.task == "text-classification":
        return [encoded.labels[int(rows[0].argmax())] for rows in logits]
    found: list[Prediction] = []
    for text, encoding, starts, rows in zip(encoded.texts, encoded.encodings, encoded.rows, logits, strict=True):
        full = np.zeros((len(encoding.ids), len(encoded.labels)), dtype=np.float32)
        full[starts] = softmax(rows)
        spans = decode_spans(text, full, encoding.offsets, encoding.word_ids, encoded.labels)
        found.append(frozenset((span.start, span.end, span.label) for span in spans))
    return found


def constant_predictions(encoded: Encoded) -> Iterator[list[Prediction]]:
    """For each label, what a model would say of every text that always says it: on each word alone, for tags.

    Where any number of labels may apply, it is the most frequent one, the two most frequent, and so on: of constant answers
    of one size those score best.
    """
    if encoded.multi_label:
        there = (np.concatenate(encoded.targets) == 1).sum(axis=0)
        often = [encoded.labels[i] for i in np.argsort(-there, kind="stable")]
        for size in range(1, len(often) + 1):
            yield [frozenset(often[:size])] * len(encoded)
        return
    for index, label in enumerate(encoded.labels):
        if encoded.task == "text-classification" or split_tag(label)[0] in {"B", "S"}:
            always = np.zeros((1, len(encoded.labels)), dtype=np.float32)
            always[0, index] = 1
            yield predictions(encoded, [np.repeat(always, len(rows), axis=0) for rows in encoded.rows])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise softmax of `(rows, labels)`."""
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: np.ndarray = raised / raised.sum(axis=-1, keepdims=True)
    return result
