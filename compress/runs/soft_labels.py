"""The teacher's soft labels: its logits on the texts that a student learns from, and its confidence."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from compress import distributed
from compress.data.align_labels import WordAnswer, added_up, align_labels
from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.splits import parts_of
from compress.data.teacher_labels import word_logits
from compress.evaluation.predictions import shared_row_logits
from compress.models.pretrained import load, open_model
from compress.progress import advancing, message
from compress.runs.hardware import device_here
from compress.runs.resumable_stages import TRAINING
from compress.runs.task_inputs import TaskInputs
from compress.training.checkpoint import write_safetensors
from serve.bundle.manifest import canonical_json
from serve.text.answers import sigmoid, softmax
from serve.text.labels import with_prefixes
from serve.text.spans import words

# Texts whose soft labels are saved at once: the most work that a kill during labelling loses.
SHARD_TEXTS = 4_096
LOGITS, CONFIDENCE = "logits.npy", "confidence.json"
TRIAL = "trial.json"  # of a short training that tries one share of the soft labels


def fold_of(examples: Sequence[Example], folds: int, seed: int) -> np.ndarray:
    """The fold (from 0) of each example, (examples,): equal parts, as `parts_of` chooses them."""
    return parts_of(examples, [1 / folds] * folds, seed)


def make_soft_labels(folder: Path, inputs: TaskInputs, teacher: Path, fold_teachers: Sequence[Path] = ()) -> None:
    """Save the teacher's logits on train and the in-domain text, and its mean confidence on train and validation.

    Each process computes its share, and the main one saves all.

    Args:
        folder: gets both.
        inputs: the texts.
        teacher: labels the in-domain text, and train too if there are no `fold_teachers`.
        fold_teachers: one a fold of `fold_of`, each fine-tuned without the texts of its fold, which it labels.
    """
    texts = inputs.soft_labelled
    generated = len(texts) - len(inputs.train) - len(inputs.unlabelled)
    message(
        inputs.notify,
        f"  {len(inputs.train)} labelled texts, {len(inputs.unlabelled)} unlabelled and {generated} generated ones",
    )
    folds_of = fold_of(inputs.splits.train, max(1, len(fold_teachers)), inputs.settings.seed)
    whole: list[np.ndarray] = [np.empty(0)] * len(texts)
    with advancing(inputs.notify, "soft labels") as shown:
        seen = 0

        def advance(count: int) -> None:
            nonlocal seen
            seen += count
            shown(seen, len(texts))

        def label(name: str, model: Any, chosen: Sequence[int]) -> None:
            for start in range(0, len(chosen), SHARD_TEXTS):
                file = folder / TRAINING / f"{name}{start}.safetensors"
                mine = chosen[start : start + SHARD_TEXTS]
                found = _shard(file, texts.take(mine), model, advance)
                for i, rows in zip(mine, found or (), strict=found is not None):
                    whole[i] = rows

        def opened(folder: Path) -> Any:
            return load(open_model(str(folder)), inputs.task).to(device_here(inputs.settings.device))

        for fold, labeller in enumerate(fold_teachers):
            label(f"fold-{fold}-", opened(labeller), np.flatnonzero(folds_of == fold).tolist())
        model = opened(teacher)
        label("", model, range(len(inputs.train) if fold_teachers else 0, len(texts)))
        on_train = shared_row_logits(model, inputs.train) if fold_teachers else whole[: len(inputs.train)]
        on_validation = shared_row_logits(model, inputs.validation)
    if on_train is None or on_validation is None:
        return
    known = {"train": on_train, "validation": on_validation}
    if fold_teachers:
        known["train_out_of_fold"] = whole[: len(inputs.train)]
    _save(folder, inputs, whole, known)


def save_answers(folder: Path, inputs: TaskInputs) -> None:
    """Save the soft labels of a file of answers as `make_soft_labels` saves a model's, and how sure the answers are."""
    assert inputs.answers
    assert inputs.answered
    soft = inputs.answered.soft
    there = [
        logits for logits in inputs.answers.logits(inputs.validation, inputs.splits.validation) if logits is not None
    ]
    known = {"train": soft[: len(inputs.train)]} | ({"validation": there} if there else {})
    _save(folder, inputs, soft, known)


def _save(
    folder: Path, inputs: TaskInputs, soft: Sequence[np.ndarray], known: Mapping[str, Sequence[np.ndarray]]
) -> None:
    """Save the soft labels of all texts, and the confidence in the logits `known` of each split's texts, which is reported too.

    There is none in numbers, which come without, and in places of answers.
    """
    task = inputs.task
    sure = (
        {split: confidence(rows, multi_label=task.multi_label) for split, rows in known.items()}
        if task.names_labels
        else {}
    )
    for line in confidence_lines(sure):
        message(inputs.notify, f"  {line}")
    (folder / CONFIDENCE).write_bytes(canonical_json(sure))
    np.save(folder / LOGITS, np.concatenate(soft), allow_pickle=False)


