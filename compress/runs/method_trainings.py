"""The stages of a method: of each student its start and its trainings, each of which takes it on by one stage, from a teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from compress import distributed
from compress.data.batches import TaskText
from compress.data.corpus import CorpusFile, CorpusText, Piece, masking_of
from compress.data.encoded import Encoded, pad_id_of
from compress.data.examples import Example
from compress.data.sampler import rows_a_step
from compress.data.task import Task
from compress.evaluation.predictions import shared_row_logits
from compress.methods.catalogue import HEAD_STAGE, Stage, with_class_weights
from compress.methods.objectives import DIRECT, Projections
from compress.models import task_heads
from compress.models.activations import LIVES, Part, active_layers, nearest_living, relative_changes, sources_of
from compress.models.families import encoder_of
from compress.models.initialise import RANDOM, is_checkpoint, student_from, student_of
from compress.models.pretrained import Opened, has_vocabulary_head, load, load_encoder, open_model
from compress.models.sentence_pooling import SentencePooling, max_tokens_in, write_pooling
from compress.progress import Notify, advancing, message, silent
from compress.runs.hardware import stage_settings
from compress.runs.lineage import loss_warnings, save_with_lineage
from compress.runs.method_chain import Link, asks_words, layers_named
from compress.runs.resumable_stages import TRAINING, Workdir
from compress.runs.stages import RunStage, folder_fingerprint, run_stages, trained_with
from compress.runs.task_inputs import TaskInputs
from compress.training.checkpoint import write_safetensors
from compress.training.loop import StageSettings, device_of_process
from compress.training.stage import train_stage, validating, validation_interval
from compress.training.teacher_cache import CachedTeacherText, TeacherCache, teacher_cache
from serve.errors import BadInput

RELATIONS = ("kl", "relation", "products", *DIRECT)  # losses of MiniLM, MiniLMv2 and DirectMiniLM
MAPS = "maps.safetensors"  # the learned maps of an objective
WITHOUT_POOLER = ("ForMaskedLM", "ForTokenClassification")
SAMPLE = 8  # pieces of text on which a teacher's layers are measured
HEAD_SHARE = 0.2  # share of the corpus's tokens for fitting a masked-language-model head


@dataclass(frozen=True)
class Labelled:
    """The text of a task, and the folder of the teacher that was fine-tuned on it."""

    task: Task
    train: Encoded
    validation: Encoded
    gold: Sequence[Example]
    teacher: Path
    class_weights: bool = False  # whether classes count alike in the loss on labels
    unlabelled: Encoded | None = None  # for stages that learn from the teacher alone


@dataclass(frozen=True)
class MethodInputs:
    """The inputs of a method's stages: the given teacher, the text, and how to train."""

    opened: Opened
    tokenizer: Tokenizer
    pieces: Sequence[Piece]  # of plain text
    labelled: dict[str, Labelled]  # by `Stage.text`, for stages that read a task
    batch: int
    # Of all trainings: the steps follow from the tokens of each. A rate replaces each stage's own, a schedule its warm-up and decay too.
    settings: StageSettings
    tokens: float = 0.0  # of plain text that the method reads
    # The student's first weights: `random`, teacher layers by a name in `STARTS`, or a checkpoint.
    start: str = "spread"
    layer_map: str = ""  # for the start `layer-map`
    whole_words: bool = False  # whether whole words are masked, not single tokens
    lineage: dict[str, Any] = field(default_factory=dict)  # added to every checkpoint's lineage
    teacher_cache: Path | None = None  # folder of the teacher's activations on `pieces`
    row_tokens: int = 0  # of the rows that stages with `pack` pack pieces into; 0 packs none
    batch_is_given: bool = False  # whether packed stages keep `batch`, however few steps they take
    notify: Notify = silent


def method_inputs(inputs: TaskInputs, teacher: Path, tokens: float) -> MethodInputs:
    """What the stages of the method read: `tokens` of the plain text, and the task with its fine-tuned `teacher`."""
    given = inputs.settings
    labelled = Labelled(
        inputs.task,
        inputs.train,
        inputs.validation,
        inputs.splits.validation,
        teacher,
        given.class_weights,
        inputs.in_domain,
    )
    return MethodInputs(
        inputs.opened,
        inputs.tokenizer,
        inputs.pieces,
        {"task": labelled},
        given.batch,
        stage_settings(given),
        tokens,
        start=given.start,
        lineage={"data": inputs.splits.fingerprint, "method": inputs.chain.method},
        row_tokens=inputs.row_tokens,
        notify=inputs.notify,
    )


