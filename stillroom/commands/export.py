"""`stillroom export`: a checkpoint with a head becomes a bundle, whoever trained it."""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from compress.data.encoded import Encoded, encode
from compress.data.examples import SPLITS, Example, Splits, Task, check_task, read_splits, read_texts
from compress.data.out_of_scope import refuse_in_scope, set_apart
from compress.engine.data_checks import labels_for, warnings_of
from compress.engine.lineage import LINEAGE, read_lineage
from compress.engine.resumable_stages import Workdir
from compress.engine.task_inputs import usable_length
from compress.evaluation.metrics import metric_name
from compress.models.pretrained import HEADS, Opened, open_model, save_tokenizer, with_markers
from export.graph.vocabulary_trimming import Trimmed, trim_vocabulary
from export.packing.builder import Variants, VariantSettings, make_variants, run_name
from export.packing.model_card import HUB_METRICS, CardFacts, Figure, model_card
from export.packing.scores_on_test import OnTest, scores_on_test
from export.packing.writer import clear_leftovers, pack, refuse_foreign
from export.precision.int8 import Scheme
from export.precision.int8_search import UNREPAIRED, Verdict, with_intervals
from export.validation.parity import Precision
from export.validation.temperature import KEPT_RIGHT, as_metrics, in_words
from latency.candidates.candidate import Candidate
from latency.measure.result_document import ProfileDocument
from latency.profile import Plan, time_grid
from serve.bundle.cpu_quota import available_cores
from serve.bundle.manifest import canonical_json
from serve.bundle.runtimes import Runtime
from serve.errors import BadInput, GateMissed
from serve.text.tokenizer import load_tokenizer
from stillroom.console import bar, say
from stillroom.inputs.recipe import listed
from stillroom.report.run_page import Report, write_report

LENGTHS = (16, 64, 128)  # tokens: a short message, a sentence or two, a paragraph


@dataclass(frozen=True)
class Exporting:
    """The settings of `stillroom export`."""

    data: str
    """Folder with train, validation and test files: calibrates, gates, reports."""
    precision: str = "fp32,int8"
    """Which graphs the bundle holds, of fp32, fp16, int8."""
    gate: float = 0.99
    """Least share of the fp32 metric that other precisions keep on validation."""
    out_of_scope: str = ""
    """Label of texts in the data that the model has no answer to; the threshold for abstaining is chosen on them."""
    keep_right: float = KEPT_RIGHT
    """Without such texts, the share of rightly answered ones that the threshold leaves answered; 0 sets no threshold."""
    int8: str = "static"
    """static, weight-only, or dynamic, whose answers depend on the batch."""
    runtime: str = "onnxruntime"
    """What serves int8: onnxruntime, which the base install has, or openvino."""
    fuse: bool = False
    """Join kernels in fp32 and fp16, for GPUs."""
    keep_words_of: tuple[Path, ...] = ()
    """Texts whose tokens the vocabulary is trimmed to; none leaves it whole."""
    name: str | None = None
    """What the server calls the model; the bundle's folder unless given."""
    max_length: int = 0
    """Longest text in tokens; 0 is all that the model takes."""
    latency_seconds: float = 20.0
    """For timing all variants in all runtimes; 0 leaves it out."""
    threads: int = 0
    """Cores to use; 0 is all."""

    @property
    def wanted(self) -> VariantSettings:
        """What to make. BadInput for what is unknown."""
        precisions = cast(tuple[Precision, ...], listed(self.precision))
        runtime = cast(Runtime, self.runtime)
        return VariantSettings(precisions, cast(Scheme, self.int8), self.fuse, self.gate, runtime, self.keep_right)


@dataclass(frozen=True)
class _Given:
    """What was asked for and opened, all of it checked."""

    wanted: VariantSettings
    opened: Opened
    task: Task
    splits: Splits
    outside: Splits | None
    """Texts out of scope, which are in none of `splits`."""
    labels: tuple[str, ...]
    max_length: int
    """In tokens."""
    threads: int
    name: str
    kept_texts: list[str]
    """What the vocabulary is trimmed to; none leaves it whole."""

    @property
    def metric(self) -> str:
        return metric_name(self.task, multi_label=self.splits.multi_label)


