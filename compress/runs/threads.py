"""How the threads of an operation wait for the next one. To be set before torch is loaded; this module does not load it."""

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # libgomp reads them once, when it is loaded

# A training step is many short operations, and a thread that sleeps after each must be woken for the next. On two cores two
# threads trained 1.65 times as fast as one with 10,000 turns, and 1.14 times with none. Beside one busy process they
# trained at 0.56 of the speed of sleeping threads: there they sleep. `benchmarks/distill/threads.py` measures it.
TRAINING_SPINS = 10_000
IDLE_CORES = 0.25  # cores that other processes may use at most for the machine to count as idle
SAMPLED_S = 0.2


def wait_for_work(spins: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads spin for `spins` turns before they sleep; 0 lets them sleep at once.

    It must be called before torch is loaded, and does nothing if the user set `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`.
    Processes started later inherit it. Where torch comes with another OpenMP than libgomp (on macOS), threads sleep at once.
    """
    if POLICY not in environment and SPINS not in environment:
        # The policy alone would mean 0 turns or minutes; the count overrides it, and the policy stays for other runtimes.
        environment.update({POLICY: "PASSIVE", SPINS: str(spins)})


def training_spins() -> int:
    """Turns that training threads should spin for: `TRAINING_SPINS` on an idle machine, 0 beside other work."""
    return TRAINING_SPINS if busy_cores() < IDLE_CORES else 0


def busy_cores(seconds: float = SAMPLED_S) -> float:
    """Cores that the machine's processes use while this one sleeps for `seconds`; infinite where the system does not say."""
    before = _cpu_time()
    time.sleep(seconds)
    after = _cpu_time()
    if before is None or after is None or after[1] == before[1]:
        return float("inf")
    idle, whole = (new - old for new, old in zip(after, before, strict=True))
    return (1 - idle / whole) * (os.cpu_count() or 1)


def _cpu_time() -> tuple[int, int] | None:
    """Idle and whole time of all cores since the machine started, in ticks (Linux's `/proc/stat`)."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return ticks[3] + ticks[4], sum(ticks)
