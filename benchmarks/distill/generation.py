"""Train a generator and students of it on sentences from fields, and score and time them.

    python benchmarks/distill/generation.py --snips FOLDER --model ENCODER --work FOLDER --out F [--rows 6000] [--threads 1]

A text is a request's intent and its slots (`GetWeather: city Oslo; timeRange tomorrow`), its target the request as somebody put it: of
snips, `--rows` of train, and all of validation and test. The teacher is ENCODER, fine-tuned; a `3x384` made of the teacher's layers
learns from targets alone, and from the teacher too. `copy` is what the fields themselves score. Each is scored on test by beam search,
and timed on `TIMED` texts of test, one by one and together, in turns. What is finished in --work is kept.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import stillroom
from compress.data.text_pairs import read_pairs
from compress.evaluation.generated import generation_scores
from compress.models.generator import Generator
from latency.measure.machine import machine_facts

GENERATION = "text2text-generation"
SETTINGS: dict[str, Any] = {"target_tokens": 32, "max_length": 96, "learning_rate": 5e-4, "patience": 0, "epochs": 3}
TIMED, ROUNDS = 64, 3
BEAMS = 5


def write_pairs(snips: Path, out: Path, rows: int) -> Path:
    """The pairs of snips' splits, `rows` of train, in the folder `out`."""
    out.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        lines = (snips / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        if split == "train":
            lines = random.Random(0).sample(lines, rows)
        made = []
        for row in map(json.loads, lines):
            slots = (f"{e['label'].replace('_', ' ')} {row['text'][e['start'] : e['end']]}" for e in row["entities"])
            made.append({"text": f"{row['label']}: {'; '.join(slots)}", "target": row["text"]})
        (out / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made), encoding="utf-8")
    return out


def main() -> None:
    """Train, score, time and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("snips", "work", "out"):
        reader.add_argument(f"--{name}", type=Path, required=True)
    reader.add_argument("--model", required=True)
    reader.add_argument("--rows", type=int, default=6_000)
    reader.add_argument("--threads", type=int, default=1)
    given = reader.parse_args()
    torch.set_num_threads(given.threads)
    data = given.work / "data"
    if not data.exists():
        write_pairs(given.snips, data, given.rows)

    def made(name: str, model: str, **settings: Any) -> Path:
        folder: Path = given.work / name
        if not folder.exists():
            stillroom.finetune(
                model, GENERATION, str(data), folder, threads=given.threads, device="cpu", **SETTINGS | settings
            )
        return folder

    teacher = made("teacher", given.model)
    student = {"student": "3x384", "epochs": 2}
    models = {
        "teacher": teacher,
        "3x384, targets alone": made("alone", str(teacher), **student),
        "3x384, targets and the teacher": made(
            "taught", str(teacher), teacher=str(teacher), soft_weight=0.5, **student
        ),
    }
    pairs = read_pairs(data / "test.jsonl")
    texts, gold = [pair.text for pair in pairs], [pair.text_pair or "" for pair in pairs]
    rows: dict[str, Any] = {"copy": {"scores": {k: asdict(v) for k, v in generation_scores(gold, texts).items()}}}
    opened = {name: Generator(folder, device="cpu") for name, folder in models.items()}
    for name, generator in opened.items():
        said = generator(texts, beams=BEAMS)
        scores = generation_scores(gold, said)
        greedy = generation_scores(gold, generator(texts, beams=1))
        rows[name] = {
            "scores": {k: asdict(v) for k, v in scores.items()}, "greedy": {k: asdict(v) for k, v in greedy.items()},
            "examples": [{"text": t, "said": s, "target": g} for t, s, g in list(zip(texts, said, gold, strict=True))[:8]],
            "one_ms": {}, "texts_per_s": {},
        }  # fmt: skip
    for _ in range(ROUNDS):
        for beams in (1, BEAMS):
            for name, generator in opened.items():
                took = []
                for text in texts[:TIMED]:
                    began = time.perf_counter()
                    generator([text], beams=beams)
                    took.append(1000 * (time.perf_counter() - began))
                began = time.perf_counter()
                generator(texts[:TIMED], beams=beams)
                rows[name]["one_ms"].setdefault(str(beams), []).append(statistics.median(took))
                rows[name]["texts_per_s"].setdefault(str(beams), []).append(TIMED / (time.perf_counter() - began))
    given.out.write_text(
        json.dumps({"machine": machine_facts(), "threads": given.threads, "rows": rows}, indent=1) + "\n",
        encoding="utf-8",
    )
    for name, row in rows.items():
        print(
            name, {k: round(v["value"], 4) for k, v in row["scores"].items()}, row.get("one_ms"), row.get("texts_per_s")
        )


if __name__ == "__main__":
    main()
