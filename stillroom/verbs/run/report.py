"""The report of a run, and the bundle that holds it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from compress.runs.answering_teacher import as_given
from compress.runs.input_summary import input_summary
from compress.runs.lineage import base_model_of, read_lineage
from compress.runs.soft_labels import soft_label_lines
from export.packing.builder import ModelReport, OnTest
from export.packing.model_card import CardFacts
from export.packing.variants import gate, read_variants
from serve.wording import all_of
from stillroom.inputs.preflight import TRIMMED, RunInputs
from stillroom.inputs.recipe import write_recipe
from stillroom.report.run_page import report_files

REPORT = "report.html"
INT8 = "student ORT int8"  # the timed candidate that ships
# The timed candidates, by the names that the summary uses.
TIMED_AS = {"teacher": "teacher torch fp32", "student": "student torch fp32", "fp32": "student ORT fp32", "int8": INT8}
TRAINED = ("teacher", "undistilled", "student")
DISTIL = "distil-"  # what the folders of a method's stages begin with
MODELS = (*TRAINED, "fp32", "int8")
MEANINGS = {
    "teacher": "the large model that the student learns from",
    "undistilled": "the control: a student of the same shape and start, trained for as many steps on the task, on labels alone",
    "student": "the small model that ships, in torch",
    "fp32": "the student exported to ONNX, in 32-bit floating point",
    "int8": "the exported student in 8-bit integers, the bundle's default variant",
}


def model_report_of(
    inputs: RunInputs, folders: dict[str, Path], scores: dict[str, Any], run_fingerprint: str = ""
) -> ModelReport:
    """The report of the student after the stage `export`, with the `scores` of the models."""
    recipe, variants, choice = (
        inputs.recipe,
        read_variants(folders["export"]),
        read_lineage(folders["student"])["choice"],
    )
    ours, theirs = variants.validation["int8"].value, scores["validation"].get("teacher")
    gates = []
    if theirs:
        share = ours / theirs["value"] if theirs["value"] else 0.0
        gates = [gate("int8 over teacher, validation", share, recipe.teacher_gate, "--teacher-gate")]
    return ModelReport(
        CardFacts(
            name=recipe.model_name,
            task=inputs.task.name,
            labels=inputs.labels,
            multi_label=inputs.splits.multi_label,
            relations=inputs.splits.relations,
            pairs=inputs.splits.pairs,
            single_texts=inputs.splits.single_texts,
            max_length=inputs.max_length,
            license=recipe.license or None,
            data_license=recipe.data_license or None,
            language=recipe.language or None,
            dataset=None if Path(recipe.data).exists() else recipe.data,
            base_model=base_model_of(inputs.opened),
            lineage=lineage_of(inputs, folders) | ({"run": run_fingerprint} if run_fingerprint else {}),
        ),
        inputs.metric,
        variants,
        msgspec.convert(scores["graphs"], OnTest) if "graphs" in scores else None,
        others={split: scores[split] for split in ("validation", "test") if split in scores},
        other_sizes={name: (folders[name] / "model.safetensors").stat().st_size for name in TRAINED if name in folders},
        other_gates=gates,
        claims=[
            choice["why"],
            *soft_label_lines(choice.get("soft_labels")),
            *claims(scores, labels=choice["method"] == "labels"),
        ],
        warnings=[*inputs.warnings, *scores.get("language_warnings", [])],
    )


def report_of(
    inputs: RunInputs,
    folders: dict[str, Path],
    scores: dict[str, Any],
    model_report: ModelReport,
    machine: dict[str, Any],
    latency: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All of the report, with texts of the data; without test scores and latency if a gate was missed."""
    document = model_report.report()
    document |= {
        "understood": input_summary(inputs),
        "machine": machine,
        "made": _made(inputs, read_lineage(folders["student"])["method"], test_read=model_report.test is not None),
        "names": {row["name"]: _meaning(row["name"], inputs) for row in document["summary"]},
        "choice": read_lineage(folders["student"])["choice"],
        "training": [
            {
                "stage": name,
                **{key: lineage[key] for key in ("loss", "validation", "best_step", "ended") if key in lineage},
            }
            for name, folder in folders.items()
            if name == folder.name
            and name not in ("start", "student", f"{DISTIL}teacher-head")
            and not name.startswith("teacher-fold")
            and (lineage := read_lineage(folder)).get("loss")
        ],
        "recipe": write_recipe(as_given(inputs.recipe, inputs.answering)),
        "lineage": model_report.facts.lineage,
    }
    from_scores = ("numbers", "questions", "per_label", "per_language", "disagreeing", "disagreements")
    document |= {key: scores[key] for key in from_scores if key in scores}
    document |= _vocabulary(folders["student"])
    if inputs.found:
        document["found"] = inputs.found
    if latency is not None:
        document["latency"] = latency
        shortest = min(row["tokens"] for row in latency["candidates"])
        times = {
            row["name"]: row["p50_ms"]
            for row in latency["candidates"]
            if row["batch"] == 1 and row["tokens"] == shortest
        }
        for row in document["summary"]:
            row["latency_ms"] = times.get(TIMED_AS.get(row["name"], ""))
        document["summary_note"] = (
            f"Latency is the median (p50) at batch 1 and {shortest} tokens: {'' if inputs.answers else 'teacher and '}student in torch, "
            "fp32 and int8 in onnxruntime."
        )
    return document


