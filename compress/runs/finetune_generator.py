"""Fine-tunes an encoder to generate a text from a text, on targets, or on targets and a larger generator's soft labels of each token.

Dong et al. 2019, "UniLM"; Wang et al. 2020, "MiniLM", section 5.2 and appendix, which also smooth the labels.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from tokenizers import Tokenizer

from compress import distributed
from compress.data.columns import columns_of
from compress.data.corpus import masking_of
from compress.data.encoded import pad_id_of, unknown_id_of, unknown_warning
from compress.data.examples import GENERATION, GENERATOR, Splits
from compress.data.text_pairs import (
    MaskedTargets,
    TokenPair,
    encoded_pairs,
    encoded_sources,
    end_id_of,
    read_pair_splits,
)
from compress.evaluation.generated import METRIC, rouge_f1
from compress.input_errors import Faults
from compress.methods.catalogue import Stage
from compress.methods.objectives import Objective, OutputTerm
from compress.methods.presets import Schedule
from compress.models.generator import (
    FEWEST_SOURCE_TOKENS,
    FEWEST_TARGET_TOKENS,
    check_family,
    check_generates,
    fits,
    generated,
)
from compress.models.initialise import differing_tokenizers, layers_fit, shape_in, student_of
from compress.models.pretrained import Opened, load_encoder, open_model, open_tokenizer
from compress.models.shapes import Shape, shape_of
from compress.progress import Notify, advancing, message
from compress.runs.hardware import on_this_machine, same_bits, stage_settings
from compress.runs.lineage import save_with_lineage
from compress.runs.open_task import check_disk, usable_length
from compress.runs.resumable_stages import TRAINING, Workdir, free_target
from compress.runs.stages import RunStage, check_same_inputs, folder_fingerprint, make_checkpoint, trained_with
from compress.runs.task_inputs import steps_of
from compress.settings import LEAST_TUNING_STEPS, WHERE_DATA_IS, FineTuning, filled_in
from compress.training.loop import Validation
from compress.training.metrics import check_trackers
from compress.training.stage import train_stage, validation_interval
from serve.errors import BadInput
from serve.files import path_beside

TARGET_TOKENS = 48  # as MiniLM generates questions and summaries of XSum
LABEL_SMOOTHING = 0.1  # MiniLM, appendix
VALIDATED_TEXTS = 200  # at most, since each costs as many passes as it gets tokens
# Settings of `finetune` that have no meaning here.
OTHER_TASKS = (
    "unlabelled", "teacher_labels", "language_temperature", "class_weights", "new_head", "text_pair_column", "tokens_column",
    "label_column", "entities_column", "tags_column", "question_column", "context_column", "answers_column", "data_revision",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The opened inputs of the training."""

    settings: FineTuning
    opened: Opened
    teacher: Opened | None
    splits: Splits
    tokenizer: Tokenizer
    longest: int  # tokens of source and target together
    target_tokens: int
    shape: Shape | None  # of the student that is made of the model; None trains the model itself
    notify: Notify

    @cached_property
    def pairs(self) -> tuple[list[TokenPair], int]:
        """The tokens of the train split, and how many of its targets are cut."""
        return encoded_pairs(self.splits.train, self.tokenizer, self.longest, self.target_tokens)

    @cached_property
    def train(self) -> MaskedTargets:
        """The batches of the training."""
        masking = masking_of(self.tokenizer, int(self.opened.config.vocab_size))
        assert self.settings.batch
        return MaskedTargets(self.pairs[0], self.settings.batch, self.settings.seed, masking, pad_id_of(self.tokenizer))

    @property
    def steps(self) -> int:
        """Most steps of the training."""
        return steps_of(self.settings.epochs, 5, LEAST_TUNING_STEPS, self.train.sampler.steps_per_epoch)


