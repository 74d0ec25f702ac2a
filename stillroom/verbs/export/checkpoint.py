"""`stillroom export`: makes a bundle of any checkpoint with a head."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.data.columns import columns_of
from compress.data.examples import Example, Splits
from compress.data.label_checks import outside_warning
from compress.data.sampler import subset
from compress.data.splits import read_splits
from compress.data.task import Task
from compress.data.texts import read_texts
from compress.input_errors import Faults
from compress.models.configurations import LINEAGE
from compress.models.pretrained import (
    Opened,
    check_labels,
    head_fault,
    open_model,
    save_tokenizer,
    with_markers,
)
from compress.models.sentence_pooling import SentencePooling, max_tokens_in, pooling_in, write_pooling
from compress.runs.data_checks import (
    FurtherTexts,
    hold_out_label,
    labels_for,
    read_further,
    refuse_in_scope,
    warnings_of,
)
from compress.runs.lineage import base_model_of, read_lineage
from compress.runs.open_task import usable_length
from compress.runs.resumable_stages import Workdir
from compress.tasks import FEATURE_EXTRACTION, task_of
from export.graph.vocabulary_trimming import Trimmed, trim_vocabulary
from export.packing.builder import ModelReport, scores_on_test
from export.packing.model_card import CardFacts
from export.packing.variants import Split, Variants, gate, make_variants, run_name
from export.packing.writer import clear_leftovers, refuse_foreign
from export.precision.int8_search import UNREPAIRED
from export.settings import VariantSettings
from export.validation.promises import PROMISE_FILE
from latency.candidates.candidate import Candidate
from latency.measure.machine import machine_facts
from latency.profile import Plan, time_grid
from serve.bundle.cpu import available_cores
from serve.bundle.manifest import MANIFEST
from serve.errors import BadInput
from serve.files import output, path_beside, replacing, vacant
from serve.options import rule_faults
from serve.text.entity_markers import knows_markers
from serve.text.labels import OUTSIDE
from serve.text.tokenizer import load_tokenizer
from stillroom.console import bar, say
from stillroom.inputs.sample_texts.messages import support_messages
from stillroom.report.pages import page_or
from stillroom.report.run_page import report_files
from stillroom.verbs.export import Exporting

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

KINDS_OF_TEXTS = ("pairs", "single_texts")  # of the data, or else in the lineage of the checkpoint
LENGTHS = (16, 64, 128)  # tokens: a short message, a sentence or two, a paragraph

LEARNED = "a tenth of train, which the checkpoint may have learned"
# Unlabelled texts that an export without data reads: one half calibrates, the other checks.
TEXTS = 1_000


@dataclass(frozen=True)
class TeacherReference:
    """The teacher that an exported student is shown beside, and held to."""

    scores: Mapping[str, dict[str, float]]
    """By split: value, low and high end of its metric."""
    size_bytes: int
    gate: float
    """Least share of its metric on validation that the served variant keeps."""
    lineage: Mapping[str, Any]
    """Added to the lineage in the manifest."""


@dataclass(frozen=True)
class _Given:
    """What the settings name, opened and checked."""

    wanted: VariantSettings
    opened: Opened
    task: Task
    splits: Splits | None
    """None without data."""
    outside: Splits | None
    """Texts out of scope, which are in none of `splits`."""
    promised_on: FurtherTexts | None
    """The texts of --promise-data."""
    labels: tuple[str, ...]
    texts: list[str]
    """Without data: texts for parity and for calibrating int8."""
    kept_texts: list[str]
    """Texts whose words the trimmed vocabulary keeps; empty: it is not trimmed."""
    max_length: int
    """In tokens."""
    how: SentencePooling | None
    """How vectors are made; None for a model with a head."""

    def validation(self) -> list[Example]:
        """The texts that the graphs are checked on: validation, or every second of the unlabelled texts."""
        return self.splits.validation if self.splits else [Example(text) for text in self.texts[1::2]]


class _Texts(NamedTuple):
    """The texts of an export, tokenised as the checkpoint in the bundle reads them."""

    calibration: "list[Encoding]"
    validation: Split
    test: Split | None
    """None without data."""
    promised_on: Split | None
    """The texts of --promise-data."""
    relations: bool
    warnings: list[str]
    """Warnings about the data, as in `stillroom run`."""


def export_checkpoint(
    checkpoint: str, out: Path, settings: Exporting, beside: TeacherReference | None = None
) -> dict[str, Any]:
    """See `stillroom.export`; with `beside`, which asks for labelled data, the report has the teacher too."""
    machine = machine_facts()  # before any work, which would count as load of the machine
    out = Path(os.path.abspath(out))
    given = _checked(checkpoint, out, settings)
    threads = settings.threads or available_cores()
    with Workdir(path_beside(out, ".export-work")).scratch() as folder:
        _refuse_taken(out)  # again, since another export may have ended meanwhile
        clear_leftovers(out)
        for ending in ("html", "json"):  # left by an earlier call that missed a gate
            path_beside(out, f".report.{ending}").unlink(missing_ok=True)
        trimmed = _copy(folder / "checkpoint", given)
        texts = _encoded(given, load_tokenizer(folder / "checkpoint", given.max_length))
        for warning in texts.warnings:
            say(f"warning: {warning}")
        say(f"export: {', '.join(given.wanted.variants)}, checked against torch")
        variants = make_variants(
            folder,
            folder / "checkpoint",
            given.wanted,
            texts.calibration,
            texts.validation,
            given.max_length,
            promised_on=texts.promised_on,
            threads=threads,
            progress=lambda line: say(f"  {line}"),
        )
        made_of = {**({"vocabulary": trimmed.counts()} if trimmed else {}), **(beside.lineage if beside else {})}
        facts = _facts(given, settings, settings.name or out.name, texts.relations, made_of)
        model_report = ModelReport(
            facts, given.task.metric.name, variants, warnings=texts.warnings, **_teacher(beside, variants)
        )

        def report_of(latency: dict[str, Any] | None) -> dict[str, Any]:
            report = model_report.report() | {"machine": machine}
            if trimmed:
                report["vocabulary"] = trimmed.counts()
            if latency:
                report["latency"] = latency
            return report

        if model_report.missed:
            for name, content in report_files(report_of(None)).items():
                with replacing(path_beside(out, f".{name}")) as unfinished:
                    unfinished.write_bytes(content)
            page = page_or(path_beside(out, ".report.html"), f"{out.name}.report.json")
            raise model_report.refusal(page, model_report.lower_gates)
        if texts.test:
            model_report = replace(model_report, test=scores_on_test(variants, texts.test, threads)[0])
        latency = None
        if settings.latency_seconds:
            timed = [example.text_alone for example in (texts.test or texts.validation).examples]
            latency = _time(variants, timed, folder / "checkpoint", given.max_length, threads, settings.latency_seconds)
            latency["machine"] = machine
        model_report = replace(model_report, claims=_claims_of(latency))
        model_report.pack(out, folder / "checkpoint", report_files(report_of(latency)))
        return model_report.document(out, page_or(out / "report.html", "report.json"))


def _checked(checkpoint: str, out: Path, settings: Exporting) -> _Given:
    """Opens and checks the inputs; writes nothing. BadInput for what cannot be exported."""
    faults = Faults()
    wanted = faults.check(lambda: _wanted(settings))
    faults.messages += rule_faults(settings)
    faults.check(lambda: _refuse_taken(out))
    opened = faults.check(lambda: _opened(checkpoint, settings.revision))
    columns = columns_of(settings)
    task = (task_of(opened.config) if opened else None) or FEATURE_EXTRACTION
    asks = task.has_contexts
    if asks:
        columns = replace(columns, text=columns.question, text_pair=columns.context)
    if asks and not settings.data:
        faults.messages.append(
            f"--data is needed: {checkpoint} answers questions, and plain texts have none. Give a folder of questions with their contexts."
        )
    kept_texts = faults.check(
        lambda: [text for file in settings.keep_words_of for text in read_texts(file, columns, pairs=True)]
    )
    texts = [] if settings.data or asks else faults.check(lambda: _unlabelled(settings))
    faults.raise_if_any()
    assert opened is not None
    assert wanted is not None
    how = None if task.head else pooling_in(opened.folder, f"CKPT {checkpoint}")
    if how and settings.data:
        raise BadInput(
            f"--data is given, and {checkpoint} gives vectors, which have no labels. Give --texts, files of text like that of requests."
        )
    splits = outside = promised_on = None
    labels = opened.head_for(task) or ()
    check_labels(labels, task, f"CKPT {checkpoint}")
    length = usable_length(settings.max_length, opened)
    if how and not settings.max_length:
        length = max_tokens_in(opened.folder, length)
    if settings.data:
        splits = read_splits(settings.data, task, columns_of(settings), revision=settings.data_revision)
        if splits.held_out and wanted and wanted.promises and not settings.promise_data:
            raise BadInput(
                f"--promise {wanted.promises[0]} needs labelled texts that the checkpoint has not learned, and {settings.data} has no "
                "validation file. Add one, or give --promise-data."
            )
        if settings.out_of_scope:
            splits, outside = hold_out_label(splits, settings.out_of_scope)
        task = task.with_multi_label(splits.multi_label)
        labels, _ = labels_for(with_markers(opened) if splits.relations else opened, splits, task, new_head=False)
        refuse_in_scope(settings.out_of_scope, labels, f"CKPT {checkpoint}")
        if settings.promise_data:
            promised_on = read_further(
                "--promise-data", Path(settings.promise_data), task, columns_of(settings), [splits, *([outside] if outside else [])],
                labels, out_of_scope=settings.out_of_scope,
            )  # fmt: skip
    return _Given(
        wanted, opened, task if splits else task.with_multi_label(opened.multi_label), splits, outside, promised_on, labels, texts or [],
        kept_texts or [], length, how,
    )  # fmt: skip


def _wanted(settings: Exporting) -> VariantSettings:
    """The variants to make. BadInput where the text that int8 needs was not given."""
    variants = settings.variants or (("fp32", "int8") if settings.data else ("fp32",))
    if "int8" in variants and not settings.data and not settings.texts:
        raise BadInput(
            "--variants int8 needs text to calibrate on and to check with, and none was given. Give --data, a "
            "folder of labelled splits, or --texts, files of unlabelled text like that of real requests."
        )
    return replace(settings.graphs, variants=variants)


def _opened(checkpoint: str, revision: str) -> Opened:
    opened = open_model(checkpoint, role="CKPT", revision=revision)
    if not (opened.folder / "model.safetensors").is_file():
        raise BadInput(f"CKPT {checkpoint} has no model.safetensors; save its weights in that one file.")
    if not opened.has_head and not pooling_in(opened.folder, f"CKPT {checkpoint}"):
        raise BadInput(
            f"CKPT {checkpoint} {head_fault(opened.config)}; nor has it a modules.json that makes it an encoder of sentences. Fine-tune it "
            "for a task first, or distil one by --method sentence-vectors."
        )
    return opened


def _unlabelled(settings: Exporting) -> list[str]:
    """The texts of an export without data: those of `texts`, or generated messages."""
    if not settings.texts:
        return [message["text"] for message in support_messages("test", TEXTS // 2, 0, set())]
    found = list(
        dict.fromkeys(text for file in settings.texts for text in read_texts(Path(file), columns_of(settings)))
    )
    if len(found) < 2:
        raise BadInput(
            f"--texts {', '.join(settings.texts)} {'has' if len(settings.texts) == 1 else 'have'} 1 text; 2 or more are needed, to "
            "calibrate on some and check with others. Give a few hundred."
        )
    return subset(found, TEXTS)


def _refuse_taken(out: Path) -> None:
    refuse_foreign(output(out))
    if not vacant(out, MANIFEST):
        raise BadInput(
            f"--out {out} is a bundle already; nothing in it was touched. Remove it, or give another folder."
        )


def _copy(folder: Path, given: _Given) -> Trimmed | None:
    """Writes the checkpoint of the bundle into `folder`, with a trimmed vocabulary if asked for, which it returns."""
    save_tokenizer(given.opened, folder)
    for file in given.opened.folder.iterdir():
        if file.name in ("config.json", "model.safetensors", LINEAGE):
            shutil.copyfile(file, folder / file.name)
    if given.how:
        write_pooling(folder, given.how, given.opened.config.hidden_size, given.max_length)
    if not given.kept_texts:
        return None
    pairs = [(example.text_read, example.text_pair) for example in given.validation()]
    trimmed = trim_vocabulary(folder, given.kept_texts, [text for pair in pairs for text in pair if text])
    say(trimmed.told())
    return trimmed


def _encoded(given: _Given, tokenizer: "Tokenizer") -> _Texts:
    def split(examples: Sequence[Example], outside: Sequence[Example] = (), rests_on: str = "validation") -> Split:
        found, strange = (given.task.encode(each, tokenizer, given.labels) for each in (examples, outside))
        return Split(examples, found, strange if outside else None, given.splits is not None, rests_on)

    splits, outside, promised_on = given.splits, given.outside, given.promised_on
    if splits is None:
        relations = given.task.has_kinds and knows_markers(tokenizer)
        calibration = tokenizer.encode_batch(given.texts[::2])
        without_outside = given.task.labels_words and OUTSIDE not in given.labels
        warnings = outside_warning("of the model", "its id2label") if without_outside else []
        return _Texts(calibration, split(given.validation()), None, None, relations, warnings)
    warnings = warnings_of(splits, tokenizer, given.task, given.max_length)
    return _Texts(
        split(splits.train).encoded.encodings,
        split(splits.validation, outside.validation if outside else (), LEARNED if splits.held_out else "validation"),
        split(splits.test, outside.test if outside else ()),
        split(promised_on.examples, promised_on.outside, PROMISE_FILE) if promised_on else None,
        splits.relations,
        [*warnings, *(promised_on.warnings("--promise-data") if promised_on else [])],
    )


def _teacher(beside: TeacherReference | None, variants: Variants) -> dict[str, Any]:
    """The teacher's part of the report: its scores and size, and the gate that the served variant is held to; none without one."""
    if not beside:
        return {}
    ours = variants.validation[run_name(variants.served, variants.wanted.runs_in(variants.served))].value
    theirs = beside.scores["validation"]["value"]
    name = f"{variants.served} over teacher, validation"
    return {
        "others": {split: {"teacher": dict(scores)} for split, scores in beside.scores.items()},
        "other_sizes": {"teacher": beside.size_bytes},
        "other_gates": [gate(name, ours / theirs if theirs else 0.0, beside.gate, "--teacher-gate")],
    }


