"""The stages of `run`, each with the inputs that decide its outcome."""

import dataclasses
from importlib.metadata import version

import onnxruntime as ort

from compress.data.examples import examples_fingerprint
from compress.runs import task_stages
from compress.runs.fingerprints import fingerprint, folder_fingerprint, texts_fingerprint, trained_with
from compress.runs.method_runner import is_checkpoint
from stillroom.inputs.preflight import RunInputs

STUDENTS_PLAN, ANSWERS = "students-plan", "teacher-answers"


def fingerprints(inputs: RunInputs) -> dict[str, str]:
    """The fingerprint of each stage: a hash of everything that decides its outcome."""
    r = inputs.recipe
    common = [
        r.task, inputs.data_fingerprint, r.seed, r.threads, r.precision, r.batch, r.accumulate, inputs.max_length, list(inputs.labels),
    ]  # fmt: skip
    if r.out_of_scope:
        common.append(r.out_of_scope)
    if r.language_temperature != 1:
        common += [r.language_temperature, [example.language for example in inputs.splits.train]]
    # onnxruntime's module says its version itself: on a GPU its package has another name.
    runtimes = [version("onnx"), version("onnxscript"), ort.__version__]
    in_domain = [
        texts_fingerprint(inputs.unlabelled),
        r.augment,
        *([inputs.answers.fingerprint] if inputs.answers else []),
        *([folder_fingerprint(inputs.answering.folder)] if inputs.answering else []),
    ]
    teacher = [
        inputs.teacher_fingerprint,
        inputs.teacher_has_head,
        r.teacher_epochs,
        r.teacher_patience,
        r.teacher_learning_rate,
        *(["answers"] if inputs.gives_answers_alone else []),
    ]
    begin = r.start if not is_checkpoint(r.start) else inputs.start_fingerprint
    kept = [r.vocabulary_size, texts_fingerprint(inputs.kept_texts)] if r.vocabulary_size else []
    student = [str(inputs.shape), begin, r.student_epochs, r.student_learning_rate]
    chain = [
        # Tokens that the text decides need no counting here: its fingerprint is below.
        [dataclasses.asdict(link) for link in inputs.chain.links(r.distill_tokens or 1.0, 1.0)],
        texts_fingerprint(inputs.corpus) if "corpus" in inputs.chain.texts else "",
    ]
    # With a budget, how long one training may take depends on all the others.
    budget = (
        [r.max_minutes, r.latency_seconds, r.undistilled, *in_domain, *teacher, *student, *chain, r.then]
        if r.max_minutes
        else []
    )
    stage_fingerprints: dict[str, str] = {}
    stage_fingerprints["plan"] = fingerprint("plan", trained_with(r.device), *common, *budget)
    if inputs.answering:
        # Generated texts depend on the tokenizer of --start.
        asked = [
            folder_fingerprint(inputs.answering.folder),
            inputs.data_fingerprint,
            examples_fingerprint(inputs.in_domain_texts),
        ]
        stage_fingerprints[ANSWERS] = fingerprint(ANSWERS, trained_with(r.device), r.threads, *asked)
    stage_fingerprints["teacher"] = fingerprint("teacher", stage_fingerprints["plan"], *teacher)
    stage_fingerprints[STUDENTS_PLAN] = fingerprint(STUDENTS_PLAN, stage_fingerprints["teacher"])
    stage_fingerprints["start"] = fingerprint("start", stage_fingerprints["teacher"], str(inputs.shape), begin, *kept)
    for fold in range(r.folds):
        name = f"teacher-fold-{fold + 1}"
        stage_fingerprints[name] = fingerprint(name, stage_fingerprints["teacher"], r.folds)
    stage_fingerprints["soft-labels"] = fingerprint(
        "soft-labels", stage_fingerprints["teacher"], *in_domain, *([r.folds] if r.folds else [])
    )
    stage_fingerprints["undistilled"] = fingerprint("undistilled", stage_fingerprints["start"], *student)
    on_task = [r.augment, r.student_epochs] if "task" in inputs.chain.texts else []
    stage_fingerprints["method"] = fingerprint(
        "method", stage_fingerprints["teacher"], str(inputs.shape), begin, in_domain[0], *on_task, *chain
    )
    ending = [r.then, r.temperature, r.soft_weight]
    stage_fingerprints["distilled"] = fingerprint(
        "distilled", stage_fingerprints["method"], stage_fingerprints["soft-labels"], *student, *ending, *kept
    )
    for weight in task_stages.SOFT_WEIGHTS:
        stage_fingerprints[f"share-{weight:g}"] = fingerprint(f"share-{weight:g}", stage_fingerprints["distilled"])
    compared = stage_fingerprints["undistilled"] if r.undistilled else ""
    stage_fingerprints["student"] = fingerprint("student", stage_fingerprints["distilled"], compared)
    ships = stage_fingerprints["student"]
    if r.keep_words_of and not r.vocabulary_size:
        ships = stage_fingerprints["trimmed"] = fingerprint("trimmed", ships, texts_fingerprint(inputs.kept_texts))
    promised = [r.promises, r.promise_confidence] if r.promises else []
    if inputs.promised_on:
        promised += [examples_fingerprint([*inputs.promised_on.examples, *inputs.promised_on.outside])]
    stage_fingerprints["export"] = fingerprint("export", ships, runtimes, r.gate, r.keep_right, *promised)
    languages = [example.language for example in inputs.splits.test]
    stage_fingerprints["scores"] = fingerprint(
        "scores",
        stage_fingerprints["export"],
        compared,
        r.gate,
        r.teacher_gate,
        *([languages] if any(languages) else []),
    )
    within = [r.budget_ms, r.percentile, r.tokens] if r.budget_ms else []
    stage_fingerprints["latency"] = fingerprint("latency", stage_fingerprints["scores"], r.latency_seconds, *within)
    stage_fingerprints["bundle"] = fingerprint(
        "bundle", stage_fingerprints["latency"], r.model_name, r.license, r.data_license, r.language,
        *(["auto", r.search_minutes] if inputs.auto else []),
    )  # fmt: skip
    return stage_fingerprints
