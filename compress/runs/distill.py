"""Distils a task-agnostic student from a teacher on plain text."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compress import distributed
from compress.data.columns import columns_of
from compress.data.corpus import CorpusText, tokenised
from compress.data.encoded import describe_unknown
from compress.data.texts import TextFiles, stream_texts
from compress.input_errors import Faults
from compress.methods.catalogue import Stage
from compress.methods.presets import preset_of
from compress.models.families import is_multilingual, row_tokens_for
from compress.models.initialise import is_checkpoint
from compress.models.pretrained import Opened, has_vocabulary_head, open_model, open_tokenizer
from compress.models.sentence_pooling import MODULES
from compress.models.shapes import BY_RULE, LAYER_MAPS, shape_of
from compress.progress import Notify, message, silent
from compress.runs.hardware import on_this_machine, same_bits, stage_settings
from compress.runs.lineage import read_lineage
from compress.runs.method_chain import (
    USED_BY,
    Chain,
    Link,
    asks_words,
    check_used,
    check_whole_batches,
    method_chain,
    student_shape,
    teacher_pooling,
)
from compress.runs.method_trainings import MethodInputs, cached_of, kept_parts, run_method
from compress.runs.resumable_stages import CORPUS, Workdir, free_target
from compress.runs.stages import check_same_inputs, fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.settings import Distillation
from compress.training.metrics import check_trackers
from compress.training.teacher_cache import check_cache, identity_of
from serve.errors import BadInput
from serve.files import output, path_beside
from serve.options import make
from serve.wording import one_of

BATCH, TOKENS = 32, 128  # defaults if neither a setting nor a schedule gives a value


@dataclass(frozen=True)
class _Inputs:
    """The opened and checked inputs."""

    settings: Distillation  # for this machine
    opened: Opened
    start: Opened | None  # the checkpoint that the student starts from
    tokenizer: Tokenizer
    chain: Chain
    texts: TextFiles
    texts_fingerprint: str
    warnings: list[str]  # to report before training


def distill(
    teacher: str,
    corpus: Iterable[Path | str] | Path | str,
    out: Path | str,
    *,
    progress: Notify = silent,
    **settings: Any,
) -> Path:
    """Distil a task-agnostic student on plain text, and write it as a checkpoint that `AutoModel` opens.

    Settings are the fields of `Distillation`: student, method, epochs, and so on. After a kill, the same call resumes from the
    last checkpoint. `progress` is called with each `Event`. Returns `out`. Raises BadInput: an unknown method, teacher, student
    or file; relation heads that do not divide both widths.
    """
    places = {"teacher": teacher, "corpus": corpus, "out": out}
    return distill_student(make(Distillation, places | settings), progress)


def distill_student(settings: Distillation, notify: Notify = silent) -> Path:
    """See `distill`."""
    notify = notify if distributed.main() else silent  # only the main process reports
    target = free_target(Path(settings.out))
    inputs = _checked(settings, target)
    for line in inputs.warnings:
        message(notify, line)
    s = inputs.settings
    same_bits(s.threads)
    common = [folder_fingerprint(inputs.opened.folder), inputs.texts_fingerprint, trained_with(s.device)]
    start = folder_fingerprint(inputs.start.folder) if inputs.start else ""
    check_same_inputs(s, {"--teacher": common[0], "--corpus": common[1], "--start": start or s.start})
    distributed.join(s.device)
    chosen = {name: value for name, value in asdict(s).items() if name not in ("teacher", "corpus", "out")}
    # Trackers, the cache's path and where the teacher's weights are do not change the training; the fingerprints of teacher and texts
    # cover the other two.
    decide = {
        "trackers": (),
        "teacher_cache": bool(s.teacher_cache),
        "revision": "",
        "text_column": "",
        "teacher_shard": False,
    }
    run_fingerprint = fingerprint("distill", *common, start, chosen | decide)
    # Without local paths.
    lineage = chosen | {"teacher_cache": bool(s.teacher_cache)}
    lineage |= {"start": inputs.start.public_name} if inputs.start else {}
    workdir = Workdir(path_beside(target, ".distill-work"), notify)
    with workdir.locked(run_fingerprint):
        workdir.publish(_run(workdir, run_fingerprint, inputs, lineage, notify), target)
    return target


def distill_result(checkpoint: Path) -> dict[str, Any]:
    """The result of `distill`: `{checkpoint, student, method, teacher, epochs, steps, loss}`; `loss` is that of the last step."""
    lineage = read_lineage(checkpoint)
    steps, loss = lineage["loss"][-1]
    found = {name: lineage[name] for name in ("student", "method", "teacher", "epochs")}
    return {"checkpoint": str(checkpoint), **found, "steps": steps, "loss": loss}


def _checked(settings: Distillation, target: Path) -> _Inputs:
    faults = Faults()
    s = faults.check(partial(on_this_machine, settings)) or settings
    used = {name: getattr(s, name) for name in USED_BY}
    faults.check(lambda: check_trackers(s.trackers))
    faults.check(lambda: check_used(s.method, used, s.start))
    opened = faults.check(lambda: open_model(s.teacher, revision=s.revision))
    tokenizer = opened and faults.check(partial(open_tokenizer, opened))
    if s.student:
        faults.check(lambda: shape_of(s.student))
    start = faults.check(lambda: open_model(s.start, role="--start")) if is_checkpoint(s.start) else None
    texts = TextFiles(tuple(Path(path) for path in s.corpus), columns_of(s))
    for path in texts.paths:
        faults.check(partial(stream_texts, path, texts.columns))
    faults.raise_if_any()
    assert opened
    assert tokenizer
    shape = student_shape(s.student, s.start, opened)
    if s.schedule:
        preset_of(s.schedule, "distillation")
    if s.start == "layer-map" and not s.layer_map:
        raise BadInput(f"--start layer-map needs --layer-map. Give {one_of(LAYER_MAPS)}.")
    chain = method_chain(
        "@".join((s.method, *s.assistants)), shape, opened.config, start=s.start, pack=s.pack,
        pooling=teacher_pooling(s.method, opened), **used,
    )  # fmt: skip
    check_whole_batches(chain, s.batch or BATCH, s.accumulate)
    warnings = []
    if tuple(s.assistants) == (BY_RULE,):
        none = "none; the student has more than half of the teacher's layers or width"
        warnings.append(f"Assistants by MiniLM's rule: {', '.join(map(str, chain.shapes[:-1])) or none}.")
    if is_multilingual(opened.config) and s.method in ("minilmv2", "hidden-states"):
        warnings.append(
            "The teacher has many languages by its family or vocabulary: which layers are learned, where no flag says so, is what served "
            "multilingual students best."
        )
    last = chain.stages[-1]
    if last[-1].objective.pooling and not (opened.folder / MODULES).is_file():
        warnings.append("The teacher's folder has no modules.json: its vectors are the means of a text's tokens.")
    if s.schedule and len(last) > 1:
        raise BadInput(
            f"--schedule sets one stage, and --method {s.method} has {len(last)} stages with their own learning rates. Leave "
            "--schedule out and give --epochs and --batch (the paper's output distribution is --epochs 10 --batch 32 --tokens 256)."
        )
    if s.whole_words and not any(stage.objective.masks_tokens for several in chain.stages for stage in several):
        raise BadInput(f"--whole-words has no effect on --method {s.method}, which masks no text. Leave it out.")
    if s.teacher_shard:
        _check_shard(s, opened, chain.stages)
    if s.teacher_cache:
        _check_cache(s, opened, chain.stages[0], target)
    return _Inputs(s, opened, start, tokenizer, chain, texts, texts_fingerprint(texts), [*warnings, *chain.warnings])


def _check_cache(settings: Distillation, opened: Opened, stages: Sequence[Stage], out: Path) -> None:
    """Check that the method can read a teacher cache, and that the folder is free or holds one for it."""
    parts = kept_parts(stages)
    if not parts:
        raise BadInput(
            f"--teacher-cache keeps activations on unmasked text, and --method {settings.method} reads the teacher on masked text or not "
            "at all. Leave it out."
        )
    if settings.assistants:
        raise BadInput(
            "--teacher-cache keeps the activations of one teacher, and an --assistant is a second one. Leave one of the two out."
        )
    folder = output(settings.teacher_cache, "--teacher-cache")
    if folder == out or out in folder.parents:
        raise BadInput(
            f"--teacher-cache {settings.teacher_cache} is the folder of --out or inside it. Give another folder."
        )
    check_cache(folder, identity_of(cached_of(opened, settings.device), parts, settings.precision))


def _check_shard(settings: Distillation, opened: Opened, stages: Sequence[Sequence[Stage]]) -> None:
    """Check that there are processes to cut the teacher over, and that each of them asks it as often as the others."""
    faults = Faults()
    if distributed.count() == 1:
        faults.messages.append(
            "--teacher-shard cuts the teacher over the processes of a training, and this is only one. Start several, one a GPU: "
            "torchrun --nproc-per-node 2 -m stillroom distill ..."
        )
    if not any(stage.objective.layers or stage.objective.asks_teacher for several in stages for stage in several):
        faults.messages.append(
            f"--teacher-shard has no effect on --method {settings.method}, which reads no teacher. Leave it out."
        )
    if settings.teacher_cache:
        faults.messages.append(
            "--teacher-shard needs every process to ask the teacher as often as the others, and they share the batches of "
            "--teacher-cache unevenly. Leave one of the two out."
        )
    if asks_words(stages[0]) and not has_vocabulary_head(opened):
        faults.messages.append(
            f"--method {settings.method} reads the teacher's masked-language-model head, and --teacher has none. Fitting one needs the "
            "whole teacher in each process. Leave --teacher-shard out, or give a teacher with that head."
        )
    faults.raise_if_any()


def _run(workdir: Workdir, run_fingerprint: str, inputs: _Inputs, lineage: dict[str, Any], notify: Notify) -> Path:
    """The folder of the finished student."""
    s, opened, chain = inputs.settings, inputs.opened, inputs.chain
    preset = preset_of(s.schedule, "distillation") if s.schedule else None
    batch = s.batch or (preset.batch if preset else BATCH)
    readers = [opened, *([inputs.start] if inputs.start else [])]
    longest = min(s.tokens or (preset.tokens if preset else TOKENS), *(reader.max_length for reader in readers))
    pieces = tokenised(
        inputs.texts, inputs.tokenizer, longest, workdir.root / CORPUS, fingerprint=inputs.texts_fingerprint
    )
    if not len(pieces):
        raise BadInput("--corpus holds no words. Give files with text.")
    for warning in describe_unknown(pieces.unknown_share, "--corpus"):
        message(notify, f"warning: {warning}")
    row_tokens = row_tokens_for(longest, *(reader.config for reader in readers))
    schedule, epochs = None, s.epochs or 1.0
    if preset:  # of a method with one stage
        text = CorpusText(pieces, 0, batch, s.seed, row_tokens=row_tokens if chain.stages[-1][0].pack else 0)
        schedule = preset.schedule(text.sampler.steps_per_epoch)
        epochs = s.epochs or schedule.steps / text.sampler.steps_per_epoch
    if s.tokens and s.tokens > longest:
        message(
            notify,
            f"warning: --tokens {s.tokens} is more than the {longest} tokens that are read at once: pieces have up to {longest}.",
        )
    tokens = epochs * float(pieces.lengths.sum())
    method_inputs = MethodInputs(
        opened, inputs.tokenizer, pieces, {}, batch,
        stage_settings(s, learning_rate=s.learning_rate, schedule=schedule, teacher_shard=s.teacher_shard),
        tokens, start=s.start, layer_map=s.layer_map, whole_words=s.whole_words,
        lineage=lineage | {"batch": batch, "tokens": longest, "epochs": epochs},
        teacher_cache=Path(os.path.abspath(s.teacher_cache)) if s.teacher_cache else None,
        row_tokens=row_tokens, batch_is_given=bool(s.batch or preset), notify=notify,
    )  # fmt: skip
    links = [
        Link(shape, stages, tuple(stage.share * tokens for stage in stages))
        for shape, stages in zip(chain.shapes, chain.stages, strict=True)
    ]
    return run_method(workdir, run_fingerprint, links, method_inputs)[-1]
