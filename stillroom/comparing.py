"""`stillroom compare`: one teacher, several methods and students, equal budgets of tokens, several seeds."""

import dataclasses
import json
import multiprocessing
import re
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from compress.checkpoint import write_safetensors
from compress.corpus import CorpusText, chunks, masking_of
from compress.distill import Settings, distil
from compress.examples import check_task
from compress.families import encoder_of
from compress.finetune import look
from compress.guards import doubts
from compress.initialise import student_of
from compress.methods import LABELS, Sizes, Stage, stages_of
from compress.objectives import Projections, check_objective
from compress.scores import METRICS, counts, gold_of, mean_score, score
from compress.tasks import TaskText, predictions, row_logits
from compress.teacher import load, load_encoder, open_model, quiet, save_tokenizer
from compress.vocabulary_head import HEAD_STAGE, has_vocabulary_head
from latency.report import write_page
from serve.bundle import canonical_json
from serve.errors import BadInput
from serve.threads import available_cores
from stillroom import training
from stillroom.comparison_page import markdown, page
from stillroom.ground import Ground, folder_mark, prepare, same_bits, texts_mark, trained_with
from stillroom.recipe import Recipe
from stillroom.show import bar, console, say
from stillroom.stages import TRAINING, Work, fingerprint

# What every method is compared with: the same student without a teacher's help, its layers new or the teacher's.
BASELINES = ("random", "none")
WRITTEN = {"work", "compare.json", "report.html", "table.md"}  # in --out
STAGES = "stages"  # of one row under way
MAPS = "maps.safetensors"  # what an objective learned beside the student
LOOKS = 10  # at validation, in one training
HEAD_SHARE = 0.2  # of the distillation tokens, for fitting a head for masked words


@dataclass(frozen=True)
class Comparison:
    """Settings of `stillroom compare`."""

    teacher: str
    task: str
    data: str
    out: str
    methods: tuple[str, ...]
    students: tuple[str, ...] = ("3x384",)
    corpus: tuple[str, ...] = ()
    seeds: int = 3
    distil_tokens: int = 1_000_000  # of plain text, for methods that learn from it
    task_tokens: int = 1_000_000  # of the task's text; methods without plain text get both here
    batch: int = 32
    tokens: int = 128  # longest piece of the corpus
    max_length: int = 0
    teacher_epochs: int = 5
    teacher_learning_rate: float = 1e-4
    threads: int = 0  # of each training; 0 shares the cores between the jobs
    jobs: int = 1  # rows at once
    precision: str = "auto"


class Row(NamedTuple):
    """One training: a method, a student, a seed."""

    method: str
    student: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}, {self.student}, seed {self.seed}"


def compare(given: Comparison) -> dict[str, Any]:
    """Train every method on every student with every seed, and say what each reached; the document that `--json` prints.

    Methods that begin on plain text start from the teacher as it was given, and end with training on labels; those that
    begin on the task start from the teacher fine-tuned on it. All see as many tokens. Rows that are finished are not
    made again, so a stopped comparison goes on where it was, and one with more methods adds theirs.

    Raises:
        BadInput: anything wrong with what was given, before any training.
    """
    given = dataclasses.replace(
        given, methods=tuple(dict.fromkeys(given.methods)), students=tuple(dict.fromkeys(given.students))
    )
    grounds = _checked(given)
    out = Path(given.out)
    work = Work(out / "work")
    rows = [
        Row(m, s, seed) for s in given.students for m in (*BASELINES, *given.methods) for seed in range(given.seeds)
    ]
    with work.locked():
        ground = next(iter(grounds.values()))
        training_marks = _marks(given, ground)
        same_bits(ground.recipe.threads)
        teacher = work.stage("teacher", training_marks["teacher"], partial(_make_teacher, ground=ground))
        if any(_asks_head(stages) for stages in _all_stages(given, grounds)):
            fit = partial(_fit_head, given=given, ground=ground)
            work.stage("teacher-head", training_marks["head"], fit)
        said = training.read_lineage(teacher)
        waiting = [row for row in rows if not work.finished(_name(row), _row_mark(given, grounds[row.student], row))]
        say(f"{len(rows)} trainings, {len(rows) - len(waiting)} of them done before")
        _run(given, waiting)
        document = _document(given, grounds, work, rows, said)
    for row in document["rows"]:
        for doubt in row["doubts"]:
            say(f"warning: {doubt}")
    (out / "compare.json").write_bytes(canonical_json(document))
    write_page(out / "report.html", page(document))
    (out / "table.md").write_text(markdown(document), encoding="utf-8")
    return document


