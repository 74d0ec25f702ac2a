"""A method by its name: its stages, how they share tokens, and what is refused."""

from typing import Any

import pytest

from compress.methods.catalogue import LABELS
from compress.models.shapes import Shape
from compress.runs.method_chain import check_start, method_chain
from serve.errors import BadInput

TEACHER = Shape(6, 48, 4, 96).as_config()
STUDENT = Shape(3, 48, 4, 96)


def test_label_steps_are_the_same_whatever_was_read_before() -> None:
    (text,) = method_chain("minilmv2", STUDENT, TEACHER).links(1000, 400, (LABELS,))
    assert [(stage.name, tokens) for stage, tokens in zip(text.stages, text.tokens, strict=True)] == [
        ("minilmv2", 1000),
        ("labels", 400),
    ]
    (both,) = method_chain("tinybert", STUDENT, TEACHER).links(1000, 400, (LABELS,))
    assert dict(zip((stage.name for stage in both.stages), both.tokens, strict=True)) == {
        "tinybert-general": 1000,
        "tinybert-task": 200,
        "tinybert-soft-labels": 200,
    }
    (task,) = method_chain("xtremedistil", STUDENT, TEACHER).links(1000, 400)
    assert sum(task.tokens) == pytest.approx(400)
    assert task.starts_from == "task"


def test_assistants_share_the_plain_text_and_the_student_alone_is_trained_on_the_task() -> None:
    between, last = method_chain("minilm@layers=4,hidden=24,heads=4,ffn=48", STUDENT, TEACHER).links(
        1000, 400, (LABELS,)
    )
    assert between.tokens == (500,)
    assert last.tokens == (500, 400)
    assert between.shape == Shape(4, 24, 4, 48)


@pytest.mark.parametrize(("start", "layer"), [("spread", 6), ("first", 3), ("alternate", 5), ("random", 5)])
def test_relations_are_those_of_the_layer_that_the_last_one_starts_from(start: str, layer: int) -> None:
    (stages,) = method_chain("minilmv2", STUDENT, TEACHER, start=start).stages
    assert {term.teacher_layer for term in stages[0].objective.layers} == {layer}  # the papers' for new layers


def test_a_target_of_another_layer_is_warned_of() -> None:
    assert not method_chain("minilmv2", STUDENT, TEACHER).warnings
    (said,) = method_chain("minilmv2", STUDENT, TEACHER, teacher_layer=4).warnings
    assert "starts from the teacher's layer 6 and learns from layer 4" in said
    (said,) = method_chain("minilm", STUDENT, TEACHER, start="first").warnings
    assert "starts from the teacher's layer 3 and learns from layer 6" in said


@pytest.mark.parametrize(
    ("start", "pairs"),
    [
        ("spread", {(0, 0), (1, 2), (2, 4), (3, 6)}),
        ("last", {(0, 0), (1, 4), (2, 5), (3, 6)}),
        ("random", {(0, 3), (1, 4), (2, 5), (3, 6)}),
    ],
)
@pytest.mark.parametrize("method", ["xtremedistil", "xtremedistil-printed"])
def test_xtremedistil_learns_each_layer_from_the_one_it_starts_from(
    method: str, start: str, pairs: set[tuple[int, int]]
) -> None:
    chain = method_chain(method, STUDENT, TEACHER, start=start)
    terms = chain.stages[0][0].objective.layers
    assert {(t.student_layer, t.teacher_layer) for t in terms if t.of == "hidden"} == pairs
    assert {(t.student_layer, t.teacher_layer) for t in terms if t.of == "scores"} == {p for p in pairs if p[0]}
    assert not chain.warnings


def test_the_losses_of_xtremedistil_are_means_and_the_printed_ones_sums() -> None:
    def losses(method: str) -> set[tuple[str, float]]:
        (stages,) = method_chain(method, STUDENT, TEACHER).stages
        return {(term.name, term.weight) for term in stages[0].objective.layers}

    assert losses("xtremedistil") == {("embeddings mse", 1), ("hidden mse", 1), ("attention mean squares", 1)}
    printed = {("embeddings half squares", 1 / 3), ("hidden half squares", 1 / 3), ("attention squares", 1 / 3)}
    assert losses("xtremedistil-printed") == printed
    assert losses("xtremedistil-no-attention") == {("embeddings mse", 1), ("hidden mse", 1)}
    (last,) = method_chain("xtremedistil-last-layer", STUDENT, TEACHER).stages[0][0].objective.layers
    assert (last.name, last.student_layer, last.teacher_layer) == ("hidden mse", 3, 6)


