"""An encoder of sentences from teacher to answers: distilled, opened by sentence-transformers, exported, compared and served."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_task import examples, write_rows

import stillroom as face
from compress.data.examples import Example
from compress.models.sentence_encoder import open_encoder, sentence_vectors
from compress.models.sentence_pooling import SentencePooling, pooling_in, write_pooling
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle

SHAPE = "layers=1,hidden=32,heads=4,ffn=64"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = dict.fromkeys(row["text"] for row in examples(400, 0))
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def sentence_teacher(tmp_path_factory: pytest.TempPathFactory, shallow_teacher: Path) -> Path:
    """The tiny teacher as a folder of sentence-transformers."""
    folder = Path(shutil.copytree(shallow_teacher, tmp_path_factory.mktemp("teacher") / "sentences"))
    write_pooling(folder, SentencePooling("mean", normalised=True), 32, 32)
    return folder


@pytest.fixture(scope="module")
def student(sentence_teacher: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return face.distill(
        str(sentence_teacher), [texts], tmp_path_factory.mktemp("student") / "small", method="sentence-vectors", student=SHAPE,
        epochs=12, batch=16, learning_rate=2e-3, threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(student: Path, texts: Path) -> Path:
    out = student.with_name("small.bundle")
    document = face.export(student, out, texts=(str(texts),), variants=("fp32", "int8"), latency_seconds=0)
    assert document["metric"] == "similarity_spearman"
    (gate,) = document["gates"]
    assert gate["passed"]
    assert "has fp32's similarities" in gate["name"]
    return Path(document["bundle"])


def test_a_student_agrees_with_its_teacher_more_than_one_that_was_not_taught(
    student: Path, sentence_teacher: Path, texts: Path, tmp_path: Path
) -> None:
    document = face.evaluate(str(student), texts, teacher=str(sentence_teacher))
    assert (document["task"], document["metric"], document["variant"]) == (
        "feature-extraction", "similarity_spearman", "torch",
    )  # fmt: skip
    # The same layers of the teacher, after one step.
    untaught = face.distill(
        str(sentence_teacher),
        [texts],
        tmp_path / "untaught",
        method="sentence-vectors",
        student=SHAPE,
        epochs=0.01,
        threads=1,
    )
    before = face.evaluate(str(untaught), texts, teacher=str(sentence_teacher))
    assert document["value"] > 0.5 + 0.5 * before["value"]
    assert document["scores"]["recall_at_10"]["value"] > before["scores"]["recall_at_10"]["value"]
    itself = face.evaluate(str(sentence_teacher), texts, teacher=str(sentence_teacher))
    assert (itself["value"], itself["scores"]["recall_at_10"]["value"]) == (pytest.approx(1), 1)


def test_sentence_transformers_opens_the_student_and_the_bundle_and_finds_their_vectors(
    student: Path, bundle: Path, texts: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    asked = texts.read_text(encoding="utf-8").splitlines()[:20]
    ours = sentence_vectors(open_encoder(str(student)), [Example(text) for text in asked])
    served = np.array([answer["embedding"] for answer in Pipeline(bundle, "fp32")(asked)])
    for folder in (student, bundle):
        theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(asked)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(served, ours, atol=1e-5)


def test_a_bundle_gives_the_same_bits_in_any_company_and_its_card_says_what_they_are(bundle: Path, texts: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert (manifest.task, manifest.labels, manifest.vector_width, manifest.normalised) == (
        "feature-extraction", [], 32, True,
    )  # fmt: skip
    assert manifest.parity["int8"]["company_differences"] == 0  # type: ignore[index]
    asked = texts.read_text(encoding="utf-8").splitlines()[:30]
    pipeline = Pipeline(bundle)
    assert pipeline.variant == "int8"
    assert pipeline(asked) == [pipeline(text) for text in asked]
    assert np.linalg.norm(pipeline(asked[0])["embedding"]) == pytest.approx(1, abs=1e-5)
    card = (bundle / "README.md").read_text(encoding="utf-8")
    assert "gives a text a vector of 32 numbers" in card
    assert "/v1/embeddings -H 'content-type: application/json' -d '{\"input\": \"...\"}'" in card
    assert 'pipeline_tag: "feature-extraction"' in card


def test_pairs_of_texts_and_models_of_a_task_are_not_compared(
    student: Path, bundle: Path, sentence_teacher: Path, texts: Path, task_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("train", "validation", "test"):
        write_rows(
            folder / f"{name}.jsonl", [{"text": f"a {i}", "text_pair": "b", "label": "xy"[i % 2]} for i in range(9)]
        )
    with pytest.raises(BadInput, match="has pairs of texts, and a vector is of one text"):
        face.evaluate(str(student), folder, teacher=str(sentence_teacher))
    with pytest.raises(BadInput, match="is a bundle, and only models of the Hub have revisions"):
        face.evaluate(str(bundle), texts, teacher=str(sentence_teacher), revision="v2")
    few = tmp_path / "few.txt"
    few.write_text("a\nb\n")
    with pytest.raises(BadInput, match=r"(?s)--teacher /nowhere.*has 2 texts; similarities need 3"):
        face.evaluate(str(student), few, teacher="/nowhere")  # both faults in one message
    with pytest.raises(
        BadInput, match=r"ranks no similarities of 1 text. These are too few.*int8 cannot keep 0.99 of 0"
    ):
        face.export(student, tmp_path / "out", texts=(str(few),), variants=("int8",), latency_seconds=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 2}, "--accumulate 2: --method sentence-vectors compares"),
        ({"batch": 2}, "--batch is 2; --method sentence-vectors compares"),
    ],
)
def test_texts_of_a_batch_are_compared_whole(
    sentence_teacher: Path, texts: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        face.distill(
            str(sentence_teacher), [texts], tmp_path / "small", method="sentence-vectors", student=SHAPE, **changes
        )


def test_a_teacher_of_first_tokens_is_followed_and_exported_as_it_is(
    shallow_teacher: Path, texts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(shallow_teacher, tmp_path / "first"))
    write_pooling(folder, SentencePooling("first", normalised=False), 32, 8)
    made = face.distill(
        str(folder), [texts], tmp_path / "small", method="sentence-vectors", student=SHAPE, epochs=0.1, threads=1
    )
    assert pooling_in(made) == SentencePooling("first", normalised=True)
    assert open_encoder(str(made)).max_length == 8
    out = Path(face.export(folder, tmp_path / "out", texts=(str(texts),), latency_seconds=0)["bundle"])
    manifest = open_bundle(out).manifest
    assert (manifest.normalised, manifest.max_length) == (False, 8)
    asked = texts.read_text(encoding="utf-8").splitlines()[:5]
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(out), device="cpu").encode(asked)
    ours = [answer["embedding"] for answer in Pipeline(out)(asked, truncate=True)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_labelled_splits_show_what_the_nearest_text_says(bundle: Path, sentence_teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labelled"
    folder.mkdir()
    for name, count, seed in (("train", 60, 1), ("validation", 20, 2), ("test", 30, 3)):
        rows = [
            {"text": f"{word} it {row['text']}", "label": word}
            for row, word in zip(examples(count, seed), ["please", "refund"] * count, strict=False)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    document = face.evaluate(str(bundle), folder, teacher=str(sentence_teacher), variant="fp32")
    assert document["examples"] == 30
    assert set(document["neighbour_accuracy"]) == {"model", "teacher"}
    assert document["neighbour_accuracy"]["teacher"] > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": ""}, "gives vectors, which have no right answer of their own. Give --teacher"),
        ({"task": "text-classification"}, "--task is text-classification, but .* gives vectors"),
        ({"variant": "int8"}, "is not a bundle, and only bundles have variants"),
        ({"teacher": "/nowhere"}, "--teacher /nowhere"),
    ],
)
def test_what_cannot_be_compared_is_said(
    student: Path, sentence_teacher: Path, texts: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        face.evaluate(str(student), texts, **({"teacher": str(sentence_teacher)} | changes))


def test_labels_are_not_asked_of_vectors_nor_vectors_of_a_model_of_a_task(
    student: Path, shallow_teacher: Path, task_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"--data is given, and .* gives vectors, which have no labels. Give --texts"):
        face.export(student, tmp_path / "out", task_data)
    with pytest.raises(BadInput, match=r"nor has it a modules.json that makes it an encoder of sentences"):
        face.export(shallow_teacher, tmp_path / "out")
    assert not (tmp_path / "out").exists()


ST = "sentence_transformers.models"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "[]", "makes its vectors by no module"),
        ("modules.json", "null", r"modules.json cannot be read \(TypeError: it holds a NoneType, not a list"),
        ("modules.json", "[5, 5]", "is not a list of modules"),
        ("modules.json", [{"type": f"{ST}.Transformer"}, {"type": f"{ST}.Pooling", "path": "../x"}], "which is outside the model"),
        ("1_Pooling/config.json", [], r"1_Pooling/config.json cannot be read \(TypeError: it holds a list, not a dict"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pools by"),
        ("modules.json", "{", "modules.json cannot be read"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pools by pooling_mode_mean_tokens and pooling_mode_cls_token",
        ),
    ],
)  # fmt: skip
def test_a_pooling_that_is_not_known_is_refused_before_training(
    sentence_teacher: Path, texts: Path, tmp_path: Path, file: str, content: object, message: str
) -> None:
    folder = Path(shutil.copytree(sentence_teacher, tmp_path / "other"))
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        face.distill(str(folder), [texts], tmp_path / "small", method="sentence-vectors", student=SHAPE)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("how", [SentencePooling("first", normalised=False), SentencePooling("mean", normalised=True)])
def test_what_is_written_is_what_is_read(tmp_path: Path, how: SentencePooling) -> None:
    write_pooling(tmp_path, how, 32, 64)
    assert pooling_in(tmp_path) == how
    modern = {"embedding_dimension": 32, "pooling_mode": {"first": "cls", "mean": "mean"}[how.pooling]}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modern))
    assert pooling_in(tmp_path) == how
