"""`stillroom explain` on small random models: its figures, what decides them, what it refuses, and what it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import command
from repository import ROOT
from small_task import examples, make_teacher, write_rows

from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput
from stillroom import explain
from stillroom.verbs.explain import show_explained

Explain = Callable[..., dict[str, Any]]
CLASSES = ("praise", "refund", "status")


def with_head(folder: Path, seed: int, labels: tuple[str, ...] = CLASSES, **changes: object) -> Path:
    """A tiny BERT with a head for `labels`, with random weights."""
    from transformers import BertForSequenceClassification
    from transformers.models.auto import AutoConfig

    make_teacher(folder, **changes)
    config = AutoConfig.from_pretrained(folder)
    config.id2label, config.num_labels = dict(enumerate(labels)), len(labels)
    config.label2id = {label: i for i, label in enumerate(labels)}
    torch.manual_seed(seed)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of other sizes: 2 layers, 3 heads, width 24."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return make_teacher(tmp_path_factory.mktemp("student") / "small", **sizes)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return examples(12, seed=3)


@pytest.fixture(scope="module")
def data(rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def made(
    tiny_teacher: Path, student: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("made") / "out"
    return out, explain(str(tiny_teacher), str(student), data, out, shown_texts=3)


def test_the_document_has_every_part_and_the_file_holds_it(made: tuple[Path, dict[str, Any]]) -> None:
    out, document = made
    assert json.loads((out / "explain.json").read_text(encoding="utf-8")) == json.loads(json.dumps(
        {key: value for key, value in document.items() if key != "report"}
    ))  # fmt: skip
    assert document["report"] == str(out / "explain.html")
    assert {path.name for path in out.iterdir()} == {"explain.json", "explain.html"}
    assert document["teacher"] == {"name": "tiny", "layers": 4, "heads": 4, "width": 32}
    assert document["student"] == {"name": "small", "layers": 2, "heads": 3, "width": 24}
    assert document["relation_heads"] == 4
    pairs = [(row["teacher_layer"], row["student_layer"]) for row in document["layers"]]
    assert pairs == [(2, 1), (4, 2)]
    assert [row["attention_by_head"] for row in document["layers"]] == [None, None]
    assert min(row[key] for row in document["layers"] for key in ("attention", "value_relation")) > 1e-6
    clusters = document["span_clusters"]
    assert (len(clusters["teacher"]), len(clusters["student"])) == (4, 2)
    assert (clusters["labels"], clusters["clusters"]) == (["city", "item"], 3)
    assert all(0 < value <= 1 for value in clusters["teacher"] + clusters["student"])
    assert document["answers"] == {
        "left_out": "answers are not compared: the two models have no heads for the same task"
    }
    differences = [row["attention"] for row in document["most_different"]]
    assert (len(differences), differences) == (12, sorted(differences, reverse=True))


def test_the_docs_name_every_key_of_the_document(made: tuple[Path, dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "explaining.md").read_text(encoding="utf-8")
    document = made[1]
    first = [document["layers"][0], document["most_different"][0]]
    keys = {key for part in (document, document["teacher"], document["span_clusters"], *first) for key in part}
    keys |= {"left_out", "differing", "differing_texts", "teacher_answer", "text_pair"}
    assert not {key for key in keys if f"`{key}`" not in page}


def test_a_pair_of_layers_has_the_divergence_of_the_models_own_attentions(
    tiny_teacher: Path, student: Path, rows: list[dict[str, object]], made: tuple[Path, dict[str, Any]]
) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher)
    batch = tokenizer([str(row["text"]) for row in rows], padding=True, return_tensors="pt")
    attentions = []
    for folder, layer in ((tiny_teacher, 4), (student, 2)):
        model = AutoModel.from_pretrained(folder, attn_implementation="eager")
        with torch.inference_mode():
            found = model(**batch, output_attentions=True).attentions[layer - 1]
        attentions.append(found.double().numpy().mean(axis=1))
    each = []
    for theirs, ours, mask in zip(*attentions, batch["attention_mask"].numpy(), strict=True):
        real = slice(0, int(mask.sum()))
        each.append((theirs[real, real] * np.log(theirs[real, real] / ours[real, real])).sum(axis=1).mean())
    assert made[1]["layers"][-1]["attention"] == pytest.approx(np.mean(each), rel=1e-4)


def test_a_model_is_at_no_distance_from_itself(tiny_teacher: Path, data: Path, tmp_path: Path) -> None:
    document = explain(str(tiny_teacher), str(tiny_teacher), data, tmp_path / "out", spans=0, unlabelled_spans=0)
    assert [(row["teacher_layer"], row["student_layer"]) for row in document["layers"]] == [(i, i) for i in range(1, 5)]
    for row in document["layers"]:
        assert (row["attention"], row["attention_by_head"], row["value_relation"]) == (0, [0] * 4, 0)
    assert "fewer than two labels" in document["span_clusters"]["left_out"]


def test_the_order_of_texts_changes_no_figure(
    tiny_teacher: Path, student: Path, rows: list[dict[str, object]], made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    turned = write_rows(tmp_path / "turned.jsonl", rows[::-1])
    again = explain(str(tiny_teacher), str(student), turned, tmp_path / "out")
    for part in ("layers", "span_clusters", "most_different", "texts", "tokens"):
        assert again[part] == made[1][part]


def test_as_many_texts_are_drawn_as_asked_for_whatever_their_order(
    tiny_teacher: Path, rows: list[dict[str, object]], tmp_path: Path
) -> None:
    drawn = []
    for name, given, seed in (("one", rows, 0), ("two", rows[::-1], 0), ("three", rows, 1)):
        data = write_rows(tmp_path / f"{name}.jsonl", [{"text": row["text"]} for row in given])
        document = explain(
            str(tiny_teacher), str(tiny_teacher), data, tmp_path / name, most_texts=4, seed=seed, layers=["1:4"]
        )
        assert (document["texts"], document["texts_in_data"]) == (4, 12)
        assert document["span_clusters"] == {
            "left_out": "the data gives no clusters of spans: it has no entities and no tags"
        }
        drawn.append([row["text"] for row in document["most_different"]])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_answers_are_compared_where_both_models_have_a_head_for_the_same_labels(
    data: Path, rows: list[dict[str, object]], tmp_path: Path
) -> None:
    from compress.data.examples import Example
    from compress.evaluation.predictions import row_logits
    from compress.models.pretrained import load, open_model, open_tokenizer

    models = [
        with_head(tmp_path / "a", 1, num_hidden_layers=2),
        with_head(tmp_path / "b", 2, CLASSES[::-1], num_hidden_layers=1),
    ]
    document = explain(*map(str, models), data, tmp_path / "out")
    expected = []
    for model in map(str, models):
        opened = open_model(model)
        texts, labels = [Example(str(row["text"])) for row in rows], opened.head_for(TEXT_CLASSIFICATION) or ()
        encoded = TEXT_CLASSIFICATION.encode(texts, open_tokenizer(opened), labels)
        expected.append(encoded.task.predictions(encoded, row_logits(load(opened, TEXT_CLASSIFICATION), encoded)))
    apart = {str(row["text"]): (a, b) for row, a, b in zip(rows, *expected, strict=True) if a != b}
    found = document["answers"]
    assert apart
    assert {row["text"]: (row["teacher_answer"], row["student_answer"]) for row in found["differing"]} == apart
    assert (found["task"], found["differing_texts"]) == ("text-classification", len(apart))

    other = with_head(tmp_path / "c", 2, ("yes", "no"), num_hidden_layers=1)
    assert explain(str(models[0]), str(other), data, tmp_path / "others")["answers"] == {
        "left_out": "answers are not compared: only one of the two models has the labels no, praise, refund, status, yes"
    }


def test_numbers_are_compared_by_their_difference(
    data: Path, rows: list[dict[str, object]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = [
        with_head(tmp_path / name, seed, (name,), num_hidden_layers=1) for seed, name in enumerate(("score", "stars"))
    ]
    document = explain(*map(str, models), data, tmp_path / "out", spans=0, unlabelled_spans=0)
    found = document["answers"]
    differences = [abs(row["teacher_answer"] - row["student_answer"]) for row in found["differing"]]
    assert len(differences) == len(rows)
    assert differences == sorted(differences, reverse=True)
    assert found["mean_difference"] == pytest.approx(np.mean(differences))
    assert found["mean_difference"] > 0
    show_explained(document)
    assert f"differ by {found['mean_difference']:.4g} on average" in capfd.readouterr().out
    assert "farthest apart" in (tmp_path / "out" / "explain.html").read_text(encoding="utf-8")


def test_columns_of_words_and_tags_give_clusters(tiny_teacher: Path, student: Path, tmp_path: Path) -> None:
    words = "the DT B-NP\nkettle NN I-NP\nis VBZ B-VP\ngreat JJ B-ADJP\n. . O\n\nplease UH B-INTJ\nrefund VB B-VP\nit PRP B-NP\n"
    for name in ("chunks.conll", "chunks.txt"):
        (tmp_path / name).write_text(words, encoding="utf-8")
        found = explain(str(tiny_teacher), str(student), tmp_path / name, tmp_path / f"{name}.out", unlabelled_spans=4)
        clusters = found["span_clusters"]
        assert (clusters["spans"], clusters["unlabelled_spans"]) == (6, 4)
        assert clusters["labels"] == ["ADJP", "INTJ", "NP", "VP"]


def test_all_that_is_wrong_is_told_at_once(tiny_teacher: Path, student: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="3 faults") as refused:
        explain("no/such", str(student / "neither"), tmp_path / "gone.jsonl", tmp_path / "out")
    for fault in ("TEACHER no/such", "STUDENT", "gone.jsonl is not a file"):
        assert fault in refused.value.message
    with pytest.raises(BadInput, match="3 faults") as refused:
        explain(str(tiny_teacher), str(student), data, tmp_path / "out", layers=["5:1", "4:0", "last", "4:2"])
    for fault in ("--layer 5:1 names a layer that is not there", "4 layers and the student 2", "--layer last", "4:2"):
        assert fault in refused.value.message
    for name, content, message in (
        ("empty.jsonl", "", "holds no text"),
        ("empty.conll", "", "holds no text"),
        ("a.pdf", "x", "does not end in"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=message):
            explain(str(tiny_teacher), str(student), tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(BadInput, match="already exists and holds other files"):
        explain(str(tiny_teacher), str(tiny_teacher), data, tmp_path / "out")


def test_models_with_different_tokenizers_are_refused(tiny_teacher: Path, data: Path, tmp_path: Path) -> None:
    other = make_teacher(tmp_path / "other", num_hidden_layers=1)
    words = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    vocabulary["kettle"], vocabulary["lamp"] = vocabulary["lamp"], vocabulary["kettle"]
    (other / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        explain(str(tiny_teacher), str(other), data, tmp_path / "out")
    assert f"TEACHER {tiny_teacher} and STUDENT {other} have different tokenizers" in refused.value.message


def test_the_command_prints_tables_or_its_document(tiny_teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the kettle is great\nplease refund it\n", encoding="utf-8")
    given = (tiny_teacher, tiny_teacher, "--data", tmp_path / "texts.txt", "--layer", "2:4", "--out", tmp_path / "out")
    code, out, said = command("explain", *given)
    assert code == 0, said
    said = " ".join(out.split())
    assert "teacher 2, student 4" in said
    assert f"Report {tmp_path / 'out' / 'explain.html'}" in said
    document = json.loads(command("explain", *given, "--json").out)
    assert document["texts"] == 2  # plain text is enough
    assert document["layers"][0]["teacher_layer"] == 2
    assert command("explain", *given, "--layer", "9:9").code == 2


def test_rows_that_were_rejected_are_left_out_with_a_line_and_an_empty_list_of_labels_makes_no_entities(
    tiny_teacher: Path, rows: list[dict[str, object]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verdicts = [row | {"answer": "reject" if i < 2 else "accept"} for i, row in enumerate(rows)]
    data = write_rows(tmp_path / "rows.jsonl", verdicts)
    document = explain(str(tiny_teacher), str(tiny_teacher), data, tmp_path / "out")
    assert document["texts_in_data"] == len(rows) - 2
    assert f"warning: 2 rows of {data} were left out: `answer` is reject" in capfd.readouterr().err.replace("\n", " ")
    labels: list[dict[str, object]] = [{"text": f"c {i}", "label": ["x", "y"] if i else []} for i in range(9)]
    document = explain(str(tiny_teacher), str(tiny_teacher), write_rows(data, labels), tmp_path / "out")
    assert document["texts"] == 9
