"""One training of a comparison, from its start to its score, in a process of its own."""

import dataclasses
import re
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from compress.data.examples import check_task
from compress.engine.hardware import same_bits
from compress.engine.lineage import read_lineage
from compress.engine.method_runner import RANDOM, Labelled, Link, asks_words, run_method
from compress.engine.resumable_stages import STATE, Workdir
from compress.engine.task_inputs import TaskInputs, open_task
from compress.evaluation.metrics import counts, gold_of
from compress.evaluation.predictions import predictions, row_logits
from compress.models.pretrained import load, open_model
from serve.bundle.manifest import canonical_json
from stillroom.commands.compare.inputs import method_inputs_of, settings_of, source_of
from stillroom.commands.compare.rows import NEW_LAYERS, Row, links_of, name_of, reads_source
from stillroom.console import console, show
from stillroom.settings.compare import Comparison

STAGES = "stages"  # of one row under way
STUDENT = "student"  # the checkpoint of a finished one


def make_row(given: Comparison, row: Row, row_fingerprint: str) -> None:
    """One training from start to score, in the folder of its row; runs in its own process."""
    console.quiet = True
    inputs = open_task(settings_of(given, row.student), Path(given.out) / "work", notify=show)
    same_bits(inputs.settings.threads)
    work = Workdir(Path(given.out) / "work")
    work.stage(name_of(row), row_fingerprint, partial(_train_row, given=given, inputs=inputs, row=row))


def _train_row(folder: Path, given: Comparison, inputs: TaskInputs, row: Row) -> None:
    finished = folder / "row.json"
    if finished.is_file():  # it was killed while it removed its stages
        shutil.rmtree(folder / STAGES, ignore_errors=True)
        return
    started = time.monotonic()
    root = Path(given.out) / "work"
    links = links_of(given, inputs, row)
    labelled = {"task": _labelled(inputs, root / "teacher")}
    if reads_source(links):
        labelled["source"] = _labelled(source_of(given, inputs), root / "teacher-source")
    method_inputs = dataclasses.replace(
        method_inputs_of(given, inputs, seed=row.seed),
        labelled=labelled,
        # The fitted head is only for students that learn from the teacher's answers on masked words.
        words=root / "teacher-head" if asks_words(links[0].stages) else None,
        start=RANDOM if row.method == NEW_LAYERS else "spread",
    )
    inner = Workdir(folder / STAGES)
    stages = run_method(inner, "row", links, method_inputs)
    task = check_task(given.task)
    model = load(open_model(str(stages[-1])), task)
    gold = [gold_of(example, task) for example in inputs.splits.test]
    said = counts(gold, predictions(inputs.test, row_logits(model, inputs.test)))
    np.save(folder / "counts.npy", said, allow_pickle=False)
    curves = {stage.name: read_lineage(stage) for stage in stages}
    document = {
        "seconds": round(sum(inner.seconds.values()) or time.monotonic() - started, 1),
        "peak_memory_bytes": _peak_bytes(),
        "tokens": _tokens(links, "task", "source"),
        "plain_tokens": _tokens(links, "corpus"),
        "curves": {
            name: {key: said[key] for key in ("loss", "validation", "tokens_read")} for name, said in curves.items()
        },
        "doubts": [f"{row}, {doubt}" for said in curves.values() for doubt in said["doubts"]],
    }
    beside = finished.with_name("row.json.partial")
    beside.write_bytes(canonical_json(document))
    shutil.rmtree(folder / STUDENT, ignore_errors=True)
    stages[-1].replace(folder / STUDENT)
    (folder / STUDENT / STATE).unlink()
    beside.replace(finished)
    shutil.rmtree(folder / STAGES)


def _labelled(inputs: TaskInputs, teacher: Path) -> Labelled:
    task = check_task(inputs.settings.task)
    own = open_model(str(teacher)).head_for(task)
    if own != inputs.labels:
        raise ValueError(f"the teacher's labels {own} are not those of the data, {inputs.labels}")
    return Labelled(task, inputs.train, inputs.validation, inputs.splits.validation, teacher)


def _tokens(links: Sequence[Link], *texts: str) -> int:
    """Tokens that the stages on `texts` read."""
    return sum(
        round(tokens)
        for link in links
        for stage, tokens in zip(link.stages, link.tokens, strict=True)
        if stage.text in texts
    )


def _peak_bytes() -> int:
    """The peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # On Linux the peak of `getrusage` starts at that of the parent process.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
