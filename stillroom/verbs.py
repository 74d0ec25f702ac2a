"""The verbs as functions: what the command line calls, and what `from stillroom import ...` gives."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.bundle import MANIFEST
from serve.errors import BadInput


def run(**settings: Any) -> dict[str, Any]:
    """Walk the whole road: from a teacher to a bundle. Settings are the fields of `stillroom.recipe.Recipe`.

    Returns the document that `stillroom run --json` prints.

    Raises:
        BadInput: anything wrong with what was given, before any training.
        GateMissed: the student fell short of a gate.
    """
    from stillroom.recipe import resolve
    from stillroom.road import run as walk

    return walk(resolve({}, {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}))


def evaluate(model: str, data: Path | str, *, variant: str | None = None, task: str | None = None) -> dict[str, Any]:
    """The task metric of a bundle, or of a checkpoint with a head, on a labelled file.

    Returns `{model, variant, task, metric, value, low, high, examples}`; for a bundle without importing torch.

    Raises:
        BadInput: the model or the file cannot be used.
    """
    from compress.examples import check_task, read_examples
    from compress.scores import METRICS, Prediction, gold_of, score

    folder = Path(model)
    if (folder / MANIFEST).is_file():
        from serve.pipeline import Pipeline

        pipeline = Pipeline(folder, variant)
        found_task = check_task(pipeline.manifest.task)
        if task and task != found_task:
            raise BadInput(f"--task is {task}, but {model} is a bundle for {found_task}.")
        examples = read_examples(Path(data), found_task)
        said: list[Prediction] = [""] * len(examples)
        # A text without a second one is not a text with an empty second one: the two kinds are answered apart.
        for kind in (True, False):
            chosen = [i for i, example in enumerate(examples) if bool(example.text_pair) is kind]
            pairs = [examples[i].text_pair or "" for i in chosen] if kind else None
            for i, answer in zip(
                chosen, pipeline([examples[i].text for i in chosen], text_pair=pairs) if chosen else [], strict=True
            ):
                said[i] = _prediction(answer)
        used = pipeline.variant
    else:
        if variant:
            raise BadInput(f"--variant {variant}: {model} is not a bundle, and only bundles have variants.")
        from compress.tasks import encode, predictions, row_logits
        from compress.teacher import HEADS, load, open_model
        from serve.encoding import load_tokenizer

        opened = open_model(model, role="MODEL")
        heads = [name for name in HEADS if opened.head_for(check_task(name)) and task in (None, name)]
        if not heads:
            raise BadInput(f"{model} has no head for {task or ' or '.join(HEADS)}; `stillroom run` gives it one.")
        found_task = check_task(heads[0])
        examples = read_examples(Path(data), found_task)
        labels = opened.head_for(found_task) or ()
        encoded = encode(examples, load_tokenizer(opened.folder, opened.max_length), found_task, labels)
        said = predictions(encoded, row_logits(load(opened, found_task), encoded))
        used = "torch"
    reached = score([gold_of(example, found_task) for example in examples], said)
    return {
        "model": model,
        "variant": used,
        "task": found_task,
        "metric": METRICS[found_task],
        "value": reached.value,
        "low": reached.low,
        "high": reached.high,
        "examples": len(examples),
    }


def _prediction(answer: Any) -> Any:
    if "entities" in answer:
        return frozenset((e["start"], e["end"], e["label"]) for e in answer["entities"])
    return answer["labels"][0]["label"]


def distill(
    teacher: str,
    corpus: Sequence[Path | str],
    out: Path | str,
    *,
    student: str = "3x384",
    method: str = "minilmv2",
    epochs: float = 1.0,
    learning_rate: float = 5e-4,
    batch: int = 32,
    relation_heads: int = 0,
    teacher_layer: int = 0,
    tokens: int = 128,
    seed: int = 0,
    precision: str = "fp32",
) -> Path:
    """Distil a task-agnostic student on plain text, and write it as a checkpoint that `AutoModel` opens.

    A killed call goes on from its last checkpoint when it is made again. Returns `out`.

    Raises:
        BadInput: an unknown method, teacher, student or file; relation heads that do not divide both widths.
    """
    import math

    import torch
    from transformers import AutoModel

    from compress.distill import (
        RelationDistillation,
        chunks,
        distil_relations,
        usual_relation_heads,
        usual_teacher_layer,
    )
    from compress.examples import read_texts
    from compress.initialise import student_of
    from compress.students import shape_of
    from compress.tasks import pad_id_of
    from compress.teacher import open_model, quiet, save_tokenizer
    from serve.bundle import canonical_json
    from serve.threads import available_cores
    from stillroom.ground import folder_mark, texts_mark
    from stillroom.show import bar
    from stillroom.stages import Work, fingerprint

    if batch < 1 or tokens < 8 or not epochs > 0 or precision not in ("fp32", "bf16"):
        raise BadInput("--batch is a whole number from 1, --tokens from 8, --epochs above 0, --precision fp32 or bf16.")
    if method != "minilmv2":
        raise BadInput(f"--method {method!r} is not known; it is minilmv2.")
    shape, opened = shape_of(student), open_model(teacher)
    texts = [text for path in corpus for text in read_texts(Path(path))]
    if not texts:
        raise BadInput("No --corpus was given; relation distillation needs plain text.")
    target = Path(os.path.abspath(out))
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise BadInput(f"--out {out} is there already; nothing in it was touched. Give another folder.")
    torch.set_num_threads(available_cores())
    torch.use_deterministic_algorithms(True)
    settings = {
        "learning_rate": learning_rate,
        "batch": batch,
        "relation_heads": relation_heads or usual_relation_heads(opened.config.hidden_size, shape.hidden),
        "teacher_layer": teacher_layer or usual_teacher_layer(opened.config.num_hidden_layers),
        "seed": seed,
        "precision": precision,
    }
    mark = fingerprint("distill", folder_mark(opened.folder), texts_mark(texts), str(shape), epochs, tokens, settings)
    work = Work(target.with_name(target.name + ".distil-work"))

    def make(folder: Path) -> None:
        tokenizer = save_tokenizer(opened, folder)
        model = AutoModel.from_pretrained(
            opened.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        small, origin = student_of(model, opened.family, shape, seed=seed)
        pieces = chunks(texts, tokenizer, min(tokens, opened.max_length))
        steps = max(1, math.ceil(epochs * len(pieces) / batch))
        with bar("relations") as shown:
            progress = distil_relations(
                model,
                small,
                opened.family,
                pieces,
                pad_id_of(tokenizer),
                RelationDistillation(steps, **settings),  # type: ignore[arg-type]
                folder=folder / "training",
                report=shown.step,
            )
        with quiet():
            small.save_pretrained(folder)
        lineage = {
            "teacher": opened.public_name,
            "method": method,
            "student": str(shape),
            "origin": origin,
            "loss": progress.loss,
        }
        (folder / "lineage.json").write_bytes(canonical_json(lineage | settings))

    with work.locked():
        work.stage("student", mark, make).replace(target)
        (target / "stage.json").unlink()
    shutil.rmtree(work.root, ignore_errors=True)
    return target


def export(
    checkpoint: Path | str,
    out: Path | str,
    data: Path | str,
    *,
    gate: float = 0.99,
    name: str | None = None,
    max_length: int = 0,
) -> Path:
    """Export a checkpoint with a head to a bundle with fp32 and int8 graphs, checked against torch and on the task metric.

    `data` is a folder of splits: int8 is calibrated on train, gated on validation, and reported on test. Returns `out`.

    Raises:
        BadInput: the checkpoint or the data cannot be used.
        GateMissed: fp32 does not answer as torch does, or int8 keeps less than `gate` of its metric.
    """
    from stillroom.exporting import export_checkpoint

    return export_checkpoint(str(checkpoint), Path(out), str(data), gate=gate, name=name, max_length=max_length)


def profile(
    models: Sequence[Path | str],
    data: Path | str,
    *,
    batches: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (16, 128),
    seconds: float = 60.0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Time bundles and checkpoints on real text, taking turns, each in a process of its own.

    The first model is what the others are compared with. `data` is a file of text. Returns the document that
    `stillroom profile --json` prints.

    Raises:
        BadInput: a model or the file cannot be used.
    """
    from compress.examples import read_texts
    from latency.candidates import Candidate
    from latency.profile import profile as time_candidates
    from serve.bundle import open_bundle
    from serve.encoding import load_tokenizer
    from serve.threads import available_cores
    from stillroom.show import bar

    cores = threads or available_cores()
    candidates: list[Candidate] = []
    for model in map(Path, models):
        if (model / MANIFEST).is_file():
            bundle = open_bundle(model)
            for variant in bundle.manifest.variants:
                label = f"{model.name} ORT {variant}"
                candidates.append(Candidate(label, "onnxruntime", variant, bundle.onnx_file(variant), cores))
        elif (model / "config.json").is_file():
            candidates.append(Candidate(f"{model.name} torch fp32", "torch", "fp32", model, cores))
        else:
            raise BadInput(f"{model} is neither a bundle nor a checkpoint folder.")
    if not candidates:
        raise BadInput("No model was given to profile.")
    folders = [Path(model) for model in models]
    tokenizers = {
        (folder / "tokenizer.json").read_bytes() for folder in folders if (folder / "tokenizer.json").is_file()
    }
    if len(tokenizers) != 1:
        raise BadInput(
            "The models do not share one tokenizer.json, so no text is of equal length for all. Profile them apart."
        )
    tokenizer = load_tokenizer(next(folder for folder in folders if (folder / "tokenizer.json").is_file()), 512)
    with bar("latency") as shown:
        document = time_candidates(
            candidates,
            read_texts(Path(data)),
            tokenizer,
            batches=batches,
            lengths=lengths,
            seconds=seconds / (len(candidates) * len(batches) * len(lengths)),
            progress=shown,
        )
    return dict(document)
