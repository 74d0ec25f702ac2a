"""What `stillroom annotate` reads: arrays, parquet, columns of other names, relations; and what it refuses before it begins."""

import gzip
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from lookup_bundles import INTENTS, intent_table, write_bundle
from pyarrow import parquet
from test_annotate import lines

from compress.data import tables
from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, reader, rows
from stillroom.verbs.annotate.checks import input_faults
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import Columns
from stillroom.verbs.annotate.run import annotate

pytestmark = pytest.mark.usefixtures("forked_workers")


def read(path: Path, **columns: Any) -> list[tuple[Any, str | None]]:
    """The fields of each row, or None, and its fault."""
    with InputFile(path, columns=Columns(**columns)) as source:
        return [(None if row.fault else json.loads(row.fields + b"}"), row.fault) for row in source.rows()]


def write(path: Path, content: str | bytes) -> Path:
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix.lower() == ".gz" else data)
    return path


# The rows of a table, or of lines, are all read as these fields.
FORMATS = [
    pytest.param("in.txt", "to rome\r\n\noslo", [{"text": "to rome"}, {"text": ""}, {"text": "oslo"}], id="txt"),
    pytest.param("page.txt", "<html>a</html>\n", [{"text": "<html>a</html>"}], id="html in txt"),
    pytest.param("in.csv", '\ufeffid,text\r\n1,"to ""rome"",\nplease"\r\n\r\n2,oslo\r\n',
                 [{"id": "1", "text": 'to "rome",\nplease'}, {"id": "2", "text": "oslo"}], id="csv"),
    pytest.param("in.tsv", "text\tid\nto rome\t1\n", [{"text": "to rome", "id": "1"}], id="tsv"),
    *(pytest.param(name, content, [{"id": "1", "text": "a, b"}], id=f"{name}, {content!r}") for name in ("in.csv", "in.tsv")
      for content in ("id;text\n1;a, b\n", "id\ttext\n1\ta, b\n", 'id, text\n1,"a, b"\n', "\n id ; text \n1;a, b\n")),
    *((name, '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]) for name in (
        "in.jsonl", "in.jsonl.gz", "lines.json", "IN.NDJSON", "in.ndjson.gz", "In.JSONL.GZ", "in.jsonlines")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "fields"), FORMATS)
def test_every_format_is_known_by_its_name_and_read(
    tmp_path: Path, name: str, content: str, fields: list[dict[str, str]]
) -> None:
    assert read(write(tmp_path / name, content)) == [(each, None) for each in fields]
    assert list(input_faults(tmp_path / name, None, Columns())) == []