@dataclass(frozen=True)
class _Ready:
    """The checkpoint as the bundle will hold it, and the splits as its tokenizer reads them."""

    checkpoint: Path
    trimmed: Trimmed | None
    encoded: dict[str, Encoded]
    outside: dict[str, Encoded]
    """Texts out of scope, where there are any."""
    warnings: list[str]
    """What a person should know of the data, as `stillroom run` tells it."""


def export_checkpoint(checkpoint: str, out: Path, settings: Exporting) -> Path:
    """See `stillroom.api.export`."""
    out = Path(os.path.abspath(out))
    given = _checked(checkpoint, out, settings)
    with Workdir(out.with_name(f"{out.name}.export-work")).scratch() as folder:
        _refuse_taken(out)  # by an export that has ended since
        clear_leftovers(out)
        for ending in ("html", "json"):  # of an earlier call: whatever this one ends in, they would tell of another
            out.with_name(f"{out.name}.report.{ending}").unlink(missing_ok=True)
        return _export(folder, out, given, settings.latency_seconds)


def _checked(checkpoint: str, out: Path, settings: Exporting) -> _Given:
    """The inputs, opened; nothing is written. BadInput for what cannot be exported."""
    wanted = settings.wanted
    if not 0 <= settings.latency_seconds < math.inf:
        raise BadInput(f"--latency-seconds is {settings.latency_seconds:g}; a number of 0 or more is needed.")
    if settings.threads < 0:
        raise BadInput(f"--threads is {settings.threads}; give 0 for all cores, or a number of them.")
    _refuse_taken(out)
    opened = open_model(checkpoint, role="CKPT")
    if not (opened.folder / "model.safetensors").is_file():
        raise BadInput(f"CKPT {checkpoint} keeps its weights in several files; save it with all of them in one.")
    tasks = [task for task in HEADS if opened.head_for(check_task(task))]
    if not tasks:
        raise BadInput(f"{checkpoint} has no head for {' or '.join(HEADS)}; fine-tune it for a task first.")
    task = check_task(tasks[0])
    length = usable_length(settings.max_length, opened)
    splits, outside = read_splits(settings.data, task), None
    if settings.out_of_scope:
        splits, outside = set_apart(splits, settings.out_of_scope)
    labels, _ = labels_for(with_markers(opened) if splits.relations else opened, splits, task, new_head=False)
    refuse_in_scope(settings.out_of_scope, labels, f"CKPT {checkpoint}")
    kept_texts = [text for file in settings.keep_words_of for text in read_texts(file, pairs=True)]
    threads = settings.threads or available_cores()
    name = settings.name or out.name
    return _Given(wanted, opened, task, splits, outside, labels, length, threads, name, kept_texts)


def _refuse_taken(out: Path) -> None:
    refuse_foreign(out)
    if out.is_dir() and any(out.iterdir()):
        raise BadInput(
            f"--out {out} is a bundle already; nothing in it was touched. Remove it, or give another folder."
        )


def _export(folder: Path, out: Path, given: _Given, latency_seconds: float) -> Path:
    """The bundle `out`, and its report, put together in `folder`. GateMissed when the report is all that there is."""
    ready = _ready(folder / "checkpoint", given)
    for warning in ready.warnings:
        say(f"warning: {warning}")
    say(f"export: {', '.join(given.wanted.precisions)}, checked against torch")
    variants = make_variants(
        folder,
        ready.checkpoint,
        given.wanted,
        ready.encoded["train"].encodings,
        given.splits.validation,
        ready.encoded["validation"],
        given.max_length,
        outside=ready.outside.get("validation"),
        threads=given.threads,
        progress=lambda line: say(f"  {line}"),
    )
    if wrong := [*variants.faults, *variants.missed]:
        page = _write_report(folder, out, _report_of(given, ready, variants, OnTest({}, {}), None))
        raise GateMissed(f"No bundle was written: {'; '.join(wrong)}. The report is {page}.")
    outside = ready.outside.get("test")
    test = scores_on_test(variants, given.splits.test, ready.encoded["test"], outside, given.threads)
    latency = _time(variants, ready.checkpoint, given.splits.test, latency_seconds, given.threads, given.max_length)
    _pack(out, given, ready, variants, test)
    _write_report(folder, out, _report_of(given, ready, variants, test, latency))
    return out


