"""Fine-tunes an encoder to generate a text from a text, on targets, or on targets and a larger generator's soft labels of each token.

Dong et al. 2019, "UniLM"; Wang et al. 2020, "MiniLM", section 5.2 and appendix, which also smooth the labels.
"""

import dataclasses
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress import distributed
from compress.data.batches import Batch, part_of, to_device
from compress.data.columns import columns_of
from compress.data.corpus import masking_of
from compress.data.encoded import pad_id_of
from compress.data.text_pairs import MaskedTargets, PairSplits, encoded_pairs, encoded_sources, read_pair_splits
from compress.distributed import Share
from compress.engine.fingerprints import fingerprint, folder_fingerprint, trained_with
from compress.engine.hardware import device_here, is_faster_in_bf16, same_bits
from compress.engine.lineage import save_with_lineage
from compress.engine.resumable_stages import TRAINING, Workdir, check_writable, free_target
from compress.engine.task_inputs import steps_of, usable_length
from compress.evaluation.generated import METRIC, rouge_f1
from compress.input_errors import Faults
from compress.losses.outputs import full, soft_label_loss
from compress.methods.presets import Schedule, preset_of
from compress.models.families import FAMILIES
from compress.models.generator import generated
from compress.models.initialise import check_same_tokens, shape_in, student_of
from compress.models.precision import check_precision
from compress.models.pretrained import Opened, load_encoder, open_model, open_tokenizer
from compress.models.shapes import Shape, shape_of
from compress.models.unilm import SETTINGS, check_generates, is_generator, masked_logits
from compress.progress import Notify, advancing, message
from compress.settings import GENERATION, LEAST_TUNING_STEPS, WHERE_DATA_IS, FineTuning
from compress.training.checkpoint import Progress
from compress.training.loop import Validation, device_of_process, train
from compress.training.prefetch import Prefetcher
from compress.training.task_training import validation_interval
from serve.bundle.cpu_quota import available_cores
from serve.errors import BadInput

TARGET_TOKENS = 48  # as MiniLM generates questions and summaries of XSum
LABEL_SMOOTHING = 0.1  # MiniLM, appendix
VALIDATED_TEXTS = 200  # at most, since each costs as many passes as it gets tokens
FEWEST_SOURCE_TOKENS = 8
# Settings of `finetune` that have no meaning here, and their defaults.
OTHER_TASKS = (
    "unlabelled", "teacher_labels", "language_temperature", "new_head", "text_pair_column", "tokens_column", "label_column",
    "entities_column", "tags_column", "question_column", "context_column", "answers_column", "data_revision",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The opened inputs of the training."""

    settings: FineTuning
    opened: Opened
    teacher: Opened | None
    splits: PairSplits
    tokenizer: Tokenizer
    longest: int  # tokens of source and target together
    target_tokens: int
    shape: Shape | None  # of the student that is made of the model; None trains the model itself
    notify: Notify

    @cached_property
    def train(self) -> MaskedTargets:
        """The batches of the training."""
        pairs = encoded_pairs(self.splits.train, self.tokenizer, self.longest, self.target_tokens)
        masking = masking_of(self.tokenizer, int(self.opened.config.vocab_size))
        assert self.settings.batch
        return MaskedTargets(pairs, self.settings.batch, self.settings.seed, masking, pad_id_of(self.tokenizer))

    @property
    def steps(self) -> int:
        """Most steps of the training."""
        return steps_of(self.settings.epochs, 5, LEAST_TUNING_STEPS, self.train.sampler.steps_per_epoch)


def fine_tune_generator(settings: FineTuning, notify: Notify) -> Path:
    """Fine-tune an encoder to generate; see `compress.engine.finetune.fine_tune`, which calls this for its task.

    Raises:
        BadInput: every fault found in the model, the teacher, the data or the settings, in one message.
    """
    target = free_target(Path(settings.out))
    inputs = _opened(settings, target, notify)
    settings = inputs.settings
    counted = ", ".join(f"{len(getattr(inputs.splits, name)):,} in {name}" for name in ("train", "validation", "test"))
    message(notify, f"{counted}; targets of at most {inputs.target_tokens} tokens, {inputs.steps:,} steps at most")
    distributed.join(settings.device)
    same_bits(settings.threads or available_cores())
    made_of = fingerprint(
        "generator", folder_fingerprint(inputs.opened.folder), folder_fingerprint(inputs.teacher.folder) if inputs.teacher else "",
        inputs.splits.fingerprint, trained_with(settings.device), inputs.longest, inputs.target_tokens,
        dataclasses.asdict(settings)
        | dict.fromkeys(("model", "data", "out", "teacher", "trackers", "device", "revision", "target_column", *WHERE_DATA_IS), ""),
    )  # fmt: skip
    workdir = Workdir(target.with_name(target.name + ".finetune-work"))
    with workdir.locked():
        folder = workdir.stage("model", made_of, partial(_train, inputs=inputs))
        workdir.publish(folder, target)
    return target


def refuse_generation_settings(settings: FineTuning) -> None:
    """BadInput where a setting of generation is given for another task."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("student", "target_tokens", "target_column")
        if getattr(settings, name)
    ]
    if given:
        raise BadInput(
            f"{' and '.join(given)} {'are settings' if given[1:] else 'is a setting'} of {GENERATION}, and --task is {settings.task}. "
            f"Leave {'them' if given[1:] else 'it'} out."
        )


