"""Every method on every family: it runs, its loss falls, it touches nothing that it should not, it resumes to the bit."""

import copy
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from encoders import encoder
from every_stage import EVERY_STAGE, PIECES, SIZES, TaskText, models, silence_dropout, text_of
from safetensors import safe_open
from safetensors.torch import save_file

from compress.data.corpus import CorpusText
from compress.losses.outputs import total
from compress.methods.catalogue import METHODS, Sizes, Stage, chain_of, stages_of, usual_layer_map, usual_teacher_layer
from compress.methods.objectives import Projections, check_objective, layer_losses
from compress.models.activations import read
from compress.models.families import FAMILIES, is_multilingual, layers_of
from compress.models.shapes import STUDENTS, Shape
from compress.training.loop import CHECKPOINT, StageSettings, Validation
from compress.training.stage import step_losses, train_stage
from serve.errors import BadInput


def run(stage: Stage, text: Any, folder: Path, report: Any = None) -> tuple[Any, list[tuple[int, float]]]:
    """A student of BERT after 12 steps, and its losses."""
    teacher, student = models("bert", stage)
    settings = StageSettings(12, learning_rate=3e-3, checkpoint_every_s=0)
    return student, train_stage(stage, teacher, student, text, settings, folder=folder, report=report).loss


# BERT learns by every stage; two families that differ most from it by stages that together read all that is read of a model. The rest is
# slow.
NEAR = {"distilbert", "modernbert"}
TELLING = {"minilmv2", "tinybert-general", "output-distribution", "soft-labels"}
LEARNING = [
    pytest.param(
        kind, method, number, marks=() if kind == "bert" or (kind in NEAR and method in TELLING) else pytest.mark.slow
    )
    for kind in sorted(FAMILIES)
    for method, number in EVERY_STAGE
]
# Of relations, of projections that are trained too, of a head alone, and of a task.
RESUMED = [("minilmv2", 0), ("tinybert-general", 0), ("xtremedistil", 1), ("soft-labels", 0)]


@pytest.mark.parametrize(("kind", "method", "number"), LEARNING)
def test_the_loss_falls(kind: str, method: str, number: int, tmp_path: Path) -> None:
    stage = stages_of(method, SIZES)[number]
    teacher, student = models(kind, stage)
    silence_dropout(student)
    maps = Projections(stage.objective, teacher.config, student.config)

    def loss() -> float:
        """On the same five batches, before and after: steps themselves see batches of different difficulty."""
        batches = [text_of(stage).at(step) for step in range(5)]
        terms = [step_losses(stage.objective, teacher, student.eval(), batch, maps, None) for batch in batches]
        return float(np.mean([total(term).item() for term in terms]))

    before = loss()
    settings = StageSettings(12, learning_rate=1e-3)
    train_stage(stage, teacher, student, text_of(stage), settings, folder=tmp_path, projections=maps)
    assert loss() < before


def dying(done: int, steps: int, loss: float, tokens_per_s: float | None) -> None:
    if done == 7:
        raise KeyboardInterrupt


def as_an_earlier_version_left_it(folder: Path) -> None:
    """Takes the name of the student from the tensors of its checkpoint."""
    with safe_open(folder / CHECKPOINT, framework="pt") as file:
        metadata, names = file.metadata(), list(file.keys())
        tensors = {re.sub(r"^(model|optimizer\.\w+)\.", r"\1.student.", name): file.get_tensor(name) for name in names}
    save_file(tensors, folder / CHECKPOINT, metadata)


@pytest.mark.parametrize(
    ("method", "number"),
    [pytest.param(*each, marks=() if each in RESUMED else pytest.mark.slow) for each in EVERY_STAGE],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(method: str, number: int, tmp_path: Path) -> None:
    stage = stages_of(method, SIZES)[number]
    # Relations are learned from packed rows.
    text = CorpusText(PIECES, 0, 3, 0, row_tokens=24) if method == "minilmv2" else text_of(stage)
    whole, losses = run(stage, text, tmp_path / "whole")
    folders = [tmp_path / "killed"]
    torch.manual_seed(99)
    with pytest.raises(KeyboardInterrupt):
        run(stage, text, folders[0], dying)
    if method in ("minilmv2", "soft-labels"):
        folders.append(shutil.copytree(folders[0], tmp_path / "earlier"))
        as_an_earlier_version_left_it(folders[1])
    for folder in folders:
        resumed, again = run(stage, text, folder)
        assert again == losses
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 13))
        assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_the_teacher_stays_as_it_was_and_so_does_what_is_not_trained(tmp_path: Path) -> None:
    for trains in ("all", "encoder", "head"):
        stage = next(s for s in stages_of("xtremedistil", SIZES) if s.name == "logits")
        stage = Stage("logits", stage.objective, "task", trains)  # type: ignore[arg-type]
        teacher, student = models("bert", stage)
        theirs, before = copy.deepcopy(teacher.state_dict()), copy.deepcopy(student.state_dict())
        train_stage(stage, teacher, student, TaskText(), StageSettings(3), folder=tmp_path / trains)
        assert all(torch.equal(theirs[name], value) for name, value in teacher.state_dict().items())
        moved = {name for name, value in student.state_dict().items() if not torch.equal(before[name], value)}
        head = {name for name in moved if name.startswith("classifier") or "pooler" in name}
        assert any("pooler" in name for name in head) == (trains != "encoder")
        assert bool(head) == (trains != "encoder")
        assert bool(moved - head) == (trains != "head")
        assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize(("trains", "drops"), [("all", True), ("head", False)])