def fine_tune_generator(settings: FineTuning, notify: Notify) -> Path:
    """Fine-tune an encoder to generate; see `compress.runs.finetune.fine_tune`, which calls this for its task.

    Raises BadInput: every fault found in the model, the teacher, the data or the settings, in one message.
    """
    target = free_target(Path(settings.out))
    inputs = _opened(settings, target, notify)
    settings = inputs.settings
    rows = ", ".join(f"{len(getattr(inputs.splits, name)):,} in {name}" for name in ("train", "validation", "test"))
    message(notify, f"{rows}; targets of at most {inputs.target_tokens} tokens, {inputs.steps:,} steps at most")
    for warning in _warnings(inputs):
        message(notify, f"warning: {warning}")
    same_bits(settings.threads)
    models = [folder_fingerprint(each.folder) if each else "" for each in (inputs.opened, inputs.teacher)]
    check_same_inputs(settings, {"--model": models[0], "--teacher": models[1], "--data": inputs.splits.fingerprint})
    distributed.join(settings.device)
    made_of = (
        "generator", *models,
        inputs.splits.fingerprint, trained_with(settings.device), inputs.longest, inputs.target_tokens,
        dataclasses.asdict(settings)
        | dict.fromkeys(("model", "data", "out", "teacher", "trackers", "device", "revision", "target_column", *WHERE_DATA_IS), ""),
    )  # fmt: skip
    workdir = Workdir(path_beside(target, ".finetune-work"), notify)
    return make_checkpoint(workdir, [RunStage("model", made_of, partial(_train, inputs=inputs))], {}, target)


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
    opened = faults.check(partial(open_model, settings.model, role="--model", revision=settings.revision))
    teacher = faults.check(partial(open_model, settings.teacher)) if settings.teacher else None
    if opened:
        faults.check(partial(check_family, opened))
        faults.check(partial(check_disk, target, opened))
    if teacher:
        faults.check(partial(check_generates, teacher))
    if opened and teacher:
        faults.check(partial(_check_same_words, teacher, opened))
    columns, target_column = columns_of(settings), settings.target_column or "target"
    splits = faults.check(partial(read_pair_splits, settings.data, columns, target_column, seed=settings.seed))
    faults.check(lambda: check_trackers(tuple(settings.trackers)))
    settings = _resolved(settings, faults)
    tokenizer = faults.check(partial(open_tokenizer, opened)) if opened else None
    lengths = [faults.check(partial(usable_length, settings.max_length, each)) for each in (opened, teacher) if each]
    longest = min((each for each in lengths if each), default=0)
    target_tokens = settings.target_tokens or TARGET_TOKENS
    if longest and not fits(longest, target_tokens):
        faults.messages.append(
            f"--target-tokens is {target_tokens}, and the model takes {longest} tokens of text and target together. Give "
            f"{FEWEST_TARGET_TOKENS} to {longest - FEWEST_SOURCE_TOKENS}."
        )
    shape = faults.check(partial(shape_of, settings.student)) if settings.student else None
    if tokenizer and opened:
        faults.check(partial(masking_of, tokenizer, int(opened.config.vocab_size)))
        faults.check(partial(end_id_of, tokenizer))
    faults.raise_if_any()
    assert opened and splits and tokenizer and longest  # noqa: PT018 - no test
    return _Inputs(settings, opened, teacher, splits, tokenizer, longest, target_tokens, shape, notify)


def _check_same_words(teacher: Opened, model: Opened) -> None:
    """BadInput unless the logits of both are of the same tokens."""
    rows = [int(each.config.vocab_size) for each in (teacher, model)]
    if differs := differing_tokenizers(teacher, model):
        raise BadInput(
            f"{model.role} {model.name} and {teacher.role} {teacher.name} do not share a tokenizer: {differs} A student learns token by "
            "token from its teacher. Give a model with the teacher's tokenizer, or a --student of the teacher itself."
        )
    if rows[0] != rows[1]:
        raise BadInput(
            f"{teacher.role} {teacher.name} has a vocabulary of {rows[0]} tokens and {model.role} {model.name} one of {rows[1]}, and "
            "predictions of tokens are compared. Give a model with the teacher's vocabulary, or a --student of the teacher itself."
        )


def _resolved(settings: FineTuning, faults: Faults) -> FineTuning:
    """`settings` with open values filled in from the schedule, or with the defaults, for this machine."""
    defaults = FineTuning.__dataclass_fields__
    strange = [name for name in OTHER_TASKS if getattr(settings, name) != defaults[name].default]
    if strange:
        these = "them" if strange[1:] else "it"
        faults.messages.append(f"{_flags(strange)} cannot be given with --task {settings.task}. Leave {these} out.")
    of_teacher = [name for name in ("temperature", "soft_weight") if getattr(settings, name) is not None]
    if of_teacher and not settings.teacher:
        need, these = ("need", "them") if of_teacher[1:] else ("needs", "it")
        faults.messages.append(
            f"{_flags(of_teacher)} {need} a --teacher, which is not given. Give it, or leave {these} out."
        )
    if settings.target_column == (settings.text_column or "text"):
        faults.messages.append(
            f"--target-column names the column of the text, {settings.target_column}. Give another column."
        )
    filled = faults.check(partial(filled_in, settings)) or settings
    return faults.check(partial(on_this_machine, filled)) or filled


