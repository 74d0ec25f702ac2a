"""The latency model of this machine: times int8 students with random weights in turns, fits their times, and keeps the fit.

The speed of such a student is that of a trained one.

It is kept for everything that the times depend on, in `latency` of stillroom's cache folder.
"""

import hashlib
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from compress.data.task import Task
from compress.models.initialise import student_config
from compress.models.pretrained import Opened
from compress.models.shapes import Shape
from compress.runs.stages import trained_with
from export.graph.exporter import export_graph, quiet
from export.precision.int8 import quantise_static
from export.precision.int8_preparation import Prepared
from latency.analysis.latency_model import OPERATORS, Errors, LatencyModel, Timed, fit
from latency.candidates.candidate import Candidate
from latency.measure.interleave import StoppingRule, Workload, measure, start_workers
from serve.bundle.fetched import cache_folder, make_private
from serve.bundle.manifest import canonical_json
from serve.files import locked, replacing
from stillroom.console import bar, say
from stillroom.student_search.space import Space

# Students that are timed: those that the error is of a fit to, and those that it is measured on.
FITTED, CHECKED = 20, 6
DEEPEST = 4  # layers of a timed student: a call's time grows by the same for each layer
SECONDS, TURNS = 60.0, 12  # of timing them all, in turns of `TURN_SECONDS`
TURN_SECONDS = 0.06
WIDE_ERROR = 0.25  # at worst, from which on the machine was too busy to fit anything
# Rows of a table of embeddings: a call reads one for each token, however many there are.
VOCABULARY = 2_000
CALIBRATION_ROWS = 4  # their values decide scales, which take the same time whatever they are
FP32, INT8 = "model.onnx", "model_quantized.onnx"
FACTS = ("cpu", "cores", "flags", "memory_gib", "os")  # of the machine


@dataclass(frozen=True)
class Call:
    """The call that is timed: one text of so many tokens, in onnxruntime's int8, on so many threads."""

    teacher: Opened
    task: Task
    labels: int
    tokens: int
    threads: int


@dataclass(frozen=True)
class MachineLatency:
    """The latency model of this machine for one kind of call, and how far it can be trusted."""

    model: LatencyModel
    errors: Errors
    """Of a fit without the students that it was checked on; `model` is fitted to all."""
    timed: tuple[Timed, ...]
    measured_at: str


