"""Several processes that train one model: the rank of this one, its shares of a batch, and communication.

`torchrun`, or `accelerate launch` on GPUs, starts the processes and sets environment variables. Rank 0 is the main process;
only it writes results. Its node is the only one that has them: what other nodes need is sent to them. With one process, the usual
case, everything here does nothing and torch.distributed is not touched.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compress.peers import Peers, Rank
from compress.peers import meet as meet_peers
from serve.errors import BadInput
from serve.files import disk_errors_reported, replacing_folder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("compress")

T = TypeVar("T")

# Environment variables that a launcher sets, by torchrun's names.
COUNT, NUMBER, HERE, NUMBER_HERE, NODE = "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"
# Longest wait of one process for the others: for a validation, or for work that only the main process does. Processes that end
# or no longer answer are noticed far sooner (`compress.peers`).
PATIENCE = timedelta(hours=12)
CHUNK_BYTES = 1 << 24  # of files that are sent at once


@dataclass(frozen=True)
class ProcessShare:
    """Part `number` (from 0) of the `of` parts that a step's batch is cut into, across processes and accumulation steps."""

    number: int = 0
    of: int = 1

    def bounds(self, count: int) -> tuple[int, int]:
        """Start and end index of this part of `count` items; equal if the part is empty."""
        return self.number * count // self.of, (self.number + 1) * count // self.of


class _Training:
    """What this process knows of the training that it takes part in."""

    peers: Peers | None = None
    began_with = 1  # processes; its batches stay cut into as many parts, or more


_training = _Training()


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get(COUNT, "1"))


def rank() -> int:
    """The number of this process; the main one's is 0."""
    return int(os.environ[NUMBER]) if count() > 1 else 0


def main() -> bool:
    """Whether this is the main process."""
    return rank() == 0


@lru_cache(maxsize=256)
def warn(text: str) -> None:
    """Log a warning in the main process, once, since one call may open a model several times. The command line shows it."""
    if main():
        log.warning("warning: %s", text)


def count_here() -> int:
    """How many of the processes run on this machine."""
    return int(os.environ.get(HERE, count()))


