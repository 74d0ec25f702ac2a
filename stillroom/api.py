"""The verbs as Python functions: what `from stillroom import ...` gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.options import make


def run(**settings: Any) -> dict[str, Any]:
    """From a teacher to a bundle. Settings are the fields of `stillroom.inputs.recipe.Recipe`.

    Returns the document that `stillroom run --json` prints.

    Raises:
        BadInput: anything wrong with what was given, before any training.
        GateMissed: the student fell short of a gate.
    """
    from stillroom.commands.run.pipeline import run as make_bundle
    from stillroom.inputs.recipe import resolve

    return make_bundle(resolve({}, {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}))


def distill(teacher: str, corpus: Sequence[Path | str], out: Path | str, **settings: Any) -> Path:
    """Distil a task-agnostic student on plain text, and write it as a checkpoint that `AutoModel` opens.

    Settings are the fields of `compress.settings.Distillation`: student, method, epochs, and so on. A killed call resumes
    from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: an unknown method, teacher, student or file; relation heads that do not divide both widths.
    """
    from compress.runs.distill import distill_student
    from compress.settings import Distillation
    from stillroom.console import show

    return distill_student(
        make(Distillation, settings | {"teacher": teacher, "corpus": list(corpus), "out": out}), show
    )


def finetune(model: str, task: str, data: str, out: Path | str, **settings: Any) -> Path:
    """Fine-tune a model on a task's labels, and on a teacher's soft labels if given, and write it as a checkpoint with a head.

    Settings are the fields of `compress.settings.FineTuning`: teacher, unlabelled, epochs, and so on. The weights that score
    best on validation are kept. A killed call resumes from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: the model, the teacher or the data cannot be used, or the two read text in different ways.
    """
    from compress.runs.finetune import fine_tune
    from compress.settings import FineTuning
    from stillroom.console import show

    return fine_tune(make(FineTuning, settings | {"model": model, "task": task, "data": data, "out": out}), show)


def label(input: Sequence[Path | str], out: Path | str, **settings: Any) -> dict[str, Any]:
    """Write a teacher's answers to the texts of files to `out`, for `finetune(..., teacher_labels=[out])`.

    One of `checkpoint` (a fine-tuned model of transformers), `command` and `url` answers. Settings are the fields of
    `compress.settings.Labelling`. A stopped call resumes when it is made again. Returns the document that `stillroom label --json`
    prints.

    Raises:
        BadInput: the teacher, a file or the output cannot be used.
    """
    from compress.labelling.label import label as label_texts
    from compress.settings import Labelling
    from stillroom.console import show

    return label_texts(make(Labelling, settings | {"input": list(input), "out": out}), show)


def select(bank: Sequence[Path | str], like: Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """Write to `out` the texts of the files `bank` that are nearest to the labelled ones under `like`.

    Needs `task` and `encoder`; other settings are the fields of `compress.settings.Selecting`. Returns the document that `stillroom
    select --json` prints.

    Raises:
        BadInput: the bank, the data, a model or the output cannot be used, or no text is left.
    """
    from compress.selecting.select import select as select_texts
    from compress.settings import Selecting
    from stillroom.console import show

    return select_texts(make(Selecting, settings | {"bank": list(bank), "like": like, "out": out}), show)


def export(checkpoint: Path | str, out: Path | str, data: Path | str = "", **settings: Any) -> dict[str, Any]:
    """Export a checkpoint with a head to a bundle, every graph of it checked against torch and on the task metric.

    `data` is a folder of splits: int8 is calibrated on train, chosen and gated on validation, and reported on test. Without it
    nothing is scored, and int8 needs `texts`. Settings are the fields of `stillroom.settings.export.Exporting`: variants, gate,
    int8, runtime, and so on. The report is in the bundle. Returns the document that `stillroom export --json` prints.

    Raises:
        BadInput: the checkpoint or the data cannot be used.
        GateMissed: a graph disagrees with torch, or keeps less than `gate` of fp32's metric. The report is beside `out`.
    """
    from stillroom.commands.export import export_checkpoint
    from stillroom.settings.export import Exporting

    return export_checkpoint(str(checkpoint), Path(out), make(Exporting, settings | {"out": out, "data": data}))


def profile(models: Sequence[Path | str], **settings: Any) -> dict[str, Any]:
    """Time bundles (folders or URLs), checkpoints and ONNX files side by side on real text, with their metric and what they cost.

    The others are compared with the first. Settings are the fields of `stillroom.settings.profile.Profiling`: data,
    device, seconds, budget_ms, and so on. Returns the document that `stillroom profile --json` prints.

    Raises:
        BadInput: a model, the file or a setting cannot be used.
    """
    from stillroom.commands.profile.run import profile as profile_these
    from stillroom.settings.profile import Profiling

    chosen = make(Profiling, settings)
    out = Path(chosen.out) if chosen.out else None
    return dict(profile_these(models, chosen, out=out))


def push(bundle: Path | str, url: str, **settings: Any) -> dict[str, Any]:
    """Upload a bundle to `url`, which `Pipeline`, `evaluate` and `profile` then take in place of its folder.

    Settings are the fields of `stillroom.settings.push.Pushing`: replace, public. Returns the document that `stillroom push --json`
    prints.

    Raises:
        BadInput: the bundle is damaged, the URL cannot be written, or it holds something else and `replace` is not given.
    """
    from stillroom.commands.push import push as push_bundle
    from stillroom.settings.push import Pushing

    return push_bundle(bundle, url, make(Pushing, settings))


def load(url: str, data: Path | str, **settings: Any) -> dict[str, Any]:
    """Load a running server with the texts of the file `data`, at one rate or at rates up to the highest that it sustains.

    Settings are the fields of `stillroom.settings.load.Loading`: rate, bound_ms, seconds, and so on. Returns the document that
    `stillroom load --json` prints.

    Raises:
        BadInput: the URL, the file or a setting cannot be used, or a first request is not answered with 2xx.
    """
    from stillroom.commands.load import load as load_server
    from stillroom.commands.load import write
    from stillroom.settings.load import Loading

    chosen = make(Loading, settings | {"data": data})
    document = load_server(url, chosen)
    if chosen.out:
        write(Path(chosen.out), document)
    return document


def capacity(report: Path | str, rate: float, **settings: Any) -> dict[str, Any]:
    """How many processes, cores and machines answer `rate` texts a second, simulated from a report of `profile`.

    Settings are the fields of `stillroom.settings.capacity.Capacity`: p99_ms, cores, headroom, and so on. Returns the document that
    `stillroom capacity --json` prints.

    Raises:
        BadInput: the report or a setting cannot be used, or no rate has a p99 within the bound.
    """
    from stillroom.commands.capacity import capacity as found
    from stillroom.settings.capacity import Capacity

    return found(report, make(Capacity, settings | {"rate": rate}))
