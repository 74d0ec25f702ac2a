"""Several processes that train one model: which of them this is, how they share a batch, what they tell each other.

`torchrun`, or `accelerate launch` on GPUs, starts them and says so in the environment. The first is the main process: it
alone writes. With one process, the usual case, everything here does nothing and torch.distributed is not touched.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from serve.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

# What a launcher sets, by torchrun's names.
COUNT, NUMBER, HERE = "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"
# The longest that processes wait for each other: for a validation, or for what the main process does alone.
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class Share:
    """Part `number`, from 0, of the `of` parts that the batch of a step is cut into, in space or in time."""

    number: int = 0
    of: int = 1

    def bounds(self, count: int) -> tuple[int, int]:
        """Where its part of `count` things begins and where it ends; the same where there are fewer things than parts."""
        return self.number * count // self.of, (self.number + 1) * count // self.of


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get(COUNT, "1"))


def main() -> bool:
    """Whether this is the main process."""
    return count() == 1 or int(os.environ[NUMBER]) == 0


def count_here() -> int:
    """How many of them share this machine."""
    return int(os.environ.get(HERE, count()))


def shares(accumulate: int) -> list[Share]:
    """The parts of each batch that are this process's, one after the other; every process has `accumulate` of them.

    Two processes cut a batch as one process does that accumulates two parts.
    """
    first = 0 if main() else int(os.environ[NUMBER]) * accumulate
    return [Share(number, count() * accumulate) for number in range(first, first + accumulate)]


def check_launch() -> None:
    """Nothing, when this process was started alone or together with all those that were asked for.

    Raises:
        BadInput: `accelerate launch --cpu` was asked for several, and on CPUs starts one.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ and count() == 1:
        raise BadInput(
            "`accelerate launch --cpu` was asked for several processes and starts only one on CPUs. "
            "Run: torchrun --nproc-per-node 2 -m stillroom ..."
        )


def join(device: str = "auto") -> None:
    """Meet the other processes, by NCCL on GPUs and by Gloo on CPUs, as `device` says; does nothing a second time."""
    import torch

    if count() > 1 and not torch.distributed.is_initialized():
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        on_cpus = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
        PartialState(cpu=on_cpus, timeout=PATIENCE)


def broadcast(value: Any) -> Any:
    """The main process's `value`, in every process. It waits for the main process; the main process waits for nobody."""
    if count() == 1:
        return value
    import torch

    join()
    said = [value]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def wait() -> None:
    """Go on when all processes have come here."""
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
    """Put the sum over all processes into each of `tensors`, of one type and device: every process gets the same bits."""
    if count() > 1:
        import torch

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, sums in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(sums.view_as(tensor))


def leave_group() -> None:
    """Leave the others: from here on this process is one alone, and so are those that it starts."""
    if count() > 1:
        import torch

        wait()
        torch.distributed.destroy_process_group()
        for name in (COUNT, NUMBER, HERE, "LOCAL_RANK"):
            os.environ.pop(name, None)
