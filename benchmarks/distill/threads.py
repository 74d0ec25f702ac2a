"""How long should a thread spin before it sleeps? Training speed with one and two threads, alone and beside a busy process.

    python benchmarks/distill/threads.py --data snips [--rounds 5] [--steps 60] [--spins 0,1000,10000,active] --out threads.json

A student of random weights trains on the labels of short texts, a fresh process for each setting, since OpenMP reads it once.
All settings take turns in each round, in an order that moves by one from round to round. One thread waits for none, so it is
measured with the first of --spins alone. `active` is OMP_WAIT_POLICY=ACTIVE without a count. Time is of whole steps, optimiser
included, after the first --warmup steps. The neighbour's share is the core time that the busy process got meanwhile. Ratios are
to one thread of the same round: their median, smallest and largest. With as many threads, every setting must reach the same
loss, to the bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compress.data.labelled_files import read_examples
from compress.runs.threads import POLICY, SPINS
from compress.tasks import TEXT_CLASSIFICATION

BUSY = "while True: pass"


def make_tokenizer(texts: list[str], file: Path) -> None:
    """A WordPiece tokenizer, learned on `texts`."""
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - no password
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=12_000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(file))


def core_seconds(process: int) -> float:
    """The core time of `process` so far; 0 where it is none. Linux only."""
    if not process:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def train(given: argparse.Namespace) -> dict[str, float]:
    """Train in this process; tokens per second, the last loss, and the share of a core that the neighbour got."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from compress.data.batches import TaskText
    from compress.methods.catalogue import LABELS
    from compress.models.shapes import shape_of
    from compress.training.loop import StageSettings
    from compress.training.stage import train_stage

    torch.set_num_threads(given.threads)
    torch.use_deterministic_algorithms(True)
    examples = read_examples(Path(given.data, "train.jsonl"), TEXT_CLASSIFICATION)
    labels = sorted({str(example.label) for example in examples})
    tokenizer = Tokenizer.from_file(given.tokenizer)
    text = TaskText(TEXT_CLASSIFICATION.encode(examples, tokenizer, labels), given.batch, 0)
    shape = shape_of(given.student)
    torch.manual_seed(0)
    student = BertForSequenceClassification(
        BertConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.ffn, num_labels=len(labels),
        )
    )  # fmt: skip
    clocks: dict[int, tuple[float, float]] = {}  # after which step: now, and the neighbour's core time

    def report(done: int, _steps: int, _loss: float, _speed: float | None) -> None:
        if done in (given.warmup, given.warmup + given.steps):
            clocks[done] = (time.perf_counter(), core_seconds(given.neighbour))

    # One step more than is timed: a checkpoint is written before the last is reported.
    settings = StageSettings(
        given.warmup + given.steps + 1, precision=given.precision, device="cpu", checkpoint_every_s=1e9
    )
    with tempfile.TemporaryDirectory() as folder:
        progress = train_stage(LABELS, None, student, text, settings, folder=Path(folder), report=report)
    (began, busy_before), (ended, busy_after) = clocks.values()
    timed = range(given.warmup, given.warmup + given.steps)
    return {
        "tokens_per_s": sum(text.sampler.tokens_at(step) for step in timed) / (ended - began),
        "loss": progress.loss[-1][1],
        "neighbour_cores": (busy_after - busy_before) / (ended - began),
    }


def measured(tokenizer: Path, threads: int, spins: str, *, beside: bool) -> dict[str, float]:
    """What `train` gives in a fresh process with these settings."""
    environment = {name: value for name, value in os.environ.items() if name not in (POLICY, SPINS)}
    environment |= {POLICY: "ACTIVE"} if spins == "active" else {POLICY: "PASSIVE", SPINS: spins}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, __file__, *sys.argv[1:], "--tokenizer", str(tokenizer), "--threads", str(threads)]
    with ExitStack() as stack:
        if beside:
            neighbour = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(neighbour.kill)
            command += ["--neighbour", str(neighbour.pid)]
        found: dict[str, float] = json.loads(subprocess.check_output(command, env=environment, text=True))
    return found


def summary(rounds: list[dict[str, dict[str, float]]], baseline: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By setting the median speed, and its ratios to the baseline of the same round."""
    found: dict[str, dict[str, Any]] = {}
    for name, base in baseline.items():
        ratios = [each[name]["tokens_per_s"] / each[base]["tokens_per_s"] for each in rounds]
        found[name] = {
            "tokens_per_s": statistics.median(each[name]["tokens_per_s"] for each in rounds),
            "neighbour_cores": statistics.median(each[name]["neighbour_cores"] for each in rounds),
            "over_one_thread": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train.jsonl, of `text` and `label`")
    parser.add_argument("--student", default="3x384")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--spins", default="0,1000,10000,active")
    for name, default in (("batch", 32), ("steps", 60), ("warmup", 5), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default="", help="file for the JSON document; without it, only the table is printed")
    parser.add_argument("--threads", type=int, default=2, help="the number compared with one thread")
    parser.add_argument("--tokenizer", default="", help=argparse.SUPPRESS)  # in a process that trains
    parser.add_argument("--neighbour", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tokenizer:
        print(json.dumps(train(given)))
        return
    spins = given.spins.split(",")
    cases: dict[str, tuple[int, str, bool]] = {}
    baseline: dict[str, str] = {}
    for beside in (False, True):
        where = "beside a busy process" if beside else "alone"
        first = f"1 thread, {where}"
        cases[first] = (1, spins[0], beside)
        cases |= {f"{given.threads} threads, spin {count}, {where}": (given.threads, count, beside) for count in spins}
        baseline |= {name: first for name in cases if name not in baseline}
    rounds: list[dict[str, dict[str, float]]] = []
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch, "tokenizer.json")
        make_tokenizer(
            [each.text for each in read_examples(Path(given.data, "train.jsonl"), TEXT_CLASSIFICATION)], tokenizer
        )
        for number in range(given.rounds):
            order = list(cases)[number % len(cases) :] + list(cases)[: number % len(cases)]
            taken = {}
            for name in order:
                threads, count, beside = cases[name]
                taken[name] = measured(tokenizer, threads, count, beside=beside)
                print(f"{number + 1}/{given.rounds} {name}: {taken[name]['tokens_per_s']:.0f}", file=sys.stderr)
            rounds.append(taken)
            load.append(os.getloadavg()[0])
    for count in (1, given.threads):
        losses = {each[name]["loss"] for each in rounds for name, case in cases.items() if case[0] == count}
        assert len(losses) == 1, f"{count} threads reached different losses: {losses}"
    found = summary(rounds, baseline)
    for name, row in found.items():
        low, high = row["spread"]
        print(
            f"{name:<44} {row['tokens_per_s']:>8.0f} tokens/s, {row['over_one_thread']:.2f} ({low:.2f} to {high:.2f}) "
            f"of one thread's; the neighbour had {row['neighbour_cores']:.2f} cores"
        )
    if given.out:
        import torch

        machine = {"cores": os.cpu_count(), "load_1min": load, "torch": torch.__version__}
        settings = vars(given) | {"data": Path(given.data).name, "out": Path(given.out).name}
        document = {"settings": settings, "machine": machine, "found": found, "rounds": rounds}
        Path(given.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
