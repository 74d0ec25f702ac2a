"""Time the divergence of relations and attentions on a GPU: Triton kernels of several sizes, tiles, and the textbook's form.

    python benchmarks/distill/gpu_kernels.py --batch 64 --tokens 512 --out kernels.json

Each time is of value and gradient, the median of CUDA events over --rounds, taking turns. The error of a way is that of its gradient
against the formula in float64, of a few texts. The floor is the time of the exponentials, of which the kernels compute six a pair of
tokens, at 16 a clock and multiprocessor. Prints a JSON document, with the options that a training uses.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from steps import Textbook
from torch import Tensor

from compress.losses import tiled_relations, triton_kl
from compress.losses.tiled_relations import RelationFactors, tiled_loss
from compress.losses.vectors import dot_scores

# Sides of a relation or attention, heads, and the widths of a head of teacher and student.
SHAPES = {
    "minilmv2 6x384 <- 12x768, relation": (1, 48, 16, 8),
    "minilm 6x384 <- 12x768, attention": (2, 12, 64, 32),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = ((32, 2), (32, 4), (64, 4), (64, 8), (128, 8))  # block and warps; others were slower or did not fit
STAGES = (1, 2, 3)  # loads under way at once
EXPONENTIALS = 6  # a pair of tokens: two for the value, and four for the gradients, of rows and of columns

Way = tuple[int, int, int] | str  # block, warps and stages of the kernels, or tiles, or textbook


@contextmanager
def kernels_of(block: int, warps: int, stages: int) -> Iterator[None]:
    """Context in which the kernels have these sizes."""
    usual = triton_kl.options

    def options(teacher: Tensor, student: Tensor) -> dict[str, Any]:
        return usual(teacher, student) | {"BLOCK": block, "num_warps": warps, "num_stages": stages}

    triton_kl.options = options
    try:
        yield
    finally:
        triton_kl.options = usual


@contextmanager
def tiles_alone() -> Iterator[None]:
    """Context in which a GPU computes in tiles too."""
    usual = tiled_relations._on_gpu
    tiled_relations._on_gpu = lambda *_dots: None
    try:
        yield
    finally:
        tiled_relations._on_gpu = usual


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, batch: int, tokens: int
) -> tuple[RelationFactors, RelationFactors, Tensor]:
    """Vectors of teacher and student, and a mask without padding. They lie in memory as projections do."""
    sides, heads, wide, narrow = shape
    made = []
    for width in (wide, narrow):
        parts = [
            torch.randn(batch, tokens, heads, width, device="cuda").to(dtype).transpose(1, 2) for _ in range(sides)
        ]
        made.append(RelationFactors(*parts))
    return made[0], made[1], torch.ones(batch, tokens, dtype=torch.long, device="cuda")


def call_of(way: Way, teacher: RelationFactors, student: RelationFactors, mask: Tensor) -> Callable[[], list[Tensor]]:
    """A function that computes the value and its gradients."""
    ours = [part.detach().requires_grad_() for part in student if part is not None]

    def call() -> list[Tensor]:
        if way == "textbook":
            value = Textbook._at_once(teacher.scores(), RelationFactors(*ours).scores(), mask)
        elif way == "tiles":
            with tiles_alone():
                value = tiled_loss("kl", teacher, RelationFactors(*ours), mask)
        else:
            with kernels_of(*way):  # type: ignore[misc]
                value = tiled_loss("kl", teacher, RelationFactors(*ours), mask)
        return [value.detach(), *torch.autograd.grad(value, ours)]

    return call


def compiled(case: tuple[str, str, int, int, int]) -> None:
    """Compiles the kernels of one way into Triton's cache on disk."""
    name, dtype, block, warps, stages = case
    call_of((block, warps, stages), *drawn(SHAPES[name], DTYPES[dtype], 2, 2 * block))()


def error(way: Way, shape: tuple[int, int, int, int], dtype: torch.dtype) -> float:
    """The norm of the gradient's difference from the formula's in float64, of the same vectors, over the norm of that."""
    torch.manual_seed(0)
    teacher, student, mask = drawn(shape, dtype, 2, 160)
    found = call_of(way, teacher, student, mask)()[1:]
    exact = [part.detach().double().requires_grad_() for part in student if part is not None]
    far = RelationFactors(*[part.double() for part in teacher if part is not None]).scores().log_softmax(-1)
    ours = dot_scores(exact[0], exact[-1]).log_softmax(-1)
    wanted = torch.autograd.grad((far.exp() * (far - ours)).sum(-1).mean(), exact)
    apart = sum((a.double() - b).square().sum() for a, b in zip(found, wanted, strict=True))
    return float((apart / sum(b.square().sum() for b in wanted)) ** 0.5)


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            if number > 1:  # the first two warm up
                taken[name].append(before.elapsed_time(after))
    return taken


def measured(name: str, dtype: str, given: argparse.Namespace) -> dict[str, Any]:
    """The results of one shape in one type."""
    shape = SHAPES[name]
    ways: dict[str, Way] = {
        f"kernels, block {block}, warps {warps}, stages {stages}": (block, warps, stages)
        for block, warps in SIZES
        for stages in STAGES
    }
    ways |= {"tiles": "tiles", "textbook": "textbook"}
    inputs = drawn(shape, DTYPES[dtype], given.batch, given.tokens)
    calls, failed = {}, {}
    for label, way in ways.items():
        call = call_of(way, *inputs)
        try:
            call()
            torch.cuda.synchronize()
        except Exception as reason:  # too much shared memory, or too little memory
            failed[label] = f"{type(reason).__name__}: {str(reason).splitlines()[0][:120]}"
        else:
            calls[label] = call
    taken = timed(calls, given.rounds)
    facts = torch.cuda.get_device_properties(0)
    pairs = given.batch * given.tokens**2 * shape[1]
    a_second = 16 * facts.multi_processor_count * 1e3 * getattr(facts, "clock_rate", 1_980_000)
    return {
        "ms": {label: statistics.median(times) for label, times in taken.items()},
        "quartiles": {label: statistics.quantiles(times, n=4)[::2] for label, times in taken.items()},
        "gradient_error": {label: error(ways[label], shape, DTYPES[dtype]) for label in calls},
        "failed": failed,
        "used": triton_kl.options(inputs[0].queries, inputs[1].queries),
        "floor_ms": 1e3 * EXPONENTIALS * pairs / a_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--compilers", type=int, default=12, help="processes that compile kernels")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU, and the kernels are for one.")
    cases = [(name, dtype, *size, stages) for name in SHAPES for dtype in DTYPES for size in SIZES for stages in STAGES]
    with ProcessPoolExecutor(given.compilers, mp_context=get_context("spawn")) as pool:
        for task in [pool.submit(compiled, case) for case in cases]:
            task.exception()  # one that does not fit says so again when it is timed
    found = {f"{name}, {dtype}": measured(name, dtype, given) for name in SHAPES for dtype in DTYPES}
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton_kl.triton.__version__}
    text = json.dumps({"machine": machine, "batch": given.batch, "tokens": given.tokens, "found": found}, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
