"""Measure the overhead of `stillroom annotate`: its texts a second over those of bare sessions, in turns.

    python benchmarks/serve/annotate.py BUNDLE TEXTS --turns 8 --out annotate.json

TEXTS is a file that `annotate` reads. The bare sessions have an advantage that no real job has: all texts are in memory, sorted by
length. They use as many processes of one thread as `annotate`; each takes the next block when it is free, tokenises, runs and decodes
it, and keeps the answers. `annotate` starts again each turn, reads the file, and writes JSON lines. Both times run from the first
text to the last answer, without the start of the processes. Core-seconds are measured too, since other load on the machine hardly
changes them; for `annotate`, those of a run with one row are subtracted. The exit code is 1 if any answers differ.
"""

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from latency.measure.machine import machine_facts
from latency.measure.statistics import paired_ratio
from serve.bundle.cpu import available_cores
from serve.model.pipeline import Pipeline, length_batches
from serve.tasks.served_task import ReadText
from serve.text.answers import AnswerOptions
from serve.text.inputs import TextWork
from stillroom.verbs.annotate.pool import length_chunks
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import Columns

BLOCK_TOKENS = 4096


def texts_of(file: Path) -> list[tuple[str, str | None]]:
    with InputFile(file, columns=Columns(answer="benchmark")) as opened:
        return [(row.text, row.pair) for row in opened.rows()]


def bare(bundle: Path, file: Path, variant: str | None, run_tokens: int, block: Any, pipe: Connection) -> None:
    """Computes blocks of texts, turn after turn; after each turn it sends its end time, and then its answers."""
    pipeline = Pipeline(bundle, variant, 1)
    pipeline.warm_up()
    options = AnswerOptions()
    texts = texts_of(file)
    blocks = length_chunks([len(text) // 4 + len(pair or "") // 4 + 2 for text, pair in texts], BLOCK_TOKENS)
    pipe.send("ready")
    while pipe.recv():
        answers = {}
        began_s = time.process_time()
        while True:
            with block.get_lock():
                mine = block.value
                block.value += 1
            if mine >= len(blocks):
                break
            chosen = [texts[place] for place in blocks[mine]]
            pairs = [pair for _, pair in chosen if pair is not None]
            encodings = pipeline.encode([text for text, _ in chosen], pairs or None)
            for batch in length_batches([len(each) for each in encodings], run_tokens):
                for place, logits in zip(batch, pipeline.session.run([encodings[i] for i in batch]), strict=True):
                    text = chosen[place][0]
                    words = pipeline.task.words(text, encodings[place])
                    read = ReadText(TextWork(*chosen[place], options), encodings[place], words)
                    answers[blocks[mine][place]] = pipeline.task.answer(read, logits, pipeline.facts)
        pipe.send((time.perf_counter(), time.process_time() - began_s))
        pipe.send(answers)


class Bare:
    """Processes of bare sessions, ready for turns."""

    def __init__(self, bundle: Path, file: Path, variant: str | None, run_tokens: int, processes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.block = spawn.Value("q", 0)
        self.pipes = []
        for _ in range(processes):
            mine, theirs = spawn.Pipe()
            arguments = (bundle, file, variant, run_tokens, self.block, theirs)
            spawn.Process(target=bare, args=arguments, daemon=True).start()
            self.pipes.append(mine)
        for pipe in self.pipes:
            pipe.recv()

    def turn(self) -> tuple[float, float, dict[int, Any]]:
        """Seconds, core-seconds, and the answers by place."""
        self.block.value = 0
        began_s = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        ended = [pipe.recv() for pipe in self.pipes]
        answers: dict[int, Any] = {}
        for pipe in self.pipes:
            answers |= pipe.recv()
        return max(end_s for end_s, _ in ended) - began_s, sum(core_s for _, core_s in ended), answers

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


def annotated(
    bundle: Path, file: Path, variant: str | None, processes: int, out: Path
) -> tuple[float, float, dict[int, Any]]:
    """Seconds, core-seconds including the start of the processes, and the answers by place."""
    command = [sys.executable, "-m", "stillroom", "annotate", str(bundle), "--input", str(file), "--output", str(out)]
    command += ["--restart", "--field", "benchmark", "--processes", str(processes), "--json"]
    command += ["--variant", variant] if variant else []
    before_s = core_seconds()
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    took_s = core_seconds() - before_s
    with out.open(encoding="utf-8") as lines:
        answers = {place: json.loads(line)["benchmark"] for place, line in enumerate(lines)}
    return json.loads(said.stdout)["seconds"], took_s, answers


def core_seconds() -> float:
    """Core-seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--variant")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--run-tokens", type=int, default=512, help="padded tokens in one call of a bare session")
    parser.add_argument("--out", type=Path, help="JSON of all turns")
    given = parser.parse_args()
    sessions = Bare(given.bundle, given.texts, given.variant, given.run_tokens, given.processes)
    seconds: dict[str, list[float]] = {"annotate": [], "bare": []}
    cores: dict[str, list[float]] = {"annotate": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        out, one_row = Path(folder) / "answers.jsonl", Path(folder) / "one.jsonl"
        one_row.write_text('{"text": "one"}\n')
        for turn in range(given.turns):
            found: dict[str, dict[int, Any]] = {}
            for name in ("annotate", "bare")[:: 1 if turn % 2 else -1]:
                if name == "bare":
                    took_s, cores_s, found[name] = sessions.turn()
                else:
                    how = (given.variant, given.processes, out)
                    start_s = annotated(given.bundle, one_row, *how)[1]
                    took_s, cores_s, found[name] = annotated(given.bundle, given.texts, *how)
                    cores_s -= start_s
                seconds[name].append(took_s)
                cores[name].append(cores_s)
            if found["annotate"] != found["bare"]:
                sys.exit("The answers differ.")
    texts = len(found["bare"])
    sessions.end()
    ratios = {
        what: paired_ratio(*([np.array([s]) for s in taken[name]] for name in ("bare", "annotate")))
        for what, taken in (("texts_per_s", seconds), ("texts_per_core_s", cores))
    }
    print(f"{texts} texts, {given.processes} processes, {given.turns} turns; answers equal")
    for name, taken in seconds.items():
        print(f"{name:9s} {texts / np.median(taken):8.0f} texts/s  ({', '.join(f'{s:.2f}' for s in taken)} s)")
        print(
            f"{'':9s} {texts / np.median(cores[name]):8.0f} texts/core-s  ({', '.join(f'{s:.2f}' for s in cores[name])} s)"
        )
    for what, (ratio, low, high) in ratios.items():
        print(f"annotate over bare, {what}: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    if given.out:
        document = {
            "machine": machine_facts(),
            "bundle": given.bundle.name,
            "texts": texts,
            "processes": given.processes,
            "seconds": seconds,
            "core_seconds": cores,
            "annotate_over_bare": {
                what: dict(zip(("ratio", "low", "high"), found, strict=True)) for what, found in ratios.items()
            },
        }
        given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
