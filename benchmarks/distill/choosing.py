"""Where distillation pays: the same student by bodies and ways to learn, over numbers of labels and of distilled tokens.

    python benchmarks/distill/choosing.py --data DATA --teacher all-MiniLM-L6-v2 --work FOLDER --out choosing.json

DATA holds the folders clinc150, snips, conll2000 and text. A *set* is some labelled texts of one of them, drawn with seed 0, the
others being texts without labels. A *body* is what the 3x384 student starts from: `new` layers, layers of the `general` teacher,
layers and head of the `tuned` one (fine-tuned on the set; spread, or its `first`, `alternate` or `last` layers), or general layers
that learned MiniLMv2's relations on so many tokens of plain text (`300k`, `3M`), or new ones that did (`new-300k`, `new-3M`). An
*arm* is what it learns on the task, always in the same number of steps:

    labels            labels alone, at two peak rates; the better on validation is that of all other arms of the body
    soft              labels and the teacher's soft labels of the same texts, by share of the soft labels
    folds             the same, from two teachers that have not seen the texts that they label
    rest              soft labels of the labelled texts and of those without labels
    xtremedistil      XtremeDistil's stages, which read the texts without labels too
    ...-3times        the same in three times as many steps

The teacher is fine-tuned on each set once. Everything finished in --work is kept, so a stopped call goes on. `--only TEXT` makes
the trainings whose name holds TEXT, such as `clinc150-10/tuned/`; `--seeds 0 1 2` repeats them; `--finished` trains none and writes
those that are there. Scores are of test; every choice is made on validation. --out holds a row a training, and the differences of
arms and of bodies with their hierarchical bootstrap intervals, over the seeds that both have.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from compress.data.batches import TaskText
from compress.evaluation.metrics import ACCURACY, Pairs, gain
from compress.evaluation.predictions import row_logits
from compress.methods.catalogue import LABELS, labels_and_soft_labels
from compress.models.initialise import student_of
from compress.models.pretrained import load, load_encoder, open_model
from compress.runs import task_stages
from compress.runs.distill import distill
from compress.runs.hardware import same_bits
from compress.runs.lineage import read_lineage, save_with_lineage
from compress.runs.method_chain import method_chain
from compress.runs.method_trainings import method_inputs, run_method, with_head
from compress.runs.open_task import open_task
from compress.runs.resumable_stages import TRAINING, Workdir
from compress.runs.soft_labels import make_soft_labels, read_confidence, read_soft_labels
from compress.runs.task_inputs import TaskInputs
from compress.settings import TaskSettings
from compress.tasks import task_named
from compress.training.loop import StageSettings
from compress.training.stage import train_stage, validating
from latency.measure.machine import machine_facts

STUDENT, FOLDS = "3x384", 2
# Labelled texts of each set: a class for clinc150, of all for the others; 0 is every text. Steps on the task of each training.
SETS = {
    "clinc150-10": 1_000, "clinc150-30": 1_500, "snips-500": 1_000, "conll2000-500": 1_000, "clinc150-0": 2_000, "snips-0": 2_000,
}  # fmt: skip
TASKS = {"clinc150": "text-classification", "snips": "token-classification", "conll2000": "token-classification"}
OTHER_STARTS = ("first", "alternate", "last")
TUNED = ("tuned", *OTHER_STARTS)
BODIES = {
    "new": 0, "general": 0, "300k": 300_000, "3M": 3_000_000, "100M": 100_000_000, "new-300k": 300_000, "new-3M": 3_000_000,
}  # fmt: skip
RATES = {"tuned": (2e-4, 4e-4), "new": (4e-4, 1e-3)}  # of other bodies those of `tuned`
ARMS = (
    "labels",
    "soft-0.5",
    "soft-0.9",
    "folds-0.5",
    "folds-0.9",
    "rest-0.9",
    "xtremedistil",
    "labels-3times",
    "rest-0.9-3times",
)
LONGER = "-3times"
VALIDATION = 800  # sentences of conll2000, which has none


class Training(NamedTuple):
    """One training of a student."""

    set: str
    body: str
    arm: str
    seed: int = 0
    rate: float = 0.0  # 0: the better of `rates_of` the body for labels

    @property
    def name(self) -> str:
        """As `--only` reads it."""
        return f"{self.set}/{self.body}/{self.arm}" + (f"@{self.rate:g}" if self.rate else "") + f"/{self.seed}"


def rates_of(body: str) -> tuple[float, ...]:
    """The peak rates that labels alone try."""
    return RATES.get(body, RATES["tuned"])


def trainings(seeds: list[int]) -> Iterator[Training]:
    """All of them, what decides most first."""
    for seed in seeds:
        for name in SETS:
            for body in (*TUNED, "general", "new", "300k", "3M", "100M", "new-300k", "new-3M"):
                for arm in ARMS:
                    few = not name.endswith("-0")
                    if (arm == "xtremedistil" or arm.endswith(LONGER)) and (body != "tuned" or not few):
                        continue
                    if arm.startswith("rest") and not few:
                        continue
                    if body not in ("tuned", "new", "3M") and arm not in ("labels", "soft-0.9", "rest-0.9"):
                        continue
                    yield from (
                        Training(name, body, arm, seed, rate)
                        for rate in (rates_of(body) if arm == "labels" else (0.0,))
                    )


def drawn(name: str, data: Path, folder: Path) -> Path:
    """The set in `folder`: train, validation and test, and `rest.txt` with the texts whose labels are left out."""
    source, _, count = name.rpartition("-")
    if (folder / "rest.txt").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rows, held, suffix = _rows(source, data)
    random.Random(0).shuffle(rows)
    kept, left, taken = [], [], {}
    for text, label, row in rows:
        key = label if source == "clinc150" else ""
        taken[key] = taken.get(key, 0) + 1
        (kept if not int(count) or taken[key] <= int(count) else left).append((text, row))
    for split, of_split in {"train": [row for _, row in kept], **held}.items():
        (folder / f"{split}{suffix}").write_text("\n".join(of_split) + "\n", encoding="utf-8")
    (folder / "rest.txt").write_text("".join(f"{text}\n" for text, _ in left), encoding="utf-8")
    return folder


def _rows(source: str, data: Path) -> tuple[list[tuple[str, str, str]], dict[str, list[str]], str]:
    """Text, class and row of each labelled text; the rows of validation and test; the suffix of their files."""
    if source != "conll2000":
        lines = {
            split: (data / source / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            for split in ("train", "validation", "test")
        }
        rows = [(json.loads(line)["text"], str(json.loads(line)["label"]), line) for line in lines.pop("train")]
        return rows, lines, ".jsonl"
    whole = {split: _sentences(data / source / f"{split}.txt") for split in ("train", "test")}
    random.Random(0).shuffle(whole["train"])
    held = {"validation": whole["train"][:VALIDATION], "test": whole["test"]}
    text_of = lambda sentence: " ".join(line.split()[0] for line in sentence.splitlines())  # noqa: E731
    return [(text_of(s), "", s) for s in whole["train"][VALIDATION:]], held, ".conll"


def _sentences(file: Path) -> list[str]:
    """Sentences of word and chunk tag, a line a word and an empty line after each."""
    found = []
    for block in file.read_text(encoding="utf-8").split("\n\n"):
        words = [line.split() for line in block.splitlines() if line.strip()]
        if words:
            found.append("\n".join(f"{word}\t{tag}" for word, _, tag in words) + "\n")
    return found


class Bench:
    """What trainings share: the given settings, the folders, the opened sets."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.work = Workdir(given.work / "stages")
        self.opened: dict[str, TaskInputs] = {}

    def inputs(self, name: str) -> TaskInputs:
        """The set `name`, opened."""
        if name not in self.opened:
            folder = drawn(name, self.given.data, self.given.work / "sets" / name)
            rest = (str(folder / "rest.txt"),) if (folder / "rest.txt").stat().st_size else ()
            settings = TaskSettings(
                teacher=self.given.teacher, task=TASKS[name.rpartition("-")[0]], data=str(folder), student=STUDENT,
                method="soft-labels", unlabelled=rest, folds=FOLDS, threads=self.given.threads, device="cpu",
            )  # fmt: skip
            self.opened[name] = open_task(settings, self.given.work)
        return self.opened[name]

    def stage(self, name: str, make: Any) -> Path:
        """The folder of one piece of work, made unless it is there."""
        flat = name.replace("/", "--")
        if not self.work.finished(flat, flat):
            print(time.strftime("%H:%M:%S"), name, flush=True)
        return self.work.stage(flat, flat, make)

    def teacher(self, name: str, fold: int | None = None) -> Path:
        """The teacher fine-tuned on the set, or on all but one fold of it."""
        inputs = self.inputs(name)
        if fold is None:
            return self.stage(
                f"{name}/teacher", partial(task_stages.make_teacher, inputs=inputs, steps=inputs.teacher_steps)
            )
        make = partial(task_stages.make_fold_teacher, inputs=inputs, steps=inputs.teacher_steps, fold=fold)
        return self.stage(f"{name}/teacher-{fold}", make)

    def soft_labels(self, name: str, *, folds: bool) -> Path:
        """Its logits, or those of the teachers of the folds."""
        teachers = [self.teacher(name, fold) for fold in range(FOLDS)] if folds else []
        make = partial(make_soft_labels, inputs=self.inputs(name), teacher=self.teacher(name), fold_teachers=teachers)
        return self.stage(f"{name}/{'folds' if folds else 'soft-labels'}", make)

    def body(self, name: str, body: str) -> Path:
        """The student before it trains on the task."""
        inputs = self.inputs(name)
        if body in TUNED:
            start = "spread" if body == "tuned" else body
            given = dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, start=start))
            return self.stage(
                f"{name}/{body}", partial(task_stages.make_start, inputs=given, teacher=self.teacher(name))
            )
        if BODIES[body]:
            return self.distilled(body)
        opened = inputs.opened

        def make(folder: Path) -> None:
            student, origin = student_of(load_encoder(opened, seed=0), inputs.shape, seed=0, new_layers=body == "new")
            save_with_lineage(student, opened, folder, {"origin": origin})

        return self.stage(f"body-{body}", make)

    def distilled(self, body: str) -> Path:
        """General layers that learned MiniLMv2's relations on so many tokens."""
        out = Path(self.given.work / f"body-{body}")
        if not out.exists():
            corpus = sorted((self.given.data / "text").glob("*.txt"))
            tokens = sum(len(file.read_bytes()) for file in corpus) / 4.5  # a token of these is about 4.5 bytes
            print(time.strftime("%H:%M:%S"), out.name, flush=True)
            distill(
                self.given.teacher,
                corpus,
                out,
                student=STUDENT,
                start="random" if body.startswith("new") else "spread",
                epochs=BODIES[body] / tokens,
                threads=self.given.threads,
                device="cpu",
            )
        return out

    def result(self, one: Training) -> dict[str, Any]:
        """The row of a finished training."""
        return json.loads((self.stage(one.name, partial(self.train, one=one)) / "result.json").read_text())  # type: ignore[no-any-return]

    def finished(self, one: Training) -> bool:
        """Whether its row is there."""
        return (self.work.root / one.name.replace("/", "--") / "result.json").is_file()

    def counts(self, row: dict[str, Any]) -> np.ndarray:
        """Correct, said and true items of each test text, (texts, 3)."""
        rate = row["rate"] if row["arm"] == "labels" else 0.0
        one = Training(row["set"], row["body"], row["arm"], row["seed"], rate)
        return np.array(json.loads((self.stage(one.name, partial(self.train, one=one)) / "counts.json").read_text()))

    def rate(self, one: Training) -> float:
        """The better of two on validation for labels alone from the same body, with seed 0."""
        tried = {
            rate: self.result(one._replace(arm="labels", seed=0, rate=rate))["validation"]
            for rate in rates_of(one.body)
        }
        return max(tried, key=lambda rate: tried[rate])

    def train(self, folder: Path, one: Training) -> None:
        """Train and score one student."""
        inputs = self.inputs(one.set)
        task = task_named(inputs.settings.task)
        kind, _, share = one.arm.removesuffix(LONGER).partition("-")
        rate = one.rate or self.rate(one)
        teacher, body = self.teacher(one.set), self.body(one.set, one.body)
        started = time.monotonic()
        given = method_inputs(inputs, teacher, 0.0)
        given = dataclasses.replace(given, settings=dataclasses.replace(given.settings, seed=one.seed))
        steps = SETS[one.set] * (3 if one.arm.endswith(LONGER) else 1)
        if kind == "xtremedistil":
            each = sum(len(ids) for ids in inputs.train.ids) / inputs.steps_per_epoch
            links = method_chain(kind, inputs.shape, inputs.opened.config).links(0, steps * each)
            last = run_method(Workdir(folder / "stages"), "run", links, given)[-1]
            model, best = load(open_model(str(last)), task), max(v for _, v in read_lineage(last)["validation"])
        else:
            soft = None
            if kind != "labels":
                soft = read_soft_labels(self.soft_labels(one.set, folds=kind == "folds"), inputs)
                soft = soft if kind == "rest" else soft[: len(inputs.train)]
            model = with_head(body, given.labelled["task"], given, keeps=one.body in TUNED)
            texts = inputs.train + inputs.in_domain if kind == "rest" and inputs.in_domain else inputs.train
            progress = train_stage(
                labels_and_soft_labels(float(share or 0), inputs.settings.temperature) if soft else LABELS,
                None,
                model,
                TaskText(texts, inputs.settings.batch, one.seed, inputs.validation.ids, soft, None, len(inputs.train)),
                StageSettings(steps, one.seed, inputs.settings.precision, learning_rate=rate, device="cpu"),
                folder=folder / TRAINING,
                labelled=inputs.train,
                validation=validating(model, inputs.validation, inputs.splits.validation, inputs.validate_every(steps)),
            )
            best = max(value for _, value in progress.validation)
        gold = [task.gold_of(example) for example in inputs.splits.test]
        said = task.metric.counts(
            gold, inputs.test.task.predictions(inputs.test, row_logits(model.to("cpu"), inputs.test))
        )
        result = one._asdict() | {
            "rate": rate, "steps": steps, "validation": round(best, 5), "test": round(task.metric.value(said), 5),
            "minutes": round((time.monotonic() - started) / 60, 2),
        }  # fmt: skip
        (folder / "counts.json").write_text(json.dumps(said.tolist()), encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def teacher_row(bench: Bench, name: str) -> dict[str, Any]:
    """Scores of the teacher of a set, and how sure it is."""
    inputs, folder = bench.inputs(name), bench.teacher(name)
    task = task_named(inputs.settings.task)
    gold = [task.gold_of(example) for example in inputs.splits.test]
    reached = task.metric.score(
        gold, inputs.test.task.predictions(inputs.test, row_logits(load(open_model(str(folder)), task), inputs.test))
    )
    found = {"set": name, "test": round(reached.value, 5), "validation": read_lineage(folder)["on_validation"]}
    found |= {"labelled": len(inputs.train), "without_labels": len(inputs.unlabelled)}
    for kind in ("soft-labels", "folds"):
        stage = bench.work.root / f"{name}--{kind}"
        found |= {f"confidence_{kind}": read_confidence(stage)} if stage.is_dir() else {}
    return found


def differences(bench: Bench, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm less labels alone from the same body, and of each body less general layers by the same arm."""
    groups: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -row["validation"]):
        of_group = groups.setdefault((row["set"], row["body"], row["arm"]), {})
        if row["seed"] == 0:  # of two rates the better on validation
            of_group.setdefault(0, row)
    for row in rows:
        of_group = groups[row["set"], row["body"], row["arm"]]
        if row["seed"] and row["rate"] == of_group.get(0, row)["rate"]:
            of_group[row["seed"]] = row
    found = []
    for (name, body, arm), ours in groups.items():
        for other in ((body, "labels"), ("general", arm)):
            theirs = groups.get((name, *other), {})
            seeds = sorted(ours.keys() & theirs.keys())
            if seeds and other != (body, arm):
                both = [[bench.counts(each[seed]) for seed in seeds] for each in (ours, theirs)]
                value = gain([[Pairs(ACCURACY, *both)]])
                found.append(
                    {"set": name, "of": f"{body}/{arm}", "less": "/".join(other), "seeds": seeds}
                    | {key: round(getattr(value, key), 4) for key in ("value", "low", "high")}
                    | {"supported": value.supported}
                )
    return found


def main() -> None:
    """Make the trainings asked for and write what is finished."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--data", type=Path, required=True)
    reader.add_argument("--teacher", required=True)
    reader.add_argument("--work", type=Path, required=True)
    reader.add_argument("--out", type=Path, required=True)
    reader.add_argument("--only", action="append", default=[])
    reader.add_argument("--finished", action="store_true")
    reader.add_argument("--seeds", type=int, nargs="+", default=[0])
    reader.add_argument("--threads", type=int, default=1)
    given = reader.parse_args()
    machine = machine_facts()
    same_bits(given.threads)
    torch.set_num_threads(given.threads)
    bench = Bench(given)
    rows: list[dict[str, Any]] = []
    teachers: dict[str, dict[str, Any]] = {}
    for one in trainings(given.seeds):
        if any(part in one.name for part in given.only or [""]) and (bench.finished(one) or not given.finished):
            rows.append(bench.result(one))
            print(json.dumps(rows[-1]), flush=True)
            if one.set not in teachers:
                teachers[one.set] = teacher_row(bench, one.set)
            write(given.out, {"machine": machine, "student": STUDENT, "teachers": [*teachers.values()], "rows": rows})
    found = {"machine": machine, "student": STUDENT, "teachers": [*teachers.values()], "rows": rows}
    write(given.out, found | {"differences": differences(bench, rows)})


def write(file: Path, document: dict[str, Any]) -> None:
    """Write the results so far."""
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
