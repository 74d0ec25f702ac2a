"""What `select` finds in a mixed bank, and what its texts are worth once they are labelled, beside texts drawn at random.

    python benchmarks/distill/selecting.py --data DATA --encoder all-MiniLM-L6-v2 --work FOLDER --out selecting.json

DATA holds the folders clinc150, snips and text. Labelled are 10 texts of each class of clinc150 (drawn with seed 0). The bank is all of
its other texts of train and, as many together, texts of snips and sentences of wikitext. `select` takes the --k nearest of each
labelled text, and of them --labels texts on which a student of the labelled ones is least sure. A person then labels what was chosen: a
text of clinc150 gets its label, any other none, which is time lost. The same student (3 of the encoder's layers) is trained on the
labelled texts and those, in the same number of steps, and scored on test. Everything finished in --work is kept.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from choosing import drawn

import stillroom
from compress.models.initialise import student_of
from compress.models.pretrained import load_encoder, open_model, save_tokenizer
from compress.models.shapes import STUDENTS, Shape
from latency.measure.machine import machine_facts

TASK, STEPS, BATCH, RATE = "text-classification", 1_000, 32, 4e-4


def rows_in(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    """`file`, with `rows` as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def mixed_bank(data: Path, labelled: Path, file: Path) -> dict[str, str]:
    """Writes the bank; the label of each of its texts that has one."""
    known = {row["text"] for row in rows_in(labelled / "train.jsonl")}
    of_task = {
        row["text"]: row["label"] for row in rows_in(data / "clinc150" / "train.jsonl") if row["text"] not in known
    }
    wiki = (data / "text" / "wikitext2_valid_test.txt").read_text(encoding="utf-8")
    sentences = [each.strip() for each in wiki.replace("\n", " . ").split(" . ")]
    sentences = [each for each in sentences if 4 <= len(each.split()) <= 30]
    snips = [row["text"] for row in rows_in(data / "snips" / "train.jsonl")]
    chance = random.Random(0)
    half = len(of_task) // 2
    others = chance.sample(snips, half) + chance.sample(sentences, min(len(sentences), len(of_task) - half))
    bank = [*of_task, *others]
    chance.shuffle(bank)
    written(file, [{"text": text} for text in bank])
    return of_task


def body(encoder: str, folder: Path, shape: Shape) -> Path:
    """A student of some of the encoder's layers, without a head."""
    if not folder.exists():
        opened = open_model(encoder)
        student, _ = student_of(load_encoder(opened, seed=0), shape, seed=0)
        student.save_pretrained(folder)
        save_tokenizer(opened, folder)
    return folder


def main() -> None:
    """Choose, train and write what was found."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--encoder", required=True)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--labels", type=int, default=1_500)
    reader.add_argument("--k", type=int, default=10)
    reader.add_argument("--threads", type=int, default=1)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    labelled = drawn("clinc150-10", given.data, given.work / "labelled")
    label_of = mixed_bank(given.data, labelled, given.work / "bank.jsonl")
    start = body(given.encoder, given.work / "body", STUDENTS["3x384"])
    first = rows_in(labelled / "train.jsonl")

    def trained(name: str, more: list[str]) -> dict[str, Any]:
        """A student of the labelled texts and of those of `more` that get a label, and its score on test."""
        kept = given.work / f"{name}.json"
        if not kept.exists():
            rows = first + [{"text": text, "label": label_of[text]} for text in more if text in label_of]
            folder = given.work / name
            for split in ("validation", "test"):
                written(folder / f"{split}.jsonl", rows_in(labelled / f"{split}.jsonl"))
            written(folder / "train.jsonl", rows)
            student = given.work / f"{name}-student"
            if not student.exists():
                stillroom.finetune(
                    start, TASK, folder, student, epochs=STEPS * BATCH / len(rows), patience=0, learning_rate=RATE,
                    batch=BATCH, threads=given.threads,
                )  # fmt: skip
            bundle = given.work / f"{name}-bundle"
            document = stillroom.export(
                student, bundle, folder, variants=("fp32",), latency_seconds=0, threads=given.threads
            )
            found = {"chosen": len(more), "labelled": len(rows) - len(first), "scores": document["scores"]}
            kept.write_text(json.dumps(found), encoding="utf-8")
        found = json.loads(kept.read_text(encoding="utf-8"))
        print(name, json.dumps(found), flush=True)
        return {"arm": name, **found}

    arms = [trained("ten-a-class", [])]
    near = {"task": TASK, "encoder": given.encoder, "k": given.k, "threads": given.threads}
    told = {}
    for name, more in (
        ("nearest", {}),
        ("unsure", {"uncertain": given.labels, "checkpoint": str(given.work / "ten-a-class-student")}),
    ):
        file, kept = given.work / f"{name}.jsonl", given.work / f"{name}-told.json"
        if not kept.exists():
            file.unlink(missing_ok=True)
            kept.write_text(json.dumps(stillroom.select([given.work / "bank.jsonl"], labelled, file, **near, **more)))
        texts = [row["text"] for row in rows_in(file)]
        told[name] = json.loads(kept.read_text()) | {"precision": sum(text in label_of for text in texts) / len(texts)}
        del told[name]["out"]
        print(name, told[name], flush=True)
    bank = [row["text"] for row in rows_in(given.work / "bank.jsonl")]
    chance = random.Random(1)
    nearest = [row["text"] for row in rows_in(given.work / "nearest.jsonl")]
    arms += [
        trained("select-unsure", [row["text"] for row in rows_in(given.work / "unsure.jsonl")]),
        trained("random", chance.sample(bank, given.labels)),
        trained("random-twice", chance.sample(bank, 2 * given.labels)),
        trained("random-of-nearest", chance.sample(nearest, given.labels)),
        trained("random-of-task", chance.sample(list(label_of), given.labels)),
    ]
    document = {"machine": machine_facts(), "steps": STEPS, "k": given.k, "select": told, "arms": arms}
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
