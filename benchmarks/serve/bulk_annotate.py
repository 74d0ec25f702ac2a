"""Measure `stillroom annotate` over a folder of parquet, on one machine and by Ray, and check its parts after kills.

    python benchmarks/serve/bulk_annotate.py BUNDLE TEXTS --rows 200000 --turns 3 --out bulk.json

TEXTS are JSON lines; their texts are drawn again and again, and written with other columns as parquet. In turns, the folder is answered by
`annotate` without Ray and with `--ray local`, each with `--processes` workers; and with `--one-file` one file with all rows by `annotate`.
Then a run with Ray loses five actors by SIGKILL, one after another, and then its driver; the same command is given again. The exit code
is 1 if the parts of any two runs differ. `seconds` are those of answering, as `--json` prints; `wall_s` are those of the whole command.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from pyarrow import parquet

from latency.measure.machine import machine_facts

KILLS = 5
FILES = 4
ACTOR = "ray::_Actor"


def write_input(texts: Path, rows: int, folder: Path) -> None:
    """FILES files of parquet, and one with all rows beside the folder."""
    with texts.open(encoding="utf-8") as lines:
        known = [json.loads(line)["text"] for line in lines]
    drawn, folder_tables = random.Random(7), []
    folder.mkdir()
    for number in range(FILES):
        count = rows // FILES
        table = pa.table({
            "id": pa.array(range(number * count, (number + 1) * count), pa.int64()),
            "text": [drawn.choice(known) for _ in range(count)],
            "day": [datetime.date(2026, 1, 1 + row % 28) for row in range(count)],
            "tags": pa.array([["a", "b"][: row % 3] for row in range(count)], pa.list_(pa.string())),
            "price": pa.array([row / 7 for row in range(count)], pa.float32()),
        })  # fmt: skip
        parquet.write_table(table, folder / f"texts-{number}.parquet", row_group_size=10_000)
        folder_tables.append(table)
    parquet.write_table(pa.concat_tables(folder_tables), folder.with_suffix(".parquet"), row_group_size=10_000)


def command(bundle: Path, given: Path, out: Path, processes: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "stillroom", "annotate", str(bundle), "--input", str(given), "--output", str(out)),
        *("--processes", str(processes), "--json", *more),
    ]


def timed(*asked: Any) -> dict[str, Any]:
    """What `--json` prints but for the places, which are temporary, and the seconds of the whole command."""
    began_s = time.perf_counter()
    said = subprocess.run(command(*asked), capture_output=True, text=True, check=True)
    told = {name: value for name, value in json.loads(said.stdout).items() if name not in ("input", "output")}
    return told | {"wall_s": time.perf_counter() - began_s}


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of each part."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(out.glob("*.parquet"))}


def actors_of(driver: int) -> list[int]:
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(ACTOR):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def with_kills(bundle: Path, given: Path, out: Path, processes: int) -> dict[str, Any]:
    """A run whose actors are killed KILLS times, then its driver; and the same command again."""
    asked = command(bundle, given, out, processes, "--ray", "local")
    driver = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    killed: list[dict[str, int]] = []
    rows_out = lambda: len(digests(out))  # noqa: E731
    while len(killed) < KILLS and driver.poll() is None:
        time.sleep(0.2)
        busy = [pid for pid in actors_of(driver.pid) if pid not in {each["pid"] for each in killed}]
        if busy and rows_out() > len(killed):
            killed.append({"pid": busy[len(killed) % len(busy)], "parts_then": rows_out()})
            os.kill(killed[-1]["pid"], signal.SIGKILL)
    before = rows_out()
    while driver.poll() is None and rows_out() < before + 2:
        time.sleep(0.1)
    driver_died = driver.poll() is None
    ray_processes = psutil.Process(driver.pid).children(recursive=True) if driver_died else []
    driver.kill()
    driver.wait()
    _, left = psutil.wait_procs(ray_processes, timeout=60)
    at_death = digests(out)
    stamps = {name: (out / name).stat().st_mtime_ns for name in at_death}
    again = timed(bundle, given, out, processes, "--ray", "local")
    written_twice = [name for name, stamp in stamps.items() if (out / name).stat().st_mtime_ns != stamp]
    return {
        "actors_killed": killed,
        "driver_killed": driver_died,
        "ray_processes_left": len(left),
        "parts_at_death": len(at_death),
        "parts_written_twice": len(written_twice),
        "partial_files": len([*out.rglob(".*.partial")]),
        "again": again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--one-file", action="store_true", help="time also `annotate` of one file with all rows")
    parser.add_argument("--out", type=Path, help="JSON of all turns")
    given = parser.parse_args()
    names = (*(["one_file"] if given.one_file else []), "local", "ray")
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    parts: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "texts"
        write_input(given.texts, given.rows, folder)
        for turn in range(given.turns):
            for name in names[:: 1 if turn % 2 else -1]:
                out = Path(temporary) / f"{name}-{turn}"
                how = (given.bundle, folder, out, given.processes)
                if name == "one_file":
                    out = out.with_suffix(".jsonl")
                    turns[name].append(timed(given.bundle, folder.with_suffix(".parquet"), out, given.processes))
                    out.unlink()
                else:
                    turns[name].append(timed(*how, *(("--ray", "local") if name == "ray" else ())))
                    parts[f"{name}-{turn}"] = digests(out)
                    shutil.rmtree(out)
                print(
                    f"{name:9s} {turns[name][-1]['texts_per_s']:8.0f} texts/s, {turns[name][-1]['wall_s']:.1f} s in all"
                )
        killed = with_kills(given.bundle, folder, Path(temporary) / "killed", given.processes)
        parts["killed"] = digests(Path(temporary) / "killed")
    equal = all(each == parts["local-0"] for each in parts.values())
    speeds = {name: float(np.median([each["texts_per_s"] for each in each_turn])) for name, each_turn in turns.items()}
    ratios = [r["texts_per_s"] / p["texts_per_s"] for r, p in zip(turns["ray"], turns["local"], strict=True)]
    document = {
        "machine": machine_facts(),
        "bundle": given.bundle.name,
        "rows": given.rows,
        "files": FILES,
        "parts": len(parts["local-0"]),
        "processes": given.processes,
        "texts_per_s": speeds,
        "ray_over_local": {"median": float(np.median(ratios)), "all": ratios},
        "parts_equal": equal,
        "sha256_of_parts": parts["local-0"],
        "killed": killed,
        "turns": turns,
        "load_average": os.getloadavg(),
    }
    print(f"Ray over the same without Ray: {document['ray_over_local']}; parts equal: {equal}")
    print(
        f"kills: {len(killed['actors_killed'])} actors, driver {killed['driver_killed']}; {killed['parts_at_death']} parts at its death"
    )
    if given.out:
        given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