def _meaning(name: str, inputs: RunInputs) -> str:
    """What the model `name` of the summary is."""
    model, _, runtime = name.partition(" ")
    if model == "teacher" and inputs.answers:
        of = "of" if inputs.answering else "in"
        return f"the answers {of} {inputs.answers.public_name} that the student learns from"
    return f"{MEANINGS[model]}; here run by {runtime}" if runtime else MEANINGS[model]


def _made(inputs: RunInputs, method: str, *, test_read: bool) -> str:
    """The teacher, method, student and data of this run, in words."""
    config, recipe, splits = inputs.opened.config, inputs.recipe, inputs.splits
    data = Path(recipe.data).resolve().name if Path(recipe.data).exists() else recipe.data
    texts = [f"{len(splits.train):,} labelled texts of {data}"]
    if method != "labels":
        texts += [f"{len(inputs.unlabelled):,} unlabelled ones"] if inputs.unlabelled else []
        texts += [f"{recipe.augment} generated from each labelled one"] if recipe.augment else []
        texts += [f"{len(inputs.corpus):,} of a corpus"] if inputs.corpus and inputs.distill_tokens else []
    if inputs.further and method != "labels" and not inputs.answering:
        texts += [f"{len(inputs.further):,} texts that it alone labels"]
    tuned = "with its head as given" if inputs.teacher_has_head else "fine-tuned on the same labels"
    scored = f"scores are on {len(splits.test):,} texts of test, read once" if test_read else "test was not read"
    how = "learned from labels alone, and starts from" if method == "labels" else f"was distilled by {method} from"
    begins = ""
    if inputs.start_fingerprint:
        begins = f", which starts from the checkpoint {Path(recipe.start).name},"
        how = "learned from labels alone, compared with" if method == "labels" else how
    body = f"{inputs.opened.public_name} ({config.num_hidden_layers}x{config.hidden_size}"
    teacher = f"the teacher {body}, {tuned})"
    if inputs.answers:
        of = "of" if inputs.answering else "in"
        how = "learned from labels alone" if method == "labels" else f"was distilled by {method} from the answers {of}"
        teacher = "" if method == "labels" else f"{inputs.answers.public_name}"
        begins = f", which starts from layers of {body}),"
    return (
        f"A student ({inputs.shape}){begins} {how} {teacher}{' ' if teacher else ''}on {all_of(texts)}. "
        f"Choices and gates use {len(splits.validation):,} texts of validation; {scored}."
    )


def lineage_of(inputs: RunInputs, folders: dict[str, Path]) -> dict[str, Any]:
    """The lineage of the student, without dates and times, so that equal inputs give an equal lineage."""
    student = read_lineage(folders["student"])
    own_start = student["method"] != "labels" and not inputs.begins_on_labels
    start = read_lineage(inputs.workdir.root / f"{DISTIL}start" if own_start else folders["start"])
    teacher = {"teacher": inputs.opened.public_name, "teacher_revision": inputs.opened.revision}
    if inputs.answers:
        teacher = {
            "teacher": inputs.answers.public_name,
            "teacher_answers_sha256": inputs.answers.fingerprint,
            "start": inputs.opened.public_name,
            "start_revision": inputs.opened.revision,
        }
    return (
        teacher
        | {
            "method": student["method"],
            "student": start["student"],
            "origin": start["origin"],
            "data": inputs.splits.fingerprint,
            "seed": inputs.recipe.seed,
            "versions": student["versions"],
            "teacher_fine_tuned": not inputs.teacher_has_head and not inputs.answers,
        }
        | _vocabulary(folders["student"])
    )


def _vocabulary(student: Path) -> dict[str, Any]:
    """What was trimmed of the vocabulary of `student`; empty if it is whole."""
    return {"vocabulary": read_json(student / TRIMMED)} if (student / TRIMMED).is_file() else {}


def claims(scores: dict[str, Any], *, labels: bool = False) -> list[str]:
    """Which models differ by the paired bootstrap, in words. With `labels`, student and undistilled are one model.

    It is of these trainings and of other texts: whether a method is worth it, one training cannot show.
    """
    found = []
    for row in scores.get("differences", []):
        if labels and row["b"] == "undistilled":
            continue
        size = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        verdict = "these two models differ" if row["differ"] else "these two models are not shown to differ"
        found.append(f"{row['a']} against {row['b']} on test: {size}, {verdict}.")
        if row["a"] in ("student", "int8") and row["b"] == "undistilled" and row["differ"] and row["difference"] < 0:
            found.append(
                f"WARNING: distillation made this model worse: {row['a']} scores below training on labels alone. A likely cause is a "
                "weak teacher. Fine-tune it longer, or use a better one. The better student is in the folder `undistilled` of the "
                "work folder; `stillroom export` makes a bundle of it."
            )
    return found


def write_bundle(
    out: Path,
    inputs: RunInputs,
    folders: dict[str, Path],
    full: dict[str, Any],
    model_report: ModelReport,
    minutes: float,
) -> None:
    """Packs graphs, report, card and manifest, renamed into place in one step.

    The `full` report with texts of the data stays in the work folder. The bundle, which may be passed on, has it without them.
    """
    report = {key: value for key, value in full.items() if key != "disagreements"}
    if "disagreeing" in full:
        report["disagreeing"] = {**full["disagreeing"], "shown_in": f"{inputs.workdir.root.name}/{REPORT}"}
    # Without the folders above the bundle, so that its bytes do not depend on where it is written.
    recipe = {"recipe.toml": write_recipe(replace(as_given(inputs.recipe, inputs.answering), out=out.name)).encode()}
    model_report.pack(out, folders["student"], report_files(report, minutes=minutes) | recipe)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