def _ready(folder: Path, given: _Given) -> _Ready:
    """A copy of the checkpoint in `folder`, trimmed if that was asked for, and the splits read with its tokenizer."""
    save_tokenizer(given.opened, folder)
    for file in given.opened.folder.iterdir():
        if file.name in ("config.json", "model.safetensors", LINEAGE):
            shutil.copyfile(file, folder / file.name)
    trimmed = _trim(folder, given) if given.kept_texts else None
    tokenizer = load_tokenizer(folder, given.max_length)
    encoded, outside = (
        {
            split: encode(examples, tokenizer, given.task, given.labels, multi_label=given.splits.multi_label)
            for split in SPLITS
            if (examples := getattr(splits, split, []))
        }
        for splits in (given.splits, given.outside)
    )
    warnings = warnings_of(given.splits, tokenizer, given.task, given.max_length)
    return _Ready(folder, trimmed, encoded, outside, warnings)


def _pack(out: Path, given: _Given, ready: _Ready, variants: Variants, test: OnTest) -> None:
    """Card and manifest around the graphs, renamed into place in one step."""
    wanted, splits, served = given.wanted, given.splits, default_variant(variants)
    lineage = _lineage(given.opened) | ({"vocabulary": ready.trimmed.as_dict()} if ready.trimmed else {})
    validation = with_intervals(variants.validation)
    confidence = {precision: variants.confidence[precision] for precision in wanted.precisions}
    facts = CardFacts(
        given.name,
        given.task,
        given.labels,
        given.max_length,
        figures=_figures(given.metric, test.scores, variants),
        shipped=run_name(served, wanted.runs_in(served)),
        lineage=lineage,
        multi_label=splits.multi_label,
        relations=splits.relations,
        limits=variants.limits,
        confidence=in_words(confidence, test.reliability),
    )
    pack(
        out,
        checkpoint=ready.checkpoint,
        onnx_files={precision: variants.file(precision) for precision in wanted.precisions},
        schemes=dict(variants.schemes),
        needs=variants.needs,
        runtimes={precision: wanted.runs_in(precision) for precision in wanted.precisions},
        temperatures={precision: chosen.temperature for precision, chosen in confidence.items()},
        abstains_below={precision: chosen.abstain_below for precision, chosen in confidence.items()},
        name=given.name,
        task=given.task,
        labels=given.labels,
        multi_label=splits.multi_label,
        relations=splits.relations,
        max_length=given.max_length,
        inputs=variants.graph.inputs,
        default_variant=served,
        lineage=lineage,
        metrics={
            "metric": given.metric,
            "validation": validation,
            "test": with_intervals(test.scores),
            "confidence": as_metrics(confidence, test.reliability),
        },
        parity=variants.as_dict()["parity"],
        extra_files={"README.md": model_card(facts).encode()},
    )


def default_variant(variants: Variants) -> Precision:
    """What is served unless another is asked for: int8 when its answers do not depend on the batch, else a float one."""
    wanted = variants.wanted
    order: tuple[Precision, ...] = ("int8", "fp32", "fp16") if wanted.int8 != "dynamic" else ("fp32", "fp16", "int8")
    return next(precision for precision in order if precision in wanted.precisions)


def _trim(checkpoint: Path, given: _Given) -> Trimmed:
    pairs = [(example.text_read, example.text_pair) for example in given.splits.validation]
    held_out = [text for pair in pairs for text in pair if text]
    trimmed = trim_vocabulary(checkpoint, given.kept_texts, held_out)
    say(
        f"vocabulary: {trimmed.kept:,} of {trimmed.tokens:,} tokens kept; of the validation texts' tokens "
        f"{trimmed.unknown_before:,} were unknown before and {trimmed.unknown:,} are now, {trimmed.texts_split_otherwise:,} of "
        f"{trimmed.texts:,} texts are split in another way"
    )
    return trimmed


def _figures(metric: str, test: dict[str, Verdict], variants: Variants) -> list[Figure]:
    """Of everything in the bundle: a card that tells of what is not there would send a reader looking."""
    kind = HUB_METRICS[metric]
    return [
        Figure(name, kind, test[name].value, test[name].low, test[name].high, variants.file(precision).stat().st_size)
        for name, precision, _ in variants.runs
        if precision in variants.wanted.precisions
    ]


