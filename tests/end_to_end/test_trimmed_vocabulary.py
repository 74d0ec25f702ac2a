"""`run --keep-words-of`: the student ships with the words that it needs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from languages import TEMPLATES, messages
from safetensors.numpy import load_file
from small_task import examples, make_teacher, write_rows
from tokenizers.processors import TemplateProcessing

import stillroom as face
from serve.errors import BadInput
from serve.tasks import open_bundle
from serve.text.tokenizer import load_tokenizer

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


@pytest.mark.slow
def test_only_what_ships_is_trimmed_and_it_answers_as_before(
    settings: Settings, task_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(settings["out"])
    before = face.run(**settings)
    whole = out.rename(out.with_name("whole"))
    trained = (out.with_name("intents.work") / "distilled" / "stage.json").stat().st_mtime_ns
    after = face.run(**settings, keep_words_of=[str(task_data / "validation.jsonl"), str(task_data / "test.jsonl")])
    assert "vocabulary: " in capsys.readouterr().err
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


def test_vocabularies_that_cannot_be_trimmed_are_refused_before_any_training(
    settings: Settings, tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a refund\n")
    body = tmp_path / "body"
    shutil.copytree(settings["start"], body)
    document = json.loads((body / "tokenizer.json").read_text())
    document["model"] = {"type": "WordLevel", "vocab": document["model"]["vocab"], "unk_token": "[UNK]"}
    (body / "tokenizer.json").write_text(json.dumps(document))
    config = json.loads((body / "tokenizer_config.json").read_text())
    (body / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    for changes, named in (
        ({"keep_words_of": ["nowhere.txt"]}, r"nowhere\.txt"),
        ({"keep_words_of": [str(words)], "start": str(body)}, "WordLevel"),
    ):
        with pytest.raises(BadInput, match=named):
            face.run(**settings | {"out": str(tmp_path / "out")} | changes)
    assert not (tmp_path / "out.work").exists()


@pytest.mark.slow
def test_a_student_is_trained_with_a_vocabulary_of_a_given_size(
    tiny_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ner"
    settings: Settings = {
        "teacher": str(tiny_teacher), "task": "token-classification", "data": str(task_data), "out": str(out),
        "student": "layers=2,hidden=32,heads=4,ffn=64", "teacher_epochs": 5, "student_epochs": 5, "teacher_learning_rate": 3e-3,
        "student_learning_rate": 3e-3, "batch": 8, "gate": 0.5, "teacher_gate": 0, "latency_seconds": 0.5, "threads": 1, "augment": 1,
        "soft_weight": 0.5, "vocabulary_size": 150, "max_length": 24,
    }  # fmt: skip
    document = face.run(**settings)
    work = out.with_name("ner.work")
    sizes = {
        name: len(json.loads((work / name / "tokenizer.json").read_text())["model"]["vocab"])
        for name in ("teacher", "undistilled", "distilled", "student")
    }
    whole = len((tiny_teacher / "vocab.txt").read_text(encoding="utf-8").splitlines())
    assert sizes == {"teacher": whole, "undistilled": 150, "distilled": 150, "student": 150}
    assert document["teacher"] > 0.9
    assert min(document["undistilled"], document["student"], document["int8"]) > 0.8
    told = json.loads((out / "report.json").read_text())["vocabulary"]
    assert (told["tokens"], told["kept"]) == (whole, 150)
    assert 0 < told["texts_split_otherwise"] <= 40
    assert open_bundle(out).manifest.lineage["teacher"] == tiny_teacher.name
    # Its recipe is the command that made it, and a rerun trains nothing.
    assert "vocabulary_size = 150\n" in (out / "recipe.toml").read_text()
    shutil.rmtree(out)
    trained = (work / "distilled" / "stage.json").stat().st_mtime_ns
    assert face.run(**settings)["int8"] == document["int8"]
    assert (work / "distilled" / "stage.json").stat().st_mtime_ns == trained
    for changes, named in (
        ({"method": "minilmv2"}, "--method minilmv2"),
        ({"vocabulary_size": 20}, "--vocabulary-size"),
    ):
        with pytest.raises(BadInput, match=named):
            face.run(**settings | {"out": str(tmp_path / "out")} | changes)


@pytest.mark.slow
def test_an_xlm_roberta_of_eight_languages_is_trimmed_to_three(tmp_path: Path) -> None:
    """Its Unigram tokenizer knows all of them."""
    import torch
    from tokenizers import SentencePieceUnigramTokenizer
    from transformers import (
        PreTrainedTokenizerFast,
        XLMRobertaConfig,
        XLMRobertaForTokenClassification,
        XLMRobertaModel,
    )

    texts = [str(row["text"]) for language in TEMPLATES for row in messages(language, 400, seed=1)]
    trained = SentencePieceUnigramTokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained.train_from_iterator(texts, vocab_size=4_000, special_tokens=special, unk_token="<unk>", show_progress=False)  # noqa: S106
    trained._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    body = tmp_path / "body"
    named = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    given = {f"{name}_token": token for name, token in named.items()}
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **given).save_pretrained(body)
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=trained.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    XLMRobertaModel(config).save_pretrained(body)
    data, three = tmp_path / "data", ("en", "ru", "hi")
    data.mkdir()
    for name, count in (("train", 150), ("validation", 40), ("test", 40)):
        rows = [row for language in three for row in messages(language, count, seed=len(name))]
        write_rows(data / f"{name}.jsonl", rows)
    settings: Settings = {
        "teacher": str(body), "task": "token-classification", "data": str(data), "out": str(tmp_path / "ner"), "method": "labels",
        "student": "layers=1,hidden=32,heads=4,ffn=64", "teacher_epochs": 6, "student_epochs": 6, "teacher_learning_rate": 5e-3,
        "student_learning_rate": 5e-3, "batch": 8, "gate": 0.5, "teacher_gate": 0, "latency_seconds": 0.5, "threads": 1,
    }  # fmt: skip
    trimmed = face.run(**settings, keep_words_of=[str(data / "test.jsonl")])
    told = json.loads((tmp_path / "ner" / "report.json").read_text())["vocabulary"]
    assert told["kept"] < 0.6 * told["tokens"]
    # No word of test fell out, and so no answer to it changed.
    assert trimmed["fp32"] == pytest.approx(trimmed["student"], abs=1e-9)
    assert trimmed["fp32"] > 0.5
    opened = XLMRobertaForTokenClassification.from_pretrained(tmp_path / "ner")
    assert len(opened.roberta.embeddings.word_embeddings.weight) == told["kept"]
    # Rows that name their language are scored by it.
    report = json.loads((tmp_path / "ner" / "report.json").read_text())
    assert [(row["language"], row["texts"]) for row in report["per_language"]] == [("en", 40), ("hi", 40), ("ru", 40)]
    assert "Languages" in (tmp_path / "ner" / "report.html").read_text()
    # Another language is spelled, and not lost.
    assert load_tokenizer(tmp_path / "ner", 64).encode(str(messages("el", 1, seed=5)[0]["text"])).ids.count(3) == 0
