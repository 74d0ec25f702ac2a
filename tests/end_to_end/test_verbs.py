"""Verbs apart from `run`, from Python and from the command line, on a tiny teacher."""

import json
import shutil
from pathlib import Path

import pytest
from test_road import stillroom

import stillroom as face
from serve.errors import BadInput, GateMissed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(f"please refund the lamp from Oslo {i}" for i in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, task_data: Path) -> Path:
    """A checkpoint with a head for the task's intents, made without this project: random weights, right labels."""
    from transformers import AutoModelForSequenceClassification

    folder = shutil.copytree(tiny_teacher, tmp_path_factory.mktemp("ckpt") / "classifier")
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
    assert lineage["loss"][-1][1] < lineage["loss"][0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    with pytest.raises(BadInput, match="is there already"):
        face.distill(str(tiny_teacher), [corpus], tmp_path / "small")


def test_distill_refuses_before_it_writes(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    for wrong, message in (
        ({"method": "magic"}, "'magic' is not known"),
        ({"teacher_layer": 9}, "layers 1 to 4"),
        ({"relation_heads": 5}, "do not divide"),
        ({"batch": 0}, "--batch is a whole number from 1"),
    ):
        with pytest.raises(BadInput, match=message):
            face.distill(
                str(tiny_teacher), [corpus], tmp_path / "small", student="layers=2,hidden=16,heads=4,ffn=32", **wrong
            )  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_export_makes_a_bundle_of_any_classifier_and_profile_times_it(
    classifier: Path, task_data: Path, tmp_path: Path
) -> None:
    made = face.export(classifier, tmp_path / "bundle", str(task_data), gate=0.0)
    assert set(face.Pipeline(made)("thank you")["labels"][0]) == {"label", "score"}
    arguments = ["profile", classifier, made, "--data", task_data / "test.jsonl", "--out", tmp_path / "timings"]
    done = stillroom(*arguments, "--batches", "1", "--lengths", "8", "--seconds", "1", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["name"] for row in document["candidates"]] == [
        "classifier torch fp32",
        "bundle ORT fp32",
        "bundle ORT int8",
    ]
    assert len(document["ratios"]) == 2
    assert {path.name for path in (tmp_path / "timings").iterdir()} == {"report.html", "report.json", "table.md"}


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
        [classifier, padded], task_data / "test.jsonl", batches=[1], lengths=[8], seconds=0.5, threads=1
    )
    assert [row["name"] for row in document["candidates"]] == ["classifier torch fp32", "padded torch fp32"]


def test_export_refuses_graphs_whose_answers_depend_on_company(
    classifier: Path, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.quantise import quantise_dynamic, quantise_static

    def dynamic(fp32_file: Path, int8_file: Path, calibration: object) -> object:
        told = quantise_static(fp32_file, int8_file, calibration)  # type: ignore[arg-type]
        quantise_dynamic(fp32_file, int8_file)
        return told

    monkeypatch.setattr("stillroom.judging.quantise_static", dynamic)
    with pytest.raises(GateMissed, match="answered otherwise in company than alone by int8"):
        face.export(classifier, tmp_path / "bundle", str(task_data), gate=0.0)
    assert list(tmp_path.iterdir()) == []


def test_export_holds_its_gate(classifier: Path, task_data: Path, tmp_path: Path) -> None:
    with pytest.raises(GateMissed, match="No bundle was written: int8 keeps"):
        face.export(classifier, tmp_path / "bundle", str(task_data), gate=1e9)
    assert list(tmp_path.iterdir()) == []
