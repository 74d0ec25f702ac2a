"""What the stages that judge make of a student, and what decides whether they are taken from an earlier run."""

import html
import json
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_task import examples, make_teacher, write_rows

from compress.data.encoded import Encoded
from compress.data.examples import Example
from compress.evaluation.metrics import ACCURACY
from compress.evaluation.numbers import PEARSON
from compress.models.pretrained import load
from compress.runs.task_stages import save
from compress.tasks import TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION
from compress.training.checkpoint import Progress
from export.packing.variants import read_variants
from export.precision.int8_search import session_logits
from serve.model.session import Session
from serve.tasks import open_bundle
from stillroom.inputs.preflight import RunInputs, prepare
from stillroom.inputs.recipe import Recipe, resolve
from stillroom.report.run_page import write_report
from stillroom.verbs.run.report import REPORT, model_report_of, read_json, report_of, write_bundle
from stillroom.verbs.run.scores import SHOWN, behind_in_languages, disagreements, further_rows, make_scores
from stillroom.verbs.run.stages import Run, make_export

Judged = tuple[RunInputs, dict[str, Path], dict[str, Any]]
TEXTS = 44  # in test: more than a report shows


def recipe_of(folder: Path, data: Path, **more: Any) -> Recipe:
    """The recipe of a run of `data` with a teacher of one layer, both in `folder`."""
    teacher = make_teacher(folder / "teacher", num_hidden_layers=1)
    given = {"teacher": str(teacher), "data": str(data), "out": str(folder / "out"), "threads": 1}
    return Recipe(**given, student="layers=1,hidden=32,heads=4,ffn=32", **more)


def details_of(role: str = "student") -> dict[str, Any]:
    choice = {"why": "It was best.", "method": "soft-labels"}
    return {"role": role, "method": "soft labels", "student": "1x32", "origin": {}, "choice": choice}


