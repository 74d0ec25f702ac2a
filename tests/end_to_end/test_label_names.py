"""Names of labels in a checkpoint's id2label: read as those of data are, or refused before anything is written."""

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from small_task import make_tokenizer

import stillroom as face
from compress.data.examples import Example
from compress.data.labelled_files import read_examples
from compress.data.teacher_labels import read_teacher_labels
from compress.labelling.label import ask_model
from compress.models.answering import open_answering
from compress.tasks import TOKEN_CLASSIFICATION, task_of
from serve.errors import BadInput
from serve.text.labels import entity_labels

TEXTS = ("where is my lamp sent to Lisbon", "please refund the kettle", "i want my money back for that radio from Oslo")


def checkpoint(folder: Path, labels: tuple[str, ...], *, texts: bool = False) -> Path:
    """A small BERT of random weights with these labels of words, or of `texts`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

    make_tokenizer(folder)
    size = len((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.5, num_labels=len(labels),
    )  # fmt: skip
    (BertForSequenceClassification if texts else BertForTokenClassification)(config).save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    document |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def exported(model: Path, out: Path) -> tuple[Path, str]:
    """The bundle of `model`, and what was said."""
    with redirect_stderr(StringIO()) as said:
        face.export(model, out, variants=("fp32",), latency_seconds=0.0, threads=1)
    return out, said.getvalue()


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("O", "B-city", "B-city"), "'B-city'"),
        (("O", "B-city", ""), "number 2 has an empty name"),
        # The rules for tags are those of data: tests/compress/data/test_tags.py.
        (("O", "b-city", "i-city"), "write B-city"),
        (("O", "S-x", "U-y"), "use one scheme"),
    ],
    ids=str,
)
def test_tags_that_are_refused_in_data_are_refused_in_a_model_before_anything_is_written(
    tmp_path: Path, labels: tuple[str, ...], says: str
) -> None:
    model = checkpoint(tmp_path / "model", labels)
    text, rows = tmp_path / "texts.jsonl", tmp_path / "test.jsonl"
    text.write_text('{"text": "a b"}\n')
    rows.write_text(json.dumps({"tokens": list("ab"), "tags": ["O", labels[1]]}) + "\n")
    for use in (
        lambda: exported(model, tmp_path / "bundle"),
        lambda: face.evaluate(str(model), rows),
        lambda: open_answering(str(model), task_of),
        lambda: face.explain(model, model, data=str(text), out=str(tmp_path / "explained")),
        lambda: face.profile([model], data=str(text)),
    ):
        with pytest.raises(BadInput, match=says) as caught:
            use()
        assert "id2label" in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "test.jsonl", "texts.jsonl"]
    if len(set(labels)) == len(labels):  # a row cannot repeat a label of a model
        tags = [label for label in labels if label != "O"]
        rows.write_text(json.dumps({"tokens": ["a"] * len(tags), "tags": tags}) + "\n")
        with pytest.raises(BadInput):
            read_examples(rows, TOKEN_CLASSIFICATION)


@pytest.mark.parametrize(("labels", "says"), [(("a", "b", "a"), "'a'"), (("a", "\u200b"), "empty name")])
def test_a_class_that_is_there_twice_or_has_no_name_is_refused(
    tmp_path: Path, labels: tuple[str, ...], says: str
) -> None:
    model = checkpoint(tmp_path / "model", labels, texts=True)
    with pytest.raises(BadInput, match=says):
        exported(model, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_label_that_begins_like_a_prefix_keeps_its_name_from_data_to_answers_and_no_padding_is_one(
    tmp_path: Path,
) -> None:
    labels = ("O", "NAME", "E-MAIL", "S-BAHN")
    model = checkpoint(tmp_path / "model", (*labels, "[PAD]"))
    bundle, _ = exported(model, tmp_path / "bundle")
    said = {each["label"] for answer in face.Pipeline(bundle)(list(TEXTS)) for each in answer["entities"]}
    assert said & {"E-MAIL", "S-BAHN"}
    assert said <= {*labels} - {"O"}
    rows = [{"tokens": text.split(), "tags": [labels[i % 4] for i in range(len(text.split()))]} for text in TEXTS]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for used in (bundle, model):
        document = face.evaluate(str(used), tmp_path / "test.jsonl")
        assert document["unknown_labels"] == []
        assert {each["label"] for each in document["labels"]} == {*labels} - {"O"}


@pytest.mark.parametrize(
    ("labels", "learned"),
    [
        (("O", "NAME", "E-MAIL"), {"NAME", "E-MAIL"}),
        (("O", "B-city", "I-city", "[PAD]"), {"city"}),
        (("ADJ", "B-ADJ", "I-ADJ"), {"ADJ"}),
    ],
    ids=lambda names: " ".join(sorted(names)),
)
def test_a_teachers_tags_are_learned_as_they_are_answered(
    tmp_path: Path, labels: tuple[str, ...], learned: set[str]
) -> None:
    teacher = open_answering(str(checkpoint(tmp_path / "model", labels)), task_of)
    ((*answers,),) = ask_model(teacher, [Example(text) for text in TEXTS], range(len(TEXTS)))
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"text": TEXTS[index]} | fields) + "\n" for index, fields in answers))
    read = read_teacher_labels([file], TOKEN_CLASSIFICATION)
    named = {entity.label for example in read.examples(multi_label=False) for entity in example.entities or ()}
    assert named == learned == set(entity_labels(teacher.labels))
    words = [word for answer in read.answers.values() for word in answer.words or ()]
    known = {"O", *(f"{prefix}-{each}" for each in learned for prefix in "BI")}
    assert {tag for word in words for tag in word.tags} <= known
    assert [sum(word.tags.values()) for word in words] == pytest.approx([1] * len(words), abs=1e-3)


@pytest.mark.parametrize(
    ("labels", "answered"),
    [
        (("O", "B-city", "I-city", "[PAD]", "X", "[CLS]", "[SEP]", "<pad>"), {"city"}),
        (("O", "S-city", "B-city", "I-city", "E-city", "PAD"), {"city"}),
        (("ADJ", "B-ADJ", "I-ADJ", "DET"), {"ADJ", "DET"}),
        (("O", "NAME", "E-MAIL", "I-NUMBER", "PHONE"), {"NAME", "E-MAIL", "I-NUMBER", "PHONE"}),
    ],
)
def test_labels_of_single_words_and_of_no_entity_stand_beside_a_scheme(
    tmp_path: Path, labels: tuple[str, ...], answered: set[str]
) -> None:
    opened = open_answering(str(checkpoint(tmp_path / "model", labels)), task_of)
    assert set(entity_labels(opened.labels)) == answered


@pytest.mark.slow
def test_a_model_that_calls_no_word_outside_is_exported_with_a_warning(tmp_path: Path) -> None:
    bundle, said = exported(checkpoint(tmp_path / "model", ("0", ".", ",", "?", "-", ":")), tmp_path / "bundle")
    assert "warning: No tag of the model is O" in said
    assert "No tag of the model is O" in (bundle / "report.json").read_text()
