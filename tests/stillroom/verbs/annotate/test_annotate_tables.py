"""`stillroom annotate` to a parquet table and to an array of vectors."""

import base64
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lookup_bundles import write_answers_bundle, write_vectors_bundle
from pyarrow import parquet

from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, tables
from stillroom.verbs.annotate.run import annotate

pytestmark = pytest.mark.usefixtures("forked_workers")

TEXTS = [f"{'please ' * (number % 5)}{['rome', 'i love it', 'fly'][number % 3]}" for number in range(23)]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vectors_bundle(tmp_path_factory.mktemp("bundles") / "vectors")


def exact(bundle: Path, texts: list[str], **options: Any) -> np.ndarray:
    """The vectors as the bundle gives them in float32."""
    answers = Pipeline(bundle)(texts, encoding_format="base64", **options)
    return np.stack([np.frombuffer(base64.b64decode(answer["embedding"]), dtype="<f4") for answer in answers])  # type: ignore[index, typeddict-item]


def typed() -> pa.Table:
    """Columns whose types JSON does not have."""
    return pa.table({
        "id": pa.array(range(23), pa.int16()),
        "text": TEXTS,
        "when": pa.array([datetime.date(2026, 1, 1 + number) for number in range(23)]),
        "tags": pa.array([["a", "b"][: number % 3] for number in range(23)], pa.list_(pa.string())),
        "kind": pa.array([["x", "y"][number % 2] for number in range(23)], pa.dictionary(pa.int8(), pa.string())),
    })  # fmt: skip