ARRAY_FAULT = "is neither a JSON array of objects nor JSON lines"
CUT = gzip.compress(random.Random(0).randbytes(100_000).hex().encode())[:50_000]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        *((name, '{"text": "a"}\n'.encode(encoding), "is UTF-16 text; save the file as UTF-8")
          for name in ("in.jsonl", "in.csv", "in.txt", "in.json", "in.jsonl.gz") for encoding in ("utf-16", "utf-16-le")),
        ("in.csv", '{"text": "a"}'.encode("utf-32"), "is UTF-32 text"),
        ("in.jsonl", b"\x80\x04\x95\x00", "is a pickle of Python"),
        ("in.txt", b"\x1f\x8b\x08\x00", "is packed with gzip"),
        ("cut.txt.gz", CUT, "is damaged or incomplete"),
        ("plain.jsonl.gz", b'{"text": "a"}\n', r"let its name end in \.gz only if it is packed"),
        ("in.jsonl", b'[\n{"text": "a"}\n]', "begins as a JSON array; give --format json"),
        ("in.json", b'[{"text": "a"}', ARRAY_FAULT),
        ("in.json", b"[" * 100_000, ARRAY_FAULT),
        ("in.json", b'[{"text": "a", "n": xNaN}]', ARRAY_FAULT),
        ("in.json", b'[{"text": "a", "n": NaNx}]', ARRAY_FAULT),
        ("in.json", b'[{"text": "a \\" NaN, ', ARRAY_FAULT),
        ("in.json", b'[{"text": "' + b"a" * 3000 + b'"}]', "is a JSON array of over 2,000 bytes"),
        ("in.csv", b"text,label\ra,x\r", "a carriage return that is no end of a line"),
        ("in.csv", b"id\n1\n", "has the column id; it needs the column text"),
        ("in.csv", b"id;content;x\n1;a;b\n", "has the columns id, content, x; it needs the column text"),
        ("in.csv", b"text,answer\na,b\n", "and answer must not"),
        ("in.parquet", b"text\na\n", "is not a parquet file"),
        ("in.parquet", b"PAR1\x15\x04 cut", "is not a parquet file"),
        ("in.parquet", b"PK\x03\x04\x14\x00", "is a zip archive"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_once_and_not_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, told: str
) -> None:
    if "2,000" in told:
        monkeypatch.setattr(reader, "MOST_ARRAY_BYTES", 2000)
    packed = name.endswith(".gz") and "UTF" in told
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(BadInput, match=told):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("in.jsonl", b'{"text": 7}', "expected `str`, got `int` - at `$.text`"),
        ("in.jsonl", b'["rome"]', "expected `object`, got `array`"),
        ("in.jsonl", b'{"text": "a\\ud83d"}', "has half a surrogate pair"),
        ("in.jsonl", b'{"text": "a", "x": "\xff"}', "is not UTF-8"),
        ("in.jsonl", b'{"text": "a", "answer": 1}', "has a field 'answer' already"),
        ("in.jsonl", b'{"text": "a", "x": ' + b"[" * 1900, "is not JSON"),
        ("in.csv", b"text,x\nc", "has 1 column, and the header has 2"),
        ("in.csv", b"text,x\n\xff,x", "is not UTF-8"),
        ("in.csv", b"text,id\nhello\rworld,1", "has a carriage return that is no end of a line"),
        ("in.jsonl", json.dumps({"text": "a" * 2001}), "is longer than 2,000 bytes"),
        ("in.json", json.dumps([{"text": "a" * 2001}, {"text": "b"}]), "is longer than 2,000 bytes"),
        ("in.txt", "a" * 2001, "is longer than 2,000 bytes"),
        # Each line of the cell is short enough.
        ("in.csv", f'text,x\n"{"a" * 1500}\n{"a" * 400}",{"a" * 1500}', "is longer than 2,000 bytes"),
        ("in.parquet", {"text": ["a" * 2001, "b"]}, "is longer than 2,000 bytes"),
        ("in.jsonl", json.dumps({"text": "ä" * 501}, ensure_ascii=False), "has a text of more than 500 characters"),
        ("in.txt", "ä" * 501, "has a text of more than 500 characters"),
        ("in.csv", f"text,x\n{'ä' * 501},a", "has a cell of more than 500 characters"),
        ("in.parquet", {"text": ["a", "b"], "text_pair": ["ä" * 501, None]}, "has a text of more than 500 characters"),
    ],
    ids=lambda value: None if isinstance(value, str) and len(value) < 60 else "",
)  # fmt: skip
def test_a_row_that_cannot_be_read_has_a_fault_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Any, fault: str
) -> None:
    monkeypatch.setattr(rows, "MOST_ROW_BYTES", 2000)
    if "characters" in fault:
        for module in (rows, tables):
            monkeypatch.setattr(module, "MOST_CHARACTERS", 500)
    file = tmp_path / name
    if isinstance(content, dict):
        write_parquet(file, content)
    elif name == "in.json":
        write(file, content)
    else:
        after = {"in.jsonl": b'\n{"text": "b"}\n', "in.csv": b"\nb,c\n", "in.txt": b"\nb\n"}[name]
        write(file, (content if isinstance(content, bytes) else content.encode()) + after)
    (_, found), (fields, none) = read(file)
    assert str(found).startswith(fault)
    assert (none, fields["text"]) == (None, "b")


