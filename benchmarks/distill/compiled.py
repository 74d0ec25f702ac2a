"""Measure whether `torch.compile` makes training faster: encoder layers, compiled one by one and not compiled, in turns.

    python benchmarks/distill/compiled.py --precision bf16
    python benchmarks/distill/compiled.py --precision bf16 --device cuda --batch 64 --tokens 512

The teacher's layers run forward, the student's forward and backward. Each layer is compiled alone, since a training leaves the
teacher at an inner layer. The outputs are compared. Prints a JSON document: seconds to the first output, and the pairs' time ratios.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from steps import now, print_document
from transformers import BertConfig, BertModel

from compress.models.precision import autocast, own_precision, weights_in

SHAPES = {"teacher": (768, 12, 3072), "student": (384, 12, 1536)}


def measured(given: argparse.Namespace, who: str) -> dict[str, Any]:
    """The results for two layers of the teacher or the student."""
    torch.manual_seed(0)
    width, heads, ffn = SHAPES[who]
    config = BertConfig(hidden_size=width, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=ffn)
    plain = BertModel(config, add_pooling_layer=False).eval()
    for parameter in plain.parameters():
        parameter.requires_grad = who == "student"
    compiled = copy.deepcopy(plain)
    for layer in compiled.encoder.layer:
        layer.compile(dynamic=True)
    device = torch.device(given.device)
    plain.to(device)
    compiled.to(device)
    ids = torch.randint(1000, config.vocab_size, (given.batch, given.tokens), device=device)

    def run(model: Any) -> Callable[[], torch.Tensor]:
        def once() -> torch.Tensor:
            with autocast(device, given.precision), own_precision(model):
                answer: torch.Tensor = model(input_ids=ids).last_hidden_state
            if who == "student":
                answer.float().square().mean().backward()
            return answer.detach()

        return once

    with (
        weights_in(plain, given.precision if who == "teacher" else ""),
        weights_in(compiled, given.precision if who == "teacher" else ""),
    ):
        expected = run(plain)().float()
        began = now(given.device)
        answer = run(compiled)().float()
        first = now(given.device) - began
        pairs = []
        for _ in range(given.rounds):
            seconds = []
            for model in (plain, compiled):
                began = now(given.device)
                run(model)()
                seconds.append(now(given.device) - began)
            pairs.append(seconds[0] / seconds[1])
    return {
        "seconds_to_first_answer": first,
        "plain_over_compiled": statistics.median(pairs),
        "quartiles": statistics.quantiles(pairs, n=4)[::2],
        "relative_difference": ((answer - expected).norm() / expected.norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    found = {who: measured(given, who) for who in SHAPES}
    print_document(given, found=found)


if __name__ == "__main__":
    main()
