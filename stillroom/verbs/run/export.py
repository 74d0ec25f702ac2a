"""The stages of a run that need no training: a trimmed vocabulary, export with parity, and latency."""

import shutil
from dataclasses import replace
from pathlib import Path

from compress.runs.lineage import read_lineage
from compress.runs.resumable_stages import STATE
from export.graph.exporter import export_graph
from export.graph.vocabulary_trimming import trim_vocabulary
from export.packing.builder import Scores
from export.packing.variants import Split, make_variants
from export.settings import VariantSettings
from latency.candidates.candidate import Candidate
from latency.measure.machine import MachineFacts
from latency.profile import Plan, time_grid
from serve.bundle.manifest import ONNX_NAMES, canonical_json
from stillroom.console import bar, say
from stillroom.inputs.preflight import TRIMMED, RunInputs, timed_tokens
from stillroom.verbs.run.report import INT8

BATCHES = (1, 8)
LENGTHS = (16, 128)  # tokens: a short message, a paragraph


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
        split_of(ours, "validation"),
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


def split_of(inputs: RunInputs, name: str) -> Split:
    """The texts of a split, those out of scope apart."""
    return Split(getattr(inputs.splits, name), getattr(inputs, name), inputs.out_of_scope(name))


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
