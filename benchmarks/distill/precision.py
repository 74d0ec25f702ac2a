"""Is training faster in bfloat16 here? Steps in float32 and in bfloat16, in turns.

    python benchmarks/distill/precision.py [--corpus text.txt] [--teacher FOLDER] [--threads 1] [--rounds 8]

Task steps (forward, backward, optimiser) of a student 3x384 and of its teacher, batches of 32 random texts of 12, 48 and 128 tokens;
with --corpus also steps of MiniLMv2, whose teacher is held in bfloat16. Both start from equal weights; their first losses must agree
within a hundredth. Ratios are bfloat16 over float32 in time: median and quartiles over rounds. Prints a JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from packing import Learner

from compress.data.corpus import CorpusText, chunks
from compress.data.encoded import pad_id_of
from compress.data.texts import read_texts
from compress.losses.outputs import total
from compress.methods.catalogue import chain_of
from compress.models.initialise import student_of
from compress.models.precision import computing
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import shape_of
from compress.runs.hardware import is_faster_in_bf16, same_bits
from latency.measure.machine import machine_facts
from stillroom.verbs.demo import teacher_folder

CPU = torch.device("cpu")
LENGTHS, BATCH = (12, 48, 128), 32


def task_steps(model: Any, length: int, precision: str) -> Callable[[], float]:
    """A function that takes one step and gives its loss."""
    ids = torch.randint(1_000, 5_000, (BATCH, length), generator=torch.Generator().manual_seed(0))
    wanted = torch.arange(BATCH)
    head = torch.nn.Linear(model.config.hidden_size, 150)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-5, fused=True)

    def step() -> float:
        with computing(CPU, precision):
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            loss = torch.nn.functional.cross_entropy(head(hidden[:, 0]).float(), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item()

    return step


def relation_steps(learner: Learner, stack: ExitStack) -> Callable[[], float]:
    """The same of MiniLMv2."""
    learner.begin(stack)

    def step() -> float:
        with computing(CPU, learner.precision):
            loss = total({"loss": learner.loss(learner.text.at(learner.done), learner.remap)})
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=False)
        learner.done += 1
        return loss.item()

    return step


def compared(make: Callable[[str], Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Milliseconds of each precision and their ratio."""
    steps = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        steps[precision] = make(precision)
    first = {precision: step() for precision, step in steps.items()}
    if abs(first["bf16"] / first["fp32"] - 1) > 0.01:
        raise SystemExit(f"The first losses differ: {first}.")
    taken: dict[str, list[float]] = {precision: [] for precision in steps}
    for _ in range(rounds):
        for precision, step in steps.items():
            began = time.perf_counter()
            step()
            taken[precision].append(1000 * (time.perf_counter() - began))
    ratios = [half / whole for half, whole in zip(taken["bf16"], taken["fp32"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "fp32_ms": round(statistics.median(taken["fp32"]), 1),
        "bf16_ms": round(statistics.median(taken["bf16"]), 1),
        "bf16_over_fp32": round(median, 2),
        "quartiles": [round(low, 2), round(high, 2)],
    }


def cases(given: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Callable[[str], Callable[[], float]]]]:
    """What is measured, by name."""
    opened, shape = open_model(given.teacher or str(teacher_folder())), shape_of("3x384")

    def student() -> Any:
        return student_of(load_encoder(opened, seed=0), shape, seed=0)[0].eval()  # no dropout: equal losses

    for length in LENGTHS:
        yield f"student, labels, {BATCH} x {length}", lambda p, n=length: task_steps(student(), n, p)  # type: ignore[misc]
        yield (
            f"teacher, labels, {BATCH} x {length}",
            lambda p, n=length: task_steps(load_encoder(opened, seed=0).eval(), n, p),
        )  # type: ignore[misc]
    if given.corpus:
        tokenizer = open_tokenizer(opened)
        ((stage,),) = chain_of("minilmv2", (shape,), opened.config, start="spread")
        pieces = chunks(read_texts(Path(given.corpus)), tokenizer, 128)[:2_000]
        text = CorpusText(pieces, pad_id_of(tokenizer), BATCH, 0, None)
        yield (
            f"student, minilmv2, {text.tokens_per_step:.0f} tokens a step",
            lambda p: relation_steps(Learner(opened, shape, stage, text, p), stack),
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="")
    parser.add_argument("--teacher", default="", help="all-MiniLM-L6-v2 of the demo by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    machine = machine_facts()
    same_bits(given.threads)
    with ExitStack() as stack:
        rows = {name: compared(make, given.rounds) for name, make in cases(given, stack)}
    document = {"machine": machine, "threads": given.threads, "auto_takes_bf16": is_faster_in_bf16(CPU), "rows": rows}
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
