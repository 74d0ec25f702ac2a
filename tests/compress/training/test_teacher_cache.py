"""A teacher's answers on disk: what they lose, that they are the teacher's, and when they are refused."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import encoder
from every_stage import HALF, thirty_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.batches import part_of
from compress.data.corpus import CorpusFile, CorpusText
from compress.distributed import ProcessShare
from compress.methods.catalogue import Sizes, stages_of
from compress.methods.objectives import Projections
from compress.models.activations import Part, read, sources_of
from compress.models.families import FAMILIES
from compress.models.initialise import student_of
from compress.training import teacher_cache as module
from compress.training.loop import StageSettings
from compress.training.stage import step_losses, train_stage
from compress.training.teacher_cache import CachedTeacherText, Layout, TeacherCache, teacher_cache
from serve.errors import BadInput

PARTS = [Part("hidden", 4), Part("keys", 3), Part("queries", 3)]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND", 50)
    monkeypatch.setattr(module, "POSITIONS", 30)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> CorpusFile:
    return thirty_pieces(tmp_path_factory.mktemp("corpus") / "text")


def cached(
    folder: Path, pieces: CorpusFile, kind: str = "bert", parts: list[Part] = PARTS, **changes: Any
) -> TeacherCache:
    teacher = encoder(kind)
    given = {"pad_id": 0, "precision": "fp32", "identity": {"teacher": "a", "text": pieces.fingerprint}} | changes
    return teacher_cache(folder, lambda: teacher, pieces, parts, **given)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), tokens=st.integers(1, 9), size=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e4, 1e7]))
def test_each_number_comes_back_to_half_a_step_of_its_group(seed: int, tokens: int, size: float) -> None:
    layout = Layout((Part("keys", 1), Part("values", 1)), 12, 4)
    x = (np.random.default_rng(seed).standard_normal((tokens, 24)) * size).astype(np.float32)
    packed = layout.packed(x)
    assert packed.shape == (tokens, layout.bytes_per_token) == (tokens, 24 + 2 * 6)
    back = layout.unpacked(packed)
    largest = np.abs(x.reshape(tokens, 6, 4)).max(axis=-1, keepdims=True).repeat(4, axis=-1).reshape(tokens, 24)
    least = 127 * 2.0**-25  # below which float16 has no steps left
    if largest.max() < 127 * 65504:
        assert (np.abs(back - x) <= largest / 127 * 0.51 + largest * 2.0**-11 + least).all()


@pytest.mark.parametrize("kind", FAMILIES)
def test_cached_activations_are_near_the_teachers(kind: str, pieces: CorpusFile, tmp_path: Path) -> None:
    cache = cached(tmp_path / "cache", pieces, kind)
    assert cache.about["bytes_per_token"] == 3 * (24 + 2 * 4)
    assert cache.about["tokens"] == pieces.lengths.sum()
    assert 0 < cache.about["relative_error"] < 0.01
    text = CorpusText(pieces, 0, 6, 0)
    for step in range(5):
        batch = CachedTeacherText(text, cache).at(step)
        assert batch.teacher_activations is not None
        inside = read(encoder(kind), batch.inputs, PARTS)
        real = batch.inputs["attention_mask"].bool()
        for part in PARTS:
            kept = batch.teacher_activations[tuple(part)]
            assert (kept[real] - inside[part][real]).norm() < 0.01 * inside[part][real].norm()
            assert not kept[~real].any()


# BERT by every method; two families that differ most from it by one of them.
@pytest.mark.parametrize(
    ("kind", "method", "row_tokens"),
    [
        *(
            ("bert", method, 0)
            for method in ("minilmv2", "minilm", "tinybert-general", "hidden-states", "directminilm")
        ),
        *(
            (kind, "minilm", row_tokens)
            for kind, row_tokens in (("bert", 20), ("mpnet", 20), ("mpnet", 0), ("modernbert", 0))
        ),
    ],
)
def test_cached_losses_are_near_those_of_the_teacher(
    kind: str, method: str, row_tokens: int, pieces: CorpusFile, tmp_path: Path
) -> None:
    objective = stages_of(method, Sizes(4, 2, 24, 24))[0].objective
    assert objective.can_be_kept
    cache = cached(tmp_path / "cache", pieces, kind, sorted(sources_of(objective.teacher_parts())))
    teacher = encoder(kind)
    student, _ = student_of(teacher, HALF, seed=1, new_layers=True)
    text = CorpusText(pieces, 0, 6, 0, row_tokens=row_tokens)
    torch.manual_seed(0)
    maps = Projections(objective, teacher.config, student.config)
    for share in (ProcessShare(0, 1), ProcessShare(1, 2)):
        found = [
            step_losses(objective, asked, student.eval(), part_of(batch, share), maps, None)
            for asked, batch in ((teacher, text.at(0)), (Silent(teacher), CachedTeacherText(text, cache).at(0)))
        ]
        for name, loss in found[0].items():
            assert found[1][name].item() == pytest.approx(loss.item(), rel=0.02, abs=1e-4)
            assert found[1][name].item() != loss.item()


class Silent(torch.nn.Module):
    """A teacher that must not be asked."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self.inner, self.config, self.base_model_prefix = teacher, teacher.config, "inner"

    def forward(self, *_given: Any, **_more: Any) -> None:
        raise AssertionError("the teacher was asked")


