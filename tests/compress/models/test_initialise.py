import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import encoder

from compress.data.corpus import CorpusText, Masking, chunks
from compress.methods.catalogue import Sizes, stages_of
from compress.models.families import FAMILIES
from compress.models.initialise import STARTS, shape_in, starting_layers, student_from, student_of, truncated
from compress.models.pretrained import load_encoder, open_model, open_tokenizer
from compress.models.shapes import Shape, spread_layers
from compress.training.loop import StageSettings
from compress.training.stage import train_stage
from serve.errors import BadInput

TEACHERS = sorted(FAMILIES)
IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def teacher_of(kind: str):
    return encoder(kind, "ForTokenClassification", seed=1, num_labels=3)


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_student_of_the_teachers_shape_is_the_teacher(kind: str) -> None:
    teacher = teacher_of(kind)
    student, _ = student_of(teacher, Shape(4, 24, 4, 48), seed=0)
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits)


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_student_with_another_activation_has_the_teachers_weights_under_it(kind: str) -> None:
    teacher = teacher_of(kind)
    student, origin = student_of(teacher, Shape(4, 24, 4, 48, "relu"), seed=0)
    named = {"distilbert": "activation", "modernbert": "hidden_activation"}.get(kind, "hidden_act")
    expected = encoder(kind, "ForTokenClassification", seed=1, num_labels=3, **{named: "relu"})
    assert origin["layers"] == "teacher layers 1, 2, 3, 4"
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, expected(IDS).logits)
        assert not torch.equal(student(IDS).logits, teacher(IDS).logits)


@pytest.mark.parametrize("kind", TEACHERS)
def test_dropping_units_that_do_nothing_changes_nothing(kind: str) -> None:
    """Half of the feed-forward units are silenced; the narrower student keeps the others and so answers alike."""
    teacher, family = teacher_of(kind), FAMILIES[kind]
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if name.endswith(f"{family.ffn_out}.weight"):
                parameter[:, ::2] = 0
    student, origin = student_of(teacher, Shape(4, 24, 4, 24), seed=0)
    assert "24 feed-forward units of largest norm" in origin["layers"]
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits)


def test_layers_are_taken_evenly_and_end_with_the_last() -> None:
    assert spread_layers(12, 3) == (4, 8, 12)
    assert spread_layers(6, 3) == (2, 4, 6)
    assert spread_layers(6, 4)[-1] == 6
    teacher = teacher_of("bert")
    student, _ = student_of(teacher, Shape(2, 24, 4, 48), seed=0)
    second, fourth = (teacher.bert.encoder.layer[i] for i in (1, 3))
    for ours, theirs in zip(student.bert.encoder.layer, (second, fourth), strict=True):
        torch.testing.assert_close(ours.attention.self.query.weight, theirs.attention.self.query.weight)


def test_chosen_layers_are_copied_and_those_that_are_not_there_refused() -> None:
    teacher = teacher_of("bert")
    student, origin = student_of(teacher, Shape(2, 24, 4, 48), seed=0, chosen=(1, 3))
    assert origin["layers"] == "teacher layers 1, 3"
    torch.testing.assert_close(
        student.bert.encoder.layer[1].output.dense.weight, teacher.bert.encoder.layer[2].output.dense.weight
    )
    with pytest.raises(BadInput, match=r"The layers 1, 5 were chosen; .* layers 1 to 4"):
        student_of(teacher, Shape(2, 24, 4, 48), seed=0, chosen=(1, 5))
    _, fresh = student_of(teacher, Shape(2, 24, 4, 48), seed=0, new_layers=True)
    assert (fresh["layers"], fresh["embeddings"]) == ("new", "the teacher's")


def test_an_encoder_without_a_head_gives_the_layers_that_are_named() -> None:
    teacher = teacher_of("bert").bert
    student, origin = student_of(teacher, Shape(2, 24, 4, 48), seed=0)
    assert origin["layers"] == "teacher layers 2, 4"
    for ours, number in zip(student.encoder.layer, (2, 4), strict=True):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, teacher.encoder.layer[number - 1].state_dict()[name])