def _checked(given: Comparison) -> dict[str, Ground]:
    """What each student stands on, once all methods are known to fit it."""
    if given.seeds < 1 or given.distil_tokens < 1 or given.task_tokens < 1 or given.jobs < 1 or not given.methods:
        raise BadInput(
            "--methods names at least one method; --seeds, --jobs, --distil-tokens and --task-tokens are whole numbers from 1."
        )
    out = Path(given.out)
    if out.exists() and not (out.is_dir() and {f.name for f in out.iterdir()} <= WRITTEN):
        raise BadInput(
            f"--out {out} is there already and holds other things; nothing was written. Give another folder."
        )
    if Path(given.teacher).resolve().is_relative_to((out / "work").resolve()):
        raise BadInput(
            f"--teacher {given.teacher} lies in {out / 'work'}, where this comparison writes. Copy it elsewhere."
        )
    grounds: dict[str, Ground] = {}
    for student in given.students:
        grounds[student] = ground = prepare(_recipe(given, student))
        for method in given.methods:
            stages = stages_of(method, _sizes(ground))
            for stage in stages:
                check_objective(stage.objective, ground.opened.config, ground.shape.as_config())
            if any(stage.text == "corpus" for stage in stages) and not ground.corpus:
                raise BadInput(f"--methods has {method}, which learns from plain text, and no --corpus was given.")
    for warning in next(iter(grounds.values())).warnings:
        say(f"warning: {warning}")
    return grounds