def _facts(given: _Given, settings: Exporting, name: str, relations: bool, made_of: Mapping[str, Any]) -> CardFacts:
    """Facts of the model for its card and manifest; `made_of` is added to the lineage of the checkpoint."""
    # The checkpoint's lineage, without its curves.
    lineage = read_lineage(given.opened.folder) or {"checkpoint": given.opened.public_name}
    texts = lineage if given.splits is None else {name: getattr(given.splits, name) for name in KINDS_OF_TEXTS}
    return CardFacts(
        name,
        given.task.name,
        given.labels,
        given.max_length,
        license=settings.license or None,
        data_license=settings.data_license or None,
        language=settings.language or None,
        base_model=base_model_of(given.opened),
        dataset=settings.data if settings.data and not Path(settings.data).exists() else None,
        lineage={key: value for key, value in lineage.items() if key not in ("loss", "validation")} | dict(made_of),
        multi_label=given.task.multi_label,
        relations=relations,
        pairs=texts.get("pairs") is True,
        single_texts=texts.get("single_texts"),
        vector_width=given.opened.config.hidden_size if given.how else 0,
        normalised=bool(given.how and given.how.normalised),
    )


def _time(
    variants: Variants, texts: list[str], checkpoint: Path, max_length: int, threads: int, seconds: float
) -> dict[str, Any]:
    """Times every variant in every runtime on real text, in turns; the default variant is the first candidate."""
    first = (variants.served, variants.wanted.runs_in(variants.served))
    candidates = [
        Candidate(name, runtime, kind, variants.file(kind), threads, max_length=max_length)
        for name, kind, runtime in sorted(variants.runs, key=lambda run: (run[1], run[2]) != first)
    ]
    if variants.search and variants.search.repaired:
        unrepaired = variants.file("int8").with_name(UNREPAIRED)
        candidates.append(Candidate("int8 before repair", "onnxruntime", "int8", unrepaired, threads))
    lengths = [length for length in LENGTHS if length <= max_length] or [max_length]
    plan = Plan((1,), tuple(lengths), seconds)
    with bar("latency") as shown:
        return time_grid(candidates, texts, load_tokenizer(checkpoint, max_length), plan, progress=shown)


def _claims_of(latency: dict[str, Any] | None) -> list[str]:
    """A sentence per variant, runtime and length: its speed relative to the default variant."""
    return (
        [
            f"{row['tokens']} tokens: {row['b']} runs at {row['ratio']:.2f} times the speed of {latency['candidates'][0]['name']} "
            f"[{row['low']:.2f}, {row['high']:.2f}]."
            for row in latency["ratios"]
        ]
        if latency
        else []
    )
