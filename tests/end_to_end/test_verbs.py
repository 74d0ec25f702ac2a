"""Verbs apart from `run`, from Python and from the command line, on a tiny teacher."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import stillroom

import compress.training.teacher_cache
import stillroom as face
from compress.methods.catalogue import METHODS, Sizes
from compress.runs import method_trainings, task_stages
from serve.bundle.cpu import HIDDEN_VARIABLE
from serve.errors import BadInput

STUDENT = "layers=2,hidden=32,heads=4,ffn=32"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of one batch, for trainings whose end tells nothing."""
    path = tmp_path_factory.mktemp("corpus") / "few.txt"
    path.write_text("\n".join(f"please refund the lamp from Oslo {i}" for i in range(50)), encoding="utf-8")
    return path


def lineage_of(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "lineage.json").read_text(encoding="utf-8"))
    return document


def weights_of(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


def test_distill_writes_a_checkpoint_that_automodel_opens(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    settings: dict[str, Any] = {"epochs": 4, "batch": 8, "learning_rate": 3e-3}
    given = (str(tiny_teacher), [corpus], tmp_path / "small")
    made = face.distill(*given, student="layers=2,hidden=16,heads=4,ffn=32", **settings)
    model, tokenizer = AutoModel.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model(**tokenizer("please refund", return_tensors="pt")).last_hidden_state.shape[-1] == 16
    losses = lineage_of(made)["loss"]
    assert np.mean([value for _, value in losses[-10:]]) < losses[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    with pytest.raises(BadInput, match="already exists"):
        face.distill(*given)


@pytest.mark.parametrize(
    "method",
    [
        # Of each kind one: relations, several stages, vectors of texts, masked text.
        pytest.param(
            name,
            marks=() if name in ("minilmv2", "output-distribution", "sentence-vectors", "mlm") else pytest.mark.slow,
        )
        for name in METHODS
        if all(s.text == "corpus" for s in METHODS[name](Sizes(4, 2, 32, 32)))
    ],
)
def test_every_method_that_needs_no_task_makes_a_student_and_goes_on_where_it_was_stopped(
    method: str, tiny_teacher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    settings = {"student": STUDENT, "method": method, "batch": 50}
    whole = face.distill(str(tiny_teacher), [corpus], tmp_path / "whole", **settings)
    saved = method_trainings.save

    def dies(model: Any, folder: Path, given: Any, details: dict[str, Any]) -> None:
        if details["role"] == "student":
            raise KeyboardInterrupt
        saved(model, folder, given, details)

    monkeypatch.setattr(method_trainings, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        face.distill(str(tiny_teacher), [corpus], tmp_path / "broken", **settings)
    monkeypatch.undo()
    assert not (tmp_path / "broken").exists()
    broken = face.distill(str(tiny_teacher), [corpus], tmp_path / "broken", **settings)
    assert weights_of(whole) == weights_of(broken)
    assert len(AutoModel.from_pretrained(whole).encoder.layer) == 2
    assert lineage_of(whole)["method"] == method


def test_a_student_starts_from_the_layers_or_the_checkpoint_that_it_is_told(
    tiny_teacher: Path, few: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    def layers(folder: Path) -> list[np.ndarray]:
        found = AutoModel.from_pretrained(folder).encoder.layer
        return [layer.output.dense.weight.detach().numpy() for layer in found]

    settings: dict[str, Any] = {"method": "minilm", "batch": 50, "learning_rate": 1e-9}
    teacher, shape = layers(tiny_teacher), "layers=2,hidden=32,heads=4,ffn=64"
    for start, numbers in (("first", (1, 2)), ("alternate", (1, 3)), ("layer-map", (3, 4)), ("random", ())):
        mapped = {"layer_map": "last"} if start == "layer-map" else {}
        out = tmp_path / start
        ours = layers(face.distill(str(tiny_teacher), [few], out, student=shape, start=start, **mapped, **settings))
        for weight, number in zip(ours, numbers, strict=False):
            np.testing.assert_allclose(weight, teacher[number - 1], atol=1e-6)
        assert numbers or not any(np.allclose(ours[0], weight) for weight in teacher)
    again = face.distill(str(tiny_teacher), [few], tmp_path / "again", start=str(tmp_path / "first"), **settings)
    np.testing.assert_allclose(layers(again), layers(tmp_path / "first"), atol=1e-6)
    assert lineage_of(again)["start"] == "first"


@pytest.mark.parametrize(("pack", "steps_per_epoch"), [(False, 10), (True, 2)])
def test_a_papers_schedule_is_followed_but_for_what_is_given(
    pack: bool, steps_per_epoch: int, tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    made = face.distill(
        str(tiny_teacher), [corpus], tmp_path / "small", student=STUDENT, schedule="minilmv2-multilingual",
        batch=20, tokens=64, accumulate=2, pack=pack,
    )  # fmt: skip
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7 * steps_per_epoch + 1))
    rates = [line["learning_rate"] for line in lines]
    assert max(rates) == 8e-4
    assert rates.index(8e-4) == -(-7 * steps_per_epoch // 20) - 1  # a twentieth of all steps to warm up
    lineage = lineage_of(made)
    assert (lineage["epochs"], lineage["batch"], lineage["tokens"]) == (7, 20, 64)
    assert lineage["tokens_read"] == 7 * 2_090  # every token of the corpus in each epoch, however it is packed
    assert all(line["padded_share"] < (0.2 if pack else 0.1) for line in lines)


def test_a_teacher_is_asked_once_for_several_students(
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: dict[str, Any] = {"batch": 50, "epochs": 3, "learning_rate": 1e-3}
    common = (str(tiny_teacher), [corpus])
    live = face.distill(*common, tmp_path / "live", student=STUDENT, **settings)
    settings["teacher_cache"] = str(tmp_path / "kept" / "cache")
    first = face.distill(*common, tmp_path / "first", student=STUDENT, **settings)
    assert "teacher cache written: " in capsys.readouterr().err
    monkeypatch.setattr(compress.training.teacher_cache, "read", None)  # what would ask the teacher
    second = face.distill(*common, tmp_path / "second", student="layers=1,hidden=32,heads=4,ffn=32", **settings)
    assert "teacher cache found: " in capsys.readouterr().err
    lineages = [lineage_of(made) for made in (live, first, second)]
    ends = [lineage["loss"][-1][1] for lineage in lineages]
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
    assert ends[1] != ends[0]
    kept = json.loads((tmp_path / "kept" / "cache" / "cache.json").read_text(encoding="utf-8"))["sha256"]
    assert [lineage["teacher_cache"] for lineage in lineages] == [False, kept, kept]
    other = tmp_path / "other.txt"
    other.write_text("another text\n", encoding="utf-8")
    with pytest.raises(BadInput, match="another text"):
        face.distill(str(tiny_teacher), [other], tmp_path / "third", student=STUDENT, **settings)


def test_whole_words_are_hidden_when_asked(tiny_teacher: Path, few: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"student": STUDENT, "method": "mlm", "batch": 50, "epochs": 1}
    plain, whole = (
        face.distill(str(tiny_teacher), [few], tmp_path / str(words), whole_words=words, **settings)
        for words in (False, True)
    )
    assert lineage_of(plain)["loss"][0] != lineage_of(whole)["loss"][0]


def test_an_assistant_stands_between_teacher_and_student(
    tiny_teacher: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    student = "layers=2,hidden=16,heads=4,ffn=32"
    settings: dict[str, Any] = {"student": student, "method": "minilm", "batch": 50, "epochs": 2}
    direct = face.distill(str(tiny_teacher), [few], tmp_path / "direct", **settings)
    settings["assistants"] = ("auto",)
    taught: list[tuple[int, int]] = []
    train_stage = method_trainings.train_stage

    def seen(stage: Any, teacher: Any, trained: Any, *others: Any, **more: Any) -> Any:
        taught.append((teacher.config.num_hidden_layers, trained.config.num_hidden_layers))
        if len(taught) == 2:
            raise KeyboardInterrupt
        return train_stage(stage, teacher, trained, *others, **more)

    monkeypatch.setattr(method_trainings, "train_stage", seen)
    with pytest.raises(KeyboardInterrupt):
        face.distill(str(tiny_teacher), [few], tmp_path / "assisted", **settings)
    made = face.distill(str(tiny_teacher), [few], tmp_path / "assisted", **settings)
    assert taught == [(4, 4), (4, 2), (4, 2)]  # the assistant is as deep as the teacher, and is not made again
    assert "layers=4,hidden=16,heads=4,ffn=32" in capsys.readouterr().err
    assert weights_of(made) != weights_of(direct)
    assert (lineage_of(made)["assistants"], lineage_of(made)["student"]) == (["auto"], student)


def test_distill_refuses_before_it_writes(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"method": "magic"}, "--method is 'magic'.*minilmv2, "),
        ({"teacher_layer": 9}, "from 1 to 4"),
        ({"relation_heads": 5}, "does not divide"),
        ({"batch": 0}, "--batch is 0"),
        ({"schedule": "minilm2"}, "--schedule is 'minilm2'.*minilm, "),
        ({"trackers": ("tensorbored",)}, "--tracker is 'tensorbored'.*tensorboard"),
        ({"method": "output-distribution", "schedule": "hidden-states"}, "output-distribution has 2 stages"),
        ({"method": "tinybert"}, "--method is 'tinybert'"),
        ({"method": "hidden-states", "layer_map": "first"}, "--layer-map is 'first'"),
        ({"method": "minilm", "layer_map": "last"}, "--layer-map has no effect on --method minilm"),
        ({"method": "minilm", "teacher_layer": 2}, "--teacher-layer has no effect on --method minilm"),
        ({"start": "./scratch"}, "--start ./scratch does not exist"),
        ({"start": "first"}, "--start first .* width of 32"),
        ({"start": "layer-map"}, "--start layer-map needs --layer-map"),
        ({"start": str(tiny_teacher)}, "layers=4,hidden=32,heads=4,ffn=64"),
        ({"method": "minilm", "whole_words": True}, "--whole-words has no effect on --method minilm"),
        ({"method": "mlm", "teacher_cache": "kept"}, "--teacher-cache .* --method mlm"),
        ({"teacher_cache": str(tiny_teacher)}, "is not a teacher cache"),
        ({"teacher_cache": str(tmp_path / "small")}, "--out"),
        ({"teacher_cache": "kept", "assistants": ("layers=3,hidden=32,heads=4,ffn=32",)}, "--assistant"),
        ({"teacher_shard": True}, "torchrun --nproc-per-node 2"),
        ({"assistants": ("huge",)}, "'huge'"),
        ({"method": "minilm", "assistants": ("layers=2,hidden=32,heads=8,ffn=32",)}, "has 8 and the teacher 4"),
        ({"temperature": 2.0}, "temperature is not a setting"),
        ({"method": "distilbert"}, "widths are 16 and 32"),
    )
    student = "layers=2,hidden=16,heads=4,ffn=32"
    for settings, named in wrong:
        with pytest.raises(BadInput, match=named):
            face.distill(str(tiny_teacher), [corpus], tmp_path / "small", student=student, **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_cut_teacher_is_refused_where_processes_would_ask_it_unevenly_or_not_at_all(
    tiny_teacher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    given: dict[str, Any] = {"student": "layers=2,hidden=16,heads=4,ffn=32", "teacher_shard": True}
    for wrong, named in (
        ({"teacher_cache": "kept"}, "--teacher-cache"),
        ({"method": "mlm"}, "--teacher-shard has no effect on --method mlm"),
        ({"method": "mlm-kd"}, "--method mlm-kd .*head"),
    ):
        with pytest.raises(BadInput, match=named):
            face.distill(str(tiny_teacher), [corpus], tmp_path / "small", **given, **wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_fine_tuned_on_labels_and_on_soft_labels(
    classifier: Path, task_data: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick: dict[str, Any] = {"epochs": 5, "patience": 0, "learning_rate": 5e-3, "batch": 8, "threads": 1}
    common = ("text-classification", str(task_data))
    assert face.evaluate(str(classifier), task_data / "test.jsonl")["value"] > 0.9
    more = tmp_path / "more.txt"
    more.write_text("\n".join(f"please refund the lamp {i}" for i in range(40)), encoding="utf-8")
    small = face.distill(str(classifier), [few], tmp_path / "small", student=STUDENT, batch=50)
    # The labels have no weight here: what this one knows of the task, it has from the teacher.
    quick |= {"teacher": str(classifier), "unlabelled": (str(more),), "soft_weight": 1.0}
    whole = face.finetune(str(small), *common, tmp_path / "whole", **quick)
    assert face.evaluate(str(whole), task_data / "test.jsonl")["value"] > 0.9
    lineage = lineage_of(whole)
    assert (lineage["method"], lineage["teacher"], lineage["model"]) == ("soft labels", "classifier", "small")
    assert {"labels", "soft_labels"} == set(json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])["terms"])

    quick |= {"epochs": 1}
    short = face.finetune(str(small), *common, tmp_path / "short", **quick)
    saved = task_stages.save

    def dies(model: Any, folder: Path, inputs: Any, progress: Any, details: dict[str, Any]) -> None:
        if details["role"] == "fine-tuned":
            raise KeyboardInterrupt
        saved(model, folder, inputs, progress, details)

    monkeypatch.setattr(task_stages, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        face.finetune(str(small), *common, tmp_path / "broken", **quick)
    monkeypatch.undo()
    broken = face.finetune(str(small), *common, tmp_path / "broken", **quick)
    assert weights_of(short) == weights_of(broken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "more.txt", "short", "small", "whole"]


@pytest.mark.slow
def test_a_model_learns_its_task_in_the_arithmetic_of_an_older_processor_too(
    tiny_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    # Both are read when torch is first used, so that it takes a process of its own.
    older = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", HIDDEN_VARIABLE: "avx512_bf16,amx_bf16"}
    command = [
        "finetune", "--model", tiny_teacher, "--task", "text-classification", "--data", task_data, "--out", tmp_path / "made",
        "--epochs", "8", "--patience", "0", "--learning-rate", "3e-3", "--batch", "8", "--threads", "1",
    ]  # fmt: skip
    done = stillroom(*command, env=os.environ | older)
    assert done.returncode == 0, done.stderr
    assert face.evaluate(str(tmp_path / "made"), task_data / "test.jsonl")["value"] > 0.9


def test_finetune_refuses_before_it_writes(
    tiny_teacher: Path, random_classifier: Path, task_data: Path, corpus: Path, tmp_path: Path
) -> None:
    cased = shutil.copytree(random_classifier, tmp_path / "cased")
    said = json.loads((cased / "tokenizer.json").read_text(encoding="utf-8"))
    said["normalizer"]["lowercase"] = False
    (cased / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"teacher": str(tiny_teacher)}, "has no head for text-classification"),
        ({"unlabelled": (str(corpus),)}, "--unlabelled needs --teacher"),
        ({"temperature": 4.0}, "--temperature needs --teacher or --teacher-labels"),
        ({"soft_weight": 0.0}, "--soft-weight needs --teacher or --teacher-labels"),
        ({"teacher": str(cased)}, "do not share a tokenizer"),
        ({"epoch": 3}, "epoch is not a setting .*epochs"),
        ({"epochs": 0.0}, "--epochs is 0"),
        ({"schedule": "minilm"}, "--schedule is 'minilm'.*glue"),
    )
    for settings, named in wrong:
        with pytest.raises(BadInput, match=named):
            face.finetune(str(tiny_teacher), "text-classification", str(task_data), tmp_path / "out", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["cased"]


@pytest.mark.slow
def test_a_tokenizer_that_was_saved_to_pad_is_the_same_tokenizer(
    random_classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    padded = shutil.copytree(random_classifier, tmp_path / "padded")
    tokenizer = Tokenizer.from_file(str(padded / "tokenizer.json"))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(16)
    tokenizer.save(str(padded / "tokenizer.json"), pretty=False)
    document = face.profile(
        [random_classifier, padded], data=str(task_data / "test.jsonl"), runtimes="torch", batches=(1,), lengths=(8,), seconds=0.5,
        threads=1,
    )  # fmt: skip
    assert [row["name"] for row in document["candidates"]] == ["classifier torch fp32", "padded torch fp32"]
