"""How the threads of an operation wait for the next one. To be set before torch is loaded; this module does not load it."""

import os
from collections.abc import MutableMapping

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # libgomp reads them once, when it is loaded

# A training step is many short operations. A thread that sleeps after each must be woken for the next, so with 10,000 turns
# (0.1 ms: libgomp's `env.c` counts 100,000 a millisecond) two threads trained 1.8 times as fast as sleeping ones on idle cores.
# On two cores that other processes wanted too they trained at 0.3 to 0.6 of the speed of sleeping ones, and with 1,000 turns at
# 0.5 to 1.1 (four pairs, short runs). `benchmarks/distill/threads.py` measures it.
TRAINING_SPINS = 1_000


def wait_for_work(spins: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads spin for `spins` turns before they sleep; 0 lets them sleep at once.

    It must be called before torch is loaded, and does nothing if the user set `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`.
    Processes started later inherit it. Where torch comes with another OpenMP than libgomp (on macOS), threads sleep at once.
    """
    if POLICY not in environment and SPINS not in environment:
        # The policy alone would mean 0 turns or minutes; the count overrides it, and the policy stays for other runtimes.
        environment.update({POLICY: "PASSIVE", SPINS: str(spins)})