def test_a_map_that_trains_no_last_layer_is_refused() -> None:
    four = Shape(4, 48, 4, 96)
    with pytest.raises(BadInput, match=r"4 to 4 of 4: .* Give --layer-map spread"):
        method_chain("hidden-states", four, TEACHER, layer_map="uniform")
    (stages,) = method_chain("tinybert-general", four, TEACHER).stages
    assert max(term.student_layer for term in stages[0].objective.layers) == 4


def test_settings_of_one_stage_take_the_place_of_its_own() -> None:
    table = {"minilmv2": {"tokens": 50, "learning_rate": 1e-3, "batch": 8, "teacher_layer": 5, "relation_heads": 12}}
    (link,) = method_chain("minilmv2", STUDENT, TEACHER, stages=table).links(1000, 400)
    (stage,) = link.stages
    assert (link.tokens, stage.learning_rate, stage.batch) == ((50,), 1e-3, 8)
    assert {(term.teacher_layer, term.heads) for term in stage.objective.layers} == {(5, 12)}


@pytest.mark.parametrize(
    ("method", "stages", "message"),
    [
        ("minlm", {}, r"--method minlm is not known\. Did you mean minilm"),
        ("minilmv2,labels", {}, "Give --method again for each"),
        ("xtremedistil@layers=4,hidden=24,heads=4,ffn=48", {}, "take assistants"),
        ("minilm", {"minilmv2": {"tokens": 5}}, r"\[stages.minilmv2\]: the stages of --method minilm are minilm\."),
        ("minilm", {"minilm": {"rate": 5}}, "rate: the settings of a stage are"),
        ("minilm", {"minilm": {"learning_rate": float("nan")}}, "learning_rate is nan"),
        ("minilm", {"minilm": {"tokens": -1}}, "tokens is -1"),
        ("minilm", {"minilm": {"batch": 2.5}}, "batch is 2.5"),
        ("soft-labels", {"soft-labels": {"batch": 8}}, "no stage before the training on the task"),
        ("minilm", {"minilm": {"teacher_layer": 2}}, "--teacher-layer has no effect on --method minilm"),
        ("directminilm", {"directminilm": {"relation_heads": 12}}, "--relation-heads has no effect"),
        ("minilm", {"minilm": 5}, r"\[stages.minilm\] is 5"),
        ("minilm", {"minilm": {"pack": 1}}, "pack is 1"),
        ("tinybert", {"tinybert-task": {"pack": True}}, "only plain text is packed"),
    ],
)
def test_bad_methods_and_stages_are_refused(method: str, stages: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        method_chain(method, STUDENT, TEACHER, stages=stages)  # type: ignore[arg-type]


def test_layers_are_copied_into_students_of_their_width_alone() -> None:
    check_start("spread", (Shape(3, 24, 4, 48),), TEACHER)  # then new layers
    with pytest.raises(BadInput, match="--start first copies the teacher's layers"):
        check_start("first", (Shape(3, 24, 4, 48),), TEACHER)


def test_a_budget_cuts_the_plain_text_of_every_stage_and_no_label_steps() -> None:
    chain = method_chain("output-distribution", STUDENT, TEACHER, stages={"hidden-states": {"tokens": 500}})
    (whole,) = chain.links(1000, 400, (LABELS,))
    (half,) = chain.links(1000, 400, (LABELS,), cut=0.5)
    assert whole.tokens == (500, 300, 400)
    assert half.tokens == (250, 150, 400)


def test_relation_stages_pack_and_a_recipe_decides_for_any_stage_on_plain_text() -> None:
    def packs(method: str, **settings: Any) -> bool:
        return method_chain(method, STUDENT, TEACHER, **settings).stages[-1][0].pack

    assert [packs(method) for method in ("minilmv2", "hidden-states")] == [True, False]
    assert not packs("minilmv2", pack=False)
    assert not packs("minilmv2", stages={"minilmv2": {"pack": False}})
    assert packs("hidden-states", stages={"hidden-states": {"pack": True}})
