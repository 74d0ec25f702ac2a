"""Time how the gradients of a step are summed over two processes on this machine: after the backward pass, or while it runs.

    python benchmarks/distill/overlap.py [--steps 12] [--rounds 3]

A BERT with random weights (3x384, 8,000 tokens in use) takes forward and backward passes on random tokens, with Gloo on the loopback and
a thread a process. `after` is what `compress.distributed.all_reduce` does: one copy, one sum, one copy back. `overlapped` sums buckets of
25 MB (DistributedDataParallel's size) as soon as their gradients are there, in other threads. `ddp` is torch's DistributedDataParallel.
`none` sums nothing, as the floor. Each round takes the ways in turn. Prints a JSON document with the seconds of each step of the main
process.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
BUCKET_BYTES = 25 << 20
BATCH, TOKENS, VOCABULARY = 16, 64, 8_000


def made() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def buckets_of(model: Any) -> list[list[Tensor]]:
    """The parameters in about the order in which their gradients come, in buckets of `BUCKET_BYTES`."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if buckets[-1] and 4 * sum(p.numel() for p in buckets[-1]) > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def overlapped(model: Any) -> Callable[[], None]:
    """Sums the buckets of `model` while its backward pass runs; the result is called after it."""
    buckets = buckets_of(model)
    waiting = [len(bucket) for bucket in buckets]
    under_way: list[tuple[Any, Tensor, list[Tensor]]] = []

    def arrived(number: int) -> None:
        waiting[number] -= 1
        if not waiting[number]:
            flat = torch.cat([p.grad.reshape(-1) for p in buckets[number] if p.grad is not None])
            under_way.append((torch.distributed.all_reduce(flat, async_op=True), flat, buckets[number]))

    for number, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: arrived(number))

    def finish() -> None:
        for work, flat, bucket in under_way:
            work.wait()
            for parameter, sums in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(sums.view_as(parameter))  # type: ignore[union-attr]
        under_way.clear()
        waiting[:] = [len(bucket) for bucket in buckets]

    return finish


def after(model: Any) -> Callable[[], None]:
    from compress import distributed

    return lambda: distributed.all_reduce([p.grad for p in model.parameters() if p.grad is not None])


def train(steps: int, rounds: int) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    models = {name: made() for name in ("none", "after", "overlapped", "ddp")}
    called = models | {"ddp": DistributedDataParallel(models["ddp"], gradient_as_bucket_view=True)}
    sums = {
        "none": lambda: None,
        "after": after(models["after"]),
        "overlapped": overlapped(models["overlapped"]),
        "ddp": lambda: None,
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(rounds):
        for name, model in called.items():
            for step in range(steps):
                ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)
                torch.distributed.barrier()
                started = time.perf_counter()
                model(input_ids=ids).last_hidden_state.square().mean().backward()
                sums[name]()
                if step:  # the first one warms up
                    seconds[name].append(time.perf_counter() - started)
                model.zero_grad(set_to_none=False)
    size = sum(p.numel() for p in models["none"].parameters())
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {"parameters": size, "median_s": median, "seconds": seconds, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if "RANK" in os.environ:
        found = train(given.steps, given.rounds)
        if os.environ["RANK"] == "0":
            print(json.dumps(found, indent=1))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {
        "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    started = [subprocess.Popen([sys.executable, *sys.argv], env=common | {"RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()
