"""The stages after training: export and parity, scores and gates, latency, and the bundle with its report."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from compress.data.encoded import Encoded
from compress.data.examples import Example, check_task
from compress.engine.hardware import device_here
from compress.engine.lineage import read_lineage
from compress.engine.task_stages import load_stage
from compress.engine.understood import understood
from compress.evaluation.metrics import Prediction, Score, difference, gold_of, per_label, score
from compress.evaluation.predictions import predictions, row_logits
from export.graph.exporter import export_graph
from export.packing.builder import VariantSettings, make_variants
from export.packing.model_card import HUB_METRICS, CardFacts, Figure, model_card
from export.packing.writer import pack
from export.precision.int8_search import with_intervals
from export.validation.temperature import as_metrics, in_words
from latency.candidates.candidate import Candidate
from latency.measure.machine import machine_facts
from latency.measure.result_document import ProfileDocument, RatioRow
from latency.profile import Plan, time_grid
from serve.bundle.manifest import canonical_json
from stillroom.commands.run.confidence import GRAPHS, confidence_of, graph_logits, on_test, reliability_on_test
from stillroom.console import bar, say
from stillroom.inputs.preflight import RunInputs
from stillroom.inputs.recipe import write_recipe
from stillroom.report.run_page import Report, page_bytes, report_page, write_report

FP32, INT8 = GRAPHS["fp32"], GRAPHS["int8"]
BATCHES = (1, 8)
LENGTHS = (16, 128)  # tokens: a short message, a paragraph
SHOWN_DISAGREEMENTS = 40
REPORT = "report.html"
MODELS = ("teacher", "undistilled", "student", "fp32", "int8")
SHOWN_AS = {
    "teacher": "teacher",
    "undistilled": "student without distillation",
    "student": "student, torch",
    "fp32": "student, fp32",
    "int8": "student, int8",
}
MEANINGS = {
    "teacher": "the large model that the student learns from",
    "undistilled": "the student trained on labels alone, from the same start in as many steps: what distillation has to beat",
    "student": "the small model, distilled from the teacher, in torch",
    "fp32": "the student exported to ONNX, in 32-bit floating point",
    "int8": "the exported student in 8-bit integers, which is what a bundle serves unless told otherwise",
}


def make_export(folder: Path, inputs: RunInputs, student: Path, teacher: Path) -> None:
    """The graphs of the student, each held against torch and fp32, and the teacher's graph for timing."""
    export_graph(teacher, folder / "teacher.onnx", inputs.max_length)
    # Of a student that finds nothing there is no share to keep: that it misses every gate is said with the scores.
    finds_nothing = max(value for _, value in read_lineage(student)["validation"]) == 0
    variants = make_variants(
        folder,
        student,
        VariantSettings(gate=0 if finds_nothing else inputs.recipe.gate, keep_right=inputs.recipe.keep_right),
        inputs.train.encodings,
        inputs.splits.validation,
        inputs.validation,
        inputs.max_length,
        outside=inputs.out_of_scope("validation"),
        threads=inputs.recipe.threads,
        progress=lambda line: say(f"  {line}"),
    )
    (folder / "export.json").write_bytes(canonical_json(variants.as_dict()))


def logits_of_all(inputs: RunInputs, folders: dict[str, Path], encoded: Encoded) -> dict[str, list[np.ndarray]]:
    """What every model of the run says of the texts of `encoded`: the logits of each one's rows."""
    said: dict[str, list[np.ndarray]] = {}
    for name in ("teacher", "undistilled", "student"):
        if name in folders:
            said[name] = row_logits(load_stage(folders[name], inputs).to(device_here(inputs.recipe.device)), encoded)
    return said | {name: graph_logits(inputs, folders, name, encoded) for name in GRAPHS}


def _answers(encoded: Encoded, said: dict[str, list[np.ndarray]]) -> dict[str, list[Prediction]]:
    return {name: predictions(encoded, logits) for name, logits in said.items()}


def make_scores(folder: Path, inputs: RunInputs, folders: dict[str, Path]) -> None:
    """Gates on validation; then test, read this once. A missed gate, or graphs that answer otherwise, leave test unread."""
    task = check_task(inputs.recipe.task)
    answers = _answers(inputs.validation, logits_of_all(inputs, folders, inputs.validation))
    validation = _scores(inputs.splits.validation, answers, task)
    gates = _gates(inputs, validation)
    document: dict[str, Any] = {"metric": inputs.metric, "validation": with_intervals(validation), "gates": gates}
    exported = read_json(folders["export"] / "export.json")
    if all(gate["passed"] for gate in gates) and not exported["faults"]:
        logits = logits_of_all(inputs, folders, inputs.test)
        said = _answers(inputs.test, logits)
        gold = [gold_of(example, task) for example in inputs.splits.test]
        reliability = reliability_on_test(inputs, folders, exported, logits)
        differing = _disagreements(inputs.splits.test, gold, said)
        document |= {
            "test": with_intervals(_scores(inputs.splits.test, said, task)),
            "reliability": {name: asdict(found) for name, found in reliability.items()},
            "differences": _differences(gold, said),
            "per_label": _per_label(gold, said),
            "disagreeing": {
                "count": sum(a != b for a, b in zip(said["teacher"], said["int8"], strict=True)),
                "texts": len(gold),
                "split": "test",
                "shown": len(differing),
            },
            "disagreements": differing,
        }
    (folder / "scores.json").write_bytes(canonical_json(document))


