"""The stages after training: export and parity, scores and gates, latency, and the bundle with its report."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from compress.data.encoded import Encoded
from compress.data.examples import check_task
from compress.engine.answering_teacher import as_given
from compress.engine.hardware import device_here
from compress.engine.lineage import base_model_of, read_lineage
from compress.engine.resumable_stages import STATE
from compress.engine.soft_labels import told
from compress.engine.task_stages import load_stage
from compress.engine.understood import understood
from compress.evaluation.metrics import Prediction, difference, gold_of, per_label, question_scores, score
from compress.evaluation.numbers import number_scores
from compress.evaluation.predictions import predictions, row_logits
from compress.evaluation.questions import Acceptable, best_answer_from, said_of
from export.graph.exporter import export_graph
from export.graph.vocabulary_trimming import trim_vocabulary
from export.packing.builder import ModelReport, OnTest, Scores, scores_on_test
from export.packing.model_card import CardFacts
from export.packing.variants import Split, gate, make_variants, read_variants
from export.precision.int8_search import with_intervals
from export.settings import VariantSettings
from latency.candidates.candidate import Candidate
from latency.measure.machine import MachineFacts
from latency.measure.result_document import ProfileDocument, RatioRow
from latency.profile import Plan, time_grid
from serve.bundle.manifest import ONNX_NAMES, canonical_json
from serve.wording import all_of
from stillroom.commands.run.disagreements import disagreements
from stillroom.commands.run.languages import behind_in_languages, per_language
from stillroom.console import bar, say
from stillroom.inputs.preflight import TRIMMED, RunInputs
from stillroom.inputs.recipe import write_recipe
from stillroom.inputs.timed_tokens import timed_tokens
from stillroom.report.run_page import Report, report_files

BATCHES = (1, 8)
LENGTHS = (16, 128)  # tokens: a short message, a paragraph
REPORT = "report.html"
INT8 = "student ORT int8"  # the timed candidate that ships
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


def make_trimmed(folder: Path, inputs: RunInputs, student: Path) -> None:
    """The student that ships, with a vocabulary trimmed to the texts that the run keeps.

    Training changes no row of the word table whose token is in no text of it, so trimming it before would give the same student.
    """
    shutil.copytree(student, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATE))
    trim(folder, inputs)


def trim(folder: Path, inputs: RunInputs) -> None:
    """Trim the vocabulary of the student in `folder`, in place, to the texts that the run keeps and to the size that it asks for."""
    pairs = [(example.text_read, example.text_pair) for example in inputs.splits.validation]
    held_out = [text for pair in pairs for text in pair if text]
    trimmed = trim_vocabulary(folder, inputs.kept_texts, held_out, inputs.recipe.vocabulary_size)
    say(f"  {trimmed.told()}")
    (folder / TRIMMED).write_bytes(canonical_json(trimmed.counts()))


def _vocabulary(student: Path) -> dict[str, Any]:
    """What was trimmed of the vocabulary of `student`; empty if it is whole."""
    return {"vocabulary": read_json(student / TRIMMED)} if (student / TRIMMED).is_file() else {}


def make_export(folder: Path, inputs: RunInputs, student: Path, teacher: Path | None) -> None:
    """Makes the student's graphs, each checked against torch and fp32, and the teacher's graph for timing if it is a model."""
    ours = inputs.read_by(student)
    if teacher:
        export_graph(teacher, folder / "teacher.onnx", inputs.max_length)
    # A student with a score of 0 or less has no share to keep here: the stage of the scores reports the missed gates.
    finds_nothing = max(value for _, value in read_lineage(student)["validation"]) <= 0
    variants = make_variants(
        folder,
        student,
        VariantSettings(
            gate=0 if finds_nothing else inputs.recipe.gate,
            keep_right=inputs.recipe.keep_right,
            promises=inputs.recipe.promises,
            promise_confidence=inputs.recipe.promise_confidence,
        ),
        ours.train.encodings,
        _split(ours, "validation"),
        inputs.max_length,
        promised_on=_promised_on(ours),
        threads=inputs.recipe.threads,
        progress=lambda line: say(f"  {line}"),
    )
    variants.wanted = replace(variants.wanted, gate=inputs.recipe.gate)
    variants.write()


def _promised_on(inputs: RunInputs) -> Split | None:
    """The texts of --promise-data, tokenised."""
    if not (found := inputs.promised_on):
        return None
    return Split(
        found.examples, inputs.encoded(found.examples), inputs.encoded(found.outside) if found.outside else None
    )


def _split(inputs: RunInputs, name: str) -> Split:
    return Split(getattr(inputs.splits, name), getattr(inputs, name), inputs.out_of_scope(name))


def _logits(inputs: RunInputs, folders: dict[str, Path], split: str) -> dict[str, list[np.ndarray]]:
    """The logits of every trained model of the run for the rows of `split`; of a file of answers if it has all of its texts."""
    encoded: Encoded = getattr(inputs, split)
    held_out = inputs.splits.held_out and inputs.splits.answered and split == "validation"  # its labels are the answers
    asked = inputs.answers if not held_out else None
    answers = asked.logits(encoded, getattr(inputs.splits, split)) if asked else [None]
    there = [logits for logits in answers if logits is not None]
    found = {"teacher": there} if len(there) == len(answers) else {}
    present = [name for name in TRAINED if name in folders]
    return found | {
        name: row_logits(
            load_stage(folders[name], inputs).to(device_here(inputs.recipe.device)),
            getattr(inputs.read_by(folders[name]), split),
        )
        for name in present
    }


def make_scores(folder: Path, inputs: RunInputs, folders: dict[str, Path]) -> None:
    """Scores on validation, then on test, which is read only here. If a gate or parity is missed, test is not read."""
    task = check_task(inputs.recipe.task)
    ours = inputs.read_by(folders["student"])

    chosen: dict[str, float] = {}  # by model: the score from which it answers a question, chosen on validation

    def answers(split: str, logits: dict[str, list[np.ndarray]]) -> dict[str, list[Prediction]]:
        readers = {"teacher": inputs}
        if "undistilled" in folders:
            readers["undistilled"] = inputs.read_by(folders["undistilled"])
        said = {}
        for name, rows in logits.items():
            encoded: Encoded = getattr(readers.get(name, ours), split)
            if task == "question-answering":
                if split == "validation":
                    right = [cast(Acceptable, gold_of(example, task)) for example in inputs.splits.validation]
                    chosen[name] = best_answer_from(right, said_of(encoded, rows))
                # The graphs are the student's.
                encoded = replace(encoded, answer_from=chosen[name if name in chosen else "student"])
            said[name] = predictions(encoded, rows)
        return said

    def scored(split: str, said: dict[str, list[Prediction]]) -> Scores:
        gold = [gold_of(example, task) for example in getattr(inputs.splits, split)]
        return with_intervals({name: score(gold, said[name]) for name in TRAINED if name in said})

    on_validation = answers("validation", _logits(inputs, folders, "validation"))
    document: dict[str, Any] = {"validation": scored("validation", on_validation)}
    model_report = model_report_of(inputs, folders, document)
    if not model_report.missed:
        test, graph_logits = scores_on_test(model_report.variants, _split(ours, "test"), inputs.recipe.threads)
        said = answers("test", _logits(inputs, folders, "test") | graph_logits)
        gold = [gold_of(example, task) for example in inputs.splits.test]
        document |= {
            "test": scored("test", said),
            "graphs": asdict(test),
            "differences": _differences(gold, said),
            "per_label": _per_label(gold, said),
        }
        if task == "text-regression":
            document["numbers"] = number_rows(gold, said)
        if task == "question-answering":
            models = [name for name in MODELS if name in said]
            document["questions"] = [
                {"name": name, **with_intervals(question_scores(gold, said[name]))} for name in models
            ]
        if languages := per_language(inputs.splits.test, gold, said):
            document["per_language"] = languages
            gates = {"teacher": inputs.recipe.teacher_gate, "fp32": inputs.recipe.gate}
            document["language_warnings"] = behind_in_languages(inputs.splits.test, gold, said, gates)
        if "teacher" in said:
            document |= disagreements(inputs.splits.test, gold, said["teacher"], said["int8"], "test")
    (folder / "scores.json").write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


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
        gates = [gate("int8 over teacher, validation", share, recipe.teacher_gate)]
    return ModelReport(
        CardFacts(
            name=recipe.model_name,
            task=check_task(recipe.task),
            labels=inputs.labels,
            multi_label=inputs.splits.multi_label,
            relations=inputs.splits.relations,
            pairs=inputs.splits.pairs,
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
        claims=[choice["why"], *told(choice.get("soft_labels")), *claims(scores, labels=choice["method"] == "labels")],
        warnings=[*inputs.warnings, *scores.get("language_warnings", [])],
    )


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
    tables = {name: per_label(gold, said[name]) if name in said else {} for name in ("teacher", "student", "int8")}
    labels = sorted({label for scored in tables.values() for label in scored})
    return [
        {
            "label": label,
            "support": max(scored.get(label, {"support": 0})["support"] for scored in tables.values()),
            **{name: scored[label]["f1"] if label in scored else None for name, scored in tables.items()},
        }
        for label in labels
    ]


def number_rows(gold: list[Prediction], said: dict[str, list[Prediction]]) -> list[dict[str, Any]]:
    """For each model that gives numbers its name and its scores beside the metric, each with value, low and high."""
    models = [name for name in MODELS if name in said]
    return [{"name": name, **with_intervals(number_scores(gold, said[name]))} for name in models]


def make_latency(
    folder: Path, inputs: RunInputs, folders: dict[str, Path], test: Scores, machine: MachineFacts
) -> None:
    """Times student and teacher, if that is a model, in torch and onnxruntime, in turns on real text of this task.

    `test` are their scores on test. `machine` was measured before any work, which would count as load.
    """
    threads = inputs.recipe.threads
    exported = folders["export"]
    candidates = []
    if "teacher" in folders:
        candidates += [
            Candidate("teacher torch fp32", "torch", "fp32", folders["teacher"], threads),
            Candidate("teacher ORT fp32", "onnxruntime", "fp32", exported / "teacher.onnx", threads),
        ]
    candidates += [
        Candidate("student torch fp32", "torch", "fp32", folders["student"], threads),
        Candidate("student ORT fp32", "onnxruntime", "fp32", exported / ONNX_NAMES["fp32"], threads),
        Candidate(INT8, "onnxruntime", "int8", exported / ONNX_NAMES["int8"], threads),
    ]
    keys = [*["teacher"] * (len(candidates) - 3), "student", "fp32", "int8"]
    metrics = {candidate.name: test[key]["value"] for candidate, key in zip(candidates, keys, strict=True)}
    lengths = [length for length in LENGTHS if length <= inputs.max_length] or [inputs.max_length]
    if inputs.recipe.budget_ms:
        lengths = sorted({*lengths, timed_tokens(inputs, inputs.recipe.tokens)})
    with bar("latency") as shown:
        document = time_grid(
            candidates,
            [example.text_alone for example in inputs.splits.test],
            inputs.read_by(folders["student"]).tokenizer,  # whose ids the others have too
            Plan(BATCHES, tuple(lengths), inputs.recipe.latency_seconds),
            metrics=metrics,
            seed=inputs.recipe.seed,
            progress=shown,
        )
    (folder / "latency.json").write_bytes(canonical_json({**document, "machine": machine}))


def speedup(document: ProfileDocument) -> RatioRow:
    """The torch teacher's p50 over the shipped variant's, batch 1, at the shortest length, with its interval.

    Without a teacher that is a model it is the p50 of the student in torch.
    """
    rows = [row for row in document["ratios"] if row["b"] == INT8 and row["batch"] == 1]
    return min(rows, key=lambda row: row["tokens"])


def report_of(
    inputs: RunInputs,
    folders: dict[str, Path],
    scores: dict[str, Any],
    model_report: ModelReport,
    machine: MachineFacts,
    latency: ProfileDocument | None = None,
) -> Report:
    """All of the report, with texts of the data; without test scores and latency if a gate was missed."""
    document = model_report.report()
    document |= {
        "understood": understood(inputs),
        "machine": machine,
        "made": _made(inputs, read_lineage(folders["student"])["method"], test_read=model_report.test is not None),
        "names": {row["name"]: _meaning(row["name"], inputs) for row in document["summary"]},
        "choice": read_lineage(folders["student"])["choice"],
        "training": [
            {"stage": name, "loss": lineage["loss"], "validation": lineage["validation"]}
            for name, folder in folders.items()
            if name == folder.name
            and name not in ("start", "student")
            and (lineage := read_lineage(folder)).get("loss")
        ],
        "recipe": write_recipe(as_given(inputs.recipe, inputs.answering)),
        "lineage": model_report.facts.lineage,
    }
    shown = ("numbers", "questions", "per_label", "per_language", "disagreeing", "disagreements")
    document |= {key: scores[key] for key in shown if key in scores}
    document |= _vocabulary(folders["student"])
    if inputs.found:
        document["found"] = inputs.found
    if latency is not None:
        document["latency"] = latency
        times = latency_by_model(latency)
        for row in document["summary"]:
            row["latency_ms"] = times.get(row["name"])
        shortest = min(row["tokens"] for row in latency["candidates"])
        document["summary_note"] = (
            f"Latency is the median (p50) at batch 1 and {shortest} tokens: {'' if inputs.answers else 'teacher and '}student in torch, "
            "fp32 and int8 in onnxruntime."
        )
    return cast(Report, document)


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


def shareable(report: Report, shown_in: str) -> Report:
    """`report` without texts of the data, for a bundle. It has the number of disagreements, and `shown_in`, the page with them."""
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
        INT8: "int8",
    }
    shortest = min(row["tokens"] for row in latency["candidates"])
    return {
        names[row["name"]]: row["p50_ms"]
        for row in latency["candidates"]
        if row["name"] in names and row["batch"] == 1 and row["tokens"] == shortest
    }


def claims(scores: dict[str, Any], *, labels: bool = False) -> list[str]:
    """What the paired bootstrap supports, in words. With `labels`, student and undistilled are one model."""
    found = []
    for row in scores.get("differences", []):
        if labels and row["b"] == "undistilled":
            continue
        size = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        verdict = (
            "a difference that the paired bootstrap supports"
            if row["supported"]
            else "no difference that the paired bootstrap supports"
        )
        found.append(f"{row['a']} against {row['b']} on test: {size}, {verdict}.")
        if row["a"] in ("student", "int8") and row["b"] == "undistilled" and row["supported"] and row["difference"] < 0:
            found.append(
                f"WARNING: distillation made this model worse: {row['a']} scores below training on labels alone. A likely cause is a "
                "weak teacher. Fine-tune it longer, or use a better one. The better student is in the folder `undistilled` of the "
                "work folder; `stillroom export` makes a bundle of it."
            )
    return found


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
            "data": inputs.data_fingerprint,
            "seed": inputs.recipe.seed,
            "versions": student["versions"],
            "teacher_fine_tuned": not inputs.teacher_has_head and not inputs.answers,
        }
        | _vocabulary(folders["student"])
    )


def write_bundle(
    out: Path,
    inputs: RunInputs,
    folders: dict[str, Path],
    full: Report,
    model_report: ModelReport,
    minutes: float,
) -> None:
    """Packs graphs, report, card and manifest, renamed into place in one step.

    The `full` report with texts of the data stays in the work folder. The bundle, which may be passed on, has it without them.
    """
    report = shareable(full, f"{inputs.workdir.root.name}/{REPORT}")
    # Without the folders above the bundle, so that its bytes do not depend on where it is written.
    recipe = {"recipe.toml": write_recipe(replace(as_given(inputs.recipe, inputs.answering), out=out.name)).encode()}
    model_report.pack(out, folders["student"], report_files(report, minutes=minutes) | recipe)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
