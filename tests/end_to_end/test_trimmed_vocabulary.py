"""`run --keep-words-of`: the student ships with the words that it needs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small_task import examples, make_teacher, write_rows

import stillroom as face
from serve.bundle.manifest import open_bundle
from serve.errors import BadInput

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, task_data: Path) -> Settings:
    """Those of a run without a teacher to train: the answers are the labels."""
    root = tmp_path_factory.mktemp("trimmed")
    answers = write_rows(root / "answers.jsonl", examples(200, seed=8))
    body = make_teacher(root / "body", num_hidden_layers=2, vocab_size=400)
    document = json.loads((body / "tokenizer.json").read_text())
    known = document["model"]["vocab"]
    known |= {f"word{i}": i for i in range(len(known), 400)}  # that no text has
    (body / "tokenizer.json").write_text(json.dumps(document))
    return {
        "teacher_labels": [str(answers)], "start": str(body),
        "task": "text-classification", "data": str(task_data), "out": str(root / "intents"),
        "student": "layers=1,hidden=32,heads=4,ffn=64", "student_epochs": 4, "student_learning_rate": 5e-3, "batch": 8,
        "gate": 0.5, "teacher_gate": 0, "undistilled": False, "latency_seconds": 0.5, "threads": 1,
    }  # fmt: skip


def test_only_what_ships_is_trimmed_and_it_answers_as_before(settings: Settings, task_data: Path) -> None:
    out = Path(settings["out"])
    before = face.run(**settings)
    whole = out.rename(out.with_name("whole"))
    trained = (out.with_name("intents.work") / "distilled" / "stage.json").stat().st_mtime_ns
    after = face.run(**settings, keep_words_of=[str(task_data / "validation.jsonl"), str(task_data / "test.jsonl")])
    # Nothing is trained again: the vocabulary is trimmed after that.
    assert (out.with_name("intents.work") / "distilled" / "stage.json").stat().st_mtime_ns == trained
    assert after["scores"]["test"]["student"] == before["scores"]["test"]["student"]
    assert after["fp32"] == before["fp32"]
    told = json.loads((out / "report.json").read_text())["vocabulary"]
    assert told["kept"] < told["tokens"]
    assert told["texts_split_otherwise"] == told["unknown"] == 0
    assert open_bundle(out).manifest.lineage["vocabulary"] == told
    tables = [load_file(bundle / "model.safetensors") for bundle in (whole, out)]
    words = next(name for name in tables[0] if name.endswith("word_embeddings.weight"))
    assert [len(table[words]) for table in tables] == [told["tokens"], told["kept"]]
    assert all((tables[0][name] == tables[1][name]).all() for name in tables[0] if name != words)
    row = json.loads((task_data / "test.jsonl").read_text().splitlines()[0])
    first, second = (face.Pipeline(bundle, variant="fp32")(row["text"])["labels"] for bundle in (whole, out))
    assert [each["label"] for each in first] == [each["label"] for each in second]
    assert [each["score"] for each in second] == pytest.approx([each["score"] for each in first], abs=1e-5)
    assert "keep_words_of = [" in (out / "recipe.toml").read_text()


@pytest.mark.slow
def test_what_falls_out_is_told_and_words_are_spelled(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "intents"
    shutil.copytree(Path(settings["out"]).with_name("intents.work"), tmp_path / "intents.work")
    words = tmp_path / "words.txt"
    words.write_text("a refund\n")
    face.run(**settings | {"out": str(out)}, keep_words_of=[str(words)])
    told = json.loads((out / "report.json").read_text())["vocabulary"]
    assert told["texts"] == 40
    assert "vocabulary: " in capsys.readouterr().err
    assert face.Pipeline(out)("please refund the lamp")["labels"][0]["label"] == "refund"


def test_what_cannot_be_trimmed_is_refused_before_any_training(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.txt"):
        face.run(**settings | {"out": str(tmp_path / "out")}, keep_words_of=["nowhere.txt"])
    body = tmp_path / "body"
    shutil.copytree(settings["start"], body)
    document = json.loads((body / "tokenizer.json").read_text())
    document["model"] = {"type": "WordLevel", "vocab": document["model"]["vocab"], "unk_token": "[UNK]"}
    (body / "tokenizer.json").write_text(json.dumps(document))
    config = json.loads((body / "tokenizer_config.json").read_text())
    (body / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    words = tmp_path / "words.txt"
    words.write_text("a refund\n")
    with pytest.raises(BadInput, match="is a WordLevel tokenizer; only WordPiece, BPE and Unigram"):
        face.run(**settings | {"out": str(tmp_path / "out"), "start": str(body)}, keep_words_of=[str(words)])
    assert not (tmp_path / "out.work").exists()