def test_a_frozen_encoder_has_no_dropout_also_after_a_validation(trains: str, drops: bool, tmp_path: Path) -> None:
    stage = next(s for s in stages_of("xtremedistil", SIZES) if s.name == "labels")
    stage = Stage("labels", stage.objective, "task", trains)  # type: ignore[arg-type]
    _, student = models("bert", stage)
    seen: list[torch.Tensor] = []
    student.bert.encoder.register_forward_hook(lambda _, __, found: seen.append(found[0].detach()))

    class Same(TaskText):
        def at(self, step: int) -> Any:
            return super().at(0)

    settings, validation = StageSettings(4, learning_rate=1e-9), Validation(2, lambda: 0.0)
    train_stage(stage, None, student, Same(), settings, folder=tmp_path, validation=lambda _: validation)
    assert len(seen) == 4
    assert [torch.allclose(seen[0], other, atol=1e-5) for other in seen[1:]] == [not drops] * 3


@pytest.mark.parametrize("method", ["minilmv2", "minilm", "directminilm", "tinybert-general"])
def test_losses_are_computed_in_full_precision_though_the_models_are_not(method: str) -> None:
    stage = stages_of(method, SIZES)[0]
    teacher, student = models("bert", stage)
    maps = Projections(stage.objective, teacher.config, student.config)
    batch = text_of(stage).at(0)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = read(teacher, batch.inputs, stage.objective.teacher_parts())
        ours = read(student.eval(), batch.inputs, stage.objective.student_parts())
        inside = layer_losses(stage.objective.layers, theirs, ours, batch.inputs["attention_mask"], 4, maps)
    outside = layer_losses(stage.objective.layers, theirs, ours, batch.inputs["attention_mask"], 4, maps)
    assert all(torch.equal(inside[name], outside[name]) for name in outside)
    assert all(term.dtype == torch.float32 for term in inside.values())


def test_the_layer_to_learn_from_is_the_one_that_served_the_size_best() -> None:
    # Comparative analysis, section 5: 6x768, 6x384, 4x576, 3x384 from twelve layers of 768.
    shapes = [(6, 768), (6, 384), (4, 576), (3, 384)]
    sizes = [Sizes(12, layers, 768, width) for layers, width in shapes]
    assert [usual_teacher_layer(one) for one in sizes] == [10, 11, 10, 10]
    assert [usual_teacher_layer(one, direct=True) for one in sizes] == [11, 11, 10, 10]
    assert usual_teacher_layer(Sizes(6, 3, 384, 384)) == 5
    # Table 3, multilingual: MiniLMv2 of L - 1 is best for every student, and its maps for XNLI.
    many = [replace(one, multilingual=True) for one in sizes]
    assert [usual_teacher_layer(one) for one in many] == [11, 11, 11, 11]
    assert [usual_teacher_layer(one, direct=True) for one in many] == [11, 11, 10, 10]
    maps = [[usual_layer_map(one) for one in each] for each in (sizes, many)]
    assert maps[0] == ["uniform+last", "uniform-consecutive", "uniform-consecutive", "single"]
    assert maps[1] == ["uniform+last", "uniform+last", "uniform+last", "uniform"]
    large = {
        family: usual_teacher_layer(Sizes(24, 6, 1024, 384, family=family))
        for family in ("bert", "roberta", "xlm-roberta")
    }
    assert large == {"bert": 21, "roberta": 19, "xlm-roberta": 19}


