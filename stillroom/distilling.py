"""`stillroom distill`: a task-agnostic student from a teacher and plain text."""

import dataclasses
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel

from compress.distill import (
    RelationDistillation,
    chunks,
    distil_relations,
    usual_relation_heads,
    usual_teacher_layer,
)
from compress.examples import read_texts
from compress.initialise import student_of
from compress.relations import check_relation_heads
from compress.students import Shape, shape_of
from compress.tasks import pad_id_of
from compress.teacher import Opened, open_model, quiet, save_tokenizer
from serve.bundle import canonical_json
from serve.errors import BadInput
from serve.threads import available_cores
from stillroom.ground import folder_mark, texts_mark, trained_with
from stillroom.show import bar
from stillroom.stages import MARK, TRAINING, Work, fingerprint


def distil_student(
    teacher: str,
    corpus: Sequence[Path],
    out: Path,
    *,
    student: str,
    epochs: float,
    learning_rate: float,
    batch: int,
    relation_heads: int,
    teacher_layer: int,
    tokens: int,
    seed: int,
    precision: str,
) -> Path:
    """See `stillroom.verbs.distill`."""
    if batch < 1 or tokens < 8 or not epochs > 0 or not learning_rate > 0 or precision not in ("fp32", "bf16"):
        raise BadInput(
            "--batch is a whole number from 1, --tokens from 8, --epochs and --learning-rate above 0, --precision fp32 or bf16."
        )
    shape, opened = shape_of(student), open_model(teacher)
    texts = [text for path in corpus for text in read_texts(path)]
    if not texts:
        raise BadInput("No --corpus was given; relation distillation needs plain text.")
    settings = RelationDistillation(
        steps=1,  # known once the corpus is cut into pieces
        learning_rate=learning_rate,
        batch=batch,
        relation_heads=relation_heads or usual_relation_heads(opened.config.hidden_size, shape.hidden),
        teacher_layer=teacher_layer or usual_teacher_layer(opened.config.num_hidden_layers),
        seed=seed,
        precision=precision,
    )
    depth = opened.config.num_hidden_layers
    if not 1 <= settings.teacher_layer <= depth:
        raise BadInput(f"--teacher-layer is {settings.teacher_layer}; the teacher has layers 1 to {depth}.")
    check_relation_heads(settings.relation_heads, opened.config.hidden_size, shape.hidden)
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} is there already; nothing in it was touched. Give another folder.")
    cores = available_cores()
    torch.set_num_threads(cores)
    torch.use_deterministic_algorithms(True)
    described = [str(shape), epochs, tokens, cores, trained_with(), dataclasses.asdict(settings)]
    mark = fingerprint("distill", folder_mark(opened.folder), texts_mark(texts), *described)
    work = Work(target.with_name(target.name + ".distil-work"))
    with work.locked():
        made = work.stage("student", mark, lambda folder: _make(folder, opened, shape, texts, epochs, tokens, settings))
        made.replace(target)
        (target / MARK).unlink()
        shutil.rmtree(work.root, ignore_errors=True)
    return target


def _make(
    folder: Path,
    opened: Opened,
    shape: Shape,
    texts: list[str],
    epochs: float,
    tokens: int,
    settings: RelationDistillation,
) -> None:
    """The student's checkpoint in `folder`."""
    tokenizer = save_tokenizer(opened, folder)
    with quiet():
        teacher = AutoModel.from_pretrained(
            opened.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    student, origin = student_of(teacher, opened.family, shape, seed=settings.seed)
    pieces = chunks(texts, tokenizer, min(tokens, opened.max_length))
    settings = dataclasses.replace(settings, steps=max(1, math.ceil(epochs * len(pieces) / settings.batch)))
    with bar("relations") as shown:
        progress = distil_relations(
            teacher,
            student,
            opened.family,
            pieces,
            pad_id_of(tokenizer),
            settings,
            folder=folder / TRAINING,
            report=shown.step,
        )
    with quiet():
        student.save_pretrained(folder)
    lineage = {"teacher": opened.public_name, "method": "minilmv2", "student": str(shape), "origin": origin}
    document = lineage | dataclasses.asdict(settings) | {"loss": progress.loss}
    (folder / "lineage.json").write_bytes(canonical_json(document))
