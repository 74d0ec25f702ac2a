"""What the test of a teacher that is cut over processes runs in each of them: what is read of it, beside a whole copy of it.

    python sharded_together.py FOLDER

Each ends in `FOLDER/PROCESS.json`: by family and precision, how far apart the two are and what share of the layers' bytes is held.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from encoders import SIZES, encoder, inputs
from joined import be_patient
from torch import nn

from compress import distributed
from compress.models.activations import Activations, Part, read
from compress.models.families import FAMILIES, layers_of
from compress.models.precision import computing, weights_in
from compress.models.sharded_layers import shard_layers

CPU = torch.device("cpu")
LAST = SIZES["num_hidden_layers"]
WANTED = (
    [Part("queries", 2)],
    [Part(of, 3) for of in ("queries", "keys", "values")],
    [Part("scores", 2), Part("hidden", 2)],
    [Part("hidden", 0)],
    [Part("hidden", LAST)],
    [Part("hidden", number) for number in range(LAST + 1)],
)


def bytes_held(model: nn.Module) -> int:
    """Bytes of the layers' weights that this process holds."""
    return sum(
        getattr(weight, "_local_tensor", weight).untyped_storage().nbytes() for weight in layers_of(model).parameters()
    )


def numbers(found: Activations) -> list[torch.Tensor]:
    """All that was read, in a fixed order."""
    scores = [dots.scores() for _, dots in sorted(found.scores.items())]
    words = [found.words.vectors] if found.words else []
    output = [] if found.output is None else [found.output[0]]
    return [*(value for _, value in sorted(found.parts.items())), *scores, *words, *output]


def compared(kind: str, precision: str) -> dict[str, Any]:
    """The largest difference of what is read of a whole and of a cut model, and the largest share that is held after a reading."""
    whole = encoder(kind, "ForMaskedLM")
    sharded = copy.deepcopy(whole)
    shard_layers(sharded, CPU, precision)
    apart, shares = 0.0, []
    readings: list[dict[str, Any]] = [{"wanted": wanted} for wanted in WANTED]
    readings += [
        {"wanted": [Part("values", 1)], "output": True},
        {"wanted": [], "output": True, "rows": torch.tensor([1, 3])},
    ]
    with torch.no_grad(), weights_in(whole, precision), computing(CPU, precision):
        full = bytes_held(whole)
        for reading in readings:
            ours, theirs = (numbers(read(model, inputs(), **reading)) for model in (whole, sharded))
            assert len(ours) == len(theirs) > 0, (reading, len(ours), len(theirs))
            apart = max(apart, *(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
            shares.append(bytes_held(sharded) / full)
    return {"apart": apart, "held": max(shares)}


def main() -> None:
    be_patient()
    distributed.join("cpu")
    found = {
        f"{kind} {precision}": compared(kind, precision)
        for kind, precision in [*((kind, "fp32") for kind in FAMILIES), ("bert", "bf16"), ("modernbert", "bf16")]
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