def test_vectors_are_an_array_in_the_order_of_the_rows(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS", 5)
    (tmp_path / "in.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    out = tmp_path / "out.npy"
    document = annotate(Annotation(vectors, tmp_path / "in.txt", out, processes=1))
    assert (document["output"], document["rows"]) == (str(out), 23)
    found = np.load(out, allow_pickle=False)
    assert (found.dtype, found.shape) == (np.float32, (23, 4))
    assert found.tobytes() == exact(vectors, TEXTS).tobytes()
    short = tmp_path / "short.npy"
    annotate(Annotation(vectors, tmp_path / "in.txt", short, AnswerOptions(dimensions=2), processes=1))
    assert np.load(short).tobytes() == exact(vectors, TEXTS, dimensions=2).tobytes()
    kept = ["out.npy", "out.npy.rows.jsonl", "out.npy.rows.jsonl.lineage.json"]
    assert sorted(file.name for file in tmp_path.glob("out*")) == kept


def test_a_table_keeps_the_columns_and_types_of_a_parquet_input(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS", 5)
    parquet.write_table(typed(), tmp_path / "in.PARQUET", row_group_size=7)
    out = tmp_path / "out.parquet"
    annotate(Annotation(vectors, tmp_path / "in.PARQUET", out, answer_field="vector", processes=1))
    found = parquet.read_table(out)
    assert found.drop_columns(["vector"]).equals(parquet.read_table(tmp_path / "in.PARQUET"))
    assert found.schema.field("vector").type == pa.list_(pa.float32())
    assert np.stack(found["vector"].to_pylist()).astype(np.float32).tobytes() == exact(vectors, TEXTS).tobytes()


@pytest.mark.parametrize(
    ("name", "output"),
    [
        *((name, "out.parquet") for name in (
            "in.jsonl", "in.jsonl.gz", "in.json", "array.json", "in.csv", "header.tsv", "in.txt", "in.parquet", "int.parquet")),
        ("in.jsonl", "out.jsonl"), ("in.parquet", "out.jsonl"), ("in.jsonl", "out.npy"), ("in.parquet", "out.npy"),
    ],
)  # fmt: skip
def test_an_input_without_rows_is_an_output_without_rows(vectors: Path, tmp_path: Path, name: str, output: str) -> None:
    if name.endswith(".parquet"):  # pandas gives a column without values any type
        empty = typed().slice(0, 0) if name == "in.parquet" else pa.table({"text": pa.array([], pa.int64())})
        parquet.write_table(empty, tmp_path / name)
    else:
        content = {"array.json": b"[]\n", "header.tsv": b"text\tid\n"}.get(name, b"")
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    document = annotate(Annotation(vectors, tmp_path / name, tmp_path / output, processes=1))
    assert document["rows"] == 0
    if output == "out.parquet":
        assert parquet.read_table(tmp_path / output).num_rows == 0
    elif output == "out.npy":
        assert len(np.load(tmp_path / output)) == 0
    else:
        assert (tmp_path / output).read_bytes() == b""


@pytest.mark.parametrize("bundle_name", ["entities", "answers"])
def test_other_answers_are_columns_with_fields(bundle_name: str, cities: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "fly to rome", "n": 1}, {"text": "please", "n": 2.5, "note": None}, {"text": "oslo", "note": "é"}
    ]  # fmt: skip
    bundle = cities
    expected: list[Any] = [Pipeline(bundle)(row["text"]) for row in rows] if bundle_name == "entities" else []
    if bundle_name == "answers":
        bundle = write_answers_bundle(tmp_path / "places")
        rows = [{"question": "to", "context": row.pop("text"), **row} for row in rows]
        expected = [Pipeline(bundle)(row["question"], text_pair=row["context"]) for row in rows]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    annotate(Annotation(bundle, tmp_path / "in.jsonl", tmp_path / "out.parquet", processes=1))
    found = parquet.read_table(tmp_path / "out.parquet")
    assert [row["answer"] for row in found.to_pylist()] == expected
    assert found["n"].to_pylist() == [1.0, 2.5, None]
    assert found["note"].to_pylist() == [None, None, "é"]
    assert "error" not in found.column_names


def test_a_stopped_run_goes_on_and_a_grown_input_is_answered_from_its_end(vectors: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    file.write_text("".join(lines[:10]) + "{}\n", encoding="utf-8")
    with pytest.raises(BadInput, match='has no field "text"'):
        annotate(Annotation(vectors, file, out, processes=1))
    assert not out.exists()
    file.write_text("".join(lines), encoding="utf-8")
    document = annotate(Annotation(vectors, file, out, processes=1))
    assert (document["rows_before"], document["rows"]) == (10, 23)
    whole = out.read_bytes()
    out.unlink()
    again = annotate(Annotation(vectors, file, out, processes=1))
    assert again["texts_per_s"] is None
    assert out.read_bytes() == whole


def test_rows_with_an_error_are_nan_or_null_with_the_message(vectors: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"text": "rome", "n": 1}\n{"n": 2}\n{"text": "fly", "n": 3}\n', encoding="utf-8"
    )
    for name in ("out.npy", "out.parquet"):
        annotate(Annotation(vectors, tmp_path / "in.jsonl", tmp_path / name, bad_rows="skip", processes=1))
    array = np.load(tmp_path / "out.npy")
    assert np.isnan(array).all(axis=1).tolist() == [False, True, False]
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["answer"] is None for row in rows] == [False, True, False]
    assert [row["error"] for row in rows][::2] == [None, None]
    assert 'has no field "text"' in rows[1]["error"]


def test_answers_that_fit_no_table_or_array_are_refused(cities: Path, vectors: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "rome", "n": 1}\n{"text": "fly", "n": {"a": 1}}\n', encoding="utf-8")
    with pytest.raises(BadInput, match="is an array of vectors, and 'cities' gives entities, BIO"):
        annotate(Annotation(cities, file, tmp_path / "out.npy"))
    with pytest.raises(BadInput, match="cannot be columns of one table"):
        annotate(Annotation(vectors, file, tmp_path / "out.parquet", processes=1))
    assert not (tmp_path / "out.parquet").exists()
    with pytest.raises(BadInput, match="--field error is the column of errors"):
        annotate(Annotation(vectors, file, tmp_path / "out.parquet", answer_field="error", processes=1))
