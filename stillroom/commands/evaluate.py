"""`stillroom evaluate`: the task metric of a bundle or a checkpoint on a labelled file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput
from serve.text.labels import entity_labels

if TYPE_CHECKING:
    from compress.data.columns import Columns

T = TypeVar("T")


def evaluate(
    model: str,
    data: Path | str,
    *,
    variant: str | None = None,
    task: str | None = None,
    columns: "Columns | None" = None,
) -> dict[str, Any]:
    """The task metric of a bundle, or of a checkpoint with a head, on a labelled file, whose `columns` may have other names.

    Returns `{model, variant, task, metric, value, low, high, examples, unknown_labels}`; for a bundle without importing torch.

    Raises:
        BadInput: the model or the file cannot be used.
    """
    from compress.data.columns import USUAL
    from compress.data.examples import check_kind, check_task, labels_in
    from compress.data.labelled_files import read_examples
    from compress.evaluation.metrics import Prediction, gold_of, metric_name, prediction_of, score
    from serve.text.entity_markers import knows_markers

    folder = Path(model)
    if (folder / MANIFEST).is_file():
        from serve.model.pipeline import Pipeline

        pipeline = _with_data(lambda: Pipeline(folder, variant), data)
        found_task = check_task(pipeline.manifest.task)
        if task and task != found_task:
            raise BadInput(f"--task is {task}, but {model} is a bundle for {found_task}.")
        examples = read_examples(Path(data), found_task, columns or USUAL)
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
        examples = read_examples(Path(data), found_task, columns or USUAL)
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
    from compress.data.labelled_files import check_there
    from compress.input_errors import Faults

    faults = Faults()
    opened = faults.check(open_it)
    faults.check(lambda: check_there(Path(data)))
    faults.raise_if_any()
    assert opened is not None
    return opened