def fit_head(folder: Path, given: MethodInputs) -> None:
    """Save the teacher with a masked-language-model head: its own, or one fitted on `HEAD_SHARE` of the method's tokens."""
    model = load_encoder(given.opened, seed=given.settings.seed, vocabulary=True)
    details: dict[str, Any] = {}
    if not has_vocabulary_head(given.opened):
        message(
            given.notify,
            "The teacher has no masked-language-model head. One is fitted to the corpus; the teacher's encoder does not change.",
        )
        tokens = HEAD_SHARE * given.tokens
        text = _corpus(given, HEAD_STAGE, tokens)
        with advancing(given.notify, HEAD_STAGE.name) as shown:
            progress = train_stage(
                HEAD_STAGE,
                None,
                model,
                text,
                replace(
                    given.settings, steps=_steps(text, tokens), schedule=None, learning_rate=0.0, teacher_shard=False
                ),
                folder=folder / TRAINING,
                report=shown.step,
            )
        details = {"loss": progress.loss}
    save(model, folder, given, {"role": "teacher with a head for masked words", **details})


def train(folder: Path, given: MethodInputs, link: Link, number: int, before: Path, teacher: Path | Opened) -> None:
    """Train the student of `before` on stage `number` of its link and save it."""
    stage, tokens = link.stages[number - 1], link.tokens[number - 1]
    asks = bool(stage.objective.layers) or stage.objective.asks_teacher
    details: dict[str, Any] = {}
    text: CorpusText | TaskText | CachedTeacherText
    labelled = validation = None
    if stage.text == "corpus":
        text = _corpus(given, stage, tokens)
        details = {"batch": text.batch}
        student = load_encoder(before, seed=given.settings.seed, vocabulary=link.masks)
        theirs = (
            load_encoder(teacher, seed=given.settings.seed, vocabulary=stage.objective.masks_tokens) if asks else None
        )
        if theirs is not None and teacher is given.opened and learns_relations(stage):
            stage, learned = _on_living_layers(stage, theirs, given)
            details |= learned
        settings = _settings(given, _steps(text, tokens))
        if given.teacher_cache and stage.objective.can_be_kept:
            text = CachedTeacherText(text, _cached(given, link, theirs))
            details |= {"teacher_cache": text.cache.about["sha256"]}
    else:
        task = given.labelled[stage.text]
        labelled = texts = task.train
        if task.class_weights:
            stage = with_class_weights(stage, np.concatenate(labelled.targets))
        if task.unlabelled and not any(term.loss == "labels" for term in stage.objective.outputs):
            texts += task.unlabelled
        text = TaskText(texts, stage.batch or given.batch, given.settings.seed, task.validation.ids)
        came_from = link.starts_from if number == 1 else link.stages[number - 2].text
        student = with_head(before, task, given, keeps=came_from == stage.text)
        theirs = load(open_model(str(task.teacher)), task.task) if asks else None
        if theirs is not None and not stage.objective.layers:
            # The texts do not change, so the teacher is asked about each of them once.
            theirs.to(device_of_process(given.settings.device))
            text = replace(text, soft=distributed.broadcast(shared_row_logits(theirs, texts)))
            theirs = None
        # Unlabelled texts add variety, not steps.
        settings = replace(_settings(given, _steps(replace(text, texts=labelled), tokens)), teacher_shard=False)
        if any(term.of == "classes" for term in stage.objective.outputs):
            every = validation_interval(settings.steps, -(-len(labelled) // given.batch))
            validation = validating(student, task.validation, task.gold, every)
    maps = _maps(stage, theirs, student, before, given.settings.seed)
    with advancing(given.notify, stage.name) as shown:
        progress = train_stage(
            stage, theirs, student, text, settings, folder=folder / TRAINING, labelled=labelled, projections=maps,
            validation=validation, report=shown.step,
        )  # fmt: skip
    if maps.state_dict():
        write_safetensors(folder / MAPS, maps.state_dict())
    warnings = loss_warnings(progress.loss, stage.name, given.notify)
    details |= {
        "role": "student",
        "student": str(link.shape),
        "stage": stage.name,
        "loss": progress.loss,
        "validation": progress.validation,
        "tokens_read": sum(text.sampler.tokens_at(step) for step in range(progress.step)),
        "doubts": warnings,
    }
    save(student, folder, given, details)
    if stage.objective.pooling:
        # The loss compares directions, so the student's vectors have no length of their own.
        readers = [given.opened, *([open_model(given.start)] if is_checkpoint(given.start) else [])]
        longest = max_tokens_in(given.opened.folder, min(reader.max_length for reader in readers))
        pooling = SentencePooling(stage.objective.pooling, normalised=True)
        write_pooling(folder, pooling, student.config.hidden_size, longest)


def with_head(before: Path, labelled: Labelled, given: MethodInputs, *, keeps: bool) -> Any:
    """The student of `before` with a head for the task: its own if it is of this task (`keeps`), otherwise a new one."""
    opened = open_model(str(before))
    own = opened.head_for(labelled.task)
    torch.manual_seed(given.settings.seed)
    wanted, several = labelled.train.labels, labelled.train.multi_label
    kept = keeps and own == wanted and opened.multi_label == several
    student = load(opened, labelled.task, None if kept else wanted)
    if not kept:
        task_heads.start_head(student, labelled.train)
    if str((opened.config.architectures or [""])[0]).endswith(WITHOUT_POOLER):
        # The given teacher's pooler, where the widths agree.
        ours = getattr(encoder_of(student), "pooler", None)
        theirs = getattr(load_encoder(given.opened.folder, seed=0), "pooler", None)
        if ours is not None and theirs is not None and student.config.hidden_size == given.opened.config.hidden_size:
            ours.load_state_dict(theirs.state_dict())
    return student


def _on_living_layers(stage: Stage, teacher: Any, given: MethodInputs) -> tuple[Stage, dict[str, Any]]:
    """`stage` without dead layers of the given teacher, see `on_living_layers`, and what was measured and taken, for the lineage.

    Raises BadInput: a layer is dead that the teacher cache was checked for.
    """
    sample = CorpusText(given.pieces[:SAMPLE], pad_id_of(given.tokenizer), SAMPLE, given.settings.seed).at(0)
    # The main process's count: on another processor they may differ in the last bits.
    changes = distributed.broadcast(relative_changes(teacher, sample.inputs))
    living, said = on_living_layers(stage, changes)
    if living != stage and given.teacher_cache:
        raise BadInput(f"{said[0]} --teacher-cache keeps only the layer that the settings name. Leave it out.")
    for line in said:
        message(given.notify, line)
    learned = sorted({term.teacher_layer for term in living.objective.layers})
    return living, {"teacher_layers": learned, "teacher_layer_changes": [round(change, 4) for change in changes]}


def learns_relations(stage: Stage) -> bool:
    """Whether `stage` learns attention or relations, which are made inside a layer, and not hidden states alone."""
    return any(term.loss in RELATIONS for term in stage.objective.layers)


def on_living_layers(stage: Stage, changes: Sequence[float]) -> tuple[Stage, tuple[str, ...]]:
    """`stage` with living teacher layers in place of dead ones, and a message for each layer that is dead.

    A dead layer gives way to the nearest that lives. It stays, with a warning, if the user named it or if no layer lives.

    Args:
        stage: one that `learns_relations`.
        changes: the teacher's `relative_changes`.
    """
    terms = stage.objective.layers
    dead = sorted({term.teacher_layer for term in terms} - {0, *active_layers(changes)})
    said = []
    for layer in dead:
        other = nearest_living(layer, changes)
        why = f"layer {layer} of the teacher changes its input by {changes[layer - 1]:.1%}, less than {LIVES:.0%}"
        if other == layer:
            said.append(f"warning: {why}, and no other layer does more. Relations are learned from layer {layer}.")
        elif stage.layer_is_given:
            said.append(
                f"warning: {why}. --teacher-layer names it, so it is kept; the nearest that does more is {other}."
            )
        else:
            said.append(f"Relations are learned from layer {other}, not {layer}: {why}.")
    if not dead or stage.layer_is_given:
        return stage, tuple(said)
    moved = tuple(
        replace(term, teacher_layer=nearest_living(term.teacher_layer, changes)) if term.teacher_layer in dead else term
        for term in terms
    )
    return replace(stage, objective=replace(stage.objective, layers=moved)), tuple(said)


def _corpus(given: MethodInputs, stage: Stage, tokens: float) -> CorpusText:
    """The plain text of `stage`, which reads about `tokens` tokens of it."""
    masking = None
    if stage.objective.masks_tokens:
        size = given.opened.config.vocab_size
        masking = masking_of(given.tokenizer, size, whole_words=given.whole_words)
    row_tokens = given.row_tokens if stage.pack else 0
    batch = stage.batch or given.batch
    if row_tokens and not stage.batch and not given.batch_is_given:
        batch = rows_a_step(batch, tokens, row_tokens)
    return CorpusText(given.pieces, pad_id_of(given.tokenizer), batch, given.settings.seed, masking, row_tokens)


def kept_parts(stages: Sequence[Stage]) -> list[Part]:
    """The teacher's vectors that `stages` read and that a cache can hold."""
    wanted = {part for stage in stages if stage.objective.can_be_kept for part in stage.objective.teacher_parts()}
    return sorted(sources_of(wanted))


def _cached(given: MethodInputs, link: Link, teacher: Any) -> TeacherCache:
    """The cache of the `teacher`'s activations for all stages of `link` that can read one."""
    assert given.teacher_cache is not None
    assert isinstance(given.pieces, CorpusFile)
    opened, folder = given.opened, given.teacher_cache
    new = not folder.exists() or not any(folder.iterdir())
    identity = cached_of(opened, given.settings.device) | {"text or --tokens": given.pieces.fingerprint}
    with advancing(given.notify, "teacher cache") as shown:
        cache = teacher_cache(
            folder, lambda: teacher, given.pieces, kept_parts(link.stages),
            pad_id=pad_id_of(given.tokenizer), precision=given.settings.precision, identity=identity,
            device=given.settings.device, report=shown,
        )  # fmt: skip
    about = cache.about
    size = f"{about['tokens']:,} tokens, {about['bytes_per_token']:,} bytes each, rounding error {about['relative_error']:.1%}"
    message(given.notify, f"  teacher cache {'written' if new else 'found'}: {size}")
    return cache


def cached_of(opened: Opened, device: str) -> dict[str, str]:
    """What a cache's numbers depend on besides the text: the teacher, the library versions and the device."""
    return {"teacher": folder_fingerprint(opened.folder), "environment": ", ".join(trained_with(device))}


def _steps(text: CorpusText | TaskText, tokens: float) -> int:
    """The steps that read about `tokens` tokens of `text`."""
    return max(1, round(tokens / text.tokens_per_step))


def _settings(given: MethodInputs, steps: int) -> StageSettings:
    """The settings of a stage of so many steps."""
    settings = replace(given.settings, steps=steps)
    if (schedule := settings.schedule) is None:
        return settings
    rate = settings.learning_rate or schedule.learning_rate
    return replace(settings, schedule=replace(schedule, steps=steps, learning_rate=rate))


def _maps(stage: Stage, teacher: Any, student: Any, before: Path, seed: int) -> Projections:
    """The learned maps of the objective: those of the stage before if it had the same (TinyBERT's two steps), else new ones."""
    torch.manual_seed(seed)
    maps = Projections(stage.objective, (student if teacher is None else teacher).config, student.config)
    if (before / MAPS).is_file():
        learned = load_file(before / MAPS)
        ours = maps.state_dict()
        if {n: v.shape for n, v in learned.items()} == {n: v.shape for n, v in ours.items()}:
            maps.load_state_dict(learned)
    return maps


def save(model: Any, folder: Path, given: MethodInputs, details: dict[str, Any]) -> None:
    """Save a checkpoint with its lineage."""
    save_with_lineage(model, given.opened, folder, {"seed": given.settings.seed} | given.lineage | details)


START, HEAD = "start", "teacher-head"  # what the folders of stages that do not train a student end with


def run_method(
    workdir: Workdir, run_fingerprint: str, links: Sequence[Link], given: MethodInputs, words: Path | None = None
) -> list[Path]:
    """The folders of the `method_stages` that train, in order; the last holds the student. `run_fingerprint` covers all inputs."""
    folders: dict[str, Path] = {}
    run_stages(workdir, method_stages(links, lambda: (links, given), (run_fingerprint,), folders, words=words), folders)
    return [folder for name, folder in folders.items() if not name.endswith((START, HEAD))]


def method_stages(
    links: Sequence[Link],
    ready: Callable[[], tuple[Sequence[Link], MethodInputs]],
    made_of: tuple[object, ...],
    folders: Mapping[str, Path],
    prefix: str = "",
    *,
    words: Path | None = None,
) -> list[RunStage]:
    """The stages of a method: of each student its start and its trainings; the last makes the student.

    The first assistant learns from the teacher; each next student learns from the assistant before it. If the teacher is asked for masked
    words, and no `words` give it a head for them, a stage fits one.

    Args:
        links: the students and their trainings; the tokens of each training may be others when its turn comes.
        ready: called then; gives the links with the tokens to read, and the inputs.
        made_of: covers all inputs.
        folders: gets the finished stages.
        prefix: what the names of the folders begin with.
        words: the teacher with such a head, if it was fitted before.
    """
    taught_by = {HEAD: words} if words else {}
    found: list[RunStage] = []

    def add(name: str, of: tuple[object, ...], make: Callable[[Path], None]) -> str:
        found.append(RunStage(name, (*made_of, *of), make))
        return name

    def teacher(name: str, given: MethodInputs) -> Path | Opened:
        """What the stage `name` left; the given teacher if it is empty."""
        return (taught_by.get(name) or folders[name]) if name else given.opened

    def begin(folder: Path, number: int, source: str) -> None:
        after, given = ready()
        _begin(folder, given, after[number], teacher(source, given), last=number == len(links) - 1)

    def learn(folder: Path, number: int, step: int, before: str, source: str) -> None:
        after, given = ready()
        train(folder, given, after[number], step, folders[before], teacher(source, given))

    source = head = ""  # the stages whose models teach: by activations, and by masked words
    if words:
        head = HEAD
    elif any(asks_words(link.stages) for link in links):
        head = add(f"{prefix}{HEAD}", ("head",), lambda folder: fit_head(folder, ready()[1]))
    for number, link in enumerate(links):
        name = prefix + ("" if number == len(links) - 1 else f"assistant-{number + 1}-")
        begins = head if asks_words(link.stages) else source
        before = add(f"{name}{START}", (name, "start"), partial(begin, number=number, source=begins))
        for step, stage in enumerate(link.stages, 1):
            asked = head if stage.objective.masks_tokens and stage.objective.asks_teacher else source
            make = partial(learn, number=number, step=step, before=before, source=asked)
            before = add(f"{name}{step}-{stage.name}", (name, "stage", step), make)
        source = head = before
    return found


def _begin(folder: Path, given: MethodInputs, link: Link, source: Path | Opened, *, last: bool) -> None:
    """Save the student before training, of the class that its first stage needs, from parts of the model in `source`."""
    if last and is_checkpoint(given.start):
        student, origin = student_from(given.start, given.opened, seed=given.settings.seed, vocabulary=link.masks)
    else:
        if link.starts_from == "corpus":
            model = load_encoder(source, seed=given.settings.seed, vocabulary=link.masks)
        else:
            labelled = given.labelled[link.starts_from]
            model = load(open_model(str(labelled.teacher)), labelled.task)
        student, origin = student_of(
            model, link.shape, seed=given.settings.seed,
            chosen=layers_named(given.start, model.config, link.shape, given.layer_map), new_layers=given.start == RANDOM,
        )  # fmt: skip
        if link.starts_from != "corpus" and origin["head"] == "new":
            task_heads.start_head(student, given.labelled[link.starts_from].train)
    save(student, folder, given, {"role": "start", "student": str(link.shape), "origin": origin})