def machine_latency(call: Call, space: Space, machine: dict[str, Any]) -> MachineLatency:
    """The kept model for `call` on this machine, or a new one, which is then kept. Raises BadInput: a student cannot be timed."""
    kept = cache_folder() / "latency" / f"{_key(call, space, machine)}.json"
    with ExitStack() as stack:
        # At the same time each process would slow the other down. A cache that cannot be written has no lock.
        with suppress(OSError):
            make_private(kept.parent)
            wait = partial(say, "another process makes this latency model; waiting for it")
            stack.enter_context(locked(kept.with_suffix(".lock"), waiting=wait))
        if found := _read(kept):
            say(f"latency model: kept from {found.measured_at[:10]} in {kept}; its error was {_errors(found.errors)}")
            return found
        shapes = timed_shapes(space)
        say(f"latency model: timing {len(shapes)} students with random weights, which takes some minutes, once")
        timed = time_students(shapes, call)
        checked = max(1, len(timed) * CHECKED // (FITTED + CHECKED))
        errors = fit(timed[:-checked]).errors_on(timed[-checked:])
        found = MachineLatency(fit(timed), errors, tuple(timed), machine["measured_at"])
        say(f"latency model: its error is {_errors(errors)}")
        if errors.worst > WIDE_ERROR:
            say(
                "warning: other programs were on the cores, so the latency model is not kept. Close them and run the command again."
            )
            return found
        with suppress(OSError):  # without a cache it is timed again the next time
            with replacing(kept) as beside:
                beside.write_bytes(canonical_json(_document(found)))
    return found


def timed_shapes(space: Space) -> list[Shape]:
    """The students to time: the corners of the space, then others by chance, on the last of which the error is measured."""
    depth = min(DEEPEST, space.teacher.layers)
    every = [shape for shape in space.shapes() if shape.layers <= depth]
    corners = dict.fromkeys(
        Shape(layers, hidden, heads, ffn, activation)
        for layers in (1, depth)
        for hidden in (space.widths[0], space.widths[-1])
        for heads in space.heads(hidden)[:1]
        for ffn, activation in (
            (space.ffns(hidden)[0], ""),
            *((space.ffns(hidden)[-1], each) for each in space.activations),
        )
    )
    others = [shape for shape in every if shape not in corners]
    drawn = random.Random(0).sample(others, min(len(others), max(CHECKED, FITTED + CHECKED - len(corners))))
    return [*corners, *drawn]


def time_students(shapes: Sequence[Shape], call: Call, *, seconds: float = SECONDS) -> list[Timed]:
    """The time of one call of each student, all timed in turns for about `seconds` after they are exported."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder, bar("latency") as shown:
        candidates = []
        for i, shape in enumerate(shapes):
            shown(i, len(shapes), f"exporting {shape}")
            place = Path(folder) / str(i)
            graph = write_random_graph(place, call.teacher, shape, call.task, call.labels, call.tokens)
            candidates.append(
                Candidate(f"{i}: {shape}", "onnxruntime", "int8", graph, call.threads, max_length=call.tokens)
            )
        row = np.array([row.ids for row in random_rows(call.teacher, 1, call.tokens)], dtype=np.int64)
        workload = Workload(f"1 x {call.tokens} tokens", 1, call.tokens, row)
        patience = StoppingRule(seconds=seconds, tight=0.005, turn_seconds=TURN_SECONDS, least_turns=TURNS)
        with start_workers(candidates, [workload], progress=shown) as workers:
            found = measure(workers, workload, patience=patience, progress=shown)
    return [Timed(shape, each.p50_ms, each.p99_ms) for shape, each in zip(shapes, found, strict=True)]


def _key(call: Call, space: Space, machine: dict[str, Any]) -> str:
    """A name for everything that the times depend on."""
    facts: Any = machine
    # Of the teacher's configuration what is one value, such as an activation; its size and names are not.
    config = {
        name: value
        for name, value in call.teacher.config.to_dict().items()
        if isinstance(value, int | float | str | bool) and not name.startswith("_") and not name.endswith("token_id")
    }
    decides = [
        OPERATORS, {name: facts[name] for name in FACTS}, ort.__version__, trained_with("cpu"), config, call.task.name, call.labels,
        call.tokens, call.threads, str(space.teacher), list(space.others), FITTED, CHECKED,
    ]  # fmt: skip
    return hashlib.sha256(canonical_json(decides)).hexdigest()[:16]


def _errors(errors: Errors) -> str:
    return f"{errors.median:.1%} at the median and {errors.worst:.1%} at worst, on {errors.students} students that were not fitted"


def _document(found: MachineLatency) -> dict[str, Any]:
    return {
        "ms_by_operator": dict(found.model.ms_by_operator),
        "p99_over_p50": found.model.p99_over_p50,
        "errors": found.errors._asdict(),
        "timed": [[vars(each.shape), each.p50_ms, each.p99_ms] for each in found.timed],
        "measured_at": found.measured_at,
    }


def _read(file: Path) -> MachineLatency | None:
    """The model in `file`; None where there is none that can be used."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        costs = {name: float(document["ms_by_operator"][name]) for name in OPERATORS}
        return MachineLatency(
            LatencyModel(costs, float(document["p99_over_p50"])),
            Errors(**document["errors"]),
            tuple(Timed(Shape(**shape), p50_ms, p99_ms) for shape, p50_ms, p99_ms in document["timed"]),
            str(document["measured_at"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class RandomRow:
    """Token ids of no text, with the attributes of a tokenizer's `Encoding`."""

    ids: list[int]

    @property
    def attention_mask(self) -> list[int]:
        """1 for each token."""
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        """0 for each token."""
        return [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def write_random_graph(folder: Path, teacher: Opened, shape: Shape, task: Task, labels: int, tokens: int) -> Path:
    """Write the int8 graph of a student of `shape` in the teacher's family, for up to `tokens` tokens, and return its file.

    Products are quantised as those of a bundle. Nothing else of its weights decides its time.
    """
    import torch

    assert task.head
    kind = task.head.model_class
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind.from_config(random_config(teacher, shape, labels)).save_pretrained(folder)
    export_graph(folder, folder / FP32, tokens)
    prepared = Prepared.of(folder / FP32, random_rows(teacher, CALIBRATION_ROWS, tokens))  # type: ignore[arg-type]
    quantise_static(prepared.model, folder / INT8, prepared.ranges)
    for left in (FP32, "model.safetensors"):
        (folder / left).unlink()
    return folder / INT8


def random_config(teacher: Opened, shape: Shape, labels: int) -> Any:
    """The configuration of a student in the teacher's family, with a head for `labels` labels and a small vocabulary."""
    config = student_config(teacher.config, shape)
    config.vocab_size = min(VOCABULARY, config.vocab_size)
    config.pad_token_id = min(config.pad_token_id or 0, config.vocab_size - 1)  # ModernBERT's is one of its last tokens
    config.num_labels = labels
    return config


def parameters(teacher: Opened, shape: Shape) -> int:
    """The parameters of an encoder of `shape` in the teacher's family, with the teacher's vocabulary and without a head."""
    import torch
    from transformers import AutoModel

    with quiet(), torch.device("meta"):
        return sum(each.numel() for each in AutoModel.from_config(student_config(teacher.config, shape)).parameters())


def random_rows(teacher: Opened, rows: int, tokens: int) -> Sequence[RandomRow]:
    """Rows of ids of the small vocabulary, without its first ones and its last, one of which is the padding."""
    vocabulary = min(VOCABULARY, teacher.config.vocab_size)
    drawn = np.random.default_rng(0).integers(vocabulary // 2, vocabulary - 1, size=(rows, tokens))
    return [RandomRow([int(each) for each in row]) for row in drawn]
