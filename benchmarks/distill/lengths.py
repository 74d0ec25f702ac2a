"""What a word and a text weigh in a loss: words of short and long texts, texts of a small batch, masked words of a ragged one.

    python benchmarks/distill/lengths.py

Prints a table in a few seconds, before and after. It makes its texts itself. Where a figure is not what the methods page says, it exits
with 1.
"""

import sys

import numpy as np
import torch
from claims import FOUND, show
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.data.batches import WHOLE, TaskText, text_shares
from compress.data.examples import Example
from compress.data.sampler import Sampler
from compress.losses.outputs import soft_label_loss
from compress.methods.objectives import OutputTerm, vocabulary_losses
from compress.models.activations import Unprojected
from compress.tasks import task_named


def words_by_length() -> None:
    """Words of 2,049 texts in batches of 32 by length: as means of each batch, and divided by what a batch holds on average."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "lamp": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    lengths = np.random.default_rng(0).lognormal(3.1, 0.45, 2_049).astype(int) + 1
    examples = [Example("lamp " * length, entities=()) for length in lengths]
    after = TaskText(task_named("token-classification").encode(examples, tokenizer, ("O", "B-x", "I-x")), 32, 0)
    steps, order = after.sampler.steps_per_epoch, lengths.argsort()
    for what, sampler, new in (("means", Sampler(lengths, 32, 0), False), ("sums", after.sampler, True)):
        words, texts = np.zeros((2, 2_049))
        padded, mates = 0, (set[tuple[int, int]](), set[tuple[int, int]]())
        for step in range(2 * steps):
            chosen = sampler.at(step)
            mates[step // steps].update((a, b) for a in chosen for b in chosen if a < b)
            if step < steps:
                weights = after.at(step).weights if new else WHOLE
                words[chosen] += weights.rows / lengths[chosen].sum() * lengths.sum() / steps
                texts[chosen] += weights.texts / len(chosen) * 2_049 / steps
                padded += len(chosen) * lengths[chosen].max()
        for name, part in (("shortest", order[:204]), ("longest", order[-204:])):
            weight = float(words[part].mean())
            right = not new or abs(weight - 1) < 1e-9
            show(f"{what}: weight of a word of the {name} tenth of texts", weight, right=right)
        show(f"{what}: most that one text weighs", texts.max(), right=not new or texts.max() < 1.001)
        again = len(mates[0] & mates[1]) / len(mates[0])
        show(f"{what}: texts that meet again in the next epoch: share", again, right=not new or again < 0.25)
        show(f"{what}: share of padding", 1 - lengths.sum() / padded, right=True)


def masked_words() -> None:
    """Words of four texts of 40, 12, 6 and 2 masked words, the shorter the worse: a mean over all of them, and by text."""
    torch.manual_seed(0)
    counts = torch.tensor([40, 12, 6, 2])
    mask = (torch.arange(40) < counts[:, None]).long()
    rows, head = mask.flatten().nonzero().flatten(), torch.nn.Linear(8, 20)
    theirs = torch.randn(len(rows), 8)
    ours = theirs + torch.randn(len(rows), 8) * counts.repeat_interleave(counts)[:, None] ** -0.2
    term = OutputTerm("soft labels", "vocabulary")
    of_text = [
        soft_label_loss(head(theirs[i]), head(ours[i]), 1.0) for i in torch.arange(len(rows)).split(counts.tolist())
    ]
    for what, weights in (("all words", None), ("texts", text_shares(mask, rows))):
        found = vocabulary_losses((term,), Unprojected(ours, head), Unprojected(theirs, head), rows, weights=weights)[
            term.name
        ]
        exact = torch.stack(of_text) @ (counts / counts.sum() if weights is None else torch.full((4,), 0.25))
        show(
            f"masked words of a ragged batch: divergence, mean over {what}",
            found.item(),
            right=abs(found - exact).item() < 1e-5,
        )


if __name__ == "__main__":
    words_by_length()
    masked_words()
    sys.exit(not all(FOUND))
