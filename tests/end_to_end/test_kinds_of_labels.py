"""Classification beyond one label a text: relations between two marked parts, and any number of labels; from data to answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import here
from small_task import examples, relations, with_label_lists, write_rows, write_splits
from starlette.testclient import TestClient

import stillroom as face
from compress.data.splits import read_splits
from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput
from serve.http.app import create_app
from serve.model.pipeline import Pipeline
from serve.settings import ServeSettings
from serve.tasks import open_bundle

TASK = "text-classification"
RECIPE = """
task = "text-classification"
student = "layers=2,hidden=32,heads=4,ffn=32"
teacher_epochs = 10
teacher_patience = 10
teacher_learning_rate = 2e-3
student_epochs = 4
student_learning_rate = 5e-3
batch = 8
threads = 1
augment = 1
undistilled = false
soft_weight = 0.5
latency_seconds = 0.5
"""


@pytest.fixture(scope="module")
def related(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("relations"), relations)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("lists"), lambda count, seed: with_label_lists(examples(count, seed)))


@pytest.fixture(scope="module")
def relation_bundle(
    tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, related: Path
) -> tuple[Path, dict[str, Any]]:
    """What `stillroom run` makes of relations, and what `--json` printed."""
    out = tmp_path_factory.mktemp("made") / "ways"
    recipe = out.with_name("recipe.toml")
    recipe.write_text(RECIPE, encoding="utf-8")
    done = here("run", recipe, "--teacher", shallow_teacher, "--data", related, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


@pytest.fixture(scope="module")
def list_checkpoint(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path, listed: Path) -> Path:
    """The tiny teacher fine-tuned on lists of labels."""
    out = tmp_path_factory.mktemp("lists") / "checkpoint"
    settings: dict[str, Any] = {"epochs": 10, "patience": 0, "learning_rate": 2e-3, "batch": 8, "threads": 1}
    return face.finetune(str(shallow_teacher), TASK, str(listed), out, **settings)


@pytest.fixture(scope="module")
def list_bundle(list_checkpoint: Path, listed: Path) -> Path:
    out = list_checkpoint.with_name("several")
    return Path(face.export(list_checkpoint, out, listed, latency_seconds=0.5)["bundle"])


@pytest.mark.slow
def test_a_run_on_relations_ends_with_a_bundle_whose_tokenizer_holds_the_markers(
    relation_bundle: tuple[Path, dict[str, Any]],
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out, document = relation_bundle
    assert document["metric"] == "accuracy"
    assert document["teacher"] > 0.9
    assert document["int8"] > 0.9
    manifest = open_bundle(out).manifest
    assert (manifest.multi_label, manifest.relations, manifest.labels) == (False, True, ["begins at", "ends at"])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    tokens = [token.strip() for token in tokenizer.tokenize("[E1] Oslo [/E1] to [E2] Basel [/E2]")]
    assert tokens == ["[E1]", "oslo", "[/E1]", "to", "[E2]", "basel", "[/E2]"]


@pytest.mark.slow
def test_a_model_of_lists_of_labels_says_so_to_transformers_and_in_the_manifest(
    list_checkpoint: Path, list_bundle: Path
) -> None:
    from transformers import pipeline

    manifest = open_bundle(list_bundle).manifest
    assert (manifest.multi_label, manifest.relations, manifest.labels) == (True, False, ["city", "refund"])
    assert manifest.metrics["metric"] == "micro_f1"
    (theirs,) = pipeline(TASK, model=str(list_checkpoint), top_k=None)(["please refund the lamp"])
    ours = face.Pipeline(list_bundle, "fp32")("please refund the lamp", top_k=2)["labels"]
    assert [(each["label"], pytest.approx(each["score"], abs=1e-4)) for each in ours] == [
        (each["label"], each["score"]) for each in theirs
    ]


@pytest.mark.slow
def test_bundle_and_checkpoint_score_on_test_as_was_said_when_they_were_made(
    relation_bundle: tuple[Path, dict[str, Any]], related: Path, list_checkpoint: Path, list_bundle: Path, listed: Path
) -> None:
    out, document = relation_bundle
    work = out.with_name("ways.work")
    said = open_bundle(list_bundle).manifest.metrics["test"]
    for model, variant, data, metric, value in (
        (out, None, related, "accuracy", document["int8"]),
        (out, "fp32", related, "accuracy", document["fp32"]),
        (work / "student", None, related, "accuracy", document["student"]),
        (work / "teacher", None, related, "accuracy", document["teacher"]),
        (list_bundle, None, listed, "micro_f1", said["int8"]["value"]),
        (list_bundle, "fp32", listed, "micro_f1", said["fp32"]["value"]),
        (list_checkpoint, None, listed, "micro_f1", said["fp32"]["value"]),
    ):
        told = face.evaluate(str(model), data / "test.jsonl", variant=variant)
        assert (told["metric"], told["value"], told["unknown_labels"]) == (metric, value, []), model
        assert value > 0.9


@pytest.mark.slow
def test_the_server_answers_two_parts_of_a_text_and_a_text_of_any_number_of_labels(
    relation_bundle: tuple[Path, dict[str, Any]], list_bundle: Path
) -> None:
    out, _ = relation_bundle
    with TestClient(create_app([out, list_bundle], ServeSettings(threads=1))) as client:

        def labels(texts: list[str], **asked: object) -> list[list[str]]:
            answer = client.post("/v1/classify", json={"text": texts} | asked).json()
            return [[each["label"] for each in result["labels"]] for result in answer["results"]]

        text = "send the kettle from Oslo to Basel 7"
        oslo, basel = ({"start": text.index(name), "end": text.index(name) + len(name)} for name in ("Oslo", "Basel"))
        for head, tail, way in ((oslo, basel, "begins at"), (basel, oslo, "ends at")):
            asked = {"text": text, "head": head, "tail": tail}
            answer = client.post("/v1/relations", json=asked | {"top_k": 1}).json()
            assert [each["label"] for each in answer["results"][0]["labels"]] == [way]
            assert answer["results"] == [Pipeline(out, threads=1)(asked, top_k=1)]
        texts = ["i want my money back for that lamp from Oslo 7", "the lamp is lovely 7", "please refund the lamp 7"]
        assert [set(found) for found in labels(texts, model="several")] == [{"city", "refund"}, set(), {"refund"}]
        assert [len(found) for found in labels(texts, model="several", top_k=2)] == [2, 2, 2]
        described = client.get("/v1/models").json()["models"]
    assert [(model["multi_label"], model["relations"]) for model in described] == [(False, True), (True, False)]


@pytest.mark.slow
def test_a_model_is_not_used_on_labels_of_another_kind(
    relation_bundle: tuple[Path, dict[str, Any]], related: Path, list_checkpoint: Path, list_bundle: Path, listed: Path
) -> None:
    way, _ = relation_bundle
    several, unmarked = "any number of labels .*`label` is one string", "lacks the markers"
    single = write_splits(listed.parent / "single", examples)
    marked = write_splits(
        listed.parent / "marked", lambda *given: [row | {"label": [row["label"]]} for row in relations(*given)]
    )
    for model, data, message in (
        (list_bundle, single, several),
        (list_checkpoint, single, several),
        (list_bundle, marked, unmarked),
        (list_checkpoint, marked, unmarked),
        (way, listed, "one label .*`label` is a list"),
    ):
        with pytest.raises(BadInput, match=message):
            face.evaluate(str(model), data / "test.jsonl")
    for data, message in ((single, several), (marked, unmarked)):
        with pytest.raises(BadInput, match=message):
            face.export(list_checkpoint, way.with_name("refused"), data)


@pytest.mark.slow
def test_a_model_of_relations_is_not_used_on_texts_that_do_not_say_where_head_and_tail_are(
    relation_bundle: tuple[Path, dict[str, Any]], related: Path, tmp_path: Path
) -> None:
    out, document = relation_bundle
    student = out.with_name("ways.work") / "student"
    bare = write_splits(
        tmp_path / "bare", lambda *given: [{"text": r["text"], "label": r["label"]} for r in relations(*given)]
    )
    for model in (out, student):
        with pytest.raises(BadInput, match=r"60 of 60 rows .* 'send the .*head.*tail"):
            face.evaluate(str(model), bare / "test.jsonl")
    with pytest.raises(BadInput, match="240 of 240 rows"):
        face.export(student, tmp_path / "refused", bare)
    marked = read_splits(str(related), TEXT_CLASSIFICATION).test
    write_rows(tmp_path / "marked.jsonl", [{"text": e.text_read, "label": e.label} for e in marked])
    assert face.evaluate(str(out), tmp_path / "marked.jsonl")["value"] == document["int8"]


def test_unlabelled_text_for_a_teacher_of_relations_needs_markers(
    shallow_teacher: Path, related: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.txt"
    bare.write_text("from [E1] Oslo [/E1] to [E2] Basel [/E2]\nfrom Oslo to Basel\n", encoding="utf-8")
    settings = {"task": TASK, "data": str(related), "student": "layers=2,hidden=32,heads=4,ffn=32"}
    with pytest.raises(BadInput, match=r"1 of 2 texts of --unlabelled .*'from Oslo to Basel'"):
        face.run(teacher=str(shallow_teacher), out=str(tmp_path / "out"), unlabelled=[str(bare)], **settings)
    assert not (tmp_path / "out").exists()
