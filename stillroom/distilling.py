"""`stillroom distill`: a task-agnostic student from a teacher and plain text."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compress.corpus import tokenised
from compress.examples import TextFiles
from compress.methods import Stage, chain_of
from compress.students import BY_RULE, Shape, assistants_of, shape_of
from compress.teacher import Opened, open_model, open_tokenizer
from serve.errors import BadInput
from serve.threads import available_cores
from stillroom.ground import folder_mark, same_bits, texts_mark, trained_with
from stillroom.show import say
from stillroom.stages import MARK, Work, fingerprint
from stillroom.walk import Link, Teaching, asks_words, fit_head, walk

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
    epochs: float = 1.0  # over the corpus, all stages of the method together; each assistant has as many
    learning_rate: float = 0.0  # 0 is each stage's own
    batch: int = 32  # pieces a step
    relation_heads: int = 0  # 0 is the paper's 48, or the nearest below it that divides both widths
    teacher_layer: int = 0  # 0 is the usual one of the method
    layer_map: str = ""  # none is the usual one of the method
    tokens: int = 128  # longest piece of the corpus
    start: str = "teacher"  # or `random`: whether layers are copied where they fit
    assistants: tuple[str, ...] = ()  # students between the teacher and the last one, in order; or `auto`
    seed: int = 0
    precision: str = "fp32"


@dataclass(frozen=True)
class _Given:
    """What was opened and checked."""

    opened: Opened
    shapes: tuple[Shape, ...]  # of the assistants and the student
    stages: tuple[tuple[Stage, ...], ...]  # of each
    texts: TextFiles
    texts_mark: str
    settings: Distillation


def distil_student(teacher: str, corpus: Sequence[Path], out: Path, settings: Distillation) -> Path:
    """See `stillroom.verbs.distill`."""
    given = _checked(teacher, corpus, settings)
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} is there already; nothing in it was touched. Give another folder.")
    cores = available_cores()
    same_bits(cores)
    common = [folder_mark(given.opened.folder), given.texts_mark, cores, trained_with()]
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
    shapes = (*assistants_of(s.assistants, shape, opened.config), shape)
    if tuple(s.assistants) == (BY_RULE,):
        say(
            f"Assistants by MiniLM's rule: {', '.join(map(str, shapes[:-1])) or 'none; the student is no half of its teacher'}."
        )
    choices = {name: getattr(s, name) for name in USED_BY}
    stages = chain_of(s.method, shapes, opened.config, **choices)
    if any(stage.text != "corpus" for several in stages for stage in several):
        raise BadInput(
            f"--method {s.method} needs a task: labels, and a teacher that was fine-tuned on it. "
            "Here a student learns from plain text alone; take one of the methods that do (see `stillroom distill --help`)."
        )
    if not corpus:
        raise BadInput("No --corpus was given; distillation without a task needs plain text.")
    texts = TextFiles(tuple(corpus))
    return _Given(opened, shapes, stages, texts, texts_mark(texts), s)


def _walk(work: Work, mark: str, given: _Given) -> Path:
    """The folder of the finished student."""
    s, opened = given.settings, given.opened
    tokenizer = open_tokenizer(opened)
    longest = min(s.tokens, opened.max_length)
    pieces = tokenised(given.texts, tokenizer, longest, work.root / "corpus", mark=given.texts_mark)
    if not len(pieces):
        raise BadInput("The --corpus holds no words: every line of it is empty. Give files with text.")
    tokens = s.epochs * float(pieces.lengths.sum())
    teaching = Teaching(
        opened, tokenizer, pieces, {}, s.batch, s.seed, s.precision, learning_rate=s.learning_rate,
        new_layers=s.start == "random", told=dataclasses.asdict(s),
    )  # fmt: skip
    if asks_words(given.stages[0]):
        head = work.stage(
            "teacher-head", fingerprint(mark, "head"), partial(fit_head, teaching=teaching, tokens=tokens)
        )
        teaching = dataclasses.replace(teaching, words=head)
    links = [
        Link(shape, stages, tuple(stage.share * tokens for stage in stages))
        for shape, stages in zip(given.shapes, given.stages, strict=True)
    ]
    return walk(work, mark, links, teaching)[-1]