def confidence(logits: Sequence[np.ndarray], *, multi_label: bool) -> float:
    """The mean probability of the likeliest answer, from each text's logits (rows, labels); 0.5 to 1 with `multi_label`."""
    rows = np.concatenate(logits).astype(np.float64)
    # For a label that applies or not, the likelier answer has the probability sigmoid(|x|).
    likeliest = sigmoid(np.abs(rows)) if multi_label else softmax(rows).max(axis=-1)
    return round(float(likeliest.mean()), 4)


def confidence_lines(sure: Mapping[str, float]) -> list[str]:
    """The teacher's confidence, as a sentence for the run's output and its report; none where it has none."""
    if not sure:
        return []
    told = f"The teacher's mean confidence is {sure['train']:.3f} on train"
    if "validation" in sure:
        told += f" and {sure['validation']:.3f} on validation"
    if "train_out_of_fold" in sure:
        told += f"; out of fold it is {sure['train_out_of_fold']:.3f} on train"
    return [told + "."]


def soft_label_lines(soft_labels: dict[str, Any] | None) -> list[str]:
    """What a report says of the soft labels that a student learned (see `SoftLabels.lineage`); nothing where there are none."""
    if not soft_labels:
        return []
    tried = ", ".join(f"{one['share']:g}: {one['validation']:.4f}" for one in soft_labels["tried"])
    share = f"Soft labels have a share of {soft_labels['share']:g} in the student's loss on labelled texts"
    best = f", the better on validation after short trainings ({tried})" if tried else ""
    return [f"{share}{best}.", *confidence_lines(soft_labels["teacher_confidence"])]


def read_confidence(folder: Path) -> dict[str, float]:
    """The teacher's confidence by split, as `make_soft_labels` saved it."""
    found: dict[str, float] = json.loads((folder / CONFIDENCE).read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class SoftLabels:
    """The soft labels that a student learns, and their share of its loss."""

    folder: Path
    weight: float
    tried: dict[float, float] = field(default_factory=dict)  # by share: the best validation score of a short training

    @property
    def lineage(self) -> dict[str, Any]:
        """As a student's lineage and the report tell of them."""
        tried = [{"share": weight, "validation": reached} for weight, reached in self.tried.items()]
        return {"share": self.weight, "tried": tried, "teacher_confidence": read_confidence(self.folder)}


def chosen_share(folder: Path, trials: Mapping[float, Path]) -> SoftLabels:
    """The soft labels in `folder` with the share whose trial was best on validation; of equal ones the largest share."""
    tried = {
        weight: float(json.loads((trial / TRIAL).read_text(encoding="utf-8"))["validation"])
        for weight, trial in trials.items()
    }
    return SoftLabels(folder, max(tried, key=lambda weight: (tried[weight], weight)), tried)


def read_soft_labels(folder: Path, inputs: TaskInputs) -> list[np.ndarray]:
    """The teacher's logits of each text's rows, as `make_soft_labels` saved them. ValueError if the texts have other rows."""
    texts = inputs.labelled_as or inputs.soft_labelled
    logits = np.load(folder / LOGITS, mmap_mode="r", allow_pickle=False)
    ends = np.cumsum([len(rows) for rows in texts.rows])
    if len(logits) != ends[-1]:
        raise ValueError(f"{folder} holds soft labels of {len(logits)} rows, and the texts have {ends[-1]}")
    of_text = np.split(logits, ends[:-1])
    if inputs.labelled_as is None or not texts.task.labels_words:
        return of_text
    return [_carried(texts, inputs.soft_labelled, i, rows) for i, rows in enumerate(of_text)]


def _carried(theirs: Encoded, ours: Encoded, index: int, logits: np.ndarray) -> np.ndarray:
    """The logits of the words of text `index` as `ours` has them, from those as `theirs` has them: what is a word depends on the tokens."""
    given, places = (
        [(word.start, word.end) for word in words(each.texts[index], encoding.offsets, encoding.word_ids)]
        for each in (theirs, ours)
        for encoding in [each.encodings[index]]
    )
    if places == given[: len(places)]:
        return logits[: len(places)]
    tags = with_prefixes(theirs.labels)
    answers = [
        WordAnswer(start, end, added_up(zip(tags, row.tolist(), strict=True)))
        for (start, end), row in zip(given, softmax(logits), strict=True)
    ]
    carried = align_labels(places, answers)
    assert carried is not None  # trimmed tokens are smaller, so they do not reach further into a text
    return word_logits(carried, ours.labels)


def _shard(file: Path, texts: Encoded, model: Any, advance: Callable[[int], None]) -> list[np.ndarray] | None:
    """The logits (rows, labels) of each of `texts` in the main process, from `file` if they were saved before; None in the others."""
    if distributed.broadcast(file.is_file()):
        advance(len(texts))
        if not distributed.main():
            return None
        return np.split(load_file(file)["logits"].numpy(), np.cumsum([len(rows) for rows in texts.rows])[:-1])
    logits = shared_row_logits(model, texts, advance)
    if logits is not None:
        file.parent.mkdir(exist_ok=True)
        write_safetensors(file, {"logits": torch.from_numpy(np.concatenate(logits))})
    return logits