def _opened(settings: FineTuning, target: Path, notify: Notify) -> _Inputs:
    faults = Faults()
    strange = [name for name in OTHER_TASKS if getattr(settings, name) != FineTuning.__dataclass_fields__[name].default]
    if strange:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        faults.messages.append(
            f"{flags} cannot be given with --task {settings.task}. Leave {'them' if strange[1:] else 'it'} out."
        )
    opened = faults.check(partial(open_model, settings.model, role="--model", revision=settings.revision))
    teacher = faults.check(partial(open_model, settings.teacher)) if settings.teacher else None
    for each in filter(None, (opened, teacher)):
        faults.check(partial(check_generates, each))
    if teacher and not is_generator(teacher.config):
        faults.messages.append(
            f"--teacher {settings.teacher} was not trained to generate text. Fine-tune it first: stillroom finetune --model "
            f"{settings.teacher} --task {settings.task} ..."
        )
    if opened and teacher:
        faults.check(partial(check_same_tokens, teacher, opened))
    splits = faults.check(
        partial(
            read_pair_splits,
            settings.data,
            columns_of(settings),
            settings.target_column or "target",
            seed=settings.seed,
        )
    )
    faults.check(partial(check_writable, target))
    settings = faults.check(partial(_resolved, settings)) or settings
    tokenizer = faults.check(partial(open_tokenizer, opened)) if opened else None
    longest = faults.check(partial(usable_length, settings.max_length, opened)) if opened else None
    target_tokens = settings.target_tokens or TARGET_TOKENS
    shape = faults.check(partial(shape_of, settings.student)) if settings.student else None
    if longest and longest - target_tokens < FEWEST_SOURCE_TOKENS:
        faults.messages.append(
            f"--target-tokens is {target_tokens}, and the model takes {longest} tokens of text and target together. Give at most "
            f"{longest - FEWEST_SOURCE_TOKENS}."
        )
    if tokenizer and opened:
        faults.check(partial(masking_of, tokenizer, int(opened.config.vocab_size)))
    faults.raise_if_any()
    assert opened and splits and tokenizer and longest  # noqa: PT018 - no test
    return _Inputs(settings, opened, teacher, splits, tokenizer, longest, target_tokens, shape, notify)


def _resolved(settings: FineTuning) -> FineTuning:
    """`settings` with open values filled in from the schedule, or with the defaults, for this machine."""
    usual: dict[str, Any] = {"learning_rate": 1e-4, "batch": 32, "temperature": 2.0, "soft_weight": 0.9}
    if settings.schedule:
        preset = preset_of(settings.schedule, "fine-tuning")
        usual |= {"epochs": preset.epochs, "learning_rate": preset.learning_rate, "batch": preset.batch}
        settings = dataclasses.replace(settings, max_length=settings.max_length or preset.tokens)
    without = [
        name for name in ("temperature", "soft_weight") if getattr(settings, name) is not None and not settings.teacher
    ]
    if without:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in without)
        raise BadInput(f"{flags} need a --teacher, which is not given. Give it, or leave them out.")
    device = device_here(settings.device)
    if settings.precision == "auto":
        settings = dataclasses.replace(settings, precision="bf16" if is_faster_in_bf16(device) else "fp32")
    check_precision(settings.precision, device)
    left_open = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **left_open)


