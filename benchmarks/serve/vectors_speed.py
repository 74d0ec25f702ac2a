"""Texts a second of a bundle of vectors beside its teacher and itself in sentence-transformers, and in infinity; each in its own process.

    python benchmarks/serve/vectors_speed.py BUNDLE TEACHER TEXTS --sentence-transformers BIN --infinity BIN [--rounds 5] [--json F]

BIN are the `bin` folders of environments that have these packages. TEXTS is a file of texts; each round answers all of them, in turns of
random order:

  annotate      `stillroom annotate` to an array, int8 and fp32, on all cores
  encode        `SentenceTransformer.encode` of the teacher and of the student (the bundle opens there), batches of 32, torch on all cores
  served        one client of 8 connections, 32 texts a request: `stillroom serve` (int8), infinity with its torch engine (student)

Starting a process and loading a model are not counted. Each vector is compared with that of the student in sentence-transformers, or the
teacher's: the mean cosine is shown, and below 0.98 the exit code is 1 (int8 is not float32).
"""

import argparse
import base64
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from running import Place, drive, post, serving, stop, wait_until_ready

from compress.data.texts import read_texts
from latency.measure.machine import machine_facts

A_REQUEST, CONNECTIONS = 32, 8
LEAST_COSINE = 0.98
ENCODE = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.load(open(sys.argv[2]))
model.encode(texts[:64])
for line in sys.stdin:
    began = time.perf_counter()
    vectors = model.encode(texts, batch_size=32, show_progress_bar=False)
    seconds = time.perf_counter() - began
    np.save(sys.argv[3], np.asarray(vectors, dtype=np.float32))
    print(json.dumps(len(texts) / seconds), flush=True)
"""
FIELDS = {"encoding_format": "base64"}


class Encoder:
    """A process with `SentenceTransformer`, which waits between its turns."""

    def __init__(self, bin_folder: Path, model: Path, texts: Path, out: Path) -> None:
        self.out = out
        self.process = subprocess.Popen(
            [bin_folder / "python", "-c", ENCODE, model, texts, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def turn(self) -> tuple[float, np.ndarray]:
        """Texts a second, and the vectors."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline() or sys.exit("sentence-transformers ended; see above")
        return float(said), np.load(self.out)


def annotated(bundle: Path, texts: Path, variant: str, folder: Path) -> tuple[float, np.ndarray]:
    """Texts a second of `annotate`, and the vectors."""
    out = folder / f"{variant}.npy"
    command = [
        sys.executable, "-m", "stillroom", "annotate", bundle, "--input", texts, "--output", out, "--variant", variant,
        "--restart", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["texts_per_s"]), np.load(out)


def served(place: Place, path: str, model: str, texts: list[str]) -> tuple[float, np.ndarray]:
    """Texts a second over HTTP, and the vectors."""
    bodies = [
        json.dumps({"model": model, "input": texts[first : first + A_REQUEST], **FIELDS}).encode()
        for first in range(0, len(texts), A_REQUEST)
    ]
    driven = drive(place, [post(place, path, body) for body in bodies], connections=CONNECTIONS)
    if driven.having(200) < len(bodies):
        sys.exit(f"{path}: {len(bodies) - driven.having(200)} of {len(bodies)} requests were not answered with 200")
    rows = [each["embedding"] for body in driven.bodies for each in json.loads(body)["data"]]
    return len(texts) / driven.seconds, np.stack([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in rows])


@contextlib.contextmanager
def infinity(bin_folder: Path, model: Path) -> Iterator[Place]:
    """infinity with its torch engine."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [
        bin_folder / "infinity_emb", "v2", "--model-id", model, "--served-model-name", "student", "--device", "cpu", "--engine", "torch",
        "--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=sys.stderr, env=environment
    ) as process:
        try:
            wait_until_ready(Place("127.0.0.1", port), "/health", process)
            yield Place("127.0.0.1", port)
        finally:
            stop(process)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The mean cosine of the vectors of the same texts."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / np.maximum(lengths, 1e-12)).mean())


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("bundle", type=Path)
    reader.add_argument("teacher", type=Path)
    reader.add_argument("texts", type=Path)
    reader.add_argument("--sentence-transformers", type=Path, required=True)
    reader.add_argument("--infinity", type=Path)
    reader.add_argument("--rounds", type=int, default=5)
    reader.add_argument("--json", type=Path)
    given = reader.parse_args()
    texts, chance = read_texts(given.texts), random.Random(0)
    found: dict[str, list[float]] = {}
    alike: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as running:
        folder = Path(scratch)
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        (folder / "texts.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
        )
        encoders = {
            name: Encoder(given.sentence_transformers, model, folder / "texts.json", folder / f"{name}.npy")
            for name, model in (("teacher", given.teacher), ("student", given.bundle))
        }
        turns: dict[str, Any] = {f"encode, {name}, torch fp32": encoder.turn for name, encoder in encoders.items()}
        for variant in ("int8", "fp32"):
            turns[f"annotate, student, {variant}"] = lambda variant=variant: annotated(
                given.bundle, folder / "texts.jsonl", variant, folder
            )
        ours = running.enter_context(
            serving([given.bundle], "--no-access-log", "--alias", f"student={given.bundle.name}")
        )
        turns["served, student, int8"] = lambda: served(ours.place, "/v1/embeddings", "student", texts)
        if given.infinity:
            theirs = running.enter_context(infinity(given.infinity, given.bundle))
            turns["served by infinity, student, torch fp32"] = lambda: served(theirs, "/embeddings", "student", texts)
        of_teacher = encoders["teacher"].turn()[1]
        of_student = encoders["student"].turn()[1]
        for _ in range(given.rounds):
            for name in chance.sample(list(turns), len(turns)):
                speed, vectors = turns[name]()
                found.setdefault(name, []).append(speed)
                alike[name] = cosine(vectors, of_teacher if "teacher" in name else of_student)
                time.sleep(0.5)
        for encoder in encoders.values():
            encoder.process.kill()
            encoder.process.wait()
    base = found["encode, teacher, torch fp32"]
    rows = [
        {
            "what": name, "texts_per_s": round(statistics.median(speeds), 1), "lowest": round(min(speeds), 1),
            "highest": round(max(speeds), 1),
            "times_the_teacher": round(statistics.median(a / b for a, b in zip(speeds, base, strict=True)), 2),
            "cosine": round(alike[name], 5),
        }
        for name, speeds in found.items()
    ]  # fmt: skip
    for row in rows:
        print(json.dumps(row))
    if given.json:
        given.json.write_text(
            json.dumps({"machine": machine_facts(), "texts": len(texts), "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    return int(any(row["cosine"] < LEAST_COSINE for row in rows))  # type: ignore[operator]


if __name__ == "__main__":
    raise SystemExit(main())
