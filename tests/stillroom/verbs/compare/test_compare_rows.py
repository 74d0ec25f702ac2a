"""The rows of a comparison: which values of `--start`, `--teacher-layer` and `--distill-tokens` make rows; and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.runs.task_inputs import TaskInputs
from serve.errors import BadInput
from stillroom.verbs.compare import Comparison, compare
from stillroom.verbs.compare.rows import Row, at_rate, links_of, rates_of, rows_of
from stillroom.verbs.compare.training import checked

NARROW = "layers=2,hidden=16,heads=4,ffn=32"
FITTING = "layers=2,hidden=32,heads=4,ffn=32"


Given = Callable[..., Comparison]


@pytest.fixture
def given(tmp_path: Path, tiny_teacher: Path, task_data: Path) -> Given:
    """A comparison with changes."""
    (tmp_path / "text.txt").write_text("please refund the lamp\n", encoding="utf-8")

    def make(**changes: Any) -> Comparison:
        settings: dict[str, Any] = {
            "teacher": str(tiny_teacher), "task": "text-classification", "data": str(task_data), "out": str(tmp_path / "out"),
            "methods": ("soft-labels",), "students": (FITTING,), "threads": 1, "seeds": 1, "corpus": (str(tmp_path / "text.txt"),),
        }  # fmt: skip
        return Comparison(**(settings | changes))

    return make


@pytest.fixture
def opened(given: Given) -> Any:
    """A comparison with changes, its inputs and its rows."""

    def make(**changes: Any) -> tuple[Comparison, TaskInputs, list[Row]]:
        comparison = given(**changes)
        inputs_of = checked(comparison)
        return comparison, inputs_of[comparison.students[0]], rows_of(comparison, inputs_of)

    return make


def told(rows: list[Row]) -> dict[str, list[tuple[object, ...]]]:
    """The choices of the rows of each method."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for row in rows:
        found.setdefault(row.method, []).append(tuple(row.choice))
    return found


def test_a_method_has_a_row_for_each_value_that_it_reads(opened: Any) -> None:
    methods = ("minilmv2", "minilm", "soft-labels")
    _, _, rows = opened(methods=methods, starts=("spread", "last"), teacher_layers=(2, 3), distill_tokens=(10, 20))
    assert told(rows) == {
        "labels-new-layers": [(None, None, None)],
        "labels-general-layers": [(None, None, None)],
        "labels": [("spread", None, None), ("last", None, None)],
        "minilmv2": [(start, layer, n) for start in ("spread", "last") for layer in (2, 3) for n in (10, 20)],
        "minilm": [(start, None, n) for start in ("spread", "last") for n in (10, 20)],
        "soft-labels": [("spread", None, None), ("last", None, None)],
    }
    assert len({row.name for row in rows}) == len(rows)
    names = [row.name for row in rows if row.method == "minilmv2"]
    assert names[0] == "minilmv2-layers2-hidden32-heads4-ffn32-spread-layer2-10tokens-0"


def test_a_folder_has_the_same_name_when_values_are_added(opened: Any) -> None:
    _, _, before = opened(methods=("minilmv2",))
    _, _, after = opened(methods=("minilmv2",), starts=("spread", "first"), distill_tokens=(1_000_000, 2_000_000))
    assert {row.name for row in before} < {row.name for row in after}


def test_new_layers_have_one_row_where_no_layer_of_the_teacher_fits(opened: Any) -> None:
    _, _, rows = opened(methods=("minilmv2",), students=(NARROW,), starts=("random", "spread"))
    assert told(rows)["minilmv2"] == [("random", None, 1_000_000)]
    _, _, rows = opened(methods=("minilmv2",), starts=("random", "spread"))
    assert told(rows)["minilmv2"] == [("random", None, 1_000_000), ("spread", None, 1_000_000)]


def test_the_stages_learn_from_the_layer_and_tokens_of_their_row(opened: Any) -> None:
    given, inputs, rows = opened(methods=("minilmv2",), teacher_layers=(2, 3), distill_tokens=(10, 20))
    for row in rows:
        if row.method == "minilmv2":
            (link,) = links_of(given, inputs, row)
            assert {term.teacher_layer for term in link.stages[0].objective.layers} == {row.choice.teacher_layer}
            assert link.tokens == (row.choice.distill_tokens, given.task_tokens)


def test_rates_are_shares_of_the_last_stages_own_unless_given(opened: Any) -> None:
    given, inputs, rows = opened(methods=("tinybert", "minilmv2"))
    rates = {row.method: rates_of(given, links_of(given, inputs, row)) for row in rows}
    assert rates == {row.method: (2e-4, 6e-4) for row in rows} | {"tinybert": (5e-5, 1.5e-4)}
    given, inputs, rows = opened(methods=("minilmv2",), label_learning_rates=(1e-3,))
    links = links_of(given, inputs, rows[-1])
    assert rates_of(given, links) == (1e-3,)
    (link,) = at_rate(links, 1e-3)
    assert [stage.learning_rate for stage in link.stages] == [5e-4, 1e-3]
    assert link.stages[0] == links[0].stages[0]


def test_every_method_that_cannot_work_is_told_at_once(given: Given, tmp_path: Path) -> None:
    # What a kill left of a page under way is no other thing.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".report.html.4711.partial").write_text("<p>", encoding="utf-8")
    for changes, faults in (
        (
            {"methods": ("minilm,minilmv2", "nosuch"), "teacher": "no-such-folder/x"},
            ("--method minilm,minilmv2", "Give --method again for each", "--method nosuch", "no-such-folder/x"),
        ),
        (
            {"methods": ("minilm", "xtremedistil-transfer"), "corpus": ()},
            ("no --corpus was given", "no --source-data was given"),
        ),
    ):
        with pytest.raises(BadInput) as told:
            compare(**vars(given(**changes)))
        assert all(fault in told.value.message for fault in faults)
        assert "holds other files" not in told.value.message


def test_every_repeated_value_that_cannot_work_is_told_at_once(given: Given, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as told:
        compare(
            **vars(given(
                methods=("minilmv2", "minilm"), starts=("alternate", "last", "first"),
                students=("layers=3,hidden=32,heads=4,ffn=32", NARROW), teacher_layers=(4, 7, 9),
            ))
        )  # fmt: skip
    said = told.value.message
    assert said.startswith("6 faults were found")
    assert "--start alternate for a student of 3 layers needs a teacher of at least 5 layers" in said
    for start in ("alternate", "last", "first"):
        assert f"--start {start} copies the teacher's layers, but layers=2,hidden=16,heads=4,ffn=32" in said
    assert "layer 7" in said
    assert "layer 9" in said
    assert not (tmp_path / "out").exists()