def _train(folder: Path, inputs: _Inputs) -> None:
    """Train, and save the checkpoint with its lineage in `folder`."""
    settings = inputs.settings
    model = load_encoder(inputs.opened, seed=settings.seed, vocabulary=True)
    if inputs.shape:
        model, _ = student_of(model, inputs.opened.family, inputs.shape, seed=settings.seed)
    teacher = load_encoder(inputs.teacher, seed=0, vocabulary=True) if inputs.teacher else None
    setattr(model.config, SETTINGS, {"target_tokens": inputs.target_tokens})
    assert settings.learning_rate
    with (
        closing(Prefetcher(inputs.train.at, inputs.steps)) as batches,
        advancing(inputs.notify, "fine-tuning") as shown,
    ):
        progress = train(
            model,
            _losses(model, teacher, batches, inputs),
            Schedule(inputs.steps, settings.learning_rate),
            folder=folder / TRAINING,
            seed=settings.seed,
            validation=_validation(model, inputs),
            precision=settings.precision,
            device=settings.device,
            accumulate=settings.accumulate,
            trackers=tuple(settings.trackers),
            batches=batches,
            report=shown.step,
        )
    save_with_lineage(model, inputs.opened, folder, _lineage(inputs, progress))


def _losses(model: Any, teacher: Any, batches: Prefetcher, inputs: _Inputs) -> Any:
    """The loss terms of a step's share: of the masked tokens, and of the teacher's distributions over the vocabulary."""
    settings, device = inputs.settings, device_of_process(inputs.settings.device)
    family = FAMILIES[model.config.model_type]
    weight = float(settings.soft_weight or 0.0) if teacher is not None else 0.0
    if teacher is not None:
        teacher.eval().to(device).requires_grad_(False)

    def loss_at(step: int, share: Share) -> dict[str, Tensor]:
        batch: Batch = to_device(part_of(batches.at(step), share), device)
        logits = masked_logits(model, family, batch.inputs, batch.row_index)
        labels = torch.nn.functional.cross_entropy(full(logits), batch.targets, label_smoothing=LABEL_SMOOTHING)
        terms = {"labels": batch.weights.labelled * (1 - weight) * labels}
        if teacher is not None:
            with torch.no_grad():
                theirs = masked_logits(teacher, FAMILIES[teacher.config.model_type], batch.inputs, batch.row_index)
            terms["soft_labels"] = (
                batch.weights.labelled * weight * soft_label_loss(theirs, logits, settings.temperature or 1.0)
            )
        return terms

    return loss_at


def _validation(model: Any, inputs: _Inputs) -> Validation:
    """By ROUGE-L of what greedy decoding gives."""
    chosen = inputs.splits.validation[:VALIDATED_TEXTS]
    sources = encoded_sources([pair.text for pair in chosen], inputs.tokenizer, inputs.longest - inputs.target_tokens)

    def evaluate() -> float:
        said = generated(model, inputs.tokenizer, sources, beams=1, power=1.0, longest=inputs.target_tokens)
        return float(rouge_f1([pair.target for pair in chosen], said)[:, -1].mean())

    every = validation_interval(inputs.steps, inputs.train.sampler.steps_per_epoch)
    return Validation(every, evaluate, inputs.settings.patience or None)


def _lineage(inputs: _Inputs, progress: Progress) -> dict[str, Any]:
    """What the checkpoint was made from, as `compress.engine.finetune.finetune_result` reads it."""
    teacher = inputs.teacher
    facts = {"teacher": teacher.public_name, "teacher_revision": teacher.revision} if teacher else {}
    return {
        "role": "fine-tuned", "task": inputs.settings.task, "model": inputs.opened.public_name,
        "model_revision": inputs.opened.revision, "method": "soft labels" if teacher else "labels",
        "data": inputs.splits.fingerprint, "seed": inputs.settings.seed, "loss": progress.loss, "metric": METRIC,
        "validation": progress.validation, "validation_texts": len(inputs.splits.validation[:VALIDATED_TEXTS]),
        "best_step": progress.best_step, "student": str(inputs.shape or shape_in(inputs.opened)), **facts,
    }  # fmt: skip
