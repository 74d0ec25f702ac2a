"""How texts are divided and weighed: held-out texts, folds, labelled texts of a batch and their shares of the loss.

    python benchmarks/distill/divisions.py

Prints a table in a few seconds. It makes its texts itself. Where a figure is not what the methods page says, it exits with 1.
"""

import sys
from collections import Counter

import numpy as np
import torch
from claims import FOUND, show
from torch.nn import functional

from compress.data.encoded import IGNORED
from compress.data.examples import Example
from compress.data.sampler import Sampler
from compress.data.splits import hold_out
from compress.methods.catalogue import labels_and_soft_labels
from compress.methods.objectives import output_losses
from compress.runs.soft_labels import fold_of


def texts_held_out() -> None:
    """Each of 1,000 texts stands twice, once with other capitals and points; 60 of 70 classes have 5 texts."""
    names = [f"class {i % 10}" if i < 700 else f"rare {i % 60}" for i in range(1000)]
    twice = [Example(text, label=names[i]) for i in range(1000) for text in (f"text {i}", f"Text {i}.")]
    kept, held = hold_out(list(twice), 0)
    there = {each.text.casefold().strip(".") for each in kept}
    shared = float(np.mean([each.text.casefold().strip(".") in there for each in held]))
    show("held-out texts that train has too, where each stands twice: share", shared, right=shared == 0)
    folds = fold_of(twice, 2, 0)
    parted = float((folds[::2] != folds[1::2]).mean())
    show("pairs of copies in two folds: share", parted, right=parted == 0)
    lost = 0
    for seed in range(200):
        once = [Example(f"text {i}", label=f"class {i % 3}" if i < 280 else f"rare {i % 20}") for i in range(300)]
        kept, held = hold_out(once, seed)
        often = Counter(each.label for each in held)
        lost += len({each.label for each in once} - {each.label for each in kept}) + sum(
            often[f"class {i}"] < 9 for i in range(3)
        )
    show("classes that train loses, or that lack in validation, in 200 divisions", lost, right=lost == 0)


def share_of_soft_labels() -> None:
    """3 labelled texts in a batch of 32 under a share of 0.9: what labels and the teacher weigh in the gradients of one text's logits."""
    torch.manual_seed(0)
    ours, theirs = torch.randn(32, 5, requires_grad=True), torch.randn(32, 5)
    targets = torch.full((32,), IGNORED)
    targets[:3] = torch.tensor([0, 1, 2])
    terms = output_losses(labels_and_soft_labels(0.9, 1.0).objective.outputs, ours, theirs, targets)
    hard, soft = (torch.autograd.grad(terms[name], ours, retain_graph=True)[0] for name in ("labels", "soft_labels"))
    alone = ours.softmax(1) - functional.one_hot(targets.clamp(min=0), 5)  # the gradient of one text's cross-entropy
    of_labels = (hard[0].norm() / alone[0].norm()).item()
    of_teacher = (soft / (ours.softmax(1) - theirs.softmax(1))).mean(dim=1).tolist()
    show("share of labels in the loss of a labelled text, asked 0.1", of_labels / (of_labels + of_teacher[0]),
         right=abs(of_labels / (of_labels + of_teacher[0]) - 0.1) < 1e-3)  # fmt: skip
    ratio = (of_labels + of_teacher[0]) / of_teacher[-1]
    show("weight of a labelled text over that of an unlabelled one", ratio, right=abs(ratio - 1) < 1e-3)
    lengths = np.random.default_rng(0).integers(5, 60, 3_200)
    steps = [Sampler(lengths, 32, 0, labelled=300).at(step) for step in range(1_000)]
    without = float(np.mean([not (step < 300).any() for step in steps]))
    show("batches without a labelled text, 300 of 3,200 being labelled: share", without, right=without == 0)


if __name__ == "__main__":
    texts_held_out()
    share_of_soft_labels()
    sys.exit(not all(FOUND))