def test_a_student_learns_from_a_disk_what_it_learns_from_the_teacher(pieces: CorpusFile, tmp_path: Path) -> None:
    stage = stages_of("minilmv2", Sizes(4, 2, 24, 24))[0]
    cache = cached(tmp_path / "cache", pieces, parts=sorted(stage.objective.teacher_parts()))
    losses = []
    text = CorpusText(pieces, 0, 6, 0)
    for name, read_from, teacher in (
        ("live", text, encoder("bert")),
        ("disk", CachedTeacherText(text, cache), Silent(encoder("bert"))),
    ):
        student, _ = student_of(encoder("bert"), HALF, seed=1, new_layers=True)
        made = train_stage(stage, teacher, student, read_from, StageSettings(30), folder=tmp_path / name)
        losses.append([loss for _, loss in made.loss])
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_killed_cache_resumes_to_the_same_bytes(
    pieces: CorpusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cached(tmp_path / "whole", pieces)

    broken_off(tmp_path / "broken", pieces)
    assert not (tmp_path / "broken").exists()
    with (tmp_path / "broken.partial" / module.NUMBERS).open("ab") as file:
        file.write(b"half a piece")
    asked: list[int] = []
    answers = module._answers
    monkeypatch.setattr(module, "_answers", lambda *given: (asked.append(len(given[2])), answers(*given))[1])
    broken = cached(tmp_path / "broken", pieces)
    assert 0 < sum(asked) < len(pieces)
    assert (broken.folder / module.NUMBERS).read_bytes() == (whole.folder / module.NUMBERS).read_bytes()
    assert broken.about["relative_error"] == pytest.approx(whole.about["relative_error"])
    asked.clear()
    cached(tmp_path / "broken", pieces)
    assert not asked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity": {"teacher": "b", "text": "t"}}, "another teacher and another text"),
        ({"precision": "bf16"}, "another precision"),
        ({"parts": [Part("hidden", 3)]}, "another part of the teacher"),
    ],
)
def test_a_cache_of_other_inputs_is_refused(
    changes: dict[str, Any], said: str, pieces: CorpusFile, tmp_path: Path
) -> None:
    cached(tmp_path / "cache", pieces)
    before = (tmp_path / "cache" / module.NUMBERS).read_bytes()
    with pytest.raises(BadInput, match=said):
        cached(tmp_path / "cache", pieces, **changes)
    assert (tmp_path / "cache" / module.NUMBERS).read_bytes() == before


def test_a_changed_cache_and_a_folder_of_other_things_are_refused(pieces: CorpusFile, tmp_path: Path) -> None:
    cached(tmp_path / "cache", pieces)
    file = tmp_path / "cache" / module.NUMBERS
    numbers = bytearray(file.read_bytes())
    numbers[100] ^= 1
    file.write_bytes(numbers)
    with pytest.raises(BadInput, match="SHA-256 differs"):
        cached(tmp_path / "cache", pieces)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").touch()
    with pytest.raises(BadInput, match="is not a teacher cache; nothing was written"):
        cached(tmp_path / "mine", pieces)


def broken_off(folder: Path, pieces: CorpusFile) -> Path:
    """What a kill in the middle leaves."""

    def dies(done: int, _all: int) -> None:
        if done > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(folder, pieces, report=dies)
    return folder.with_name(folder.name + ".partial")


def test_lost_numbers_of_a_killed_cache_are_made_again(pieces: CorpusFile, tmp_path: Path) -> None:
    whole = cached(tmp_path / "whole", pieces)
    (broken_off(tmp_path / "broken", pieces) / module.NUMBERS).unlink()
    again = cached(tmp_path / "broken", pieces)
    assert again.about["sha256"] == whole.about["sha256"]


def test_a_cache_killed_before_its_rename_is_resumed(
    pieces: CorpusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, to: path.rename(to) if path.is_file() else pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            cached(tmp_path / "cache", pieces)
    assert cached(tmp_path / "cache", pieces).about["tokens"] == pieces.lengths.sum()


def test_a_partial_cache_of_other_inputs_is_left_alone(pieces: CorpusFile, tmp_path: Path) -> None:
    partial = broken_off(tmp_path / "cache", pieces)
    before = (partial / module.NUMBERS).read_bytes()
    with pytest.raises(BadInput, match="partial was written for another teacher and another text"):
        cached(tmp_path / "cache", pieces, identity={"teacher": "b", "text": "t"})
    assert (partial / module.NUMBERS).read_bytes() == before
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").touch()
    with pytest.raises(BadInput, match=r"other.partial exists and is not a teacher cache"):
        cached(tmp_path / "other", pieces)


def test_an_empty_folder_is_taken_and_a_cache_outlives_its_folder(pieces: CorpusFile, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    cache = cached(tmp_path / "cache", pieces)
    before = cache.at([[3], [5]], 16)
    shutil.rmtree(tmp_path / "cache")
    after = cache.at([[3], [5]], 16)
    assert all(torch.equal(before[part], after[part]) for part in before)


def test_infinite_activations_are_refused(pieces: CorpusFile, tmp_path: Path) -> None:
    teacher = encoder("bert")
    with torch.no_grad():
        teacher.encoder.layer[0].output.dense.bias[0] = float("inf")
    given: dict[str, Any] = {"pad_id": 0, "precision": "fp32", "identity": {}}
    with pytest.raises(BadInput, match="activations are not finite"):
        teacher_cache(tmp_path / "cache", lambda: teacher, pieces, PARTS, **given)
    assert not (tmp_path / "cache").exists()


def test_no_room_is_told_before_anything_is_written(
    pieces: CorpusFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _folder: usage(1_000))
    with pytest.raises(BadInput, match=r"tokens of 96 bytes, and only 0.0 GB are free"):
        cached(tmp_path / "cache", pieces)
    assert [file.name for file in tmp_path.iterdir()] == ["cache.lock"]
