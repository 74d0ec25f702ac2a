"""What `stillroom run` reaches with nothing but its needed settings: whole data sets, 3,000 texts of each, and little time.

    python benchmarks/distill/defaults.py --data DATA --teacher all-MiniLM-L6-v2 --work FOLDER --out defaults.json [--only TEXT]

DATA holds the folders clinc150, snips and conll2000. The set SET-N has N labelled texts of SET, drawn with seed 0 (for clinc150 N of each
class; 0 is all), and no text without labels. Each run is a command as its user gives it, on one thread, so that two can go on at once:
`--only TEXT` makes the runs whose name holds TEXT, such as `snips-3000` or `minutes`. What is finished in --work is not made again.
--out holds a row a run, with its scores and the paired differences that its report states under `claims`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from choosing import TASKS, drawn

from latency.measure.machine import machine_facts

SEEDS = (0, 1, 2)
RUNS: list[tuple[str, list[str]]] = [
    *((f"{name}/seed-{seed}", ["--seed", str(seed)]) for seed in SEEDS for name in ("snips-3000", "conll2000-3000", "clinc150-20")),
    *((f"{name}/all", []) for name in ("conll2000-0", "snips-0", "clinc150-0")),
    *((f"snips-0/minutes-{minutes}", ["--max-minutes", str(minutes)]) for minutes in (10, 20, 40)),
]  # fmt: skip


def made(name: str, asked: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """The document of the run, made or found, and its report's choice and paired differences."""
    of_set = name.partition("/")[0]
    out = given.work / name
    kept = out.with_suffix(".json")
    if not kept.exists():
        data = drawn(of_set, given.data, given.work / "sets" / of_set)
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "stillroom", "run", "--teacher", given.teacher, "--task", TASKS[of_set.rpartition("-")[0]],
            "--data", str(data), "--student", "3x384", "--out", str(out), "--threads", "1", "--teacher-gate", "0", "--gate", "0",
            "--latency-seconds", "5", "--json", *asked,
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}")
        document = json.loads(done.stdout)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        document |= {"choice": report["choice"], "claims": report.get("claims"), "asked": asked}
        part = kept.with_name(f"{kept.name}.part")
        part.write_text(json.dumps(document) + "\n", encoding="utf-8")
        os.replace(part, kept)
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return {"run": name, **found}


def main() -> None:
    """Make the runs and write what they reached."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--only", action="append", default=[])
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    machine, rows = machine_facts(), []
    for name, asked in RUNS:
        if given.only and not any(part in name for part in given.only):
            continue
        rows.append(made(name, asked, given))
        print(
            json.dumps(
                {key: rows[-1].get(key) for key in ("run", "teacher", "undistilled", "student", "int8", "minutes")}
            ),
            flush=True,
        )
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