def _lineage(opened: Opened) -> dict[str, Any]:
    """What the checkpoint says of where it comes from; its curves stay with it."""
    found = read_lineage(opened.folder) or {"checkpoint": opened.public_name}
    return {key: value for key, value in found.items() if key not in ("loss", "validation")}


def _time(
    variants: Variants,
    checkpoint: Path,
    examples: Sequence[Example],
    seconds: float,
    threads: int,
    max_length: int,
) -> ProfileDocument | None:
    """Every variant in every runtime on real text, taking turns; the one that is served comes first."""
    if not seconds:
        return None
    served = default_variant(variants)
    first = (served, variants.wanted.runs_in(served))
    runs = sorted(variants.runs, key=lambda run: (run[1], run[2]) != first)
    candidates = [
        Candidate(name, runtime, kind, variants.file(kind), threads, max_length=max_length)
        for name, kind, runtime in runs
    ]
    if variants.search and variants.search.repaired:
        unrepaired = variants.file("int8").with_name(UNREPAIRED)
        candidates.append(Candidate("int8 before repair", "onnxruntime", "int8", unrepaired, threads))
    lengths = [length for length in LENGTHS if length <= max_length] or [max_length]
    with bar("latency") as shown:
        return time_grid(
            candidates,
            [example.text_read for example in examples],
            load_tokenizer(checkpoint, max_length),
            Plan((1,), tuple(lengths), seconds),
            progress=shown,
        )


def _report_of(
    given: _Given, ready: _Ready, variants: Variants, test: OnTest, latency: ProfileDocument | None
) -> Report:
    document = variants.as_dict()
    split, verdicts = ("test", test.scores) if test.scores else ("validation", variants.validation)
    report: dict[str, Any] = {
        "title": given.name,
        "task": given.task,
        "metric_name": f"{given.metric}, {split}",
        "summary": [
            {
                "name": run,
                "metric": verdicts[run].value,
                "low": verdicts[run].low,
                "high": verdicts[run].high,
                "size_bytes": variants.file(precision).stat().st_size,
            }
            for run, precision, _ in variants.runs
        ],
        "claims": [*in_words(variants.confidence, test.reliability), *claims_of(latency)],
        "gates": [
            {
                "name": f"{run} over fp32, validation",
                "value": variants.validation[run].share,
                "needed": variants.wanted.gate,
                "passed": variants.validation[run].share >= variants.wanted.gate,
            }
            for run, precision, _ in variants.runs
            if precision != "fp32"
        ],
        "warnings": [*ready.warnings, *variants.faults, *variants.missed, *variants.limits, *variants.notes],
        "agreement": {run: dict(vars(verdict)) for run, verdict in verdicts.items()},
        "search": document["search"],
        "fusions": document["fusions"],
        "parity": document["parity"],
        "confidence": as_metrics(variants.confidence, test.reliability),
    }
    if ready.trimmed:
        report["vocabulary"] = ready.trimmed.as_dict()
    if latency:
        report["latency"] = latency
    return cast(Report, report)


def claims_of(latency: ProfileDocument | None) -> list[str]:
    """In words: how fast each variant and runtime is at each length beside the one that is served."""
    if latency is None:
        return []
    reference = latency["candidates"][0]["name"]
    return [
        f"{row['tokens']} tokens: {row['b']} runs at {row['ratio']:.2f} times the speed of {reference} "
        f"[{row['low']:.2f}, {row['high']:.2f}]."
        for row in latency["ratios"]
    ]


def _write_report(folder: Path, out: Path, report: Report) -> Path:
    """Beside the bundle, not in it: timings differ from run to run, and a bundle's bytes do not.

    Each file is whole in `folder` before it is renamed into place.
    """
    write_report(folder / "report.html", report)
    (folder / "report.json").write_bytes(canonical_json(report))
    for ending in ("json", "html"):
        os.replace(folder / f"report.{ending}", out.with_name(f"{out.name}.report.{ending}"))
    return out.with_name(f"{out.name}.report.html")
