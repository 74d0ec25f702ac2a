"""Several processes that train one model: the rank of this one, its shares of a batch, and communication.

`torchrun`, or `accelerate launch` on GPUs, starts the processes and sets environment variables. Rank 0 is the main process;
only it writes files. With one process, the usual case, everything here does nothing and torch.distributed is not touched.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from serve.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

# Environment variables that a launcher sets, by torchrun's names.
COUNT, NUMBER, HERE = "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"
# Longest wait of one process for the others: for a validation, or for work that only the main process does.
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class Share:
    """Part `number` (from 0) of the `of` parts that a step's batch is cut into, across processes and accumulation steps."""

    number: int = 0
    of: int = 1

    def bounds(self, count: int) -> tuple[int, int]:
        """Start and end index of this part of `count` items; equal if the part is empty."""
        return self.number * count // self.of, (self.number + 1) * count // self.of


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get(COUNT, "1"))


def main() -> bool:
    """Whether this is the main process."""
    return count() == 1 or int(os.environ[NUMBER]) == 0


def count_here() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get(HERE, count()))


def shares(accumulate: int) -> list[Share]:
    """The `accumulate` shares of each batch that this process computes, in order.

    Two processes cut a batch into the same parts as one process with `accumulate=2`.
    """
    first = 0 if main() else int(os.environ[NUMBER]) * accumulate
    return [Share(number, count() * accumulate) for number in range(first, first + accumulate)]


def check_launch() -> None:
    """Check that the launcher started as many processes as were asked for.

    Raises:
        BadInput: `accelerate launch --cpu` was asked for several processes and started only one.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ and count() == 1:
        raise BadInput(
            "`accelerate launch --cpu` was asked for several processes and starts only one on CPUs. "
            "Run: torchrun --nproc-per-node 2 -m stillroom ..."
        )


def join(device: str = "auto") -> None:
    """Join the process group: by NCCL on GPUs, by Gloo on CPUs, as `device` says. A second call does nothing."""
    import torch

    if count() > 1 and not torch.distributed.is_initialized():
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        on_cpus = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
        PartialState(cpu=on_cpus, timeout=PATIENCE)


def broadcast(value: Any) -> Any:
    """The main process's `value`, in every process; the others wait for the main process."""
    if count() == 1:
        return value
    import torch

    join()
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Every process's `value`, by rank, in every process."""
    if count() == 1:
        return [value]
    import torch

    join()
    values: list[Any] = [None] * count()
    torch.distributed.all_gather_object(values, value)
    return values


def wait() -> None:
    """Block until all processes have called this."""
    if count() > 1:
        import torch

        join()
        torch.distributed.barrier()


def broadcast_tensors(tensors: Sequence["Tensor"]) -> None:
    """Give every process the main process's values of `tensors`, in place."""
    if count() > 1:
        import torch

        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)


def all_reduce(tensors: Sequence["Tensor"]) -> None:
    """Replace each of `tensors`, all of one dtype and device, by its sum over all processes; every process gets the same bits."""
    if count() > 1:
        import torch

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, sums in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(sums.view_as(tensor))


def leave_group() -> None:
    """Leave the process group: this process, and those that it starts, then count as single processes."""
    if count() > 1:
        import torch

        wait()
        torch.distributed.destroy_process_group()
        for name in (COUNT, NUMBER, HERE, "LOCAL_RANK"):
            os.environ.pop(name, None)
