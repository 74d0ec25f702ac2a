"""`stillroom distill`: a task-agnostic student from a teacher and plain text."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compress.corpus import CorpusText, Piece, chunks, masking_of
from compress.distill import Settings, distil
from compress.examples import read_texts
from compress.guards import doubts
from compress.initialise import student_of
from compress.methods import Sizes, Stage, stages_of
from compress.objectives import check_objective
from compress.students import Shape, shape_of
from compress.tasks import pad_id_of
from compress.teacher import Opened, load_encoder, open_model, quiet, save_tokenizer
from compress.vocabulary_head import HEAD_STAGE, has_vocabulary_head
from serve.bundle import canonical_json
from serve.errors import BadInput
from serve.threads import available_cores
from stillroom.ground import folder_mark, same_bits, texts_mark, trained_with
from stillroom.show import bar, say
from stillroom.stages import MARK, TRAINING, Work, fingerprint

# Settings that only some methods read.
USED_BY = {
    "relation_heads": ("minilmv2",),
    "teacher_layer": ("minilmv2", "directminilm"),
    "layer_map": ("hidden-states", "output-distribution"),
}


@dataclass(frozen=True)
class Distillation:
    """Settings of `stillroom distill`."""

    student: str = "3x384"
    method: str = "minilmv2"
    epochs: float = 1.0  # over the corpus, all stages of the method together
    learning_rate: float = 0.0  # 0 is each stage's own
    batch: int = 32  # pieces a step
    relation_heads: int = 0  # 0 is the paper's 48, or the nearest below it that divides both widths
    teacher_layer: int = 0  # 0 is the usual one of the method
    layer_map: str = ""  # none is the usual one of the method
    tokens: int = 128  # longest piece of the corpus
    start: str = "teacher"  # or `random`: whether layers are copied where they fit
    seed: int = 0
    precision: str = "fp32"


@dataclass(frozen=True)
class _Given:
    """What was opened and checked."""

    opened: Opened
    shape: Shape
    stages: tuple[Stage, ...]
    texts: list[str]
    settings: Distillation


def distil_student(teacher: str, corpus: Sequence[Path], out: Path, settings: Distillation) -> Path:
    """See `stillroom.verbs.distill`."""
    given = _checked(teacher, corpus, settings)
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} is there already; nothing in it was touched. Give another folder.")
    cores = available_cores()
    same_bits(cores)
    common = [folder_mark(given.opened.folder), texts_mark(given.texts), cores, trained_with()]
    mark = fingerprint("distill", *common, dataclasses.asdict(settings))
    work = Work(target.with_name(target.name + ".distil-work"))
    with work.locked():
        folder = _walk(work, mark, given)
        folder.replace(target)
        (target / MARK).unlink()
        shutil.rmtree(work.root, ignore_errors=True)
    return target


def _checked(teacher: str, corpus: Sequence[Path], settings: Distillation) -> _Given:
    s = settings
    if (
        s.batch < 1
        or s.tokens < 8
        or not s.epochs > 0
        or s.learning_rate < 0
        or s.precision not in ("fp32", "bf16")
        or s.start not in ("teacher", "random")
    ):
        raise BadInput(
            "--batch is a whole number from 1, --tokens from 8, --epochs above 0, --learning-rate 0 (the method's own) or more, "
            "--precision fp32 or bf16, --start teacher or random."
        )
    for name, users in USED_BY.items():
        if getattr(s, name) and s.method not in users:
            raise BadInput(
                f"--{name.replace('_', '-')} says nothing to --method {s.method}; it is for {' and '.join(users)}. Leave it out."
            )
    shape, opened = shape_of(s.student), open_model(teacher)
    config = opened.config
    sizes = Sizes(
        config.num_hidden_layers,
        shape.layers,
        config.hidden_size,
        shape.hidden,
        s.relation_heads,
        s.teacher_layer,
        s.layer_map,
    )
    stages = stages_of(s.method, sizes)
    if any(stage.text == "task" for stage in stages):
        raise BadInput(
            f"--method {s.method} needs a task: labels, and a teacher that was fine-tuned on it. "
            "Here a student learns from plain text alone; take one of the methods that do (see `stillroom distill --help`)."
        )
    for stage in stages:
        check_objective(stage.objective, config, shape.as_config())
    texts = [text for path in corpus for text in read_texts(path)]
    if not texts:
        raise BadInput("No --corpus was given; distillation without a task needs plain text.")
    return _Given(opened, shape, stages, texts, s)


def _walk(work: Work, mark: str, given: _Given) -> Path:
    """The folder of the finished student, after each stage of the method in a folder of its own."""
    teacher_folder = given.opened.folder
    masks = any(stage.objective.masks_tokens for stage in given.stages)
    asked = any(stage.objective.masks_tokens and stage.objective.asks_teacher for stage in given.stages)
    if asked and not has_vocabulary_head(given.opened):
        say("The teacher has no head for masked words; one is fitted to the corpus first, its encoder untouched.")
        fit = partial(_fit_head, given=given, teacher=teacher_folder)
        teacher_folder = work.stage("teacher-head", fingerprint(mark, "head"), fit)
    start = partial(_make_start, given=given, teacher=teacher_folder, masks=masks)
    folder = work.stage("start", fingerprint(mark, "start"), start)
    for number, stage in enumerate(given.stages, 1):
        make = partial(_make_stage, given=given, stage=stage, teacher=teacher_folder, before=folder)
        folder = work.stage(f"{number}-{stage.name}", fingerprint(mark, "stage", number), make)
    return folder


def _fit_head(folder: Path, given: _Given, teacher: Path) -> None:
    tokenizer = save_tokenizer(given.opened, folder)
    model = load_encoder(teacher, seed=given.settings.seed, vocabulary=True)
    _train(folder, given, HEAD_STAGE, None, model, tokenizer, share=0.2)
    _save(model, folder, given, {"role": "teacher with a fitted head for masked words"})


def _make_start(folder: Path, given: _Given, teacher: Path, masks: bool) -> None:
    save_tokenizer(given.opened, folder)
    model = load_encoder(teacher, seed=given.settings.seed, vocabulary=masks)
    s = given.settings
    student, origin = student_of(model, given.opened.family, given.shape, seed=s.seed, new_layers=s.start == "random")
    _save(student, folder, given, {"role": "start", "origin": origin})


def _make_stage(folder: Path, given: _Given, stage: Stage, teacher: Path, before: Path) -> None:
    tokenizer = save_tokenizer(given.opened, folder)
    masks = any(one.objective.masks_tokens for one in given.stages)
    student = load_encoder(before, seed=given.settings.seed, vocabulary=masks)
    needed = load_encoder(teacher, seed=given.settings.seed, vocabulary=stage.objective.masks_tokens)
    progress = _train(folder, given, stage, needed, student, tokenizer, share=stage.share)
    doubted = doubts(progress.loss, stage.name)
    for doubt in doubted:
        say(f"warning: {doubt}")
    details = {"role": "student", "stage": stage.name, "loss": progress.loss, "doubts": doubted}
    _save(student, folder, given, details)


def _train(
    folder: Path, given: _Given, stage: Stage, teacher: Any, student: Any, tokenizer: Tokenizer, *, share: float
) -> Any:
    s = given.settings
    pieces: list[Piece] = chunks(given.texts, tokenizer, min(s.tokens, given.opened.max_length))
    if not pieces:
        raise BadInput("The --corpus holds no words: every line of it is empty. Give files with text.")
    masking = masking_of(tokenizer, student.config.vocab_size) if stage.objective.masks_tokens else None
    text = CorpusText(pieces, pad_id_of(tokenizer), s.batch, s.seed, masking)
    steps = max(1, round(share * s.epochs * text.order.steps_per_epoch))
    with bar(stage.name) as shown:
        return distil(
            stage,
            teacher,
            student,
            given.opened.family,
            text,
            Settings(steps, s.seed, s.precision, learning_rate=s.learning_rate),
            folder=folder / TRAINING,
            report=shown.step,
        )


def _save(model: Any, folder: Path, given: _Given, details: dict[str, Any]) -> None:
    with quiet():
        model.to("cpu").save_pretrained(folder)
    lineage = {"teacher": given.opened.public_name, **dataclasses.asdict(given.settings), "student": str(given.shape)}
    (folder / "lineage.json").write_bytes(canonical_json(lineage | details))
