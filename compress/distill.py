"""Task-agnostic distillation of self-attention relations (MiniLMv2) on unlabelled text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from compress.checkpoint import Progress
from compress.families import Family, encoder_of, layers_of, linear
from compress.loop import Order, Report, Schedule, train
from compress.relations import check_relation_heads, relation_loss
from compress.vocabulary import rows_in_use
from serve.errors import BadInput


@dataclass(frozen=True)
class RelationDistillation:
    """Settings of the relation stage. Betas and warm-up share are those of the comparative analysis, appendix B."""

    steps: int
    learning_rate: float = 5e-4
    batch: int = 32
    relation_heads: int = 48
    # Which teacher layer, from 1, the student's last layer learns from.
    teacher_layer: int = 1
    seed: int = 0
    precision: str = "fp32"
    checkpoint_every_s: float = 30.0


def usual_teacher_layer(teacher_layers: int) -> int:
    """The layer that served students of this size best: `L - 2` of twelve or more (methods of the comparative analysis,
    section 5), one below the top of a shallower teacher."""
    return max(1, teacher_layers - 2 if teacher_layers >= 12 else teacher_layers - 1)


def usual_relation_heads(teacher_width: int, student_width: int) -> int:
    """The paper's 48 where it divides both widths, otherwise the largest number below it that does."""
    return max(n for n in range(1, 49) if teacher_width % n == 0 and student_width % n == 0)


def chunks(texts: Sequence[str], tokenizer: Tokenizer, longest: int) -> list[np.ndarray]:
    """Token ids of `texts`, each cut into pieces of at most `longest` tokens that carry the special tokens of their own."""
    pieces: list[np.ndarray] = []
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(max_length=longest)
    for start in range(0, len(texts), 1_000):
        for encoding in tokenizer.encode_batch(list(texts[start : start + 1_000])):
            for part in (encoding, *encoding.overflowing):
                if sum(part.special_tokens_mask) < len(part.ids):
                    pieces.append(np.array(part.ids, dtype=np.int64))
    return pieces


def distil_relations(
    teacher: Any,
    student: Any,
    family: Family,
    pieces: Sequence[np.ndarray],
    pad_id: int,
    settings: RelationDistillation,
    *,
    folder: Path,
    report: Report | None = None,
) -> Progress:
    """Train `student` in place until its last layer's Q-Q, K-K and V-V relations are those of one teacher layer.

    Only what the loss reads is computed: the teacher up to the projections of its chosen layer, the student up to those
    of its last, so that layer's output projection and feed-forward stay as they start.

    Args:
        teacher: any head; not changed.
        student: any head of the same family and vocabulary.
        family: where both keep their parts.
        pieces: token ids of the corpus, as `chunks` gives them.
        pad_id: fills padded positions.
        settings: steps, rates, relation heads and the teacher's layer.
        folder: for checkpoints.
        report: told of each step.

    Raises:
        BadInput: relation heads that do not divide both widths, or a layer that the teacher does not have.
    """
    check_relation_heads(settings.relation_heads, teacher.config.hidden_size, student.config.hidden_size)
    depth = len(layers_of(teacher, family))
    if not 1 <= settings.teacher_layer <= depth:
        raise BadInput(f"The teacher has layers 1 to {depth}; layer {settings.teacher_layer} was asked for.")
    order = Order(np.array([len(piece) for piece in pieces]), settings.batch, settings.seed)
    teacher.eval()
    last = len(layers_of(student, family))
    with (
        reading_layer(teacher, family, settings.teacher_layer) as teacher_layer,
        reading_layer(student, family, last) as student_layer,
        rows_in_use(student, pieces, pad_id) as remap,
    ):

        def loss_at(step: int) -> dict[str, Tensor]:
            ids, mask = padded([pieces[i] for i in order.at(step)], pad_id)
            device = next(student.parameters()).device
            on_device = mask.to(device)
            with torch.no_grad():
                teacher.to(device)  # training has put the student there; after the first step it is there already
                theirs = projections(teacher, teacher_layer, family, ids.to(device), on_device)
            ours = projections(student, student_layer, family, torch.from_numpy(remap)[ids].to(device), on_device)
            return {
                name: relation_loss(theirs[name], ours[name], on_device, settings.relation_heads)
                for name in ("queries", "keys", "values")
            }

        return train(
            _Both(student, student_layer),
            loss_at,
            Schedule(settings.steps, settings.learning_rate, warmup=0.05, betas=(0.9, 0.98)),
            folder=folder,
            seed=settings.seed,
            precision=settings.precision,
            checkpoint_every_s=settings.checkpoint_every_s,
            report=report,
        )


class _Both(nn.Module):
    """The student's lower layers and the layer that is read, as one thing to train."""

    def __init__(self, lower: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.lower, self.layer = lower, layer


@contextmanager
def reading_layer(model: Any, family: Family, number: int) -> Iterator[nn.Module]:
    """Within it the encoder of `model` ends below layer `number` (from 1), and yields that layer, unused, to read from."""
    parent_path, _, name = family.layers.rpartition(".")
    parent = encoder_of(model).get_submodule(parent_path)
    whole = layers_of(model, family)
    setattr(parent, name, nn.ModuleList(list(whole)[: number - 1]))
    try:
        yield whole[number - 1]
    finally:
        setattr(parent, name, whole)


def projections(model: Any, layer: nn.Module, family: Family, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Queries, keys and values of `layer`, each (batch, tokens, width), of an encoder that ends below it."""
    hidden = encoder_of(model)(input_ids=ids, attention_mask=mask).last_hidden_state
    paths = {"queries": family.query, "keys": family.key, "values": family.value}
    return {name: linear(layer, path)(hidden) for name, path in paths.items()}


def padded(pieces: Sequence[np.ndarray], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, both (batch, tokens), padded to the longest."""
    width = max(map(len, pieces))
    ids = np.full((len(pieces), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(pieces), width), dtype=np.int64)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = piece
        mask[row, : len(piece)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