def test_an_array_is_rows_each_on_one_line_with_its_numbers_as_they_were(tmp_path: Path) -> None:
    given = tmp_path / "in.json"
    given.write_text(
        '\ufeff\n [{"text": "a b", "n": 1.50, "l": [\n 1e5 ]}, 7,\r\n{"text" :\r"ä"}, {"id": 1} ]', "utf-8"
    )
    with InputFile(given) as source:
        found = list(source.rows())
        assert source.share_read() == 1
        assert source.place(found[1].line) == f"{given}, row 2"
    assert found[0].fields == b'{"text":"a b","n":1.50,"l":[1e5]'
    assert found[2].fields == '{"text":"ä"'.encode()
    assert [row.fault for row in found] == [
        None,
        'expected `object`, got `int`; give an object such as {"text": "..."}',
        None,
        "has no field \"text\"; its fields are 'id'",
    ]
    (tmp_path / "in.json.gz").write_bytes(gzip.compress(given.read_bytes()))
    assert read(tmp_path / "in.json.gz") == read(given)


def write_parquet(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


class Counted:
    """A file, with the bytes that are read of it counted."""

    def __init__(self, file: Any) -> None:
        self.file, self.read_bytes = file, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, size: int = -1) -> Any:
        data = self.file.read(size)
        self.read_bytes += len(data)
        return data


def test_parquet_is_read_a_row_group_at_a_time(tmp_path: Path) -> None:
    texts = [random.Random(number).randbytes(200).hex() for number in range(5000)]
    file = write_parquet(tmp_path / "in.parquet", {"text": texts}, row_group_size=1000)
    with InputFile(file) as source:
        counted = source._raw = Counted(source._raw)  # type: ignore[assignment]
        found = source.rows()
        assert next(found).text == texts[0]
        assert counted.read_bytes < file.stat().st_size / 2
        assert [row.text for row in found] == texts[1:]
        assert source.share_read() == 1


def test_a_part_of_a_row_group_reads_no_batches_behind_its_end(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "in.parquet", {"text": [str(i) for i in range(30_000)]}, row_group_size=30_000)
    with InputFile(file) as source:
        source.prepare()
        whole, taken = source.table, []

        def iter_batches(*given: Any, **options: Any) -> Iterator[Any]:
            for batch in whole.iter_batches(*given, **options):
                taken.append(batch)
                yield batch

        source.table = SimpleNamespace(
            metadata=whole.metadata, schema_arrow=whole.schema_arrow, iter_batches=iter_batches
        )
        assert sum(len(rows) for _, rows in source.batches(10)) == 10
    assert len(taken) == 1


def test_the_values_of_parquet_become_json(tmp_path: Path) -> None:
    columns = {
        "text": ["a", None],
        "when": [1.5, float("nan")],
        "price": [Decimal("1.20"), None],
        "tags": [["x"], []],
        "inner": [{"n": 1}, None],
    }
    found = read(write_parquet(tmp_path / "in.parquet", columns))
    assert found[0] == ({"text": "a", "when": 1.5, "price": "1.20", "tags": ["x"], "inner": {"n": 1}}, None)
    assert found[1][1] == 'expected `str`, got `null` - at `$.text`; give an object such as {"text": "..."}'


@pytest.mark.parametrize(
    "values", [[b"a", b"b"], [Decimal("1.20"), None], [date(2026, 1, 2), None], [1, 2], [["a"], []]], ids=repr
)
def test_a_column_of_texts_of_another_type_is_refused_before_a_row_is_read(tmp_path: Path, values: list[Any]) -> None:
    for columns in ({"text": values}, {"text": ["a", "b"], "text_pair": values}):
        with pytest.raises(
            BadInput, match=r"has a column text(_pair)? of type .*, and texts are needed; cast it to string"
        ):
            read(write_parquet(tmp_path / "in.parquet", columns))
    same = pa.table({"text": pa.array(["a", None]).dictionary_encode(), "text_pair": pa.nulls(2)})
    parquet.write_table(same, tmp_path / "in.parquet")
    assert read(tmp_path / "in.parquet")[0] == ({"text": "a", "text_pair": None}, None)


