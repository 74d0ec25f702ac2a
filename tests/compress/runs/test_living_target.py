"""Relations are learned from teacher layers that live, by default; a dead layer that is named is kept and warned of."""

import json
from pathlib import Path

import pytest

from benchmarks.distill.grow import grown
from compress import distill
from compress.methods.catalogue import Sizes, stages_of
from compress.models.pretrained import load_encoder, open_model
from compress.progress import Event
from compress.runs.lineage import save_with_lineage
from compress.runs.method_trainings import learns_relations, on_living_layers
from serve.errors import BadInput

STUDENT = "layers=2,hidden=16,heads=4,ffn=32"
DEAD = (0.5, 0.02, 0.4, 0.01)  # relative changes of four layers


@pytest.fixture(scope="module")
def grown_teacher(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of eight layers whose even ones pass on what they get."""
    opened = open_model(str(tiny_teacher))
    folder = tmp_path_factory.mktemp("grown") / "teacher"
    save_with_lineage(grown(load_encoder(opened, seed=0), opened.family), opened, folder, {})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("my card was charged twice in paris\ni want a refund for the hotel in london please\n" * 20)
    return file


def taught(teacher: Path, text: Path, out: Path, **settings: object) -> tuple[list[int], list[str]]:
    """The teacher layers in the lineage of a student of `teacher`, and the messages about layers."""
    events: list[Event] = []
    made = distill(str(teacher), [text], out, progress=events.append, **({"student": STUDENT, "threads": 1} | settings))
    lineage = json.loads((made / "lineage.json").read_text(encoding="utf-8"))
    layers = len(lineage["teacher_layer_changes"])
    assert all((lineage["teacher_layer_changes"][i] < 0.1) == (layers == 8 and i % 2 == 1) for i in range(layers))
    return lineage["teacher_layers"], [str(e) for e in events if e.kind == "message" and "changes its input" in str(e)]


@pytest.mark.parametrize("method", ["minilmv2", "minilm"])
def test_an_inactive_layer_is_never_the_default(grown_teacher: Path, text: Path, tmp_path: Path, method: str) -> None:
    # A student of the teacher's width starts from its last layer, 8, and would learn from it. So does minilm always.
    student = "layers=2,hidden=64,heads=4,ffn=64"
    layers, said = taught(grown_teacher, text, tmp_path / "student", student=student, method=method)
    assert layers == [7]
    assert len(said) == 1
    assert "Relations are learned from layer 7, not 8" in said[0]


def test_a_layer_that_is_named_is_kept_and_warned_of(grown_teacher: Path, text: Path, tmp_path: Path) -> None:
    layers, said = taught(grown_teacher, text, tmp_path / "dead", teacher_layer=4)
    assert layers == [4]
    assert len(said) == 1
    assert said[0].startswith("warning: layer 4 of the teacher changes its input by")
    assert "the nearest that does more is 3" in said[0]
    assert taught(grown_teacher, text, tmp_path / "alive", teacher_layer=5) == ([5], [])


def test_a_teacher_whose_layers_all_live_is_taken_as_before(tiny_teacher: Path, text: Path, tmp_path: Path) -> None:
    assert taught(tiny_teacher, text, tmp_path / "student") == ([3], [])  # the layer below the last, for new layers


def test_a_cache_is_not_written_of_another_layer(grown_teacher: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"learned from layer 7, not 8.*--teacher-cache keeps only"):
        taught(
            grown_teacher, text, tmp_path / "student", method="minilm", teacher_cache=str(tmp_path / "kept"),
        )  # fmt: skip
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("method", ["minilm", "minilm-value-mse", "minilm-hidden-relation", "minilm-layer-to-layer"])
def test_all_terms_of_a_relation_move_together(method: str) -> None:
    (stage,) = stages_of(method, Sizes(4, 2, 24, 24))
    assert learns_relations(stage)
    moved, said = on_living_layers(stage, DEAD)
    assert {term.teacher_layer for term in moved.objective.layers} <= {1, 3}
    assert said
    assert len(moved.objective.layers) == len(stage.objective.layers)
    assert on_living_layers(stage, (0.5, 0.5, 0.5, 0.5)) == (stage, ())


def test_a_teacher_without_a_living_layer_is_learned_from_with_a_warning() -> None:
    (stage,) = stages_of("minilm", Sizes(4, 2, 24, 24))
    same, (said,) = on_living_layers(stage, (0.01, 0.02, 0.03, 0.04))
    assert same == stage
    assert "no other layer does more. Relations are learned from layer 4" in said


def test_hidden_states_are_learned_from_any_layer() -> None:
    assert not any(learns_relations(stage) for stage in stages_of("hidden-states", Sizes(4, 2, 24, 24)))
