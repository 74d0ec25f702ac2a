"""`stillroom search` with a tiny teacher: what it trains and chooses, what a second call repeats, and what no student can meet."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from quick_search import quick_searches
from small_task import examples, make_teacher, write_splits
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from compress.evaluation.metrics import ACCURACY, Score
from compress.models.families import family_of
from compress.models.initialise import student_config
from compress.models.pretrained import open_model
from compress.models.shapes import STUDENTS, Shape, shape_of
from latency.analysis.latency_model import OPERATORS, Timed
from serve.bundle.fetched import cache_folder
from serve.errors import BadInput
from stillroom import search
from stillroom.report.search_page import as_good
from stillroom.student_search import machine_latency, trials
from stillroom.student_search.controller import Controller
from stillroom.student_search.machine_latency import parameters, random_config, random_rows
from stillroom.student_search.space import Space, encoder_weights, space_of
from stillroom.student_search.trials import first_shapes
from stillroom.verbs.search import show_search

SETTINGS: dict[str, Any] = {
    "task": "text-classification", "tokens": 16, "trials": 3, "trial_steps": 12, "teacher_epochs": 20, "teacher_learning_rate": 5e-3,
    "student_learning_rate": 5e-3, "threads": 1, "batch": 16, "budget_ms": 60_000.0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_searches(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("data") / "data", examples, (120, 40, 20))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two layers, and of one size of the feed-forward layer: four students are in its space, each of which torch exports for seconds."""
    return str(make_teacher(tmp_path_factory.mktemp("teacher") / "tiny", num_hidden_layers=2, intermediate_size=32))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("found") / "found"


@pytest.fixture(scope="module")
def given(teacher: str, data: Path) -> dict[str, Any]:
    """The settings of a search with a budget that every student meets."""
    return SETTINGS | {"teacher": teacher, "data": str(data)}


@pytest.fixture(scope="module")
def found(given: dict[str, Any], out: Path) -> dict[str, Any]:
    return search(**given, out=str(out))