def _scores(examples: Sequence[Example], said: dict[str, list[Prediction]], task: Any) -> dict[str, Score]:
    gold = [gold_of(example, task) for example in examples]
    return {name: score(gold, answers) for name, answers in said.items()}


def _gates(inputs: RunInputs, validation: dict[str, Score]) -> list[dict[str, Any]]:
    """Each bar as a share of a metric on validation."""
    rows = [("int8 over fp32", "int8", "fp32", inputs.recipe.gate)]
    rows.append(("int8 over teacher", "int8", "teacher", inputs.recipe.teacher_gate))
    gates = []
    for name, a, b, needed in rows:
        share = validation[a].value / validation[b].value if validation[b].value else 0.0
        gates.append({"name": f"{name}, validation", "value": share, "needed": needed, "passed": share >= needed})
    return gates


def _differences(gold: list[Prediction], said: dict[str, list[Prediction]]) -> list[dict[str, Any]]:
    pairs = [("student", "undistilled"), ("int8", "undistilled"), ("int8", "teacher"), ("int8", "fp32")]
    found = []
    for a, b in pairs:
        if a in said and b in said:
            d = difference(gold, said[a], said[b])
            found.append(
                {
                    "a": a,
                    "b": b,
                    "difference": d.value,
                    "low": d.low,
                    "high": d.high,
                    "supported": not d.low <= 0 <= d.high,
                }
            )
    return found


def _per_label(gold: list[Prediction], said: dict[str, list[Prediction]]) -> list[dict[str, Any]]:
    tables = {name: per_label(gold, said[name]) for name in ("teacher", "student", "int8")}
    labels = sorted({label for scored in tables.values() for label in scored})
    return [
        {
            "label": label,
            "support": max(scored.get(label, {"support": 0})["support"] for scored in tables.values()),
            **{name: scored[label]["f1"] if label in scored else None for name, scored in tables.items()},
        }
        for label in labels
    ]


def _disagreements(
    examples: Sequence[Example], gold: list[Prediction], said: dict[str, list[Prediction]]
) -> list[dict[str, str]]:
    rows = []
    for example, truth, teacher, student in zip(examples, gold, said["teacher"], said["int8"], strict=True):
        if teacher != student:
            rows.append(
                {
                    "text": example.text_read,
                    "teacher": _spelled(example.text, teacher),
                    "student": _spelled(example.text, student),
                    "gold": _spelled(example.text, truth),
                }
            )
    return rows[:SHOWN_DISAGREEMENTS]


def _spelled(text: str, answer: Prediction) -> str:
    if isinstance(answer, str):
        return answer
    items: list[Any] = sorted(answer)
    said = [item if isinstance(item, str) else f"{item[2]}: {text[item[0] : item[1]]}" for item in items]
    return "; ".join(said) or "nothing"


def make_latency(folder: Path, inputs: RunInputs, folders: dict[str, Path], scores: dict[str, Any]) -> None:
    """Teacher and student, in torch and onnxruntime, taking turns on real text of this task."""
    threads = inputs.recipe.threads
    exported = folders["export"]
    candidates = [
        Candidate("teacher torch fp32", "torch", "fp32", folders["teacher"], threads),
        Candidate("teacher ORT fp32", "onnxruntime", "fp32", exported / "teacher.onnx", threads),
        Candidate("student torch fp32", "torch", "fp32", folders["student"], threads),
        Candidate("student ORT fp32", "onnxruntime", "fp32", exported / FP32, threads),
        Candidate("student ORT int8", "onnxruntime", "int8", exported / INT8, threads),
    ]
    rows = scores["test"]
    metrics = {
        c.name: rows[key]["value"]
        for c, key in zip(candidates, ("teacher", "teacher", "student", "fp32", "int8"), strict=True)
    }
    lengths = [length for length in LENGTHS if length <= inputs.max_length] or [inputs.max_length]
    with bar("latency") as shown:
        document = time_grid(
            candidates,
            [example.text_read for example in inputs.splits.test],
            inputs.tokenizer,
            Plan(BATCHES, tuple(lengths), inputs.recipe.latency_seconds),
            metrics=metrics,
            seed=inputs.recipe.seed,
            progress=shown,
        )
    (folder / "latency.json").write_bytes(canonical_json(document))