@pytest.mark.slow
def test_a_student_that_finds_nothing_is_exported_and_left_to_the_gates(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        write_rows(tmp_path / f"{name}.jsonl", examples(8, seed=0))
    inputs = prepare(recipe_of(tmp_path, tmp_path, task="token-classification"))
    model = load(inputs.opened, TOKEN_CLASSIFICATION, inputs.labels)
    model.classifier.bias.data[0] = 100  # it says "outside" of every word
    save(model, tmp_path / "student", inputs, Progress(validation=[(1, 0.0)]), details_of())
    make_export(tmp_path, inputs, tmp_path / "student", tmp_path / "student")
    made = read_variants(tmp_path)
    assert made.search is not None
    assert (made.validation["fp32"].value, made.faults, made.search.repaired) == (0, [], [])
    # What the search asked for nothing, the gate asks.
    assert [(gate["value"], gate["needed"], gate["passed"]) for gate in made.gates] == [(0, 0.99, False)]


@pytest.mark.slow
def test_texts_out_of_scope_are_not_learned_and_the_graphs_are_judged_by_who_abstains(tmp_path: Path) -> None:
    strange = [{"text": f"how tall is a tower of {i} bricks", "label": "strange"} for i in range(5)]
    for seed, name in enumerate(("train", "validation", "test")):
        write_rows(tmp_path / f"{name}.jsonl", examples(24, seed) + strange[seed:])
    gates = {"gate": 0.0, "teacher_gate": 0.0}
    recipe = recipe_of(tmp_path, tmp_path, task="text-classification", out_of_scope="strange", **gates)
    inputs = prepare(recipe)
    assert inputs.labels == ("praise", "refund", "status")
    assert not [text for text in inputs.train.texts + inputs.validation.texts + inputs.test.texts if "bricks" in text]
    assert Run(inputs).fingerprints["teacher"] != Run(prepare(replace(recipe, out_of_scope=""))).fingerprints["teacher"]
    assert Run(inputs).fingerprints["export"] != Run(prepare(replace(recipe, keep_right=0.5))).fingerprints["export"]

    folders = dict.fromkeys(("teacher", "start", "student"), tmp_path / "student") | {"export": tmp_path}
    model = load(inputs.opened, TEXT_CLASSIFICATION, inputs.labels)
    save(model, folders["student"], inputs, Progress(validation=[(1, 0.5)]), details_of())
    make_export(tmp_path, inputs, folders["student"], folders["student"])
    make_scores(tmp_path, inputs, folders)
    model_report = model_report_of(inputs, folders, read_json(tmp_path / "scores.json"))
    assert model_report.test is not None
    test = model_report.test.reliability
    assert list(model_report.confidence) == ["fp32", "int8"]
    for graph, chosen in model_report.confidence.items():
        assert chosen.validation.out_of_scope_texts == 4
        assert (test[graph].rows, test[graph].out_of_scope_texts) == (24, 3)
        assert test[graph].out_of_scope_abstained in (0, 1 / 3, 2 / 3, 1)
        said = session_logits(Session(model_report.variants.file(graph), 1), inputs.test)
        assert replace(test[graph], out_of_scope_texts=0, out_of_scope_abstained=None) == chosen.on(inputs.test, said)


@pytest.mark.parametrize(("better", "shown"), [(24, False), (36, True)])
def test_with_unlabelled_text_a_student_distils_unless_labels_are_shown_to_be_better(
    better: int, shown: bool, tmp_path: Path
) -> None:
    rows = [{"text": f"send lamp {i}", "label": "refund" if i < better else "praise"} for i in range(40)]
    for name in ("train", "validation", "test"):
        write_rows(tmp_path / f"{name}.jsonl", [row | {"text": f"{row['text']} {name}"} for row in rows])
    (tmp_path / "more.txt").write_text("a text without a label\n", encoding="utf-8")
    recipe = recipe_of(tmp_path, tmp_path, task="text-classification")
    found = []
    for given in (recipe, replace(recipe, unlabelled=(str(tmp_path / "more.txt"),))):
        run = Run(inputs := prepare(given))
        for label, name in enumerate(("teacher", "undistilled")):  # the one says praise of all texts, the other refund
            model = load(inputs.opened, TEXT_CLASSIFICATION, inputs.labels)
            model.classifier.bias.data[label] = 100
            run.folders[name] = tmp_path / name
            right = (40 - better, better)[label] / 40
            save(
                model,
                run.folders[name],
                inputs,
                Progress(validation=[(1, right)]),
                details_of() | {"on_validation": right},
            )
        trials = {stage.name for stage in run.stages} & {"share-0.5", "share-0.9"}
        compared = [stage for stage in run.stages if stage.name == "labels-against-teacher"]
        for stage in compared:
            assert stage.needed()
            (tmp_path / "compared").mkdir()
            assert stage.make
            stage.make(tmp_path / "compared")
            run.folders[stage.name] = tmp_path / "compared"
        distils = next(stage for stage in run.stages if stage.name == "soft-labels").needed()
        found.append((distils, len(trials), len(compared)))
    # Without unlabelled text the better score decides, and two short trainings choose the share.
    assert found == [(False, 2, 0), (not shown, 0, 1)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """A teacher that says one label of every text and a student that says another, exported and scored."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "my data").mkdir()
    for seed, name in enumerate(("train", "validation", "test")):
        write_rows(folder / "my data" / f"{name}.jsonl", examples(TEXTS, seed))
    known = {"license": "mit", "data_license": "CC0", "language": "en", "gate": 0.0, "teacher_gate": 0.0}
    inputs = prepare(recipe_of(folder, folder / "my data", task="text-classification", **known))
    folders = {name: folder / "stages" / name for name in ("teacher", "start", "student", "export", "scores")}
    for label, name in enumerate(("teacher", "start", "student")):
        model = load(inputs.opened, TEXT_CLASSIFICATION, inputs.labels)
        model.classifier.bias.data[label] = 100
        save(model, folders[name], inputs, Progress(validation=[(1, 0.5)]), details_of(name))
    folders["export"].mkdir()
    make_export(folders["export"], inputs, folders["student"], folders["teacher"])
    folders["scores"].mkdir()
    make_scores(folders["scores"], inputs, folders)
    return inputs, folders, read_json(folders["scores"] / "scores.json")


def latency() -> dict[str, Any]:
    """Of one text of 16 and of 32 tokens, in no time at all."""
    row = {
        "batch": 1,
        "p50_ms": 1.5,
        "p90_ms": 2.0,
        "p99_ms": 3.0,
        "texts_per_s": 500.0,
        "doubts": [],
        "precision": "fp32",
    }
    names = {"teacher torch fp32": "torch", "student ORT int8": "onnxruntime"}
    rows = [{**row, "name": n, "runtime": r, "tokens": tokens} for tokens in (16, 32) for n, r in names.items()]
    machine = {"cpu": "Some CPU", "cores": 2, "versions": {"torch": "2.13.0"}, "measured_at": "2026-11-22T20:14:07Z"}
    return {"machine": machine, "candidates": rows, "ratios": []}


def test_a_bundle_holds_no_text_of_the_data_and_says_where_the_texts_are_shown(judged: Judged) -> None:
    inputs, folders, scores = judged
    out = Path(inputs.recipe.out)
    inputs.workdir.root.mkdir()
    model_report, times = model_report_of(inputs, folders, scores, "mark"), latency()
    full = report_of(inputs, folders, scores, model_report, times["machine"], times)
    write_report(inputs.workdir.root / REPORT, full)
    write_bundle(out, inputs, folders, full, model_report, 1.0)
    open_bundle(out)  # verifies every file
    texts = [row.text for split in (inputs.splits.train, inputs.splits.validation, inputs.splits.test) for row in split]
    held = {
        path.name: path.read_text(encoding="utf-8")
        for path in out.iterdir()
        if path.suffix in {".html", ".json", ".md"}
    }
    assert {"README.md", "manifest.json", "report.html", "report.json"} <= held.keys()
    for name, content in held.items():
        spelled = [word for text in texts for word in (text, html.escape(text), json.dumps(text)[1:-1])]
        assert not [word for word in spelled if word in content], name
    assert '\nlicense: "mit"\nlanguage: "en"\n' in held["README.md"]
    assert "Licence of the model: mit; of the data: CC0." in held["README.md"]
    said = f"Teacher and int8 student differ on {TEXTS} of {TEXTS} texts of test."
    elsewhere = (
        "A bundle contains no texts of the data; out.work/report.html, on the machine that made it, shows the first 40."
    )
    assert f"{said} {elsewhere}" in held["report.html"]
    full = (inputs.workdir.root / "report.html").read_text(encoding="utf-8")
    assert f"{said} The table shows the first 40." in full
    assert sum(html.escape(row.text) in full for row in inputs.splits.test) >= 40


def test_a_report_says_what_was_trained_from_what_where_and_what_its_names_are(judged: Judged) -> None:
    inputs, folders, scores = judged
    model_report, timed = model_report_of(inputs, folders, scores), latency()
    report = report_of(inputs, folders, scores, model_report, timed["machine"], timed)
    assert report["made"] == (
        f"A student ({inputs.shape}) was distilled by soft labels from the teacher teacher (1x32, fine-tuned on the same labels) "
        "on 44 labelled texts of my data. Choices and gates use 44 texts of validation; scores are on 44 texts of test, read once."
    )
    assert report["machine"]["cpu"] == "Some CPU"
    assert list(report["names"]) == [row["name"] for row in report["summary"]]
    assert [name for name in report["names"] if "openvino" not in name] == ["teacher", "student", "fp32", "int8"]
    assert "at batch 1 and 16 tokens" in report["summary_note"]
    first = {"validation": scores["validation"]}
    unread = report_of(inputs, folders, first, model_report_of(inputs, folders, first), timed["machine"])
    assert unread["made"].endswith("; test was not read.")
    assert "disagreeing" not in unread


def test_a_gate_that_is_missed_is_told_as_a_document(judged: Judged) -> None:
    inputs, folders, scores = judged
    strict = replace(inputs, settings=replace(inputs.recipe, teacher_gate=0.99))
    better = {"teacher": {"value": 1.0, "low": 1.0, "high": 1.0}}
    model_report = model_report_of(strict, folders, {"validation": scores["validation"] | better})
    missed = model_report.refusal(Path("report.html"), " Try more.")
    assert re.fullmatch(
        r"No bundle was written: int8 over teacher, validation is 0\.\d+, needed 0\.99\. The report is report.html\. Try more\.",
        missed.message,
    )
    assert missed.document is not None
    assert (missed.document["bundle"], missed.document["report"]) == (None, "report.html")
    assert [(gate["name"], gate["passed"]) for gate in missed.document["gates"]] == [
        ("int8 over fp32, validation", True),
        ("int8 over teacher, validation", False),
    ]
    assert missed.exit_code == 3


def test_the_graphs_run_over_validation_in_the_export_alone(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, folders, scores = judged
    ran: list[list[str]] = []

    def watched(session: Session, encoded: Encoded) -> list[np.ndarray]:
        ran.append(encoded.texts)
        return session_logits(session, encoded)

    monkeypatch.setattr("export.precision.int8_search.session_logits", watched)
    make_scores(tmp_path, inputs, folders)
    assert read_json(tmp_path / "scores.json") == scores
    assert ran == [inputs.test.texts] * len(read_variants(folders["export"]).runs)


def test_the_package_of_onnxruntime_for_gpus_serves_as_well(
    tiny_teacher: Path, task_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_onnxruntime(name: str) -> str:
        if name == "onnxruntime":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    given = {"teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "out": "out"}
    inputs = prepare(resolve({}, given))
    expected = Run(inputs).fingerprints
    monkeypatch.setattr("stillroom.verbs.run.stages.version", without_onnxruntime)
    assert Run(inputs).fingerprints == expected


def test_numbers_differ_where_they_can_be_told_from_each_other_and_the_furthest_apart_come_first() -> None:
    examples = [Example(f"text {i}", "second" if i == 2 else None, label=float(i)) for i in range(4)]
    teacher = [0.0, 10.0, 20.0, 30.0]
    found = disagreements(examples, [0.0, 1.0, 2.0, 3.0], teacher, [0.5, 15.0, 40.0, 30.0], "test")
    assert found["disagreeing"] == {"count": 2, "texts": 4, "split": "test", "shown": 2}
    assert found["disagreements"] == [
        {"text": "text 2 | second", "teacher": "20", "student": "40", "gold": "2"},
        {"text": "text 1", "teacher": "10", "student": "15", "gold": "1"},
    ]


def test_classes_and_entities_differ_where_they_are_not_the_same_and_so_many_are_shown() -> None:
    examples = [Example("to rome")] * 100
    gold = [frozenset({(3, 7, "city")})] * 100
    found = disagreements(examples, gold, gold, [frozenset()] * 100, "test")
    assert (found["disagreeing"]["count"], len(found["disagreements"])) == (100, SHOWN)
    assert found["disagreements"][0] == {
        "text": "to rome", "teacher": "city: rome", "student": "nothing", "gold": "city: rome",
    }  # fmt: skip
    assert disagreements(examples[:2], ["a", "b"], ["a", "b"], ["a", "a"], "test")["disagreeing"]["count"] == 1


def test_each_model_has_its_other_scores_with_their_intervals() -> None:
    gold = [float(i) for i in range(50)]
    rows = further_rows(PEARSON, gold, {"int8": [-number for number in gold], "teacher": gold})
    assert [row["name"] for row in rows] == ["teacher", "int8"]
    assert (rows[0]["spearman"]["value"], rows[0]["mean_squared_error"]["value"]) == (1, 0)
    assert rows[1]["spearman"]["high"] < -0.99


def test_a_language_that_falls_behind_its_gate_is_warned_of_and_chance_is_not() -> None:
    languages = ["de"] * 40 + ["fr"] * 400 + ["it"] * 3
    examples = [Example(f"text {i}", label="a", language=language) for i, language in enumerate(languages)]
    gold = [("a", "b")[i % 2] for i in range(len(examples))]
    teacher = list(gold)
    # In de every fourth answer is wrong, in it one of three, in fr none.
    wrong = {*range(0, 40, 4), 440}
    int8 = [("b" if label == "a" else "a") if i in wrong else label for i, label in enumerate(gold)]
    said = {"teacher": teacher, "fp32": int8, "int8": int8}
    found = behind_in_languages(ACCURACY, examples, gold, said, {"teacher": 0.97, "fp32": 0.99})
    (warning,) = found
    assert warning.startswith("In de int8 keeps 0.7500 of teacher's score on 40 texts of test")
    assert behind_in_languages(ACCURACY, examples, gold, said | {"int8": gold}, {"teacher": 0.97, "fp32": 0.99}) == []
    without = [Example(example.text, label="a") for example in examples]
    assert behind_in_languages(ACCURACY, without, gold, said, {"teacher": 0.97}) == []


def test_a_missed_gate_is_named_by_its_flag_with_a_value_that_passes(
    judged: tuple[RunInputs, dict[str, Path], dict[str, Any]],
) -> None:
    inputs, folders, scores = judged
    strict = replace(inputs, settings=replace(inputs.recipe, teacher_gate=0.99))
    better = {"teacher": {"value": 1.0, "low": 1.0, "high": 1.0}}
    said = model_report_of(strict, folders, {"validation": scores["validation"] | better}).lower_gates
    asked = re.fullmatch(r" If less is enough, the same command with --teacher-gate (0\.\d+) accepts it, .*", said)
    assert asked
    easier = replace(inputs, settings=replace(inputs.recipe, teacher_gate=float(asked[1])))
    passing = model_report_of(easier, folders, {"validation": scores["validation"] | better})
    assert (passing.missed, passing.lower_gates) == ([], "")