@pytest.mark.parametrize(
    ("config", "many"),
    [({"model_type": "bert", "vocab_size": 30_522}, False), ({"model_type": "modernbert", "vocab_size": 50_368}, False),
     ({"model_type": "bert", "vocab_size": 105_879}, True), ({"model_type": "xlm-roberta", "vocab_size": 5_000}, True)],
)  # fmt: skip
def test_the_layers_that_are_learned_follow_the_teachers_languages(config: dict[str, Any], many: bool) -> None:
    teacher = SimpleNamespace(**config, num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    assert is_multilingual(teacher) is many

    def learned(method: str) -> set[tuple[int, int]]:
        (stages,) = chain_of(method, [STUDENTS["3x384"]], teacher)
        return {(term.student_layer, term.teacher_layer) for term in stages[0].objective.layers}

    assert learned("minilmv2") == {(3, 11 if many else 10)}
    assert learned("hidden-states") == ({(1, 4), (2, 8), (3, 12)} if many else {(3, 12)})


@pytest.mark.parametrize("stops", [False, True])
def test_the_teacher_is_as_it_was_after_training_in_bfloat16_however_it_ends(tmp_path: Path, stops: bool) -> None:
    stage = stages_of("minilmv2", SIZES)[0]
    teacher, student = models("bert", stage)
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    seen: list[torch.dtype] = []

    def look(done: int, _steps: int, _loss: float, _speed: float | None) -> None:
        seen.append(teacher.encoder.layer[0].attention.self.query.weight.dtype)
        if stops and done == 2:
            raise KeyboardInterrupt

    settings = StageSettings(3, precision="bf16")
    with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        train_stage(stage, teacher, student, text_of(stage), settings, folder=tmp_path, report=look)
    assert seen == [torch.bfloat16] * (2 if stops else 3)
    after = teacher.state_dict()
    assert all(
        after[name].dtype == weight.dtype and torch.equal(after[name], weight) for name, weight in before.items()
    )


def test_above_the_last_values_nothing_is_computed_or_moved(tmp_path: Path) -> None:
    stage = stages_of("minilmv2", SIZES)[0]
    teacher, student = models("bert", stage)
    kept = copy.deepcopy(student.encoder.layer[-1].output.state_dict())
    ran: list[int] = []
    for number, layer in enumerate(layers_of(teacher), 1):
        layer.register_forward_hook(lambda _m, _i, _o, number=number: ran.append(number))
    train_stage(stage, teacher, student, CorpusText(PIECES, 0, 8, 0), StageSettings(2), folder=tmp_path)
    assert set(ran) == {1, 2}  # it learns from layer 3, whose queries, keys and values need the output of layer 2
    assert all(torch.equal(kept[name], value) for name, value in student.encoder.layer[-1].output.state_dict().items())


@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("electra", "modernbert"))]
)
def test_a_narrower_student_of_other_heads_learns_by_what_allows_it(kind: str, tmp_path: Path) -> None:
    for name in ("minilmv2", "hidden-states"):
        stage = stages_of(name, Sizes(4, 2, 24, 12))[0]
        teacher, student = models(kind, stage, Shape(2, 12, 2, 24))
        text = CorpusText(PIECES, 0, 8, 0)
        settings = StageSettings(40, learning_rate=3e-3)
        values = [v for _, v in train_stage(stage, teacher, student, text, settings, folder=tmp_path / name).loss]
        assert np.mean(values[-10:]) < np.mean(values[:10])


def learns_from_a_teacher(stage: Stage) -> bool:
    return bool(stage.objective.layers) or stage.objective.asks_teacher


@pytest.mark.parametrize(
    "method", [name for name in METHODS if any(map(learns_from_a_teacher, stages_of(name, Sizes(4, 4, 24, 24))))]
)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(method: str) -> None:
    """Equal depth and width, terms of distillation alone, maps that start as the identity: the loss is zero."""
    sizes = Sizes(4, 4, 24, 24, teacher_layer=4)
    for stage in filter(learns_from_a_teacher, stages_of(method, sizes)):
        teacher, _ = models("bert", stage)
        student = copy.deepcopy(teacher)
        maps = Projections(stage.objective, teacher.config, student.config)
        terms = step_losses(stage.objective, teacher, student.eval(), text_of(stage).at(0), maps, None)
        for name, term in terms.items():
            if not name.endswith("labels") or name.endswith("soft labels"):
                assert term.item() == pytest.approx(0, abs=1e-5), name


@pytest.mark.parametrize(
    ("method", "sizes", "student", "message"),
    [
        ("minilm", SIZES, Shape(2, 24, 6, 48), "the student has 6 and the teacher 4"),
        ("distilbert", SIZES, Shape(2, 12, 4, 24), "the widths are 12 and 24"),
        ("minilmv2", Sizes(4, 2, 24, 24, 5), Shape(2, 24, 4, 48), "--relation-heads is 5.* 1, 2, 3, 4, 6, 8, 12, 24"),
        ("minilmv2", Sizes(4, 2, 24, 24, 0, 5), Shape(2, 24, 4, 48), r"no layer 5\. Give a layer from 1 to 4"),
    ],
)
def test_incompatible_students_are_refused(method: str, sizes: Sizes, student: Shape, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_objective(stages_of(method, sizes)[0].objective, encoder("bert").config, student.as_config())


def test_an_unknown_method_and_a_deeper_student_are_refused() -> None:
    with pytest.raises(BadInput, match=r"'minilm3' is not known"):
        stages_of("minilm3", SIZES)
    with pytest.raises(BadInput, match="no deeper than its teacher"):
        stages_of("tinybert", Sizes(4, 6, 24, 24))
