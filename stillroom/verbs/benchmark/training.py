"""Writes the files of a task as splits, fine-tunes the model on them, and scores it."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.data.labelled_files import read_examples
from compress.evaluation.metrics import ENTITY_F1, Prediction
from compress.evaluation.predictions import row_logits
from compress.evaluation.questions import ANSWER_F1
from compress.models.pretrained import Opened, load, open_model
from compress.progress import Event
from compress.runs.finetune import fine_tune
from compress.runs.hardware import device_here
from compress.runs.resumable_stages import Workdir
from compress.runs.stages import fingerprint, folder_fingerprint, trained_with
from compress.settings import FineTuning
from serve.bundle.manifest import canonical_json, sha256_file
from serve.errors import BadInput
from serve.text.questions import EVEN_SCORE
from serve.text.tokenizer import load_tokenizer
from stillroom.console import show
from stillroom.verbs.benchmark import Benchmarking
from stillroom.verbs.benchmark.suites import SuiteTask, Tuning

POSITIVE = "1"  # the class whose F1 GLUE reports
SCORE, MODEL, WARNINGS = "score.json", "model", "warnings.json"
WARNING = "warning: "
TRAIN, VALIDATION, TEST = "train.jsonl", "validation.jsonl", "test.jsonl"


@dataclass(frozen=True)
class Prepared:
    """The files of a task, written as splits."""

    folder: Path
    fingerprint: str
    warnings: list[str]


def scored_name(suffix: str) -> str:
    """The file of labelled rows that are scored under `suffix`."""
    return f"scored-{suffix or 'dev'}.jsonl"


def prepare(work: Workdir, task: SuiteTask, data: Path) -> Prepared:
    """Writes the files of `task` in `data` as splits, in a stage of `work`. Raises BadInput: a file is not as published."""
    decided_by = fingerprint("suite", task.name, [sha256_file(data / file) for file in task.files])

    def make(folder: Path) -> None:
        warnings: list[str] = []

        def write(name: str, file: str, suffix: str = "") -> None:
            found = task.rows(data, file, suffix)
            warnings.extend(found.warnings)
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found.rows), encoding="utf-8")
            try:
                read_examples(folder / name, task.kind)
            except BadInput as fault:
                raise BadInput(f"{data / file} is not as it was published. {fault.message}") from None

        write(TRAIN, task.train)
        for suffix, file in task.scored.items():
            write(scored_name(suffix), file, suffix)
        first = next(iter(task.scored))
        write(VALIDATION, task.validation or task.scored[first], "en" if "en" in task.scored else first)
        shutil.copyfile(folder / VALIDATION, folder / TEST)  # which is not read
        (folder / WARNINGS).write_bytes(canonical_json(sorted(set(warnings))))

    folder = work.stage(f"data-{task.name}", decided_by, make)
    return Prepared(folder, decided_by, json.loads((folder / WARNINGS).read_text(encoding="utf-8")))


def tune(
    work: Workdir, task: SuiteTask, given: Benchmarking, opened: Opened, ready: Prepared, tuning: Tuning, seed: int
) -> dict[str, Any]:
    """The scores of one fine-tuning, made or found in `work`: `validation` in the first metric, `scores`, `warnings`."""
    decided_by = fingerprint(
        "benchmark", folder_fingerprint(opened.folder), ready.fingerprint, vars(tuning), seed, given.threads, given.precision,
        trained_with(given.device),
    )  # fmt: skip
    warnings: list[str] = []

    def hear(event: Event) -> None:
        """Shows the progress alone, and keeps the warnings, but for that about validation, which stands in for test."""
        if event.kind != "message":
            show(event)
        elif event.text.startswith(WARNING) and "more than one split" not in event.text:
            warnings.append(event.text.removeprefix(WARNING))

    def make(folder: Path) -> None:
        length = min(tuning.max_length, opened.max_length)
        if not (folder / MODEL).is_dir():
            settings = FineTuning(
                model=str(opened.folder), task=task.kind.name, data=str(ready.folder), out=str(folder / MODEL), epochs=tuning.epochs,
                patience=0, learning_rate=tuning.learning_rate, batch=tuning.batch, max_length=length, new_head=True, seed=seed,
                threads=given.threads, precision=given.precision, device=given.device,
            )  # fmt: skip
            fine_tune(settings, hear)
            (folder / WARNINGS).write_bytes(canonical_json(warnings))
        model = load(open_model(str(folder / MODEL)), task.kind).to(device_here(given.device))
        labels = open_model(str(folder / MODEL)).head_for(task.kind) or ()
        tokenizer = load_tokenizer(folder / MODEL, length)

        def logits_on(file: Path) -> tuple[list[Example], Encoded, list[np.ndarray]]:
            examples: list[Example] = read_examples(file, task.kind)
            encoded = task.kind.encode(examples, tokenizer, labels)
            return examples, encoded, row_logits(model, encoded)

        answer_from = EVEN_SCORE
        if task.kind.has_contexts:
            examples, encoded, logits = logits_on(ready.folder / VALIDATION)
            answer_from = task.kind.with_threshold(encoded, examples, logits).answer_from

        def scores(file: Path) -> Mapping[str, float]:
            examples, encoded, logits = logits_on(file)
            gold = [task.kind.gold_of(example) for example in examples]
            said = task.kind.predictions(replace(encoded, answer_from=answer_from), logits)
            return {metric: scored(metric, gold, said) for metric in task.metrics}

        found = {suffix: scores(ready.folder / scored_name(suffix)) for suffix in task.scored}
        decides = scores(ready.folder / VALIDATION) if task.validation else found[next(iter(task.scored))]
        document = {
            "validation": decides[task.metrics[0]],
            "scores": found,
            "warnings": json.loads((folder / WARNINGS).read_text(encoding="utf-8")),
        }
        (folder / SCORE).write_bytes(canonical_json(document))
        shutil.rmtree(folder / MODEL)

    folder = work.stage(f"{task.name}-{tuning.name}-seed-{seed}", decided_by, make)
    found: dict[str, Any] = json.loads((folder / SCORE).read_text(encoding="utf-8"))
    return found


def scored(metric: str, gold: Sequence[Prediction], predicted: Sequence[Prediction]) -> float:
    """One metric of predictions: accuracy, f1 (of class 1), matthews, pearson, spearman, entity_f1, answer_f1 or exact_match.

    Accuracy, F1 and Matthews' correlation are scikit-learn's, Pearson's and Spearman's SciPy's; constant predictions have a
    correlation of 0. Entity F1 is that of `compress.evaluation.metrics`, which tests hold to seqeval; answers are scored by
    SQuAD's and MLQA's definitions (`compress.evaluation.questions`). Raises ValueError: another name.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    theirs: Any = list(gold)
    ours: Any = list(predicted)
    for ours_too in (ENTITY_F1, ANSWER_F1):
        if metric == ours_too.name:
            return ours_too.value(ours_too.counts(gold, predicted))
    if metric in ("pearson", "spearman"):
        if len(set(ours)) < 2 or len(set(theirs)) < 2:
            return 0.0
        return float((pearsonr if metric == "pearson" else spearmanr)(theirs, ours).statistic)
    by_name: dict[str, Callable[[], float]] = {
        "accuracy": lambda: accuracy_score(theirs, ours),
        "f1": lambda: f1_score(theirs, ours, pos_label=POSITIVE, average="binary", zero_division=0),
        "matthews": lambda: matthews_corrcoef(theirs, ours) if len({*theirs, *ours}) > 1 else 0.0,
        "exact_match": lambda: ANSWER_F1.further_scores(gold, predicted)["exact_match"].value,
    }
    if metric not in by_name:
        raise ValueError(f"{metric} is no metric of a suite")
    return float(by_name[metric]())
