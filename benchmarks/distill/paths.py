"""Compare students of this engine with those of plain training: MiniLMv2 both ways from the same seed, then a task.

    python benchmarks/distill/paths.py --teacher FOLDER --corpus text.txt --data clinc150 --task text-classification

Plain training is in float32, runs all of both models, holds relations whole, and uses torch's own attention. This engine runs in
float32 and in bfloat16. All read the same texts in the same steps at the same learning rates. First they run without dropout,
where they can differ only by rounding: their loss curves are compared step by step. Then they run with dropout and several seeds:
each way draws its own dropout, and a student's score varies with the draws. Each student is then fine-tuned on the task in the
same way and scored on its test split. Prints a JSON document.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.data.batches import inputs_for
from compress.data.corpus import CorpusText, chunks
from compress.data.texts import read_texts
from compress.distributed import ProcessShare
from compress.evaluation.predictions import row_logits
from compress.losses.vectors import dot_scores, split_heads
from compress.methods.catalogue import Stage
from compress.methods.presets import Schedule
from compress.models.initialise import student_of
from compress.models.precision import autocast
from compress.models.pretrained import load, load_encoder, open_model, save_tokenizer
from compress.runs.task_stages import on_task
from compress.tasks import task_named
from compress.training.loop import StageSettings, train
from compress.training.stage import train_stage
from stillroom.inputs.preflight import RunInputs, prepare
from stillroom.inputs.recipe import resolve

WAYS = {"plain": "fp32", "float32": "fp32", "bfloat16": "bf16"}


def relation_loss(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """The divergence of relations as MiniLMv2 writes it, with all scores in memory."""
    padded = ~mask.bool()[:, None, None, :]  # (batch, 1, 1, tokens)
    target, ours = (
        functional.log_softmax(dot_scores(x.float(), x.float()).masked_fill(padded, float("-inf")), dim=-1)
        for x in (teacher, student)
    )
    each = (target.exp() * (target - ours)).masked_fill(padded, 0.0).sum(dim=-1).mean(dim=1)  # (batch, tokens)
    return ((each * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def plain(
    stage: Stage, teacher: Any, student: Any, text: CorpusText, settings: StageSettings, folder: Path
) -> list[float]:
    """Trains in the plain way; returns the reported losses."""
    term = stage.objective.layers[0]

    def relations(model: nn.Module, layer: int, inputs: dict[str, Tensor]) -> list[Tensor]:
        states = model(**inputs_for(model, inputs), output_hidden_states=True).hidden_states[layer - 1]
        attention = model.encoder.layer[layer - 1].attention.self  # type: ignore[union-attr, index]
        return [split_heads(part(states), term.heads) for part in (attention.query, attention.key, attention.value)]

    def loss_at(step: int, _share: ProcessShare) -> dict[str, Tensor]:
        batch = text.at(step)
        with torch.no_grad():
            theirs = relations(teacher, term.teacher_layer, batch.inputs)
        ours = relations(student, term.student_layer, batch.inputs)
        mask = batch.inputs["attention_mask"]
        return {str(i): relation_loss(a, b, mask) for i, (a, b) in enumerate(zip(theirs, ours, strict=True))}

    torch.manual_seed(settings.seed)
    schedule = Schedule(settings.steps, stage.learning_rate, stage.warmup, betas=stage.betas)
    with mock.patch("compress.training.loop.computing", autocast):  # without this engine's attention
        progress = train(student, loss_at, schedule, StageSettings(seed=settings.seed), folder=folder)
    return [loss for _, loss in progress.loss]


def student_by(
    way: str, inputs: RunInputs, text: CorpusText, given: argparse.Namespace, *, seed: int, dropout: bool
) -> Any:
    """The student, its loss curve, and the seconds of its training."""
    teacher = load_encoder(inputs.opened, seed=0).eval()
    student, _ = student_of(teacher, inputs.shape, seed=seed)
    for module in student.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    (stage,) = inputs.chain.stages[-1]
    settings = StageSettings(given.steps, seed, WAYS[way], checkpoint_every_s=1e9)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if way == "plain":
            curve = plain(stage, teacher, student, text, settings, Path(folder))
        else:
            curve = [loss for _, loss in train_stage(stage, teacher, student, text, settings, folder=Path(folder)).loss]
    return student, curve, time.perf_counter() - began


def score(student: Any, inputs: RunInputs, given: argparse.Namespace) -> float:
    """The task metric on test of the student after fine-tuning."""
    task = task_named(inputs.recipe.task)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student.save_pretrained(folder / "student")
        save_tokenizer(inputs.opened, folder / "student")
        torch.manual_seed(0)
        model = load(open_model(str(folder / "student")), task, inputs.labels)
        steps = round(given.task_epochs * -(-len(inputs.train) // inputs.recipe.batch))
        on_task(model, folder, inputs, steps, inputs.recipe.student_learning_rate, "fine-tuning")
        gold = [task.gold_of(example) for example in inputs.splits.test]
        return task.metric.score(gold, task.predictions(inputs.test, row_logits(model, inputs.test))).value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--corpus", action="append", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--student", default="3x384")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--task-epochs", type=float, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as out:
        chosen = {name: getattr(given, name) for name in ("teacher", "task", "data", "student", "threads")}
        inputs = prepare(resolve({}, chosen | {"out": f"{out}/bundle", "precision": "fp32", "method": "minilmv2"}))
        texts = [text for file in given.corpus for text in read_texts(Path(file))]
        pieces = chunks(texts, inputs.tokenizer, given.tokens)
        curves: dict[str, Any] = {"without dropout": {}}
        scores: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in [None, *range(given.seeds)]:
            text = CorpusText(pieces, inputs.train.pad_id, given.batch, seed or 0)
            for way in WAYS:
                student, curve, seconds = student_by(way, inputs, text, given, seed=seed or 0, dropout=seed is not None)
                curves.setdefault("without dropout" if seed is None else f"seed {seed}", {})[way] = curve
                if seed is not None:
                    scores[way].append(score(student, inputs, given))
                print(way, seed, f"{seconds:.0f} s", curve[-1], scores[way], file=sys.stderr, flush=True)
    exact = curves["without dropout"]
    apart = {way: [b / a - 1 for a, b in zip(exact["plain"], exact[way], strict=True)] for way in WAYS}
    document = {
        "settings": vars(given),
        "machine": {"torch": torch.__version__, "processor": platform.processor()},
        "largest_relative_difference_without_dropout": {way: max(map(abs, found)) for way, found in apart.items()},
        "last_losses": {name: {way: curve[-1] for way, curve in found.items()} for name, found in curves.items()},
        "test_metric": scores,
        "mean_test_metric": {way: statistics.mean(found) for way, found in scores.items()},
        "curves": curves,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