@pytest.fixture
def copied(found: dict[str, Any], out: Path, tmp_path: Path) -> Path:
    """Where another search finds a copy of what that one has made: its teacher, soft labels and trials."""
    shutil.copytree(out.with_name("found.work"), tmp_path / "again.work")
    return tmp_path / "again"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained from now on."""
    names: list[str] = []
    real = trials.task_stages.on_task

    def on_task(*given: Any, **more: Any) -> Any:
        names.append(given[5])
        return real(*given, **more)

    monkeypatch.setattr(trials.task_stages, "on_task", on_task)
    return names


def scores_of(document: dict[str, Any]) -> dict[str, Any]:
    return {row["student"]: row["validation"] for row in document["trials"]}


def test_the_best_of_those_that_were_trained_is_chosen_and_timed(found: dict[str, Any], out: Path) -> None:
    rows = found["trials"]
    assert len(rows) == 3
    assert len({row["student"] for row in rows}) == 3
    assert {row["student"]: shape_of(row["student"]) for row in rows} == {
        row["student"]: Shape(*(row[name] for name in ("layers", "hidden", "heads", "ffn", "activation")))
        for row in rows
    }
    scores = [row["validation"]["value"] for row in rows]
    assert found["chosen"] == rows[scores.index(max(scores))]["student"]
    assert [row["measured_ms"] is not None for row in rows] == [row["student"] == found["chosen"] for row in rows]
    assert found["fitting"] == found["considered"]
    assert all(row["predicted_ms"] > 0 for row in rows)
    kept = json.loads((out / "search.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps({key: value for key, value in found.items() if key != "report"}))


def test_terminal_and_page_name_the_choice_and_its_command_and_no_text_of_the_data(
    found: dict[str, Any], data: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"--student {found['chosen']} " in found["command"] + " "
    assert f"--teacher {out}.work/teacher " in found["command"]
    assert (out.with_name("found.work") / "teacher" / "model.safetensors").is_file()
    show_search(found)
    shown = capsys.readouterr().out
    assert found["chosen"] in shown.replace("\n", " ")
    assert "Predicted times were wrong by" in shown
    page = (out / "search.html").read_text(encoding="utf-8")
    assert found["chosen"] in page
    assert "<svg" in page
    assert json.loads((data / "validation.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"] not in page


def refused(*_: object, **__: object) -> None:
    raise AssertionError("this was finished")


def test_the_same_call_again_trains_and_times_nothing(
    found: dict[str, Any], given: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((trials.task_stages, "on_task"), (trials.task_stages, "make_teacher")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr("stillroom.student_search.search.time_students", refused)
    monkeypatch.setattr(machine_latency, "time_students", refused)
    again = search(**given, out=str(out))
    same = ("chosen", "trials", "latency_model", "teacher")
    assert {name: again[name] for name in same} == {name: found[name] for name in same}


def test_more_trials_train_only_the_new_ones(
    found: dict[str, Any], given: dict[str, Any], copied: Path, trained: list[str]
) -> None:
    for trial in copied.with_name("again.work").glob("trial-*"):  # the interval of an earlier version, by another rule
        (trial / "trial.json").write_text('{"value": 0.5, "low": 0.0, "high": 1.0}')
    more = search(**given | {"trials": 4}, out=str(copied))
    before, after = scores_of(found), scores_of(more)
    assert before.items() <= after.items()
    assert trained == [f"trial of {student}" for student in after if student not in before]
    assert len(trained) == 1


def test_a_search_that_was_stopped_goes_on_to_the_same_result(
    found: dict[str, Any], given: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial in copied.with_name("again.work").glob("trial-*"):
        shutil.rmtree(trial)
    real = trials.task_stages.make_start
    starts: list[Path] = []

    def stopped(folder: Path, *given: Any) -> None:
        starts.append(folder)
        if len(starts) == 2:
            (folder / "model.safetensors").write_bytes(b"half of it")
            raise KeyboardInterrupt
        real(folder, *given)

    monkeypatch.setattr(trials.task_stages, "make_start", stopped)
    shutil.rmtree(copied.with_name("again.work") / "found")
    with pytest.raises(KeyboardInterrupt):
        search(**given, out=str(copied))
    again = search(**given, out=str(copied))
    assert len(starts) == 4  # of three students, the second of which began again
    assert scores_of(again) == scores_of(found)


def test_a_search_by_the_controller_learns_again_what_was_trained_before(
    given: dict[str, Any], copied: Path, trained: list[str]
) -> None:
    for trial in copied.with_name("again.work").glob("trial-*"):
        shutil.rmtree(trial)
    three = search(**given | {"sampler": "controller"}, out=str(copied))
    assert three["sampler"] == "controller"
    del trained[:]
    four = search(**given | {"sampler": "controller", "trials": 4}, out=str(copied))
    before, after = scores_of(three), scores_of(four)
    assert before.items() <= after.items()
    assert trained == [f"trial of {student}" for student in after if student not in before]
    assert len(trained) == 1


def test_the_controller_is_rewarded_by_the_papers_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(Shape(2, 128, 2, 256))
    fitting, found, told = space.shapes(), dict[Shape, trials.Trial](), list[tuple[Any, float]]()
    monkeypatch.setattr(Controller, "learn", lambda _, shape, value: told.append((shape, value)))
    suggested = trials.suggested(
        "controller", space, fitting, found, seed=0, first=[fitting[3]], predicted_ms=lambda shape: float(shape.ffn), budget_ms=1.0
    )  # fmt: skip
    for score, shape in zip((0.7, 0.8, 0.9), suggested, strict=False):
        found[shape] = trials.Trial(shape, Score(score, 0.0, 1.0), np.zeros((1, 3)), ACCURACY, 1.0)
    first, second, _ = found
    assert first == fitting[3]
    assert dict(told) == {  # the third is learned once a fourth is asked for
        tuple(space.parameters_of(shape).values()): pytest.approx(score * (shape.ffn / (0.6 * 256)) ** -0.06)
        for shape, score in ((first, 0.7), (second, 0.8))
    }


def test_the_difference_of_two_students_takes_texts_that_go_together_together() -> None:
    of_texts = np.repeat(np.random.default_rng(0).random(20) < 0.6, 10).astype(float)[:, None]  # right in whole tens
    one, other = (np.concatenate([right, *np.ones((2, 200, 1))], axis=1) for right in (of_texts, 0 * of_texts))
    together, apart = (
        trials.Trial(Shape(2, 128, 2, 256), Score(0, 0, 0), one, ACCURACY, 1.0, clusters).less(
            trials.Trial(Shape(1, 128, 2, 256), Score(0, 0, 0), other, ACCURACY, 1.0, clusters)
        )
        for clusters in (np.repeat(np.arange(20), 10), None)
    )
    assert together.value == apart.value
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_only_students_that_are_predicted_to_fit_are_trained(
    found: dict[str, Any], given: dict[str, Any], copied: Path
) -> None:
    slow, fast = (of(row["predicted_ms"] for row in found["trials"]) for of in (max, min))
    budget = (slow + fast) / 2
    split = search(**given | {"budget_ms": budget}, out=str(copied))
    assert 0 < split["fitting"] < split["considered"]
    assert all(row["predicted_ms"] <= budget for row in split["trials"])
    kept = json.loads((copied / "search.json").read_text(encoding="utf-8"))
    assert kept["chosen"] is None or kept["chosen"] in {row["student"] for row in kept["trials"]}


def test_a_damaged_latency_model_is_made_again_and_a_budget_that_none_meets_is_refused_before_any_training(
    found: dict[str, Any], given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = (cache_folder() / "latency").glob("*.json")
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path / "cache"))
    document = json.loads(kept.read_text(encoding="utf-8"))
    del document["ms_by_operator"]["layer"]
    damaged = cache_folder() / "latency" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_text(json.dumps(document), encoding="utf-8")

    def times(shapes: list[Shape], *_: Any, **__: Any) -> list[Timed]:  # which are real in the others of this file
        return [Timed(shape, 0.1 * shape.layers, 0.2 * shape.layers) for shape in shapes]

    monkeypatch.setattr(machine_latency, "time_students", times)
    monkeypatch.setattr("stillroom.student_search.search.time_students", times)
    with pytest.raises(BadInput, match=r"--budget-ms 1e-06 .* layers=1,hidden=32.*takes 0\.\d+ ms"):
        search(**given | {"budget_ms": 1e-6}, out=str(tmp_path / "none"))
    assert json.loads(damaged.read_text(encoding="utf-8"))["ms_by_operator"].keys() == set(OPERATORS)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "none.work" / "teacher").exists()


def test_students_that_are_faster_and_not_shown_to_be_worse_are_as_good() -> None:
    def row(student: str, high: float | None, ms: float) -> dict[str, Any]:
        minus = None if high is None else {"value": high - 0.02, "low": high - 0.04, "high": high}
        return {"student": student, "minus_chosen": minus, "predicted_ms": ms}

    rows = [row("too slow", 0.03, 9.0), row("best", None, 5.0), row("as good", 0.01, 3.0), row("worse", -0.01, 1.0)]
    assert [each["student"] for each in as_good({"chosen": "best", "trials": rows})] == ["as good"]


@pytest.mark.parametrize("tokens", [2, 500])
def test_lengths_that_no_text_has_are_refused(tokens: int, given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"--tokens {tokens} is not from 8 to"):
        search(**given | {"tokens": tokens}, out=str(tmp_path / "none"))


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "mpnet", "modernbert"])
def test_students_of_every_family_can_have_random_weights(family: str) -> None:
    config = AutoConfig.for_model(family)
    teacher = SimpleNamespace(config=config, family=family_of(config.model_type, "a model"))
    shape = Shape(2, 128, 2, 256)
    small = random_config(teacher, shape, 3)  # type: ignore[arg-type]
    model = AutoModelForSequenceClassification.from_config(small)
    row = random_rows(teacher, 1, 12)[0]  # type: ignore[arg-type]
    ids = torch.tensor([row.ids])
    assert model(input_ids=ids).logits.shape == (1, 3)
    assert small.pad_token_id not in row.ids
    whole = AutoModel.from_config(student_config(config, shape))
    assert parameters(teacher, shape) == sum(each.numel() for each in whole.parameters())  # type: ignore[arg-type]


# The shapes that a search chooses from: none larger than the teacher, the papers' among them, each of which a sampler can suggest.
BERT, MINILM = Shape(12, 768, 12, 3072), Shape(6, 384, 12, 1536)


@pytest.mark.parametrize("others", [(), ("relu",)])
@pytest.mark.parametrize("teacher", [BERT, MINILM, Shape(4, 32, 4, 64), Shape(1, 128, 2, 512)])
def test_every_shape_is_suggested_for_what_the_sampler_is_told_of_it(teacher: Shape, others: tuple[str, ...]) -> None:
    space = Space(teacher, others)
    every = space.shapes()
    assert teacher in every
    assert len(set(every)) == len(every)
    for shape in every:
        assert space.suggested(optuna.trial.FixedTrial(space.parameters_of(shape))) == shape
        assert shape.layers <= teacher.layers
        assert shape.hidden <= teacher.hidden
        assert shape.ffn <= teacher.ffn
        assert shape.hidden % shape.heads == 0
        assert shape.hidden < teacher.hidden or shape.heads == teacher.heads, "only its own heads let layers be copied"


def test_the_students_of_the_papers_are_in_the_space_of_their_teacher() -> None:
    assert set(STUDENTS.values()) <= set(Space(BERT).shapes())
    small = {shape for shape in STUDENTS.values() if shape.layers <= 6 and shape.hidden <= 384}
    assert small <= set(Space(MINILM).shapes())


def test_the_largest_of_each_depth_at_the_teachers_width_is_tried_first_then_those_of_the_papers() -> None:
    space = Space(MINILM)
    fitting = [shape for shape in space.shapes() if encoder_weights(shape) <= encoder_weights(STUDENTS["3x384"])]
    papers = [shape for shape in STUDENTS.values() if shape in fitting]
    assert papers == [STUDENTS["3x384"]]
    assert first_shapes(space, fitting) == [
        STUDENTS["3x384"], Shape(4, 384, 12, 512), Shape(2, 384, 12, 1536), Shape(1, 384, 12, 1536),
    ]  # fmt: skip
    assert first_shapes(space, [Shape(2, 128, 2, 128)]) == []
    both = [replace(shape, activation=activation) for shape in fitting for activation in ("", "relu")]
    assert first_shapes(Space(MINILM, ("relu",)), both) == first_shapes(space, fitting)
    deep = Shape(6, 384, 12, 384, "relu")  # no other of six layers fits
    assert first_shapes(Space(MINILM, ("relu",)), [*fitting, deep]) == [deep, *first_shapes(space, fitting)]


def test_relu_is_tried_beside_the_activation_of_a_teacher_that_has_another(tiny_teacher: Path) -> None:
    opened = open_model(str(tiny_teacher))
    assert space_of(opened).activations == ("", "relu")
    opened.config.hidden_act = "relu"
    assert space_of(opened).activations == ("",)