def test_a_narrower_student_has_the_best_embedding_of_its_rank() -> None:
    table = torch.randn(60, 24, generator=torch.Generator().manual_seed(3))
    ours = truncated(table, 8).numpy().astype(np.float64)
    u, s, _ = np.linalg.svd(table.numpy().astype(np.float64), full_matrices=False)
    # Columns agree up to sign, so products of rows agree exactly.
    np.testing.assert_allclose(ours @ ours.T, (u[:, :8] * s[:8]) @ (u[:, :8] * s[:8]).T, atol=1e-4)


def test_a_narrower_or_deeper_student_is_new_where_shapes_forbid_and_says_so() -> None:
    teacher = teacher_of("bert")
    narrow, origin = student_of(teacher, Shape(2, 12, 4, 24), seed=0)
    assert origin["embeddings"].startswith("truncated SVD")
    assert (origin["layers"], origin["head"]) == ("new", "new")
    assert narrow(IDS).logits.shape == (2, 9, 3)
    _, deeper = student_of(teacher, Shape(6, 24, 4, 48), seed=0)
    assert (deeper["embeddings"], deeper["layers"], deeper["head"]) == ("the teacher's", "new", "the teacher's")


def test_a_seed_fixes_what_is_new_and_the_teacher_stays_as_it_was() -> None:
    teacher = teacher_of("bert")
    before = copy.deepcopy(teacher.state_dict())
    first, second, other = (student_of(teacher, Shape(2, 12, 4, 24), seed=s)[0].state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(
        first["bert.encoder.layer.0.output.dense.weight"], other["bert.encoder.layer.0.output.dense.weight"]
    )
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


@pytest.mark.parametrize(
    ("name", "layer_map", "twelve_to_four", "six_to_three"),
    [
        ("spread", "", (3, 6, 9, 12), (2, 4, 6)),
        ("alternate", "", (1, 3, 5, 7), (1, 3, 5)),
        ("first", "", (1, 2, 3, 4), (1, 2, 3)),
        ("last", "", (9, 10, 11, 12), (4, 5, 6)),
        ("layer-map", "last", (9, 10, 11, 12), (4, 5, 6)),
        ("layer-map", "uniform-consecutive", (3, 6, 9, 12), (2, 4, 6)),
        ("layer-map", "uniform+last", (9, 10, 11, 12), (4, 5, 6)),
        ("layer-map", "single", (3, 6, 9, 12), (2, 4, 6)),  # layers that learn from none are spread evenly
    ],
)
def test_the_layers_that_a_start_names_are_those_of_the_field(
    name: str, layer_map: str, twelve_to_four: tuple[int, ...], six_to_three: tuple[int, ...]
) -> None:
    assert starting_layers(name, 12, 4, map_name=layer_map) == twelve_to_four
    assert starting_layers(name, 6, 3, map_name=layer_map) == six_to_three


@pytest.mark.parametrize("start", STARTS)
def test_a_student_computes_what_the_layers_of_its_start_compute(start: str) -> None:
    """The teacher with its other layers taken out is what the student must be."""
    teacher = teacher_of("bert")
    chosen = starting_layers(start, 4, 2, map_name="last")
    student, origin = student_of(teacher, Shape(2, 24, 4, 48), seed=0, chosen=chosen)
    assert origin["layers"] == f"teacher layers {chosen[0]}, {chosen[1]}"
    pruned = copy.deepcopy(teacher)
    pruned.bert.encoder.layer = torch.nn.ModuleList([pruned.bert.encoder.layer[i - 1] for i in chosen])
    with torch.no_grad():
        torch.testing.assert_close(student(IDS).logits, pruned(IDS).logits)


def test_a_start_that_the_teacher_is_too_shallow_for_is_refused() -> None:
    for start, teacher, student, fault in (
        ("alternate", 6, 4, "at least 7 layers; this one has 6"),
        ("last", 6, 8, "--start last .* at least 8 layers"),
        ("top", 6, 3, "--start top is not known"),
    ):
        with pytest.raises(BadInput, match=fault):
            starting_layers(start, teacher, student)


def checkpoint(folder: Path, tokenizer: Path, kind: str = "distilbert", head: str = "", **changes: Any) -> Path:
    """A random model of another family than the tiny teacher's, with its tokenizer."""
    size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    encoder(kind, head, seed=4, num_hidden_layers=2, **({"vocab_size": size} | changes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    return folder


def reworded(folder: Path, change: Any) -> Path:
    """The tokenizer of `folder` after `change` of what its file says; the file of words alone goes."""
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(said)
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    (folder / "vocab.txt").unlink(missing_ok=True)
    return folder


def test_a_student_starts_from_a_checkpoint_of_its_own_as_it_stands(tiny_teacher: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", tiny_teacher)
    student, origin = student_from(str(folder), open_model(str(tiny_teacher)), seed=0)
    assert origin == {"embeddings": "small's", "layers": "small's", "head": "none"}
    assert shape_in(open_model(str(folder))) == Shape(2, 24, 4, 48)
    saved = load_encoder(folder, seed=1).state_dict()
    assert saved.keys() == student.state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in student.state_dict().items())


NEAR = {("distilbert", "minilmv2"), ("electra", "output-distribution"), ("mpnet", "minilmv2")}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(kind, method, marks=() if (kind, method) in NEAR else pytest.mark.slow)
        for kind in ("distilbert", "electra", "mpnet")
        for method in ("minilmv2", "output-distribution", "hidden-states", "minilm")
    ],
)
def test_a_student_of_another_family_learns(tiny_teacher: Path, tmp_path: Path, kind: str, method: str) -> None:
    opened = open_model(str(tiny_teacher))
    folder = checkpoint(tmp_path / "small", tiny_teacher, kind)
    stage = stages_of(method, Sizes(4, 2, 32, 24))[-1]
    masks = stage.objective.masks_tokens
    student, origin = student_from(str(folder), opened, seed=0, vocabulary=masks)
    assert origin["head"] == ("new" if masks else "none")
    teacher = load_encoder(tiny_teacher, seed=0, vocabulary=masks)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # random weights attend to everything alike
    tokenizer = open_tokenizer(opened)
    pieces = chunks(["where is my lovely kettle", "thank you, the radio is great for Lisbon"] * 8, tokenizer, 24)
    text = CorpusText(pieces, 0, 8, 0, Masking(4, tokenizer.get_vocab_size()) if masks else None)
    settings = StageSettings(30, learning_rate=3e-3)
    values = [v for _, v in train_stage(stage, teacher, student, text, settings, folder=tmp_path / "work").loss]
    assert np.mean(values[-5:]) < np.mean(values[:5])


def test_a_start_with_another_vocabulary_is_refused(tiny_teacher: Path, tmp_path: Path) -> None:
    def swap(said: Any) -> None:
        words = said["model"]["vocab"]
        words["kettle"], words["lamp"] = words["lamp"], words["kettle"]
        words["wagon"] = len(words)

    known = json.loads((tiny_teacher / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    folder = reworded(checkpoint(tmp_path / "small", tiny_teacher, vocab_size=len(known) + 1), swap)
    with pytest.raises(BadInput) as raised:
        student_from(str(folder), open_model(str(tiny_teacher)), seed=0)
    said = str(raised.value)
    assert f"of {len(known)} and {len(known) + 1} tokens 3 differ" in said
    assert f"'kettle' is {known['kettle']} in the teacher's ids and {known['lamp']} in the student's" in said
    assert "'wagon' is missing in the teacher's ids" in said
    assert "Give a checkpoint with the teacher's tokenizer" in said


def test_a_start_with_other_tokenizer_rules_is_refused(tiny_teacher: Path, tmp_path: Path) -> None:
    def keep_case(said: Any) -> None:
        said["normalizer"]["lowercase"] = False

    folder = reworded(checkpoint(tmp_path / "small", tiny_teacher), keep_case)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"do_lower_case": False}), encoding="utf-8")
    with pytest.raises(BadInput, match=r"'The'\) is 'the' \(\d+\) by the teacher's and '\[UNK\]'"):
        student_from(str(folder), open_model(str(tiny_teacher)), seed=0)


def test_a_start_with_another_vocabulary_head_is_refused(tiny_teacher: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", tiny_teacher, head="ForMaskedLM", vocab_size=200)
    opened = open_model(str(tiny_teacher))
    student_from(str(folder), opened, seed=0)
    with pytest.raises(BadInput, match="has a vocabulary of 200 tokens"):
        student_from(str(folder), opened, seed=0, vocabulary=True)