def _flags(names: Sequence[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def _warnings(inputs: _Inputs) -> list[str]:
    """What to know of these texts and this student."""
    found: list[str] = []
    splits, (pairs, cut) = inputs.splits, inputs.pairs
    if splits.held_out:
        found.append(f"There is no validation file: {len(splits.validation):,} texts of train are held out instead.")
    if cut:
        found.append(
            f"{cut:,} of {len(pairs):,} targets of train are longer than {inputs.target_tokens} tokens: the rest is not learned. "
            "Give more --target-tokens."
        )
    if long := sum(len(pair.source) == inputs.longest - inputs.target_tokens for pair in pairs):
        found.append(
            f"{long:,} of {len(pairs):,} texts of train fill their {inputs.longest - inputs.target_tokens} tokens or are cut."
        )
    found += unknown_warning([pair.source for pair in pairs], unknown_id_of(inputs.tokenizer), "train")
    if inputs.shape and not layers_fit(inputs.opened.config, inputs.shape):
        found.append(
            f"The student's layers start at random: {inputs.shape} has another width or number of heads than {inputs.opened.name}, or "
            "more layers. It needs far more training than a student that starts from its layers."
        )
    return found


def _train(folder: Path, inputs: _Inputs) -> None:
    """Train, and save the checkpoint with its lineage in `folder`."""
    settings = inputs.settings
    model = load_encoder(inputs.opened, seed=settings.seed, vocabulary=True)
    if inputs.shape:
        model, _ = student_of(model, inputs.shape, seed=settings.seed)
    teacher = load_encoder(inputs.teacher, seed=0, vocabulary=True) if inputs.teacher else None
    setattr(model.config, GENERATOR, {"tokens": inputs.longest, "target_tokens": inputs.target_tokens})
    weight = float(settings.soft_weight or 0.0) if teacher is not None else 0.0
    terms = [OutputTerm("labels", "vocabulary", 1 - weight, smoothing=LABEL_SMOOTHING)]
    if teacher is not None:
        terms.append(OutputTerm("soft labels", "vocabulary", weight, settings.temperature or 1.0))
    stage = Stage("fine-tuning", Objective(outputs=tuple(terms)), text="pairs")
    assert settings.learning_rate
    schedule = Schedule(inputs.steps, settings.learning_rate)
    # Of validation those that are scored in training, evenly spread over its file, by ROUGE-L of what greedy decoding gives.
    chosen = inputs.splits.validation[:: -(-len(inputs.splits.validation) // VALIDATED_TEXTS)]
    sources = encoded_sources([pair.text for pair in chosen], inputs.tokenizer, inputs.longest - inputs.target_tokens)

    def evaluate() -> float:
        said = generated(model, inputs.tokenizer, sources, beams=1, power=0.0, longest=inputs.target_tokens)
        return float(rouge_f1([pair.text_pair or "" for pair in chosen], said)[:, -1].mean())

    every = validation_interval(inputs.steps, inputs.train.sampler.steps_per_epoch)
    validation = Validation(every, evaluate, settings.patience or None)
    with advancing(inputs.notify, stage.name) as shown:
        progress = train_stage(
            stage, teacher, model, inputs.train, stage_settings(settings, inputs.steps, schedule=schedule),
            folder=folder / TRAINING, validation=lambda _: validation, report=shown.step,
        )  # fmt: skip
    asked = inputs.teacher
    lineage = {
        "role": "fine-tuned", "task": settings.task, "model": inputs.opened.public_name,
        "model_revision": inputs.opened.revision, "method": "soft labels" if asked else "labels",
        "data": inputs.splits.fingerprint, "seed": settings.seed, "loss": progress.loss, "metric": METRIC,
        "validation": progress.validation, "validation_texts": len(chosen),
        "best_step": progress.best_step, "ended": progress.ended, "student": str(inputs.shape or shape_in(inputs.opened)),
        **({"teacher": asked.public_name, "teacher_revision": asked.revision} if asked else {}),
    }  # fmt: skip
    save_with_lineage(model, inputs.opened, folder, lineage, max_length=inputs.longest)
