"""The stages of `run`: the trainings, then export, scores, timing and the bundle."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import onnxruntime as ort

from compress.data.examples import examples_fingerprint
from compress.runs.stages import Cost, Of, RunStage, fingerprints_of, run_stages
from export.packing.builder import ModelReport
from latency.measure.machine import MachineFacts
from latency.measure.result_document import ProfileDocument
from stillroom.inputs.preflight import RunInputs
from stillroom.report.run_page import Report, write_report
from stillroom.verbs.run.export import make_export, make_latency
from stillroom.verbs.run.report import REPORT, model_report_of, read_json, report_of
from stillroom.verbs.run.scores import make_scores
from stillroom.verbs.run.student_stages import StudentStages
from stillroom.verbs.run.time_budget import EXPORT_SECONDS, REST, STARTING_SECONDS
from stillroom.verbs.run.within_budget import BudgetMissed, check_met


class Run(StudentStages):
    """One run to a bundle."""

    def __init__(self, inputs: RunInputs, machine: MachineFacts | None = None) -> None:
        super().__init__(inputs)
        self.machine = machine
        self.model_report: ModelReport | None = None
        self.report: Report = {}
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
                " More --student-epochs, more --unlabelled text or a larger --student usually help; lower the gate only if a lower score "
                "is enough.",
            )

    def _time(self, folder: Path) -> None:
        assert self.model_report
        assert self.machine
        test = self.model_report.scores["test"]
        make_latency(folder, self.inputs, self.folders, test, self.machine)

    def _check_budget(self, folder: Path) -> None:
        """BudgetMissed, after the report is written, where the student is too slow."""
        latency = cast(ProfileDocument, read_json(folder / "latency.json"))
        try:
            check_met(self.inputs, latency, self._write_report(latency))
        except BudgetMissed:
            shutil.rmtree(folder)  # so that the same command times it again
            raise

    def _write_report(self, latency: ProfileDocument | None = None) -> Path:
        assert self.model_report
        assert self.machine
        self.report = report_of(self.inputs, self.folders, self.scores, self.model_report, self.machine, latency)
        return write_report(self.inputs.workdir.root / REPORT, self.report)