def speedup(document: ProfileDocument) -> RatioRow:
    """The torch teacher's p50 over the shipped variant's, batch 1, at the shortest length, with its interval."""
    rows = [row for row in document["ratios"] if row["b"] == "student ORT int8" and row["batch"] == 1]
    return min(rows, key=lambda row: row["tokens"])


def report_of(
    inputs: RunInputs, folders: dict[str, Path], scores: dict[str, Any], latency: ProfileDocument | None
) -> Report:
    """All that the report shows, texts of the data included; without test scores and latency when a gate was missed."""
    split = "test" if "test" in scores else "validation"
    exported = read_json(folders["export"] / "export.json")
    sizes = {
        name: (folders[name] / "model.safetensors").stat().st_size
        for name in ("teacher", "undistilled", "student")
        if name in folders
    } | {"fp32": (folders["export"] / FP32).stat().st_size, "int8": (folders["export"] / INT8).stat().st_size}
    document: dict[str, Any] = {
        "title": inputs.recipe.model_name,
        "task": inputs.recipe.task,
        "understood": understood(inputs),
        "machine": latency["machine"] if latency else machine_facts(),
        "made": _made(inputs, read_lineage(folders["student"])["method"], test_read="test" in scores),
        "names": {name: MEANINGS[name] for name in MODELS if name in scores[split]},
        "metric_name": f"{scores['metric']}, {split}",
        "summary": [
            {"name": name, "metric": row["value"], "low": row["low"], "high": row["high"], "size_bytes": sizes[name]}
            for name in MODELS
            if (row := scores[split].get(name))
        ],
        "claims": [*claims(scores), *in_words(confidence_of(exported), on_test(scores))],
        "gates": scores["gates"],
        "search": exported["search"],
        "fusions": exported["fusions"],
        "parity": exported["parity"],
        "confidence": as_metrics(confidence_of(exported), on_test(scores)),
        "training": [
            {"stage": name, "loss": lineage["loss"], "validation": lineage["validation"]}
            for name in ("teacher", "relations", "undistilled", "student")
            if name in folders and (lineage := read_lineage(folders[name]))["loss"]
        ],
        "warnings": inputs.warnings,
        "recipe": write_recipe(inputs.recipe),
        "lineage": lineage_of(inputs, folders),
    }
    document |= {key: scores[key] for key in ("per_label", "disagreeing", "disagreements") if key in scores}
    if latency is not None:
        document["latency"] = latency
        times = latency_by_model(latency)
        for row in document["summary"]:
            row["latency_ms"] = times.get(row["name"])
        shortest = min(row["tokens"] for row in latency["candidates"])
        document["summary_note"] = (
            f"Latency is the median (p50) of a batch of one text of {shortest} tokens: teacher and student in torch, fp32 and int8 "
            "in onnxruntime."
        )
    return cast(Report, document)


def _made(inputs: RunInputs, method: str, *, test_read: bool) -> str:
    """What was trained from what, on which data, in words."""
    config, recipe, splits = inputs.opened.config, inputs.recipe, inputs.splits
    data = Path(recipe.data).resolve().name if Path(recipe.data).exists() else recipe.data
    texts = [f"{len(splits.train):,} labelled texts of {data}"]
    texts += [f"{len(inputs.unlabelled):,} unlabelled ones"] if inputs.unlabelled else []
    texts += [f"{recipe.augment} generated from each labelled one"] if recipe.augment else []
    texts += [f"{len(inputs.corpus):,} of a corpus"] if inputs.corpus else []
    tuned = "with its head as given" if inputs.teacher_has_head else "fine-tuned on the same labels"
    scored = f"scores are of {len(splits.test):,} texts of test, read once" if test_read else "test was not read"
    return (
        f"A student ({inputs.shape}) was distilled by {method} from the teacher {inputs.opened.public_name} "
        f"({config.num_hidden_layers}x{config.hidden_size}, {tuned}) on {_listed(texts)}. "
        f"Choices and gates are of {len(splits.validation):,} texts of validation; {scored}."
    )


