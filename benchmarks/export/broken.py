"""Write a checkpoint that loses its accuracy in 8 bits, to test the repair of an export.

    python benchmarks/export/broken.py CHECKPOINT --out FOLDER [--layer 1] [--units 16] [--size 50]
    stillroom export FOLDER --data D --out BUNDLE

In one feed-forward layer of a BERT-like classifier, some units become large constants whose weights cancel out in the sum. In
float32 hardly an answer changes. Smoothing does not help, since both the values and the weights are large.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from export.graph.exporter import load_answering_model, quiet


def plant(checkpoint: Path, out: Path, layer: int, units: int, size: float) -> None:
    model = load_answering_model(checkpoint)
    part = model.base_model.encoder.layer[layer]
    torch.manual_seed(0)
    width = part.output.dense.weight.shape[0]
    constants, weights = torch.rand(units) * 8 + 8, torch.randn(width, units) * size
    part.intermediate.dense.weight.data[:units] = 0
    part.intermediate.dense.bias.data[:units] = constants
    cancelling = weights - torch.outer(weights @ constants, constants) / constants.dot(constants)
    part.output.dense.weight.data[:, :units] = cancelling
    with quiet():
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--size", type=float, default=50.0)
    given = parser.parse_args()
    plant(given.checkpoint, given.out, given.layer, given.units, given.size)
    print(f"{given.out}: {given.units} units of layer {given.layer} cancel out")


if __name__ == "__main__":
    main()
