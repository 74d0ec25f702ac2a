"""The verbs as functions: what the command line calls, and what `from stillroom import ...` gives."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from compress.input_errors import refuse_unknown
from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput
from serve.text.labels import entity_labels

T = TypeVar("T")


def run(**settings: Any) -> dict[str, Any]:
    """Go the whole way: from a teacher to a bundle. Settings are the fields of `stillroom.inputs.recipe.Recipe`.

    Returns the document that `stillroom run --json` prints.

    Raises:
        BadInput: anything wrong with what was given, before any training.
        GateMissed: the student fell short of a gate.
    """
    from stillroom.commands.run.pipeline import run as make_bundle
    from stillroom.inputs.recipe import resolve

    return make_bundle(resolve({}, {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}))


def evaluate(model: str, data: Path | str, *, variant: str | None = None, task: str | None = None) -> dict[str, Any]:
    """The task metric of a bundle, or of a checkpoint with a head, on a labelled file.

    Returns `{model, variant, task, metric, value, low, high, examples, unknown_labels}`; for a bundle without importing torch.

    Raises:
        BadInput: the model or the file cannot be used.
    """
    from compress.data.examples import check_kind, check_task, labels_in, read_examples
    from compress.evaluation.metrics import Prediction, gold_of, metric_name, prediction_of, score
    from serve.text.entity_markers import knows_markers

    folder = Path(model)
    if (folder / MANIFEST).is_file():
        from serve.model.pipeline import Pipeline

        pipeline = _with_data(lambda: Pipeline(folder, variant), data)
        found_task = check_task(pipeline.manifest.task)
        if task and task != found_task:
            raise BadInput(f"--task is {task}, but {model} is a bundle for {found_task}.")
        examples = read_examples(Path(data), found_task)
        multi_label = pipeline.manifest.multi_label
        if found_task == "text-classification":
            check_kind(examples, model, multi_label=multi_label, markers=knows_markers(pipeline.tokenizer))
        said: list[Prediction] = [""] * len(examples)
        # A text without a second one is not a text with an empty second one: the two kinds are answered apart.
        for kind in (True, False):
            chosen = [i for i, example in enumerate(examples) if bool(example.text_pair) is kind]
            pairs = [examples[i].text_pair or "" for i in chosen] if kind else None
            for i, answer in zip(
                chosen,
                # Cut, as training and the evaluation of checkpoints read them.
                pipeline([examples[i].text_read for i in chosen], text_pair=pairs, truncate=True) if chosen else [],
                strict=True,
            ):
                said[i] = prediction_of(answer, multi_label=multi_label)
        used, names = pipeline.variant, pipeline.manifest.labels
    else:
        if variant:
            raise BadInput(f"--variant {variant}: {model} is not a bundle, and only bundles have variants.")
        from compress.data.encoded import encode
        from compress.evaluation.predictions import predictions, row_logits
        from compress.models.pretrained import HEADS, load, open_model
        from serve.text.tokenizer import load_tokenizer

        wanted = "a bundle or a transformers folder"
        opened = _with_data(lambda: open_model(model, role="MODEL", wanted=wanted), data)
        heads = [name for name in HEADS if opened.head_for(check_task(name)) and task in (None, name)]
        if not heads:
            raise BadInput(f"{model} has no head for {task or ' or '.join(HEADS)}; `stillroom run` gives it one.")
        found_task = check_task(heads[0])
        examples = read_examples(Path(data), found_task)
        labels = opened.head_for(found_task) or ()
        multi_label = found_task == "text-classification" and opened.multi_label
        tokenizer = load_tokenizer(opened.folder, opened.max_length)
        if found_task == "text-classification":
            check_kind(examples, model, multi_label=multi_label, markers=knows_markers(tokenizer))
        encoded = encode(examples, tokenizer, found_task, labels, multi_label=multi_label)
        said = predictions(encoded, row_logits(load(opened, found_task), encoded))
        used, names = "torch", list(labels)
    reached = score([gold_of(example, found_task) for example in examples], said)
    known = entity_labels(names) if found_task == "token-classification" else names
    there = labels_in(examples, found_task)
    return {
        "model": model,
        "variant": used,
        "task": found_task,
        "metric": metric_name(found_task, multi_label=multi_label),
        "value": reached.value,
        "low": reached.low,
        "high": reached.high,
        "examples": len(examples),
        "unknown_labels": [name for name in there if name not in known],
    }


def _with_data(open_it: Callable[[], T], data: Path | str) -> T:
    """What `open_it` gives; BadInput for what is wrong with it and for a file `data` that is not there, in one message."""
    from compress.data.examples import check_there
    from compress.input_errors import Faults

    faults = Faults()
    opened = faults.check(open_it)
    faults.check(lambda: check_there(Path(data)))
    faults.raise_if_any()
    assert opened is not None
    return opened


def distill(teacher: str, corpus: Sequence[Path | str], out: Path | str, **settings: Any) -> Path:
    """Distil a task-agnostic student on plain text, and write it as a checkpoint that `AutoModel` opens.

    Settings are the fields of `compress.engine.distill.Distillation`: student, method, epochs, and so on. A killed call goes
    on from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: an unknown method, teacher, student or file; relation heads that do not divide both widths.
    """
    import compress
    from stillroom.console import show

    return compress.distill(teacher, corpus, out, progress=show, **settings)


def finetune(model: str, task: str, data: str, out: Path | str, **settings: Any) -> Path:
    """Fine-tune a model on a task, on labels or on a teacher's soft labels too, and write it as a checkpoint with a head.

    Settings are the fields of `compress.engine.finetune.FineTuning`: teacher, unlabelled, epochs, and so on. The weights that did
    best on validation are kept. A killed call goes on from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: the model, the teacher or the data cannot be used, or the two read text in different ways.
    """
    import compress
    from stillroom.console import show

    return compress.finetune(model, task, data, out, progress=show, **settings)


def export(checkpoint: Path | str, out: Path | str, data: Path | str, **settings: Any) -> Path:
    """Export a checkpoint with a head to a bundle, every graph of it checked against torch and on the task metric.

    `data` is a folder of splits: int8 is calibrated on train, chosen and gated on validation, and reported on test.
    Settings are the fields of `stillroom.commands.export.Exporting`: precision, gate, int8, runtime, and so on. The report goes
    beside the bundle. Returns `out`.

    Raises:
        BadInput: the checkpoint or the data cannot be used.
        GateMissed: a graph does not answer as it must, or keeps less than `gate` of fp32's metric.
    """
    from stillroom.commands.export import Exporting, export_checkpoint

    refuse_unknown("export", settings, Exporting)
    return export_checkpoint(str(checkpoint), Path(out), Exporting(str(data), **settings))


def profile(models: Sequence[Path | str], **settings: Any) -> dict[str, Any]:
    """Time bundles, checkpoints and ONNX files side by side on real text, with their metric and what they cost.

    The first model is what the others are compared with. Settings are the fields of `stillroom.commands.profile.run.Profiling`: data,
    device, seconds, budget_ms, and so on. Returns the document that `stillroom profile --json` prints.

    Raises:
        BadInput: a model, the file or a setting cannot be used.
    """
    from stillroom.commands.profile.run import Profiling, profile_models

    refuse_unknown("profile", settings, Profiling)
    return dict(profile_models([Path(model) for model in models], Profiling(**settings)))