def test_nan_and_infinity_come_back_as_null_and_other_rows_as_they_are(tmp_path: Path) -> None:
    rows = ['{"text": "a", "n": NaN, "l": [1.50, -Infinity]}', '{"text": "is NaN, or", "n": 1.50}', '{"text": NaN}']
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    with InputFile(tmp_path / "in.jsonl") as source:
        first, second, third = source.rows()
    assert first.fields == b'{"text": "a", "n": null, "l": [1.50, null]'
    assert second.fields == rows[1][:-1].encode()
    assert third.fault is not None
    assert "got `null` - at `$.text` (NaN and Infinity are read as null)" in third.fault
    (tmp_path / "in.json").write_text(f"[{', '.join(rows[:2])}]")
    assert read(tmp_path / "in.json")[0] == ({"text": "a", "n": None, "l": [1.5, None]}, None)


@pytest.mark.parametrize("nan", ["NaN", "-Infinity"])
def test_nan_in_one_row_of_an_array_leaves_long_numbers_and_texts_of_all_as_they_were_written(
    tmp_path: Path, nan: str
) -> None:
    others = r'"text": "\u00e9 \"[NaN, -Infinity]\\\\", "n": 1.000, "id": 123456789012345678901234567890, "m": 0.1234567890123456789'
    (tmp_path / "in.json").write_text(f'[{{{others}}},{{"l": [{nan},{nan}], {others}}},\n{{{others}, "n": {nan}}}]')
    with InputFile(tmp_path / "in.json") as source:
        found = [row.fields.decode() for row in source.rows()]
    assert found == [f"{{{others}", f'{{"l": [null,null], {others}', f'{{{others}, "n": null']


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # how Python marks what cannot be imported
    with pytest.raises(BadInput, match=r"pyarrow, which reads it, is not installed; .*pip install '\.\[build\]'"):
        read(file)


