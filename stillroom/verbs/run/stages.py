"""The stages of `run`: the trainings, then export, scores, timing and the bundle."""

import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime as ort

from compress.data.examples import examples_fingerprint
from compress.runs.lineage import read_lineage
from compress.runs.stages import Cost, Of, RunStage, fingerprints_of, run_stages
from export.graph.exporter import export_graph
from export.packing.builder import ModelReport
from export.packing.variants import make_variants
from export.settings import VariantSettings
from latency.candidates.candidate import Candidate
from latency.profile import Plan, time_grid
from serve.bundle.manifest import ONNX_NAMES, canonical_json
from serve.errors import GateMissed
from stillroom.console import bar, say
from stillroom.inputs.preflight import RunInputs, timed_tokens
from stillroom.report.run_page import write_report
from stillroom.verbs.run.report import INT8, REPORT, model_report_of, read_json, report_of
from stillroom.verbs.run.scores import make_scores
from stillroom.verbs.run.student_stages import StudentStages
from stillroom.verbs.run.time_budget import EXPORT_SECONDS, REST, STARTING_SECONDS

BATCHES = (1, 8)
LENGTHS = (16, 128)  # tokens: a short message, a paragraph


class BudgetMissed(GateMissed):
    """The int8 student is slower than the budget."""

    def __init__(self, message: str, measured_ms: float) -> None:
        super().__init__(message)
        self.measured_ms = measured_ms


class Run(StudentStages):
    """One run to a bundle."""

    def __init__(self, inputs: RunInputs, machine: dict[str, Any] | None = None) -> None:
        super().__init__(inputs)
        self.machine = machine
        self.model_report: ModelReport | None = None
        self.report: dict[str, Any] = {}
        self.stages += self._bundle_stages()
        self.fingerprints = fingerprints_of(self.stages)

    def make(self, *names: str) -> dict[str, Path]:
        """Run the stages, or those that are named, and give the folders of all that were made so far."""
        return run_stages(self.inputs.workdir, self.stages, self.folders, only=names or None)

    def _bundle_stages(self) -> list[RunStage]:
        inputs, r = self.inputs, self.inputs.recipe
        # onnxruntime's module says its version itself: on a GPU its package has another name.
        runtimes = [version("onnx"), version("onnxscript"), ort.__version__]
        ships = "trimmed" if r.keep_words_of and not r.vocabulary_size else "student"
        promised: list[object] = [r.promises, r.promise_confidence] if r.promises else []
        if inputs.promised_on:
            promised.append(examples_fingerprint([*inputs.promised_on.examples, *inputs.promised_on.outside]))
        languages = [example.language for example in inputs.splits.test]
        return [
            RunStage(
                "export",
                ("export", Of(ships), runtimes, r.gate, r.keep_right, *promised),
                lambda folder: make_export(
                    folder, self.inputs, self.folders["student"], self.folders.get("teacher")
                ),
                "export: fp32 and int8, checked against torch",
                alone=True,
                costs=(Cost(REST, "second", lambda _: EXPORT_SECONDS),),
            ),
            RunStage(
                "scores",
                (
                    "scores", Of("export"), Of("undistilled") if r.undistilled else "", r.gate, r.teacher_gate,
                    *([languages] if any(languages) else []),
                ),
                lambda folder: make_scores(folder, self.inputs, self.folders),
                "scores: gates on validation, then test, once",
                then=self._check_gates,
                costs=(Cost(REST, "text", lambda _: 4 * len(inputs.test) + 5 * len(inputs.validation)),),
            ),
            RunStage(
                "latency",
                (
                    "latency", Of("scores"), r.latency_seconds, *([r.budget_ms, r.percentile, r.tokens] if r.budget_ms else []),
                ),
                self._time,
                lambda: f"timing {'teacher and student, in turns' if 'teacher' in self.folders else 'the student'}",
                then=self._check_budget,
                costs=(Cost(REST, "second", lambda _: STARTING_SECONDS + r.latency_seconds),),
            ),
            RunStage(
                "bundle",
                (
                    "bundle", Of("latency"), r.model_name, r.license, r.data_license, r.language,
                    *(["auto", r.search_minutes] if inputs.auto else []),
                ),
            ),
        ]  # fmt: skip

    @property
    def scores(self) -> dict[str, Any]:
        """The scores of every model."""
        return read_json(self.folders["scores"] / "scores.json")

    def _check_gates(self, _folder: Path) -> None:
        """GateMissed, after the report is written, where a gate is missed."""
        self.model_report = model_report_of(self.inputs, self.folders, self.scores, self.fingerprints["bundle"])
        if self.model_report.missed:
            raise self.model_report.refusal(
                self._write_report(),
                f" More --student-epochs, more --unlabelled text or a larger --student usually help.{self.model_report.lower_gates}",
            )

    def _time(self, folder: Path) -> None:
        """Times student and teacher, if that is a model, in torch and onnxruntime, in turns on real text of this task."""
        assert self.model_report
        assert self.machine  # measured before any work, which would count as load
        inputs, folders, test = self.inputs, self.folders, self.model_report.scores["test"]
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
        (folder / "latency.json").write_bytes(canonical_json({**document, "machine": self.machine}))

    def _check_budget(self, folder: Path) -> None:
        """BudgetMissed, after the report is written, where the student is too slow."""
        latency = read_json(folder / "latency.json")
        try:
            check_met(self.inputs, latency, self._write_report(latency))
        except BudgetMissed:
            shutil.rmtree(folder)  # so that the same command times it again
            raise

    def _write_report(self, latency: dict[str, Any] | None = None) -> Path:
        assert self.model_report
        assert self.machine
        self.report = report_of(self.inputs, self.folders, self.scores, self.model_report, self.machine, latency)
        return write_report(self.inputs.workdir.root / REPORT, self.report)


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
        ours.split("validation"),
        inputs.max_length,
        promised_on=ours.promise_split(),
        threads=inputs.recipe.threads,
        progress=lambda line: say(f"  {line}"),
    )
    variants.wanted = replace(variants.wanted, gate=inputs.recipe.gate)
    variants.write()


def check_met(inputs: RunInputs, latency: dict[str, Any], report: Path) -> None:
    """Check the measured latency of the int8 student against the budget, if there is one.

    `report` is the file that the message names.

    Raises:
        BudgetMissed: it is slower.
    """
    recipe = inputs.recipe
    if not recipe.budget_ms:
        return
    tokens = timed_tokens(inputs, recipe.tokens)
    row = next(
        each
        for each in latency["candidates"]
        if each["name"] == INT8 and each["batch"] == 1 and each["tokens"] == tokens
    )
    measured_ms = row["p50_ms"] if recipe.percentile == 50 else row["p99_ms"]
    if measured_ms > recipe.budget_ms:
        raise BudgetMissed(
            f"The int8 student {inputs.shape} has p{recipe.percentile} of {measured_ms:.3g} ms on {tokens} tokens, and the budget is "
            f"{recipe.budget_ms:g} ms. Report: {report}.",
            measured_ms,
        )