def node() -> int:
    """The number of this machine, the main process's being 0: as the launcher says, or else from the number of processes on each."""
    return int(os.environ.get(NODE, rank() // count_here())) if count() > 1 else 0


def first_here() -> bool:
    """Whether this is the process that writes and reports for its machine."""
    return count() == 1 or int(os.environ.get(NUMBER_HERE, rank() % count_here())) == 0


def begin_with(processes: int) -> None:
    """Let batches be cut into the parts of a training that began with so many processes; see `shares`."""
    _training.began_with = processes


def shares(accumulate: int) -> list[ProcessShare]:
    """The `accumulate` shares of each batch that this process computes, in order; more if the training began with more processes.

    Two processes cut a batch into the same parts as one process with `accumulate=2`, or one that goes on with the training of two.
    """
    parts = max(_training.began_with, count()) * accumulate
    first, end = ProcessShare(rank(), count()).bounds(parts)
    return [ProcessShare(number, parts) for number in range(first, end)]


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


def meet(on_lost: Callable[[str], None] = log.critical) -> None:
    """Wait for the other processes to start. From now on this one ends when another has; a second call does nothing.

    `on_lost` is then called with a message, in one process of each machine.

    Raises:
        BadInput: not all processes can be reached.
    """
    lacking = [name for name in (NUMBER, HERE, NUMBER_HERE) if name not in os.environ]
    if count() > 1 and lacking:
        raise BadInput(
            f"{COUNT} is {count()}, and {' and '.join(lacking)} {'are' if lacking[1:] else 'is'} not set. Start the processes by torchrun, "
            "or set these for each of them."
        )
    if count() > 1 and _training.peers is None:
        _training.peers = meet_peers(rank(), count(), node(), on_lost if first_here() else lambda _: None)


def failed(message: str) -> None:
    """Tell the other processes that this one ends, and why."""
    if _training.peers:
        _training.peers.failed(message)


def agreed(facts: Mapping[str, str], refusal: Callable[[Rank, Mapping[str, str]], str]) -> None:
    """See `compress.peers.Peers.agreed`."""
    if count() > 1:
        meet()
        assert _training.peers
        with _broken_connections():
            _training.peers.agreed(facts, refusal)


def join(device: str = "auto") -> None:
    """Join the process group: tensors on GPUs go by NCCL, those on CPUs by Gloo, as `device` says. A second call does nothing."""
    import torch

    if count() > 1 and not torch.distributed.is_initialized():
        from accelerate import PartialState
        from accelerate.utils import parse_flag_from_env

        meet()
        assert _training.peers
        on_cpus = device == "cpu" or not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
        with _broken_connections():
            # Not left to accelerate, whose group has NCCL alone: files and other work on CPUs would wait on the GPU.
            torch.distributed.init_process_group(
                "gloo" if on_cpus else "cpu:gloo,cuda:nccl",
                store=torch.distributed.PrefixStore("group", _training.peers.store),  # type: ignore[attr-defined]
                rank=rank(), world_size=count(), timeout=PATIENCE,
            )  # fmt: skip
        PartialState(cpu=on_cpus)


@contextmanager
def _broken_connections() -> Iterator[None]:
    """Context of communication: if it fails because another process was lost, this one ends with the message about that."""
    try:
        yield
    except RuntimeError:
        if _training.peers:
            _training.peers.connection_broke()
        raise


def broadcast(value: Any) -> Any:
    """The main process's `value`, in every process; the others wait for the main process."""
    if count() == 1:
        return value
    import torch

    join()
    values = [value]
    with _broken_connections():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def by_main(call: Callable[[], T]) -> T:
    """The result of `call`, which only the main process calls; or the `BadInput` that it raises, in every process."""
    found: Any = None
    fault = ""
    if main():
        try:
            found = call()
        except BadInput as error:
            if count() == 1:
                raise
            fault = error.message
    found, fault = broadcast((found, fault))
    if fault:
        raise BadInput(fault)
    result: T = found
    return result


def gather(value: Any) -> list[Any]:
    """Every process's `value`, by rank, in every process."""
    if count() == 1:
        return [value]
    import torch

    join()
    values: list[Any] = [None] * count()
    with _broken_connections():
        torch.distributed.all_gather_object(values, value)
    return values


def collect(value: Any) -> list[Any] | None:
    """Every process's `value`, by rank, in the main process; None in the others."""
    if count() == 1:
        return [value]
    import torch

    join()
    values: list[Any] | None = [None] * count() if main() else None
    with _broken_connections():
        torch.distributed.gather_object(value, values, dst=0)
    return values


def wait() -> None:
    """Block until all processes have called this."""
    if count() > 1:
        collect(None)
        broadcast(None)


def broadcast_tensors(tensors: Sequence["Tensor"]) -> None:
    """Give every process the main process's values of `tensors`, in place."""
    if count() > 1:
        import torch

        with _broken_connections():
            for tensor in tensors:
                torch.distributed.broadcast(tensor, src=0)


def all_reduce(tensors: Sequence["Tensor"]) -> None:
    """Replace each of `tensors`, all of one dtype and device, by its sum over all processes; every process gets the same bits."""
    if count() > 1:
        import torch

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _broken_connections():
            torch.distributed.all_reduce(flat)
        for tensor, sums in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(sums.view_as(tensor))


def copy_folder(folder: Path) -> None:
    """Copy `folder` of the main process's machine to `folder` of every other one, in place of what is there.

    The path may be another one on each machine. All processes call this; it is written when they return.

    Raises:
        BadInput: a disk is full.
    """
    if count() == 1:
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if main() else []
    named = broadcast([(str(path.relative_to(folder)), path.stat().st_size) for path in files])
    writes = node() != 0 and first_here()
    with (
        disk_errors_reported(
            f"{folder}, this node's copy of what the main process made,",
            if_full="Make room, and give the same command again on every node",
        ),
        replacing_folder(folder, alone=True) if writes else nullcontext(folder) as target,
    ):
        for name, size in named:
            _copy_file(target / name if main() or writes else None, size)
    wait()


def _copy_file(path: Path | None, size: int) -> None:
    """Send the file `path` of the main process, of `size` bytes; the others write it to their `path`, or nowhere if it is None."""
    import torch

    if path and not main():
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb" if main() else "wb") if path else open(os.devnull, "wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            # (length,), on the CPU
            chunk = torch.empty(length, dtype=torch.uint8)
            if main() and file.readinto(chunk.numpy()) != length:  # type: ignore[attr-defined]
                raise BadInput(f"{path} was changed while it was sent to other nodes. Give the same command again.")
            broadcast_tensors([chunk])
            if not main():
                file.write(chunk.numpy().tobytes())


def only_main() -> None:
    """Leave the process group: the main process goes on as a single process, and the others end here."""
    if count() > 1:
        import torch

        ends = not main()
        wait()
        if _training.peers:
            _training.peers.stop()
        torch.distributed.destroy_process_group()
        _training.peers, _training.began_with = None, 1
        for name in (COUNT, NUMBER, HERE, NUMBER_HERE, NODE):
            os.environ.pop(name, None)
        if ends:
            raise SystemExit(0)