def test_pairs_are_answered_as_pairs_and_an_output_goes_on_with_their_column_alone(
    intents: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.csv", "text,reply\ni love,it\nrefund,\n")
    job = Annotation(
        intents, tmp_path / "in.csv", tmp_path / "out.jsonl", AnswerOptions(top_k=1), text_pair_column="reply"
    )
    annotate(job)
    pipeline = Pipeline(intents)
    first, second = (each["answer"] for each in lines(tmp_path / "out.jsonl"))
    assert first == pipeline("i love", text_pair="it", top_k=1) != pipeline("i love", top_k=1)
    assert second == pipeline("refund", top_k=1)
    with pytest.raises(BadInput, match='was begun with text_pair_column "reply", now null'):
        annotate(replace(job, text_pair_column="text_pair"))


@pytest.mark.parametrize(
    ("name", "content", "columns", "said"),
    [
        ("in.jsonl", '{"text": "a"}', {"text_pair_column": "reply"}, "has no field \"reply\"; its fields are 'text'"),
        ("in.csv", "text\na\n", {"text_pair_column": "reply"}, "it needs the columns text and reply"),
        ("in.txt", "a\n", {"text_pair_column": "reply"}, "--text-pair-column reply: txt has no columns"),
        ("in.txt", "a\n", {"text_column": "body"}, "--text-column body: txt has no columns"),
        ("in.jsonl", '{"text": "a"}', {"text_pair_column": "text"}, "--text-column 'text' is not a column of texts"),
        ("in.csv", "id,content\n1,a\n", {"text_column": "body"}, "has the columns id, content; it needs the column body"),
        ("in.parquet", {"id": [1], "content": ["a"]}, {"text_column": "body"}, "has the columns id, content; it needs the column body"),
    ],
)  # fmt: skip
def test_columns_that_were_asked_for_must_be_there(
    intents: Path, tmp_path: Path, name: str, content: Any, columns: dict[str, str], said: str
) -> None:
    file = write_parquet(tmp_path / name, content) if isinstance(content, dict) else write(tmp_path / name, content)
    with pytest.raises(BadInput) as refused:
        annotate(Annotation(intents, file, tmp_path / "out.jsonl", **columns))
    assert said in refused.value.message
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", '{"text": 1, "body": "a", "reply": "b"}'),
        ("in.json", '[{"text": 1, "body": "a", "reply": "b"}]'),
        ("in.csv", "text,body,reply\n1,a,b\n"),
        ("in.parquet", {"text": [1], "body": ["a"], "reply": ["b"]}),
    ],
)
def test_the_texts_may_stand_under_other_names(tmp_path: Path, name: str, content: Any) -> None:
    file = write_parquet(tmp_path / name, content) if isinstance(content, dict) else write(tmp_path / name, content)
    with InputFile(file, columns=Columns("body", "reply")) as source:
        (row,) = source.rows()
    assert (row.text, row.pair, row.fault) == ("a", "b", None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.jsonl", '{"body": "a"}\n' * 30, "lines 1, 2, 3, 4, 5 and 25 more: has no field \"text\"; its fields are 'body'"),
        ("in.json", '{"data": [{"text": "a"}]}', "line 1: has no field \"text\"; its fields are 'data'; give an array"),
        ("in.json", json.dumps({"data": [{"text": "a"}] * 30}, indent=1), "one object a line\n"),
    ],
    ids=["30 rows", "an object of rows", "an object of rows on many lines"],
)  # fmt: skip
def test_a_fault_of_every_row_is_told_once_and_leaves_nothing_new_behind(
    cities: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    write(tmp_path / name, content)
    (tmp_path / "empty.jsonl").touch()
    for out in ("out.jsonl", "empty.jsonl"):  # which was there before, and stays
        with pytest.raises(BadInput) as refused:
            annotate(Annotation(cities, tmp_path / name, tmp_path / out))
        assert said in refused.value.message
        assert len(refused.value.message.splitlines()) <= 4
        left = {file.name for file in tmp_path.iterdir()} - {"empty.jsonl.lineage.json"}
        assert left == {"empty.jsonl", name}


RELATED = {"head": {"start": 2, "end": 5}, "tail": {"start": 9, "end": 13}}


@pytest.mark.parametrize(
    ("name", "offsets"),
    [("in.jsonl", "codepoints"), ("in.json", "codepoints"), ("in.parquet", "codepoints"), ("in.jsonl", "utf16")],
)
def test_relations_are_read_in_every_format_with_markers_at_their_offsets(
    tmp_path: Path, name: str, offsets: Any
) -> None:
    more = offsets == "utf16"  # the emoji has one unit more
    parts = {part: {key: place + more for key, place in where.items()} for part, where in RELATED.items()}
    row = {"text": "😀 fly to rome", **parts}
    if name == "in.parquet":
        write_parquet(tmp_path / name, {key: [value] for key, value in row.items()})
    else:
        write(tmp_path / name, json.dumps([row] if name == "in.json" else row))
    with InputFile(tmp_path / name, columns=Columns(relations=True, offsets=offsets)) as source:
        (found,) = source.rows()
    assert found.text == "😀 [E1] fly [/E1] to [E2] rome [/E2]"


def test_relations_are_answered_as_the_pipeline_answers_them(relations: Path, tmp_path: Path) -> None:
    row = {"text": "😀 fly to rome", **RELATED}
    given = write(tmp_path / "in.jsonl", json.dumps(row))
    annotate(Annotation(relations, given, tmp_path / "out.jsonl", AnswerOptions(top_k=1)))
    (found,) = lines(tmp_path / "out.jsonl")
    assert found == {**row, "answer": Pipeline(relations)(row, top_k=1)}
    assert found["answer"]["labels"][0]["label"] == "to"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        pytest.param({"text": "fly to rome"}, 'give "head" and "tail" beside "text"', id="no-parts"),
        pytest.param({"text": "[E1] fly [/E1] to [E2] rome [/E2]"}, 'give "head" and "tail"', id="markers-alone"),
        pytest.param({"text": "fly", **RELATED}, "head.end 5 is outside the text", id="outside"),
        pytest.param({"text": "[E1] fly to rome", **RELATED}, "already has the marker [E1]", id="marked"),
        pytest.param({"text": "fly to rome", **RELATED, "head": 3}, "expected `object | null`, got `int`", id="a-number"),
    ],
)  # fmt: skip
def test_a_row_without_its_two_parts_is_a_bad_row(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    ((_, found),) = read(tmp_path / "in.jsonl", relations=True)
    assert fault in str(found)


def refused(job: Annotation, before: list[str]) -> str:
    """The message of a job that is refused and makes no file."""
    with pytest.raises(BadInput) as caught:
        annotate(job)
    assert sorted(file.name for file in job.output.parent.iterdir()) == before, "something was written"
    return caught.value.message


@pytest.fixture
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says of each intent on its own whether it applies."""
    folder = tmp_path_factory.mktemp("bundles") / "labels"
    return write_bundle(folder, intent_table() - 1, task="text-classification", labels=INTENTS, multi_label=True)


NO_EFFECT = "--{} has no effect on a model for {}"


@pytest.mark.parametrize(
    ("bundle", "options", "said"),
    [
        ("cities", {"abstain": True}, NO_EFFECT.format("abstain", "token-classification")),
        ("cities", {"top_k": 2}, NO_EFFECT.format("top-k", "token-classification")),
        ("labels", {"abstain": True}, "--abstain: 'labels' decides on each label separately"),
        ("intents", {"abstain": True}, "--abstain: 'intents' has no `abstain_below` for fp32"),
        ("intents", {"aggregation": "max"}, NO_EFFECT.format("aggregation", "text-classification")),
        ("intents", {"constrained": True}, NO_EFFECT.format("constrained", "text-classification")),
        ("intents", {"min_score": 0.5}, NO_EFFECT.format("min-score", "text-classification")),
        ("intents", {"offsets": "utf8"}, NO_EFFECT.format("offsets", "text-classification")),
        ("relations", {"min_score": 0.5}, NO_EFFECT.format("min-score", "relations")),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_read_or_made(
    request: pytest.FixtureRequest, tmp_path: Path, bundle: str, options: dict[str, Any], said: str
) -> None:
    given = write(tmp_path / "in.jsonl", "no row that could be read\n")
    found = request.getfixturevalue(bundle)
    assert said in refused(Annotation(found, given, tmp_path / "out.jsonl", AnswerOptions(**options)), ["in.jsonl"])


def test_faults_of_output_options_and_columns_are_told_at_once(intents: Path, relations: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id\n1\n")
    job = Annotation(
        intents, tmp_path / "in.csv", tmp_path / "nowhere" / "out.jsonl", AnswerOptions(constrained=True),
        answer_field="text", text_column="text_pair",
    )  # fmt: skip
    with pytest.raises(BadInput) as caught:
        annotate(job)
    for each in ("there is no folder", "--constrained has no effect", "--text-column 'text_pair' is not a column"):
        assert each in caught.value.message
    job = replace(job, output=tmp_path / "out.jsonl", text_column="body", bundle=tmp_path / "nothing")
    message = refused(job, ["in.csv"])
    assert "nothing does not exist" in message
    assert "has the column id; it needs the column body" in message
    job = replace(job, bundle=intents, variant="int8", options=AnswerOptions())
    assert "'intents' has no variant 'int8'; give one of 'fp32'" in refused(job, ["in.csv"])
    message = refused(replace(job, bundle=relations, variant=None), ["in.csv"])
    assert "csv cannot hold the head and tail of a relation; give jsonl, json or parquet" in message


def test_values_of_options_are_all_told_at_once() -> None:
    with pytest.raises(BadInput, match=r"min_score is 2; give a number from 0 to 1(?s:.*)top_k is 0; give a whole"):
        AnswerOptions(min_score=2, top_k=0)


@pytest.mark.parametrize(("contexts", "pair"), [(False, None), (True, "")], ids=["pair", "context"])
def test_an_empty_second_text_of_json_lines_is_none_and_an_empty_context_stays(
    tmp_path: Path, contexts: bool, pair: str | None
) -> None:
    write(tmp_path / "in.jsonl", '{"text": "a", "text_pair": ""}')
    with InputFile(tmp_path / "in.jsonl", columns=Columns(contexts=contexts)) as source:
        (row,) = source.rows()
    assert row.pair == pair
