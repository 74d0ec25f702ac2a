"""How much of a student's gradient each of XtremeDistil's losses has.

    python benchmarks/distill/learned.py --teacher all-MiniLM-L6-v2 --text FILE

XtremeDistil's stage of representations: the norm of the gradient of its attention loss beside that of its hidden states, of a `3x384`
that starts from the teacher's layers, on 32 lines of FILE; of all weights, and of the matrices of queries and keys alone. Both losses
must be 0 where the student is the teacher.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.data.batches import padded
from compress.methods.catalogue import Stage
from compress.methods.objectives import Projections, layer_losses
from compress.models.activations import read
from compress.models.initialise import starting_layers, student_of
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import shape_of
from compress.runs.method_chain import method_chain

TEXTS, TOKENS, QUERIES_AND_KEYS = 32, 64, ("query", "key", "q_lin", "k_lin")


def batch(opened: Any, text: Path) -> dict[str, Tensor]:
    """The first lines of `text`, padded."""
    lines = text.read_text(encoding="utf-8").splitlines()[:TEXTS]
    ids = [each.ids[:TOKENS] for each in open_tokenizer(opened).encode_batch(lines)]
    mask = padded([[1] * len(each) for each in ids], 0)
    return {"input_ids": torch.from_numpy(padded(ids, 0)), "attention_mask": torch.from_numpy(mask)}


def losses(stage: Stage, teacher: Any, student: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The terms of `stage`, by name."""
    torch.manual_seed(0)
    maps = Projections(stage.objective, teacher.config, student.config)
    with torch.no_grad():
        theirs = read(teacher, inputs, stage.objective.teacher_parts())
    ours = read(student, inputs, stage.objective.student_parts())
    heads = student.config.num_attention_heads
    return layer_losses(stage.objective.layers, theirs, ours, inputs["attention_mask"], heads, maps)


def gradient(loss: Tensor, student: Any, only: tuple[str, ...] = ("",)) -> float:
    """The norm of the gradient of `loss`, of parameters whose name holds one of `only`."""
    chosen = [weight for name, weight in student.named_parameters() if any(part in name for part in only)]
    slopes = torch.autograd.grad(loss, chosen, retain_graph=True, allow_unused=True)
    return float(sum(slope.square().sum() for slope in slopes if slope is not None)) ** 0.5


def main() -> None:
    """Print a table."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--text", type=Path, required=True)
    given = reader.parse_args()
    opened, shape = open_model(given.teacher), shape_of("3x384")
    teacher, inputs = load_encoder(opened, seed=0).eval(), batch(open_model(given.teacher), given.text)
    chosen = starting_layers("spread", teacher.config.num_hidden_layers, shape.layers)
    student, _ = student_of(teacher, shape, seed=0, chosen=chosen)
    print("method                 of                 attention     hidden    share")
    for method in ("xtremedistil-printed", "xtremedistil"):
        stage = method_chain(method, shape, teacher.config).stages[0][0]
        found = losses(stage, teacher, student, inputs)
        attention = next(loss for name, loss in found.items() if name.startswith("attention"))
        hidden = torch.stack([loss for name, loss in found.items() if not name.startswith("attention")]).sum()
        for what, only in (("all weights", ("",)), ("queries and keys", QUERIES_AND_KEYS)):
            one, other = gradient(attention, student, only), gradient(hidden, student, only)
            print(f"{method:22} {what:18} {one:9.4g}  {other:9.4g}  {one / other:7.2%}")
        same, _ = student_of(teacher, shape_of("6x384"), seed=0)
        exact = method_chain(method, shape_of("6x384"), teacher.config).stages[0][0]
        assert all(loss.item() < 1e-6 for loss in losses(exact, teacher, same, inputs).values())


if __name__ == "__main__":
    main()
