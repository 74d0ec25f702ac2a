"""An encoder of sentences from teacher to answers: distilled, opened by sentence-transformers, exported, compared and served."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from small_task import examples, make_teacher, write_rows, write_splits

import stillroom as face
from compress.data.examples import Example
from compress.models.sentence_encoder import open_encoder, sentence_vectors
from compress.models.sentence_pooling import SentencePooling, pooling_in, write_pooling
from export.settings import Precision
from serve.bundle.manifest import ONNX_NAMES
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.model.session import padded
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
    out = tmp_path_factory.mktemp("student") / "small"
    return distilled(sentence_teacher, texts, out, epochs=6, batch=16, learning_rate=2e-3)


@pytest.fixture(scope="module")
def bundle(student: Path, texts: Path) -> Path:
    out = student.with_name("small.bundle")
    document = face.export(student, out, texts=(str(texts),), variants=("fp32", "fp16", "int8"), latency_seconds=0)
    assert document["metric"] == "similarity_spearman"
    assert [gate["passed"] for gate in document["gates"]] == [True, True]
    assert all("has fp32's similarities" in gate["name"] for gate in document["gates"])
    return Path(document["bundle"])


def distilled(teacher: Path, texts: Path, out: Path, **settings: object) -> Path:
    return face.distill(str(teacher), [texts], out, method="sentence-vectors", student=SHAPE, threads=1, **settings)


def test_a_student_agrees_with_its_teacher_more_than_one_that_was_not_taught(
    student: Path, sentence_teacher: Path, texts: Path, tmp_path: Path
) -> None:
    untaught = distilled(sentence_teacher, texts, tmp_path / "untaught", epochs=0.01)  # the same layers, after one step
    found, before, itself = (
        face.evaluate(str(model), texts, teacher=str(sentence_teacher))
        for model in (student, untaught, sentence_teacher)
    )
    told = ("feature-extraction", "similarity_spearman", "torch")
    assert (found["task"], found["metric"], found["variant"]) == told
    assert found["value"] > 0.5 + 0.5 * before["value"]
    recalls = [document["scores"]["recall_at_10"]["value"] for document in (found, before, itself)]
    assert recalls[0] > recalls[1]
    assert (itself["value"], recalls[2]) == (pytest.approx(1), 1)


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


@pytest.mark.parametrize("variant", ["fp32", "fp16", "int8"])
def test_each_graph_has_token_states_and_sentence_vectors_by_the_names_that_other_libraries_read(
    bundle: Path, texts: Path, variant: Precision
) -> None:
    asked = texts.read_text(encoding="utf-8").splitlines()[:9]
    session = ort.InferenceSession(bundle / ONNX_NAMES[variant], providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    assert names == ["last_hidden_state", "sentence_embedding", "logits"]  # fastembed reads the first
    rows = Pipeline(bundle, variant).encode(asked)
    inputs = [node.name for node in session.get_inputs()]
    states, vectors, logits = session.run(names, padded(rows, inputs, max(map(len, rows))))
    mask = np.array([[place < len(row) for place in range(states.shape[1])] for row in rows])[..., None]
    means = (states * mask).sum(axis=1) / mask.sum(axis=1)
    np.testing.assert_allclose(vectors, means / np.linalg.norm(means, axis=1, keepdims=True), atol=2e-3)
    np.testing.assert_array_equal(vectors, logits)
    assert {node.type for node in session.get_outputs()} == {"tensor(float)"}


def test_a_bundle_gives_the_same_bits_in_any_company_and_its_card_says_what_they_are(bundle: Path, texts: Path) -> None:
    manifest = open_bundle(bundle).manifest
    assert (manifest.task, manifest.labels) == ("feature-extraction", [])
    assert (manifest.vector_width, manifest.normalised) == (32, True)
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


def test_data_settings_and_models_that_have_no_vectors_to_compare_are_refused(
    student: Path,
    bundle: Path,
    sentence_teacher: Path,
    shallow_teacher: Path,
    texts: Path,
    task_data: Path,
    tmp_path: Path,
) -> None:
    def pairs(count: int, _: int) -> list[dict[str, object]]:
        return [{"text": f"a {i}", "text_pair": "b", "label": "xy"[i % 2]} for i in range(count)]

    paired = write_splits(tmp_path / "pairs", pairs, (9, 9, 9))
    few, out, teacher = tmp_path / "few.txt", tmp_path / "out", str(sentence_teacher)
    few.write_text("a\nb\n")
    score = partial(face.evaluate, str(student))
    for use, named in (
        (lambda: score(paired, teacher=teacher), "pairs of texts"),
        (lambda: face.evaluate(str(bundle), texts, teacher=teacher, revision="v2"), "only models of the Hub"),
        (lambda: score(few, teacher="/nowhere"), "(?s)--teacher /nowhere.*2 texts"),  # both faults in one message
        (lambda: score(texts), "Give --teacher"),
        (lambda: score(texts, teacher=teacher, task="text-classification"), "--task is text-classification"),
        (lambda: score(texts, teacher=teacher, variant="int8"), "only bundles have variants"),
        (lambda: distilled(sentence_teacher, texts, out, accumulate=2), "--accumulate 2"),
        (lambda: distilled(sentence_teacher, texts, out, batch=2), "--batch is 2"),
        (lambda: face.export(student, out, texts=(str(few),), variants=("int8",), latency_seconds=0), "of 1 text"),
        (lambda: face.export(student, out, task_data), "Give --texts"),
        (lambda: face.export(shallow_teacher, out), "modules.json"),
    ):
        with pytest.raises(BadInput, match=named):
            use()
    assert not out.exists()


def test_a_teacher_of_first_tokens_is_followed_and_exported_as_it_is(texts: Path, tmp_path: Path) -> None:
    folder = make_teacher(tmp_path / "first", num_hidden_layers=1)
    write_pooling(folder, SentencePooling("first", normalised=False), 32, 8)
    made = distilled(folder, texts, tmp_path / "small", epochs=0.1)
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


ST = "sentence_transformers.models"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "[]", "by no module"),
        ("modules.json", "null", "modules.json cannot be read .*NoneType"),
        ("modules.json", "[5, 5]", "is not a list of modules"),
        ("modules.json", [{"type": f"{ST}.Transformer"}, {"type": f"{ST}.Pooling", "path": "../x"}], "outside the model"),
        ("1_Pooling/config.json", [], "1_Pooling/config.json cannot be read .*list"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, "pools by"),
        ("modules.json", "{", "modules.json cannot be read"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pools by lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean_tokens and .*cls_token"),
    ],
)  # fmt: skip
def test_a_pooling_that_is_not_known_is_refused_before_training(
    sentence_teacher: Path, texts: Path, tmp_path: Path, file: str, content: object, message: str
) -> None:
    folder = Path(shutil.copytree(sentence_teacher, tmp_path / "other"))
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        distilled(folder, texts, tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("how", [SentencePooling("first", normalised=False), SentencePooling("mean", normalised=True)])
def test_the_pooling_that_is_written_is_read_again(tmp_path: Path, how: SentencePooling) -> None:
    write_pooling(tmp_path, how, 32, 64)
    assert pooling_in(tmp_path) == how
    modern = {"embedding_dimension": 32, "pooling_mode": {"first": "cls", "mean": "mean"}[how.pooling]}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modern))
    assert pooling_in(tmp_path) == how
