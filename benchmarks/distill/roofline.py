"""Measure the share of the machine's peak of matrix products that a training step of MiniLMv2 reaches.

    python benchmarks/distill/roofline.py --student 6x384 --tokens 128,256,512
    python benchmarks/distill/roofline.py --student 3x384 --teacher FOLDER --precision bf16 --tokens 256
    python benchmarks/distill/roofline.py --device cuda --precision bf16 --tokens 512 --tokens-per-step 32768

"Needed" are the floating-point operations of the formulas: the teacher up to the compared projections, the student forward and
twice as many backward, and the products of the relations; nothing is computed twice, and element-wise work is left out. "Spent" are
those of all matrix products that are really computed, counted by torch, which does not see into Triton's kernels: on a GPU those of
the relations are missing. The peak is the fastest of 4 products of 2,048 x 2,048 matrices in the same precision and threads, on a GPU
of 8,192 x 8,192. It is measured again after each turn, since other load on the machine slows both. Each
share is of a turn and its own peak; the result is the median with quartiles. Prints a JSON document.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from steps import TURN, Measured, now, opened, print_document, train
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from compress.models.precision import HALVES

SQUARE = {"cpu": 2_048, "cuda": 8_192}


def forward(config: Any, layers: float, tokens: int) -> float:
    """Floating-point operations a token of `layers` whole layers on sequences of `tokens`."""
    width, inner = config.hidden_size, config.intermediate_size
    return layers * (2 * (4 * width**2 + 2 * width * inner) + 4 * tokens * width)


def needed(on: Measured, tokens: int) -> dict[str, float]:
    """Floating-point operations a token, by what they are for."""
    teacher_layer, student_layer, _ = on.layers
    theirs, ours = on.teacher.config, on.student().config
    relations = len(on.stage.objective.layers)

    def up_to_projections(config: Any, layer: int) -> float:
        return forward(config, layer - 1, tokens) + relations * 2 * config.hidden_size**2

    return {
        "teacher": up_to_projections(theirs, teacher_layer),
        "student": 3 * up_to_projections(ours, student_layer),
        # Scores of both models; the gradients of a score for its two tokens are one product.
        "loss": relations * 2 * tokens * (theirs.hidden_size + 2 * ours.hidden_size),
    }


def spent(on: Measured, given: argparse.Namespace) -> float:
    """Floating-point operations of all matrix products of a step."""

    def attention(query: Any, key: Any, value: Any, *_more: Any, **_others: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    known = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the counter does not see other threads
    with tempfile.TemporaryDirectory() as folder, FlopCounterMode(display=False, custom_mapping=known) as counter:
        train(on, given, 1, Path(folder))
    torch.set_num_threads(threads)
    return float(counter.get_total_flops())


def peak(precision: str, device: str) -> float:
    """Floating-point operations a second."""
    size = SQUARE[device]
    a, b = (torch.randn(size, size, device=device).to(HALVES.get(precision, torch.float32)) for _ in range(2))
    seconds = []
    for _ in range(4):
        began = now(device)
        a @ b
        seconds.append(now(device) - began)
    return 2 * size**3 / min(seconds)


def measured(given: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """The results for sequences of `tokens`."""
    on = opened(given, tokens)
    by_use = needed(on, tokens)
    real = on.text.sampler.tokens_at(0)
    products = spent(on, given) / real
    shares: list[float] = []
    speeds: list[float] = []
    peaks: list[float] = []
    began, turn = 0.0, TURN[given.device]

    def report(done: int, _steps: int, _loss: float, _speed: float | None) -> None:
        nonlocal began
        if done % turn:
            return
        seconds = now(given.device) - began
        if done > 2 * turn:  # the first two include set-up
            speeds.append(sum(map(on.text.sampler.tokens_at, range(done - turn, done))) / seconds)
            peaks.append(peak(given.precision, given.device))
            shares.append(sum(by_use.values()) * speeds[-1] / peaks[-1])
        began = now(given.device)

    peak(given.precision, given.device)
    with tempfile.TemporaryDirectory() as folder:
        train(on, given, (given.turns + 3) * turn, Path(folder), report)
    for counted in (speeds, shares):
        counted.pop()  # on a GPU the last turn lacks a step, which the turn before has done
    return {
        "needed_flops_per_token": by_use,
        "spent_over_needed": products / sum(by_use.values()),
        "tokens_per_s": statistics.median(speeds),
        "peak_gflops": statistics.median(peaks) / 1e9,
        "share_of_peak": statistics.median(shares),
        "quartiles": statistics.quantiles(shares, n=4)[::2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--student", default="6x384")
    parser.add_argument("--tokens", default="128,256,512")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--turns", type=int, default=9, help="of one step; on a GPU of eight, whose next step begins early"
    )
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    given.corpus = []
    if given.threads:
        torch.set_num_threads(given.threads)
    found = {tokens: measured(given, tokens) for tokens in map(int, given.tokens.split(","))}
    print_document(given, tokens=found)


if __name__ == "__main__":
    main()
