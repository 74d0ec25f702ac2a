"""Verbs apart from `run`, from Python and from the command line, on a tiny teacher."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_run import stillroom

import compress.training.teacher_cache
import stillroom as face
from compress.methods.catalogue import METHODS, Sizes
from compress.runs import method_trainings, task_stages
from serve.bundle.cpu import HIDDEN_VARIABLE
from serve.errors import BadInput


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(f"please refund the lamp from Oslo {i}" for i in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path) -> Path:
    """A checkpoint with a head for the task's intents, made without this project: random weights, right labels."""
    from transformers import AutoModelForSequenceClassification

    folder = shutil.copytree(shallow_teacher, tmp_path_factory.mktemp("ckpt") / "classifier")
    labels = dict(enumerate(["praise", "refund", "status"]))
    AutoModelForSequenceClassification.from_pretrained(
        folder, id2label=labels, label2id={v: k for k, v in labels.items()}
    ).save_pretrained(folder)
    return folder


def test_distill_writes_a_checkpoint_that_automodel_opens(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    made = face.distill(
        str(tiny_teacher),
        [corpus],
        tmp_path / "small",
        student="layers=2,hidden=16,heads=4,ffn=32",
        epochs=8,
        batch=8,
        learning_rate=3e-3,
    )
    model, tokenizer = AutoModel.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model(**tokenizer("please refund", return_tensors="pt")).last_hidden_state.shape[-1] == 16
    lineage = json.loads((made / "lineage.json").read_text(encoding="utf-8"))
    assert np.mean([value for _, value in lineage["loss"][-10:]]) < lineage["loss"][0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    with pytest.raises(BadInput, match="already exists; it was not changed"):
        face.distill(str(tiny_teacher), [corpus], tmp_path / "small")


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

    settings = {"student": "layers=2,hidden=32,heads=4,ffn=32", "method": method, "batch": 50}
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
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    assert len(AutoModel.from_pretrained(whole).encoder.layer) == 2
    assert json.loads((whole / "lineage.json").read_text(encoding="utf-8"))["method"] == method


def test_a_student_starts_from_the_layers_or_the_checkpoint_that_it_is_told(
    tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    settings: dict[str, Any] = {"method": "minilm", "batch": 50, "learning_rate": 1e-9}
    teacher = AutoModel.from_pretrained(tiny_teacher)
    for start, layers in (("first", (1, 2)), ("alternate", (1, 3)), ("layer-map", (3, 4)), ("random", ())):
        student = "layers=2,hidden=32,heads=4,ffn=64"
        mapped = {"layer_map": "last"} if start == "layer-map" else {}
        made = face.distill(
            str(tiny_teacher), [corpus], tmp_path / start, student=student, start=start, **mapped, **settings
        )
        ours = AutoModel.from_pretrained(made).encoder.layer
        for layer, number in zip(ours, layers, strict=False):
            theirs = teacher.encoder.layer[number - 1].output.dense.weight
            assert np.allclose(layer.output.dense.weight.detach(), theirs.detach(), atol=1e-6)
        drawn = (teacher.encoder.layer[i].output.dense.weight for i in range(4))
        assert layers or not any(np.allclose(ours[0].output.dense.weight.detach(), w.detach()) for w in drawn)
    again = face.distill(str(tiny_teacher), [corpus], tmp_path / "again", start=str(tmp_path / "first"), **settings)
    theirs = AutoModel.from_pretrained(tmp_path / "first").encoder.layer
    for layer, before in zip(AutoModel.from_pretrained(again).encoder.layer, theirs, strict=True):
        assert np.allclose(layer.output.dense.weight.detach(), before.output.dense.weight.detach(), atol=1e-6)
    assert json.loads((again / "lineage.json").read_text(encoding="utf-8"))["start"] == "first"


@pytest.mark.parametrize(("pack", "steps_per_epoch"), [(False, 10), (True, 2)])
def test_a_papers_schedule_is_followed_but_for_what_is_given(
    pack: bool, steps_per_epoch: int, tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    made = face.distill(
        str(tiny_teacher), [corpus], tmp_path / "small", student="layers=2,hidden=32,heads=4,ffn=32",
        schedule="minilmv2-multilingual", batch=20, tokens=64, accumulate=2, pack=pack,
    )  # fmt: skip
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7 * steps_per_epoch + 1))
    rates = [line["learning_rate"] for line in lines]
    assert max(rates) == 8e-4
    assert rates.index(8e-4) == -(-7 * steps_per_epoch // 20) - 1  # a twentieth of all steps to warm up
    lineage = json.loads((made / "lineage.json").read_text(encoding="utf-8"))
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
    student = "layers=2,hidden=32,heads=4,ffn=32"
    live = face.distill(*common, tmp_path / "live", student=student, **settings)
    settings["teacher_cache"] = str(tmp_path / "kept" / "cache")
    first = face.distill(*common, tmp_path / "first", student=student, **settings)
    assert "teacher cache written: " in capsys.readouterr().err
    monkeypatch.setattr(compress.training.teacher_cache, "read", None)  # what would ask the teacher
    second = face.distill(*common, tmp_path / "second", student="layers=1,hidden=32,heads=4,ffn=32", **settings)
    assert "teacher cache found: " in capsys.readouterr().err
    lineages = [json.loads((made / "lineage.json").read_text(encoding="utf-8")) for made in (live, first, second)]
    ends = [lineage["loss"][-1][1] for lineage in lineages]
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
    assert ends[1] != ends[0]
    kept = json.loads((tmp_path / "kept" / "cache" / "cache.json").read_text(encoding="utf-8"))["sha256"]
    assert [lineage["teacher_cache"] for lineage in lineages] == [False, kept, kept]
    other = tmp_path / "other.txt"
    other.write_text("another text\n", encoding="utf-8")
    with pytest.raises(BadInput, match="was written for another text or --tokens"):
        face.distill(str(tiny_teacher), [other], tmp_path / "third", student=student, **settings)


def test_whole_words_are_hidden_when_asked(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    made = {
        whole: face.distill(
            str(tiny_teacher), [corpus], tmp_path / str(whole), student="layers=2,hidden=32,heads=4,ffn=32", method="mlm",
            batch=50, whole_words=whole,
        )
        for whole in (False, True)
    }  # fmt: skip
    losses = [json.loads((folder / "lineage.json").read_text(encoding="utf-8"))["loss"] for folder in made.values()]
    assert losses[0][0] != losses[1][0]


def test_an_assistant_stands_between_teacher_and_student(
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    from transformers import AutoModel

    student = "layers=2,hidden=16,heads=4,ffn=32"
    settings: dict[str, Any] = {"student": student, "method": "minilm", "batch": 50, "epochs": 2}
    direct = face.distill(str(tiny_teacher), [corpus], tmp_path / "direct", **settings)
    taught: list[tuple[int, int]] = []
    train_stage = method_trainings.train_stage

    def seen(stage: Any, teacher: Any, trained: Any, *others: Any, **more: Any) -> Any:
        taught.append((teacher.config.num_hidden_layers, trained.config.num_hidden_layers))
        if len(taught) == 2:
            raise KeyboardInterrupt
        return train_stage(stage, teacher, trained, *others, **more)

    monkeypatch.setattr(method_trainings, "train_stage", seen)
    assisted = {**settings, "assistants": ("auto",)}
    with pytest.raises(KeyboardInterrupt):
        face.distill(str(tiny_teacher), [corpus], tmp_path / "assisted", **assisted)
    monkeypatch.setattr(
        method_trainings, "train_stage", lambda *given, **more: taught.append((0, 0)) or train_stage(*given, **more)
    )
    made = face.distill(str(tiny_teacher), [corpus], tmp_path / "assisted", **assisted)
    assert taught == [(4, 4), (4, 2), (0, 0)]  # the assistant is as deep as the teacher, and is not made again
    assert "layers=4,hidden=16,heads=4,ffn=32" in capsys.readouterr().err
    ours, theirs = (AutoModel.from_pretrained(folder).state_dict() for folder in (made, direct))
    assert ours.keys() == theirs.keys()
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    lineage = json.loads((made / "lineage.json").read_text(encoding="utf-8"))
    assert (lineage["assistants"], lineage["student"]) == (["auto"], student)


def test_distill_refuses_before_it_writes(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    for wrong, message in (
        ({"method": "magic"}, "--method is 'magic'; give one of minilmv2, "),
        ({"teacher_layer": 9}, "Give a layer from 1 to 4"),
        ({"relation_heads": 5}, "does not divide"),
        ({"batch": 0}, "--batch is 0; give a whole number from 1"),
        ({"schedule": "minilm2"}, "--schedule is 'minilm2'.*; give one of minilm, "),
        ({"trackers": ("tensorbored",)}, "--tracker is 'tensorbored'.*; give some of tensorboard"),
        (
            {"method": "output-distribution", "schedule": "hidden-states"},
            "--method output-distribution has 2 stages with",
        ),
        ({"method": "tinybert"}, "--method is 'tinybert'.* give one of minilmv2, "),
        ({"method": "hidden-states", "layer_map": "first"}, "--layer-map is 'first'; give one of single"),
        (
            {"method": "minilm", "layer_map": "last"},
            "--layer-map has no effect on --method minilm, only on hidden-states",
        ),
        ({"method": "minilm", "teacher_layer": 2}, "--teacher-layer has no effect on --method minilm"),
        ({"start": "./scratch"}, "--start ./scratch does not exist. Give the path of a transformers folder"),
        (
            {"start": "first"},
            "--start first copies the teacher's layers, but .* does not fit them: the teacher has a width of 32",
        ),
        ({"start": "layer-map"}, "--start layer-map needs --layer-map. Give single, last"),
        ({"start": str(tiny_teacher)}, "is layers=4,hidden=32,heads=4,ffn=64, and --student is layers=2"),
        ({"method": "minilm", "whole_words": True}, "--whole-words has no effect on --method minilm"),
        (
            {"method": "mlm", "teacher_cache": "kept"},
            "--teacher-cache keeps activations on unmasked text, and --method mlm reads",
        ),
        ({"teacher_cache": str(tiny_teacher)}, "is not a teacher cache; nothing was written"),
        ({"teacher_cache": str(tmp_path / "small")}, "is a file, or the folder of --out or inside it"),
        (
            {"teacher_cache": "kept", "assistants": ("layers=3,hidden=32,heads=4,ffn=32",)},
            "an --assistant is a second one",
        ),
        (
            {"teacher_shard": True},
            "this is only one. Start several, one a GPU: torchrun --nproc-per-node 2 -m stillroom distill",
        ),
        ({"assistants": ("huge",)}, "'huge' is not known"),
        (
            {"method": "minilm", "assistants": ("layers=2,hidden=32,heads=8,ffn=32",)},
            "the student has 8 and the teacher 4",
        ),
        ({"temperature": 2.0}, "temperature is not a setting"),
        ({"method": "distilbert"}, "as wide as its teacher, but the widths are 16 and 32"),
    ):
        with pytest.raises(BadInput, match=message):
            face.distill(
                str(tiny_teacher), [corpus], tmp_path / "small", student="layers=2,hidden=16,heads=4,ffn=32", **wrong
            )  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_cut_teacher_is_refused_where_processes_would_ask_it_unevenly_or_not_at_all(
    tiny_teacher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for wrong, message in (
        ({"teacher_cache": "kept"}, "they share the batches of --teacher-cache unevenly"),
        ({"method": "mlm"}, "--teacher-shard has no effect on --method mlm, which reads no teacher"),
        (
            {"method": "mlm-kd"},
            "--method mlm-kd reads the teacher's masked-language-model head, and --teacher has none",
        ),
    ):
        with pytest.raises(BadInput, match=message):
            face.distill(
                str(tiny_teacher), [corpus], tmp_path / "small", student="layers=2,hidden=16,heads=4,ffn=32",
                teacher_shard=True, **wrong,
            )  # type: ignore[arg-type]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_fine_tuned_on_labels_and_on_soft_labels(
    tiny_teacher: Path, task_data: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick: dict[str, Any] = {"epochs": 8, "patience": 0, "learning_rate": 3e-3, "batch": 8, "threads": 1}
    common = ("text-classification", str(task_data))
    teacher = face.finetune(str(tiny_teacher), *common, tmp_path / "teacher", **quick)
    assert face.evaluate(str(teacher), task_data / "test.jsonl")["value"] > 0.9
    more = tmp_path / "more.txt"
    more.write_text("\n".join(f"please refund the lamp {i}" for i in range(40)), encoding="utf-8")
    student = "layers=2,hidden=32,heads=4,ffn=64"
    small = face.distill(str(teacher), [corpus], tmp_path / "small", student=student, batch=50)
    # The labels have no weight here: what this one knows of the task, it has from the teacher.
    quick |= {"teacher": str(teacher), "unlabelled": (str(more),), "soft_weight": 1.0}
    whole = face.finetune(str(small), *common, tmp_path / "whole", **quick)
    assert face.evaluate(str(whole), task_data / "test.jsonl")["value"] > 0.9
    lineage = json.loads((whole / "lineage.json").read_text(encoding="utf-8"))
    assert (lineage["method"], lineage["teacher"], lineage["model"]) == ("soft labels", "teacher", "small")
    assert {"labels", "soft_labels"} == set(json.loads((whole / "metrics.jsonl").read_text().splitlines()[0])["terms"])

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
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "more.txt", "small", "teacher", "whole"]


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
    tiny_teacher: Path, classifier: Path, task_data: Path, corpus: Path, tmp_path: Path
) -> None:
    cased = shutil.copytree(classifier, tmp_path / "cased")
    said = json.loads((cased / "tokenizer.json").read_text(encoding="utf-8"))
    said["normalizer"]["lowercase"] = False
    (cased / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    for wrong, message in (
        (
            {"teacher": str(tiny_teacher)},
            "has no head for text-classification; a teacher fine-tuned on the task is needed",
        ),
        ({"unlabelled": (str(corpus),)}, "--unlabelled needs --teacher"),
        ({"temperature": 4.0}, "--temperature needs --teacher or --teacher-labels"),
        ({"soft_weight": 0.0}, "--soft-weight needs --teacher or --teacher-labels"),
        ({"teacher": str(cased)}, "do not share a tokenizer: their vocabularies agree"),
        ({"epoch": 3}, "epoch is not a setting .did you mean epochs"),
        ({"epochs": 0.0}, "--epochs is 0; give a number above 0"),
        ({"schedule": "minilm"}, "--schedule is 'minilm'; give one of glue"),
    ):
        with pytest.raises(BadInput, match=message):
            face.finetune(str(tiny_teacher), "text-classification", str(task_data), tmp_path / "out", **wrong)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["cased"]


@pytest.mark.slow
def test_export_makes_a_bundle_of_any_classifier(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    made = Path(face.export(classifier, tmp_path / "bundle", str(task_data), gate=0.0, latency_seconds=0.5)["bundle"])
    assert set(face.Pipeline(made)("thank you")["labels"][0]) == {"label", "score"}
    with pytest.raises(BadInput, match="is a bundle already; nothing in it was touched"):
        face.export(classifier, made, str(task_data), gate=0.0)
    unheard = tmp_path / "unheard.jsonl"
    unheard.write_text(json.dumps({"text": "thank you", "label": "thanks"}), encoding="utf-8")
    assert face.evaluate(str(made), unheard)["unknown_labels"] == ["thanks"]
    assert face.evaluate(str(made), task_data / "test.jsonl")["unknown_labels"] == []


@pytest.mark.slow
def test_a_tokenizer_that_was_saved_to_pad_is_the_same_tokenizer(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    padded = shutil.copytree(classifier, tmp_path / "padded")
    tokenizer = Tokenizer.from_file(str(padded / "tokenizer.json"))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(16)
    tokenizer.save(str(padded / "tokenizer.json"), pretty=False)
    document = face.profile(
        [classifier, padded],
        data=str(task_data / "test.jsonl"),
        runtimes="torch",
        batches=(1,),
        lengths=(8,),
        seconds=0.5,
        threads=1,
    )
    assert [row["name"] for row in document["candidates"]] == ["classifier torch fp32", "padded torch fp32"]