def _recipe(given: Comparison, student: str) -> Recipe:
    """What all rows of one student share; the seed of a row fixes its training and not its data."""
    return Recipe(
        teacher=given.teacher,
        task=given.task,
        data=given.data,
        out=str(Path(given.out) / "work" / "none"),
        student=student,
        corpus=given.corpus,
        threads=given.threads or max(1, available_cores() // given.jobs),
        precision=given.precision,
        max_length=given.max_length,
        batch=given.batch,
        teacher_epochs=given.teacher_epochs,
        teacher_learning_rate=given.teacher_learning_rate,
    )


def _sizes(ground: Ground) -> Sizes:
    config, shape = ground.opened.config, ground.shape
    return Sizes(config.num_hidden_layers, shape.layers, config.hidden_size, shape.hidden)


def _all_stages(given: Comparison, grounds: dict[str, Ground]) -> list[tuple[Stage, ...]]:
    return [stages_of(method, _sizes(ground)) for ground in grounds.values() for method in given.methods]


def _masks(stages: Sequence[Stage]) -> bool:
    return any(stage.objective.masks_tokens for stage in stages)


def _asks_head(stages: Sequence[Stage]) -> bool:
    """Whether the teacher is asked for masked words."""
    return any(stage.objective.masks_tokens and stage.objective.asks_teacher for stage in stages)


def _marks(given: Comparison, ground: Ground) -> dict[str, str]:
    """Fingerprints of what all rows share."""
    r = ground.recipe
    common = [r.task, ground.data_mark, r.threads, r.precision, r.batch, ground.max_length, trained_with()]
    teacher = fingerprint(
        "teacher", folder_mark(ground.opened.folder), *common, r.teacher_epochs, r.teacher_learning_rate
    )
    head = fingerprint("head", teacher, texts_mark(ground.corpus), given.tokens, given.distil_tokens)
    return {"teacher": teacher, "head": head}


def _row_mark(given: Comparison, ground: Ground, row: Row) -> str:
    marks = _marks(given, ground)
    stages = [] if row.method in BASELINES else [dataclasses.asdict(s) for s in stages_of(row.method, _sizes(ground))]
    budget = [given.distil_tokens, given.task_tokens, given.tokens]
    return fingerprint("row", marks["head"], str(ground.shape), row.method, row.seed, stages, budget)


def _name(row: Row) -> str:
    return f"{row.method}-{row.student.replace(',', '-').replace('=', '')}-{row.seed}"


def _make_teacher(folder: Path, ground: Ground) -> None:
    steps = (
        0 if ground.teacher_has_head else -(-len(ground.train) // ground.recipe.batch) * ground.recipe.teacher_epochs
    )
    say(f"teacher: {steps} steps at most" if steps else "teacher: it has a head for this task")
    training.make_teacher(folder, ground, steps)
    # The check against chance, and nothing else of that stage: methods ask the teacher as they train.
    model = training.load_stage(folder, ground)
    training.check_teacher(model, ground, folder)


def _fit_head(folder: Path, given: Comparison, ground: Ground) -> None:
    """The general teacher with a head for masked words: its own, or one fitted to the corpus."""
    save_tokenizer(ground.opened, folder)
    model = load_encoder(ground.opened.folder, seed=0, vocabulary=True)
    if not has_vocabulary_head(ground.opened):
        say("The teacher has no head for masked words; one is fitted to the corpus, its encoder untouched.")
        text = _corpus(given, ground, seed=0, masks=True)
        steps = max(1, round(HEAD_SHARE * given.distil_tokens / text.tokens_per_step))
        with bar("head for masked words") as shown:
            settings = Settings(steps, 0, ground.recipe.precision)
            distil(
                HEAD_STAGE,
                None,
                model,
                ground.opened.family,
                text,
                settings,
                folder=folder / TRAINING,
                report=shown.step,
            )
    with quiet():
        model.to("cpu").save_pretrained(folder)


def _corpus(given: Comparison, ground: Ground, *, seed: int, masks: bool) -> CorpusText:
    pieces = chunks(ground.corpus, ground.tokenizer, min(given.tokens, ground.max_length))
    masking = masking_of(ground.tokenizer, ground.opened.config.vocab_size) if masks else None
    return CorpusText(pieces, ground.train.pad_id, given.batch, seed, masking)


def _run(given: Comparison, rows: Sequence[Row]) -> None:
    """Every row in a process of its own, so that one's memory is not another's; `given.jobs` at a time."""
    if not rows:
        return
    context = multiprocessing.get_context("spawn")
    with (
        bar("trainings") as shown,
        ProcessPoolExecutor(given.jobs, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        shown(0, len(rows))
        futures = {pool.submit(make_row, given, row): row for row in rows}
        failed: list[str] = []
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                except (FloatingPointError, BadInput) as error:
                    failed.append(f"{futures[future]}: {error}")
                say(f"  {done}/{len(rows)}  {futures[future]}")
                shown(done, len(rows), str(futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        raise BadInput(
            f"{len(failed)} of {len(rows)} trainings could not be finished; the others are kept. Leave these methods out, or give "
            "another budget or --batch:\n" + "\n".join(failed)
        )


def make_row(given: Comparison, row: Row) -> None:
    """One training from start to score, in the folder of its row; called in a process of its own."""
    console.quiet = True
    ground = prepare(_recipe(given, row.student))
    same_bits(ground.recipe.threads)
    work = Work(Path(given.out) / "work")
    work.stage(_name(row), _row_mark(given, ground, row), partial(_train_row, given=given, ground=ground, row=row))


def _train_row(folder: Path, given: Comparison, ground: Ground, row: Row) -> None:
    started = time.monotonic()
    root = Path(given.out) / "work"
    inner = Work(folder / STAGES)
    if row.method in BASELINES:
        stages: tuple[Stage, ...] = (LABELS,)
        general = True
    else:
        stages = stages_of(row.method, _sizes(ground))
        general = stages[0].text == "corpus"
        if all(stage.text == "corpus" for stage in stages):
            stages = (*stages, LABELS)
    budgets = _budgets(stages, given)
    before = inner.stage(
        "start", "start", partial(_make_start, ground=ground, root=root, row=row, general=general, masks=_masks(stages))
    )
    curves: dict[str, Any] = {}
    for number, (stage, tokens) in enumerate(zip(stages, budgets, strict=True), 1):
        make = partial(
            _make_stage, given=given, ground=ground, root=root, row=row, stage=stage, tokens=tokens, before=before,
            masks=_masks(stages),
        )  # fmt: skip
        before = inner.stage(f"{number}-{stage.name}", "stage", make)
        curves[f"{number} {stage.name}"] = json.loads((before / "curve.json").read_text(encoding="utf-8"))
    task = check_task(given.task)
    model = load(open_model(str(before)), task)
    gold = [gold_of(example, task) for example in ground.splits.test]
    said = counts(gold, predictions(ground.test, row_logits(model, ground.test)))
    np.save(folder / "counts.npy", said, allow_pickle=False)
    seconds = sum(inner.seconds.values()) or time.monotonic() - started
    told = {
        "seconds": round(seconds, 1),
        "peak_memory_bytes": _peak_bytes(),
        "tokens": round(sum(budgets)),
        "curves": curves,
    }
    (folder / "row.json").write_bytes(canonical_json(told))
    shutil.rmtree(folder / STAGES)


def _peak_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if status.is_file():
        # What `getrusage` says on Linux begins with the peak of the process that started this one.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _budgets(stages: Sequence[Stage], given: Comparison) -> list[float]:
    """Tokens of each stage; they add up to the same for every method."""
    whole = given.distil_tokens + given.task_tokens
    if stages[0].text == "corpus" and stages[-1] is LABELS:
        return [*(stage.share * given.distil_tokens for stage in stages[:-1]), float(given.task_tokens)]
    return [stage.share * whole for stage in stages]


def _make_start(folder: Path, ground: Ground, root: Path, row: Row, *, general: bool, masks: bool) -> None:
    """The student before training, of the class that its first stage needs."""
    save_tokenizer(ground.opened, folder)
    task = check_task(ground.recipe.task)
    if not general:
        teacher = load(open_model(str(root / "teacher")), task)
    else:
        # A student that learns from masked words without asking its teacher gets no head that was fitted to the corpus.
        asks = row.method not in BASELINES and _asks_head(stages_of(row.method, _sizes(ground)))
        source = root / "teacher-head" if asks else ground.opened.folder
        teacher = load_encoder(source, seed=row.seed, vocabulary=masks)
    student, _ = student_of(
        teacher, ground.opened.family, ground.shape, seed=row.seed, new_layers=row.method == "random"
    )
    _save(student, folder)


def _make_stage(
    folder: Path,
    given: Comparison,
    ground: Ground,
    root: Path,
    row: Row,
    stage: Stage,
    tokens: float,
    before: Path,
    *,
    masks: bool,
) -> None:
    save_tokenizer(ground.opened, folder)
    family = ground.opened.family
    settings = Settings(1, row.seed, ground.recipe.precision)
    if stage.text == "corpus":
        corpus = _corpus(given, ground, seed=row.seed, masks=stage.objective.masks_tokens)
        steps = max(1, round(tokens / corpus.tokens_per_step))
        student = load_encoder(before, seed=row.seed, vocabulary=masks)
        asks = stage.objective.masks_tokens and stage.objective.asks_teacher
        teacher = load_encoder(root / "teacher-head" if asks else ground.opened.folder, seed=row.seed, vocabulary=asks)
        order = corpus.order
        maps = _maps(stage, teacher, student, before, row.seed)
        progress = distil(
            stage,
            teacher,
            student,
            family,
            corpus,
            dataclasses.replace(settings, steps=steps),
            folder=folder / TRAINING,
            projections=maps,
        )
    else:
        text = TaskText(ground.train, given.batch, row.seed, ground.validation.ids)
        steps = max(1, round(tokens / text.tokens_per_step))
        task = check_task(given.task)
        opened = open_model(str(before))
        torch.manual_seed(row.seed)
        student = load(opened, task, None if opened.head_for(task) else ground.labels)
        finished = open_model(str(root / "teacher"))
        teacher = load(finished, task)
        if finished.head_for(task) != ground.labels:
            raise ValueError(
                f"the teacher's labels {finished.head_for(task)} are not those of the data, {ground.labels}"
            )
        if masks and not opened.head_for(task):
            _give_pooler(student, ground)

        def watch(remap: np.ndarray | None) -> Any:
            return look(student, ground.validation, ground.splits.validation, max(1, steps // LOOKS), remap)

        order = text.order
        maps = _maps(stage, teacher, student, before, row.seed)
        answers = any(term.of == "classes" for term in stage.objective.outputs)
        progress = distil(
            stage,
            teacher,
            student,
            family,
            text,
            dataclasses.replace(settings, steps=steps),
            folder=folder / TRAINING,
            projections=maps,
            watch=watch if answers else None,
        )
    _save(student, folder)
    if maps.state_dict():
        write_safetensors(folder / MAPS, maps.state_dict())
    told = {
        "loss": progress.loss,
        "validation": progress.validation,
        "tokens": sum(order.tokens_at(step) for step in range(progress.step)),
        "doubts": doubts(progress.loss, f"{row}, {stage.name}"),
    }
    (folder / "curve.json").write_bytes(canonical_json(told))


def _maps(stage: Stage, teacher: Any, student: Any, before: Path, seed: int) -> Projections:
    """The learned maps of the objective: those of the stage before, where it had the same ones (TinyBERT's two steps)."""
    torch.manual_seed(seed)
    maps = Projections(stage.objective, teacher.config, student.config)
    if (before / MAPS).is_file():
        learned = load_file(before / MAPS)
        ours = maps.state_dict()
        if {n: v.shape for n, v in learned.items()} == {n: v.shape for n, v in ours.items()}:
            maps.load_state_dict(learned)
    return maps


def _give_pooler(student: Any, ground: Ground) -> None:
    """The general teacher's pooler to a student of its width that was trained with a head for words, which has none."""
    ours = getattr(encoder_of(student), "pooler", None)
    theirs = getattr(load_encoder(ground.opened.folder, seed=0), "pooler", None)
    if ours is not None and theirs is not None and student.config.hidden_size == ground.opened.config.hidden_size:
        ours.load_state_dict(theirs.state_dict())


def _save(model: Any, folder: Path) -> None:
    model.config.architectures = [type(model).__name__]
    with quiet():
        model.to("cpu").save_pretrained(folder)


def _document(
    given: Comparison, grounds: dict[str, Ground], work: Work, rows: Sequence[Row], teacher: dict[str, Any]
) -> dict[str, Any]:
    """The table: for each method and student the mean over seeds, its spread and interval, and what it cost."""
    task = check_task(given.task)
    found: list[dict[str, Any]] = []
    scored = {row: np.load(work.root / _name(row) / "counts.npy", allow_pickle=False) for row in rows}
    told = {row: json.loads((work.root / _name(row) / "row.json").read_text(encoding="utf-8")) for row in rows}
    for student in given.students:
        none = [scored[row] for row in rows if row.student == student and row.method == "none"]
        for method in (*BASELINES, *given.methods):
            mine = [row for row in rows if row.student == student and row.method == method]
            counted = [scored[row] for row in mine]
            values = [float(mean_score([one]).value) for one in counted]
            mean, apart = mean_score(counted), mean_score(counted, less=none)
            found.append(
                {
                    "method": method,
                    "student": student,
                    "mean": mean.value,
                    "low": mean.low,
                    "high": mean.high,
                    "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                    "values": values,
                    "less_none": dataclasses.asdict(apart) if method != "none" else None,
                    "seconds": statistics.mean(told[row]["seconds"] for row in mine),
                    "peak_memory_bytes": max(told[row]["peak_memory_bytes"] for row in mine),
                    "tokens": told[mine[0]]["tokens"],
                    "curves": told[mine[0]]["curves"],
                    "doubts": [d for row in mine for curve in told[row]["curves"].values() for d in curve["doubts"]],
                }
            )
    ground = next(iter(grounds.values()))
    model = training.load_stage(work.root / "teacher", ground)
    gold = [gold_of(example, task) for example in ground.splits.test]
    reached = score(gold, predictions(ground.test, row_logits(model, ground.test)))
    settings = {name: value for name, value in dataclasses.asdict(given).items() if name not in ("out", "jobs")}
    return {
        "metric": METRICS[task],
        "teacher": dataclasses.asdict(reached) | {"steps": teacher["best_step"]},
        "rows": sorted(found, key=lambda one: -one["mean"]),
        "settings": settings | {"teacher": ground.opened.public_name, "precision": ground.recipe.precision},
        "versions": trained_with(),
    }
