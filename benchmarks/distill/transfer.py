"""Which of clinc150, conll2000 and semeval2010_task8 is the best source for the intents and the entities of snips.

    python benchmarks/distill/transfer.py --data DATA --teacher all-MiniLM-L6-v2 --work FOLDER --out transfer.json

DATA holds these four data sets. --texts of each train and --scored of each validation of a source are drawn with a seed; the test of
snips is read whole. `stillroom transfer` does the rest, and what it trained in --work is kept.
"""

import argparse
import json
from pathlib import Path

import stillroom
from compress.data.sampler import subset
from compress.data.splits import read_splits, split_file
from compress.tasks import task_named
from latency.measure.machine import machine_facts

SOURCES: dict[str, tuple[str, str]] = {
    "intents": ("clinc150", "text-classification"),
    "chunks": ("conll2000", "token-classification"),
    "relations": ("semeval2010_task8", "text-classification"),
}
TARGETS: dict[str, tuple[str, str]] = {
    "snips-intents": ("snips", "text-classification"),
    "snips-entities": ("snips", "token-classification"),
}


def write_capped(data: Path, out: Path, task: str, texts: int, scored: int) -> None:
    """The splits of `data` in `out`, with `texts` rows of train and `scored` of validation."""
    read_splits(str(data), task_named(task))  # a fault is told with its file
    out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", texts), ("validation", scored), ("test", None)):
        file = split_file(data, split)
        if file is None:
            continue
        blocks = file.suffix == ".txt"  # sentences of columns, with an empty line after each
        rows = file.read_text(encoding="utf-8").strip().split("\n\n" if blocks else "\n")
        kept = rows if count is None else subset(rows, count)
        (out / file.name).write_text(("\n\n" if blocks else "\n").join(kept) + "\n", encoding="utf-8")


def main() -> None:
    """Cap, transfer and write."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--student", default="layers=2,hidden=384,heads=12,ffn=768")
    reader.add_argument("--texts", type=int, default=2_000)
    reader.add_argument("--scored", type=int, default=500)
    reader.add_argument("--teacher-learning-rate", type=float, default=3e-4)
    reader.add_argument("--seeds", type=int, default=2)
    reader.add_argument("--source-steps", type=int, default=200)
    reader.add_argument("--target-steps", type=int, default=100)
    reader.add_argument("--labels", type=int, nargs="+", default=[10, 100])
    reader.add_argument("--most-minutes", type=float, default=35.0)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--out", type=Path, required=True)
    given = reader.parse_args()
    machine = machine_facts()
    named: dict[str, list[str]] = {}
    for flag, tasks in (("sources", SOURCES), ("targets", TARGETS)):
        for name, (folder, task) in tasks.items():
            capped = given.work / "data" / folder
            write_capped(given.data / folder, capped, task, given.texts, given.scored if flag == "sources" else 700)
            named.setdefault(flag, []).append(f"{name}={task}:{capped}")
    document = stillroom.transfer(
        teacher=given.teacher, **named, student=given.student, seeds=given.seeds, labels=tuple(given.labels), threads=1, max_length=64,
        source_steps=given.source_steps, target_steps=given.target_steps, teacher_epochs=3,
        teacher_learning_rate=given.teacher_learning_rate, most_minutes=given.most_minutes, out=str(given.work / "found"),
    )  # fmt: skip
    kept = {key: value for key, value in document.items() if key not in ("report", "checkpoint")}
    given.out.write_text(json.dumps(kept | {"machine": machine}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
