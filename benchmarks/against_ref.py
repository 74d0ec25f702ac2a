"""Compare the benchmarks of this checkout with those of another commit, in turns, by ratio.

    python benchmarks/against_ref.py main~5 benchmarks/serve
    python benchmarks/against_ref.py v0.1.0 benchmarks/serve --rounds 10 --slower 1.1

Each round runs the suite of this checkout and that of the other commit, each on its own code, in alternating order. The other
commit is in a temporary worktree. A benchmark is slower if the 95 % interval of its ratio lies wholly above `--slower`; the exit
code is then 3. Times of other days or machines are never compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from latency.measure.statistics import process_ratio

ROOT = Path(__file__).resolve().parent.parent


def medians_ms(code: Path, suite: str) -> dict[str, float]:
    """Median of each benchmark of `suite` with the packages of the folder `code`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "benchmarks.json"
        command = [sys.executable, "-m", "pytest", suite, "-q", "--benchmark-only", f"--benchmark-json={report}"]
        command += ["-o", "addopts=", "-o", f"pythonpath={code}", "-p", "no:cacheprovider"]
        ended = subprocess.run(
            command,
            cwd=code,  # each commit has its own suite, since names may have changed
            env={**os.environ, "PYTHONPATH": str(code)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            sys.exit(f"The benchmarks failed on {code}:\n{ended.stdout[-3000:]}")
        found = json.loads(report.read_text())["benchmarks"]
    return {each["name"]: 1e3 * each["stats"]["median"] for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref")
    parser.add_argument("suite", nargs="?", default="benchmarks/serve")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--slower", type=float, default=1.05)
    given = parser.parse_args()
    now: dict[str, list[float]] = {}
    before: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "code"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, given.ref], cwd=ROOT, check=True)
        try:
            for i in range(given.rounds):
                for code, times in ((ROOT, now), (other, before))[:: 1 if i % 2 else -1]:
                    for name, median_ms in medians_ms(code, given.suite).items():
                        times.setdefault(name, []).append(median_ms)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    slower = []
    for name in now.keys() & before.keys():
        turns = [[np.array([x]) for x in each[name]] for each in (now, before)]
        ratio, low, high = process_ratio(*turns)
        if low > given.slower:
            slower.append(name)
        print(f"{name:40s} {np.median(now[name]):9.4f} ms  {ratio:.3f} times {given.ref} [{low:.3f}, {high:.3f}]")
    sys.exit(3 if slower else 0)


if __name__ == "__main__":
    main()
