"""`stillroom export`: a checkpoint with a head becomes a bundle, whoever trained it."""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

from compress.examples import check_task, read_splits
from compress.preflight import labels_for
from compress.scores import gold_of, metric_name, score
from compress.tasks import encode, predictions
from compress.teacher import HEADS, Opened, open_model, save_tokenizer, with_markers
from export.card import HUB_METRICS, CardFacts, Figure, model_card
from export.pack import pack, refuse_foreign
from serve.errors import BadInput, GateMissed
from serve.session import Session
from stillroom.ground import usable_length
from stillroom.judging import FP32, INT8, PARITY_TEXTS, graph_logits, make_graphs, parity_faults
from stillroom.lineage import LINEAGE, read_lineage
from stillroom.show import say


def export_checkpoint(checkpoint: str, out: Path, data: str, *, gate: float, name: str | None, max_length: int) -> Path:
    """See `stillroom.verbs.export`."""
    refuse_foreign(out)
    if out.is_dir() and any(out.iterdir()):
        raise BadInput(
            f"--out {out} is a bundle already; nothing in it was touched. Remove it, or give another folder."
        )
    opened = open_model(checkpoint, role="CKPT")
    if not (opened.folder / "model.safetensors").is_file():
        raise BadInput(f"CKPT {checkpoint} keeps its weights in several files; save it with all of them in one.")
    tasks = [task for task in HEADS if opened.head_for(check_task(task))]
    if not tasks:
        raise BadInput(f"{checkpoint} has no head for {' or '.join(HEADS)}; fine-tune it for a task first.")
    task = check_task(tasks[0])
    length = usable_length(max_length, opened)
    splits = read_splits(data, task)
    labels, _ = labels_for(with_markers(opened) if splits.relations else opened, splits, task, new_head=False)
    metric = metric_name(task, multi_label=splits.multi_label)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch)
        ready = folder / "checkpoint"
        tokenizer = save_tokenizer(opened, ready)
        for file in opened.folder.iterdir():
            if file.name in ("config.json", "model.safetensors", LINEAGE):
                shutil.copyfile(file, ready / file.name)
        tokenizer.enable_truncation(max_length=length)
        encoded = {
            split: encode(getattr(splits, split), tokenizer, task, labels, multi_label=splits.multi_label)
            for split in ("train", "validation", "test")
        }
        texts = [example.text_or_pair for example in splits.validation[:PARITY_TEXTS]]
        say("export: fp32 and int8, checked against torch")
        document = make_graphs(folder, ready, encoded["train"].encodings, texts, length, None)

        def scores(split: str) -> dict[str, Any]:
            gold = [gold_of(example, task) for example in getattr(splits, split)]
            found = {}
            for variant, file in (("fp32", FP32), ("int8", INT8)):
                reached = score(gold, predictions(encoded[split], graph_logits(Session(folder / file), encoded[split])))
                found[variant] = {"value": reached.value, "low": reached.low, "high": reached.high}
            return found

        validation = scores("validation")
        share = validation["int8"]["value"] / max(validation["fp32"]["value"], 1e-12)
        if share < gate:
            raise GateMissed(
                f"No bundle was written: int8 keeps {share:.4f} of fp32's {metric} on validation, needed {gate:g}."
            )
        if faults := parity_faults(document["parity"]):
            raise GateMissed(f"No bundle was written: {'; '.join(faults)}.")
        metrics = {"metric": metric, "validation": validation, "test": scores("test")}
        lineage = _lineage(opened)
        facts = CardFacts(
            name or out.name,
            task,
            labels,
            length,
            lineage=lineage,
            multi_label=splits.multi_label,
            relations=splits.relations,
        )
        return pack(
            out,
            checkpoint=ready,
            onnx_files={"fp32": folder / FP32, "int8": folder / INT8},
            schemes={"fp32": "fp32", "int8": document["int8"]["scheme"]},
            name=name or out.name,
            task=task,
            labels=labels,
            multi_label=splits.multi_label,
            relations=splits.relations,
            max_length=length,
            inputs=document["inputs"],
            default_variant="int8",
            lineage=lineage,
            metrics=metrics,
            parity=document["parity"],
            cpu=document["int8"]["cpu"],
            extra_files={"README.md": _card(facts, metrics).encode()},
        )


def _lineage(opened: Opened) -> dict[str, Any]:
    """What the checkpoint says of where it comes from; its curves stay with it."""
    found = read_lineage(opened.folder) or {"checkpoint": opened.public_name}
    return {key: value for key, value in found.items() if key not in ("loss", "validation")}


def _card(facts: CardFacts, metrics: dict[str, Any]) -> str:
    kind = HUB_METRICS[metrics["metric"]]
    figures = [Figure(variant, kind, row["value"], row["low"], row["high"]) for variant, row in metrics["test"].items()]
    return model_card(dataclasses.replace(facts, figures=figures, shipped="int8"))