def _listed(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def shareable(report: Report, shown_in: str) -> Report:
    """`report` without texts of the data, for a bundle: it says how many differ, and that `shown_in` shows them."""
    kept: dict[str, Any] = {key: value for key, value in report.items() if key != "disagreements"}
    if "disagreeing" in report:
        kept["disagreeing"] = {**report["disagreeing"], "shown_in": shown_in}
    return cast(Report, kept)


def latency_by_model(latency: ProfileDocument) -> dict[str, float]:
    """p50 at batch 1 and the shortest length, by the names that the summary uses."""
    names = {
        "teacher torch fp32": "teacher",
        "student torch fp32": "student",
        "student ORT fp32": "fp32",
        "student ORT int8": "int8",
    }
    shortest = min(row["tokens"] for row in latency["candidates"])
    return {
        names[row["name"]]: row["p50_ms"]
        for row in latency["candidates"]
        if row["name"] in names and row["batch"] == 1 and row["tokens"] == shortest
    }


def claims(scores: dict[str, Any]) -> list[str]:
    """What the paired bootstrap supports, in words."""
    found = []
    for row in scores.get("differences", []):
        size = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        verdict = (
            "a difference that the paired bootstrap supports"
            if row["supported"]
            else "no difference that the paired bootstrap supports"
        )
        found.append(f"{row['a']} against {row['b']} on test: {size}, {verdict}.")
        if row["a"] in ("student", "int8") and row["b"] == "undistilled" and row["supported"] and row["difference"] < 0:
            found.append(
                f"WARNING: distillation made this model worse: labels alone serve better than {row['a']}. A teacher that is weak "
                "itself does that. Fine-tune it longer or take a better one; the better student of the two is the stage "
                "`undistilled` in the work folder, and `stillroom export` makes a bundle of it."
            )
    return found


def lineage_of(inputs: RunInputs, folders: dict[str, Path]) -> dict[str, Any]:
    """Where the student comes from; no dates and no times, so that equal inputs give equal lines."""
    student, start = read_lineage(folders["student"]), read_lineage(folders["start"])
    return {
        "teacher": inputs.opened.public_name,
        "teacher_revision": inputs.opened.revision,
        "method": student["method"],
        "student": start["student"],
        "origin": start["origin"],
        "data": inputs.data_fingerprint,
        "seed": inputs.recipe.seed,
        "versions": student["versions"],
        "teacher_fine_tuned": not inputs.teacher_has_head,
    }


def write_bundle(
    out: Path,
    inputs: RunInputs,
    folders: dict[str, Path],
    scores: dict[str, Any],
    latency: ProfileDocument,
    run_fingerprint: str,
    minutes: float,
) -> None:
    """Report, card and manifest around the graphs, renamed into place in one step.

    The report with texts of the data stays in the work folder; a bundle, which is passed on, has the one without.
    """
    exported = read_json(folders["export"] / "export.json")
    full = report_of(inputs, folders, scores, latency)
    write_report(inputs.workdir.root / REPORT, full)
    report = shareable(full, f"{inputs.workdir.root.name}/{REPORT}")
    lineage = lineage_of(inputs, folders) | {"run": run_fingerprint}
    confidence = confidence_of(exported)
    metrics = {key: scores[key] for key in ("metric", "test", "validation")} | {"confidence": report["confidence"]}
    pack(
        out,
        checkpoint=folders["student"],
        onnx_files={"fp32": folders["export"] / FP32, "int8": folders["export"] / INT8},
        schemes=exported["schemes"],
        needs=exported["needs"],
        temperatures={name: chosen.temperature for name, chosen in confidence.items()},
        abstains_below={name: chosen.abstain_below for name, chosen in confidence.items()},
        name=inputs.recipe.model_name,
        task=check_task(inputs.recipe.task),
        labels=inputs.labels,
        multi_label=inputs.splits.multi_label,
        relations=inputs.splits.relations,
        pairs=inputs.splits.pairs,
        max_length=inputs.max_length,
        inputs=exported["inputs"],
        default_variant="int8",
        lineage=lineage,
        metrics=metrics,
        parity=exported["parity"],
        extra_files={
            "README.md": card_of(
                inputs, report, lineage, exported["limits"], in_words(confidence, on_test(scores))
            ).encode(),
            REPORT: page_bytes(report_page(report)),
            "report.json": canonical_json({**report, "minutes": minutes}),
            "recipe.toml": write_recipe(inputs.recipe).encode(),
        },
    )


def card_of(
    inputs: RunInputs, report: Report, lineage: dict[str, Any], limits: Sequence[str], confidence: Sequence[str]
) -> str:
    """The bundle's README, from what the report says."""
    metric = HUB_METRICS[inputs.metric]
    figures = [
        Figure(SHOWN_AS[row["name"]], metric, row["metric"], row.get("low"), row.get("high"), row.get("size_bytes"))
        for row in report["summary"]
    ]
    teacher = inputs.recipe.teacher
    return model_card(
        CardFacts(
            name=inputs.recipe.model_name,
            task=check_task(inputs.recipe.task),
            labels=inputs.labels,
            multi_label=inputs.splits.multi_label,
            relations=inputs.splits.relations,
            max_length=inputs.max_length,
            figures=figures,
            shipped=SHOWN_AS["int8"],
            dataset=None if Path(inputs.recipe.data).exists() else inputs.recipe.data,
            report=True,
            limits=limits,
            confidence=confidence,
            base_model=None if Path(teacher).exists() else teacher,
            lineage=lineage,
        )
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that a stage left."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
