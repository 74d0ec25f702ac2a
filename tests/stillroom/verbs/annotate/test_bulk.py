"""`stillroom annotate` over a folder: parts of each input, made once."""

import datetime
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from lookup_bundles import write_vectors_bundle
from patience import PATIENCE_S
from processes import started
from pyarrow import parquet

from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.tasks import open_bundle
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, reader
from stillroom.verbs.annotate.checks import is_bulk
from stillroom.verbs.annotate.parts import MANIFEST, Job
from stillroom.verbs.annotate.reader import InputFile
from stillroom.verbs.annotate.rows import Columns, Start
from stillroom.verbs.annotate.run import annotate, annotate_files, summary

pytestmark = pytest.mark.usefixtures("forked_workers")

TEXTS = [f"{'please ' * (number % 5)}{['rome', 'fly to rome', 'fly'][number % 3]}" for number in range(23)]


def table(first: int = 0) -> pa.Table:
    return pa.table({
        "id": pa.array(range(first, first + 23), pa.int16()),
        "text": TEXTS,
        "day": [datetime.date(2026, 1, 1 + number) for number in range(23)],
        "tags": pa.array([["a", "b"][: number % 3] for number in range(23)], pa.list_(pa.string())),
    })  # fmt: skip


def write_inputs(folder: Path) -> None:
    """A file of each kind, with what makes the places of rows hard to find: blank lines, line ends in cells, a byte-order mark."""
    (folder / "deep").mkdir(parents=True)
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    (folder / "lines.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    cells = [f'{number},"{text}","two\nlines"' for number, text in enumerate(TEXTS)]
    (folder / "deep" / "cells.csv").write_text("\n\nid,text,note\n" + "\n".join(cells) + "\n", encoding="utf-8")
    (folder / "plain.txt").write_text("\r\n".join(TEXTS) + "\r\n", encoding="utf-8")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "array.json").write_text(f"[{', '.join(lines)}]", encoding="utf-8")
    parquet.write_table(table(), folder / "table.parquet", row_group_size=7)
    (folder / "many.csv.gz").write_bytes(
        gzip.compress(("text\n" + "".join(f"{each}\n" for each in TEXTS * 4)).encode())
    )


def settings_of(bundle: Path, given: Path | str, out: Path | str, **more: Any) -> Annotation:
    return Annotation(bundle, given, out, **({"processes": 1, "part_rows": 5} | more))


def job_of(bundle: Path, out: Path) -> Job:
    digest = open_bundle(bundle).manifest.digest
    return Job(str(bundle), digest, "fp32", 1, "cpu", Columns(), AnswerOptions(), None, "stop", 5, str(out))


def parts_of(out: Path, name: str) -> list[Path]:
    return sorted(out.glob(f"{name}-*"))


def digests(out: Path) -> dict[str, str]:
    files = [each for each in out.rglob("*") if each.is_file() and each.name != MANIFEST]
    return {each.relative_to(out).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bulk") / "in"
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(plain: Path, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the inputs. Not to be changed."""
    out = tmp_path_factory.mktemp("bulk") / "out"
    document = annotate_files(settings_of(plain, inputs, out, processes=2))
    assert (document["files"], document["rows"], document["parts_before"], document["bad_rows"]) == (7, 230, 0, 0)
    assert summary(document).startswith("230 rows of 7 files by ")
    return out


@pytest.fixture(scope="module")
def answers(plain: Path) -> list[object]:
    """The answers to TEXTS."""
    return list(Pipeline(plain)(TEXTS))


@pytest.mark.parametrize(
    ("name", "count"),
    [("lines.jsonl", 5), ("deep/cells.csv", 5), ("plain.txt", 5), ("packed.jsonl.gz", 1), ("array.json", 1), ("many.csv.gz", 2)],
)  # fmt: skip
def test_the_parts_of_a_file_are_the_answers_to_its_rows_in_order(
    name: str, count: int, plain: Path, whole: Path, answers: list[object]
) -> None:
    parts = parts_of(whole, name)
    assert len(parts) == count
    found = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    times = 4 if name == "many.csv.gz" else 1
    assert [(each["text"], each["answer"]) for each in found] == list(zip(TEXTS, answers, strict=True)) * times
    if "id" in found[0]:
        assert [int(each["id"]) for each in found] == list(range(23))


def test_the_parts_of_a_file_are_its_output_as_one_file(plain: Path, inputs: Path, whole: Path, tmp_path: Path) -> None:
    annotate(Annotation(plain, inputs / "lines.jsonl", tmp_path / "one.jsonl", processes=1))
    parts = parts_of(whole, "lines.jsonl")
    assert b"".join(part.read_bytes() for part in parts) == (tmp_path / "one.jsonl").read_bytes()


def test_a_parquet_input_has_parquet_parts_with_all_its_columns(
    plain: Path, inputs: Path, whole: Path, tmp_path: Path
) -> None:
    annotate(Annotation(plain, inputs / "table.parquet", tmp_path / "one.parquet", processes=1))
    parts = parts_of(whole, "table.parquet")
    assert [part.name for part in parts][:2] == [
        "table.parquet-000000000000-000000000005.parquet",
        "table.parquet-000000000005-000000000010.parquet",
    ]
    found = pa.concat_tables(parquet.read_table(part) for part in parts)
    assert found.equals(parquet.read_table(tmp_path / "one.parquet"))
    assert found.drop_columns(["answer"]).equals(table())


def test_a_part_begins_anywhere_in_a_row_group_of_many_batches(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(table(), tmp_path / "in.parquet")
    monkeypatch.setattr(reader, "TABLE_ROWS", 4)
    for begin, end in ((0, 23), (9, 11), (12, 23), (7, 17)):
        with InputFile(tmp_path / "in.parquet", start=Start(begin)) as file:
            found = list(file.batches(end))
            assert pa.Table.from_batches([batch for batch, _ in found]).equals(table().slice(begin, end - begin))
            assert [row.line for _, rows in found for row in rows] == list(range(begin + 1, end + 1))


def test_a_rerun_makes_what_is_missing_and_nothing_twice(
    plain: Path, inputs: Path, whole: Path, tmp_path: Path
) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(inputs, given)  # with the times of the files
    settings = settings_of(plain, given, out)
    annotate_files(settings)
    assert digests(out) == digests(whole)
    missing, unlisted, cut = (part.name for part in parts_of(out, "lines.jsonl")[:3])
    (out / missing).unlink()
    (out / cut).write_bytes(b"half a li")
    manifest = json.loads((out / MANIFEST).read_bytes())
    del manifest["parts"][unlisted]  # of a driver that was killed before it wrote the manifest again
    (out / MANIFEST).write_text(json.dumps(manifest))
    (out / f".{missing}.{'0' * 32}.partial").write_text("of a writer that was killed")
    (given / "more.txt").write_text("fly\n")
    before = {each: each.stat().st_mtime_ns for each in out.rglob("[a-z]*-0*")}
    document = annotate_files(settings)
    changed = {each.name for each, stamp in before.items() if each.stat().st_mtime_ns != stamp}
    assert changed == {cut}
    assert (document["rows"] - document["rows_before"], document["files"]) == (11, 8)
    assert not list(out.rglob(".*"))
    assert digests(out).items() > digests(whole).items()
    manifest = json.loads((out / MANIFEST).read_bytes())
    assert {name: part["sha256"] for name, part in manifest["parts"].items()} == digests(out)
    assert (manifest["complete"], sum(part["rows"] for part in manifest["parts"].values())) == (True, 231)
    assert annotate_files(settings)["texts_per_s"] is None


def test_vectors_are_lists_of_float32_in_parquet(tmp_path: Path) -> None:
    bundle = write_vectors_bundle(tmp_path / "vectors")
    parquet.write_table(table(), tmp_path / "in.parquet")
    annotate_files(settings_of(bundle, tmp_path / "in.parquet", tmp_path / "out", part_rows=20, answer_field="vector"))
    parts = parts_of(tmp_path / "out", "in.parquet")
    found = pa.concat_tables(parquet.read_table(part) for part in parts)
    annotate(Annotation(bundle, tmp_path / "in.parquet", tmp_path / "one.parquet", answer_field="vector"))
    assert found.schema.field("vector").type == pa.list_(pa.float32())
    assert found.equals(parquet.read_table(tmp_path / "one.parquet"))


def test_bad_rows_are_named_before_anything_is_answered(plain: Path, tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    (given / "a.jsonl").write_text('{"text": "fly"}\nnot json\n{"no": 1}\n')
    parquet.write_table(pa.table({"text": ["fly", None, "rome"]}), given / "b.parquet")
    with pytest.raises(BadInput) as told:
        annotate_files(settings_of(plain, given, tmp_path / "out"))
    assert f"{given / 'a.jsonl'}, line 2: is not JSON" in str(told.value)
    assert f"{given / 'a.jsonl'}, line 3: has no field \"text\"; its fields are 'no'" in str(told.value)
    assert f"{given / 'b.parquet'}, row 2: " in str(told.value)
    assert not (tmp_path / "out").exists()
    document = annotate_files(settings_of(plain, given, tmp_path / "out", bad_rows="skip"))
    assert (document["rows"], document["bad_rows"]) == (6, 3)
    (lines,) = parts_of(tmp_path / "out", "a.jsonl")
    fields = [list(json.loads(line)) for line in lines.read_text().splitlines()]
    assert fields == [["text", "answer"], ["error"], ["error"]]
    (part,) = parts_of(tmp_path / "out", "b.parquet")
    found = parquet.read_table(part)
    assert [each is None for each in found["error"].to_pylist()] == [True, False, True]
    assert [each is None for each in found["answer"].to_pylist()] == [False, True, False]


def test_a_row_that_fails_in_the_model_stops_the_work_and_the_rest_is_kept(cities: Path, tmp_path: Path) -> None:
    given = tmp_path / "in.txt"
    given.write_text("fly\n" * 7 + "love it\n" + "fly\n" * 7)  # its model says NaN at `it`
    with pytest.raises(Exception, match=r"in.txt, line 8: (?s:.*)1 of 3 parts are in .*Give the same command again"):
        annotate_files(settings_of(cities, given, tmp_path / "out"))
    assert [part.name for part in parts_of(tmp_path / "out", "in.txt")] == ["in.txt-000000000000-000000000005.jsonl"]
    document = annotate_files(settings_of(cities, given, tmp_path / "skipped", bad_rows="skip"))
    assert (document["rows"], document["bad_rows"]) == (15, 1)


def refused(bundle: Path, given: Path | str, out: Path | str, **more: Any) -> str:
    with pytest.raises(BadInput) as told:
        annotate_files(settings_of(bundle, given, out, **more))
    return told.value.message


def test_an_output_of_another_job_is_refused_and_kept(
    plain: Path, cities: Path, inputs: Path, whole: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "in"
    shutil.copytree(inputs, elsewhere)
    shutil.copytree(whole, out)
    before = digests(out)
    missing = "deep/cells.csv is missing, lines.jsonl is missing, many.csv.gz is missing"
    for bundle, given, changes, said in (
        (plain, elsewhere, {}, "array.json has changed"),  # the same files elsewhere are other inputs
        (cities, inputs, {}, "was begun with bundle "),
        (plain, inputs, {"part_rows": 6}, "part_rows 5, now 6"),
        (plain, inputs, {"answer_field": "a"}, 'field "answer", now "a"'),
        (plain, f"{inputs}/*.parquet", {}, missing),
    ):
        assert said in refused(bundle, given, out, **changes)
    (out / MANIFEST).unlink()
    for restart in (False, True):
        assert "holds files that `annotate` did not write" in refused(plain, inputs, out, restart=restart)
    assert digests(out) == before


def test_restart_removes_the_parts_and_nothing_else(plain: Path, inputs: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "mine.txt").write_text("mine")
    annotate_files(settings_of(plain, inputs / "plain.txt", out, part_rows=20, restart=True))
    assert sorted(each.name for each in out.rglob("*") if each.is_file()) == [
        MANIFEST,
        "mine.txt",
        "plain.txt-000000000000-000000000020.jsonl",
        "plain.txt-000000000020-000000000023.jsonl",
    ]


def test_places_that_cannot_be_used_are_refused(plain: Path, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for given, output, said in (
        (f"{inputs}/*.orc", out, "no file is there; give a file, a folder, or a pattern"),
        (tmp_path / "none", out, "no file is there"),
        (inputs, tmp_path / "out.jsonl", "has the name of a file"),
        (inputs, inputs / "out", "is in the input folder"),
        ("-", out, "standard input and output have no parts"),
        ("https://host/in.jsonl", out, "on this machine's disk and at s3://"),
        (
            inputs / "plain.txt",
            "/proc/self",
            "--output /proc/self cannot be written",
        ),  # which the superuser cannot write to either
    ):
        assert said in refused(plain, given, output)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "notes.doc").write_text("x")
    told = refused(plain, tmp_path / "odd", tmp_path / "x.parquet")
    assert told.startswith("2 faults were found; nothing was done.")
    assert "notes.doc is no known format" in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "out", "is_a_folder"),
    [
        ("{}", "{}/out", True),
        ("{}/*.txt", "{}/out", True),
        ("s3://bucket/in.txt", "{}/out", True),
        ("{}/plain.txt", "{}", True),
        ("{}/plain.txt", "s3://bucket/out", True),
        ("{}/plain.txt", "{}/out.jsonl", False),
        ("-", "-", False),
    ],
)
def test_folders_patterns_and_stores_are_answered_to_a_folder_of_parts(
    given: str, out: str, is_a_folder: bool, inputs: Path
) -> None:
    assert is_bulk(Annotation(inputs, given.format(inputs), out.format(inputs))) is is_a_folder
    assert is_bulk(Annotation(inputs, inputs / "plain.txt", inputs / "out", ray="local"))


def running(bundle: Path, given: Path, out: Path, *more: str) -> "AbstractContextManager[subprocess.Popen[str]]":
    """The command with parts of 50 rows, and with one process."""
    command = [sys.executable, "-m", "stillroom", "annotate", str(bundle), "--input", str(given), "--output", str(out)]
    command += ["--part-rows", "50", "--processes", "1", *more]
    return started(command, stderr=subprocess.PIPE, text=True)


def wait_until(there: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Waits for it while the process runs."""
    until_s = time.monotonic() + PATIENCE_S
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.005)


SLOW_TEXT = "fly to rome please " * 8


def test_a_rerun_after_kills_and_ctrl_c_ends_with_the_same_bytes(slow: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in.txt", tmp_path / "out"
    given.write_text(f"{SLOW_TEXT}\n" * 700, encoding="utf-8")
    annotate_files(settings_of(slow, given, tmp_path / "undisturbed", part_rows=50))
    out.mkdir()  # otherwise one file is the output of one file

    with running(slow, given, out) as driver:
        wait_until(partial(has_parts, out, 2), driver)
        workers = [each for each in psutil.Process(driver.pid).children() if "spawn_main" in " ".join(each.cmdline())]
        workers[0].kill()  # is replaced
        wait_until(partial(has_parts, out, 4), driver)
        workers = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.communicate()
        _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
        assert not alive

    with running(slow, given, out) as driver:
        wait_until(partial(has_parts, out, 6), driver)
        driver.send_signal(signal.SIGINT)
        said = driver.communicate(timeout=PATIENCE_S)[1]
        assert driver.returncode == 130, said
        assert not list(out.glob(".*.partial"))
        assert not json.loads((out / MANIFEST).read_bytes())["complete"]

    with running(slow, given, out) as driver:
        said = driver.communicate(timeout=PATIENCE_S)[1]
        assert driver.returncode == 0, said
        assert " that were there of 1 file by " in said
        assert digests(out) == digests(tmp_path / "undisturbed")


@pytest.mark.parametrize(("kind", "kills"), [("txt", 2), ("parquet", 1)])
def test_a_run_that_is_killed_within_each_part_gets_on_and_ends_with_the_same_bytes(
    slow: Path, tmp_path: Path, kind: str, kills: int
) -> None:
    given, out = tmp_path / f"in.{kind}", tmp_path / "out"
    texts = [f"{SLOW_TEXT[: 100 + number % 50]}{number}" for number in range(400)]
    if kind == "txt":
        given.write_text("\n".join(texts), encoding="utf-8")
    else:
        parquet.write_table(pa.table({"text": texts}), given)
    annotate_files(settings_of(slow, given, tmp_path / "undisturbed", part_rows=400))
    out.mkdir()
    run = (slow, given, out, "--part-rows", "400")

    for _ in range(kills):
        before = batches_in(out)
        with running(*run) as driver:
            wait_until(partial(is_beyond, out, before), driver)
        assert not parts_of(out, given.name)
        with unfinished(out).open("ab") as file:
            file.write(b'[["half a')  # of a line, as a kill leaves it
    with running(*run) as driver:
        said = driver.communicate(timeout=PATIENCE_S)[1]
    assert driver.returncode == 0, said
    assert digests(out) == digests(tmp_path / "undisturbed")


def test_a_restart_uses_no_answers_of_a_part_that_was_begun(slow: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "in.txt", tmp_path / "out"
    given.write_text(f"{SLOW_TEXT}\n" * 250, encoding="utf-8")
    out.mkdir()
    for restart in (False, True):
        with running(slow, given, out, "--part-rows", "250", *(["--restart"] * restart)) as driver:
            wait_until(partial(is_beyond, out, 0), driver)
        begun = unfinished(out).read_bytes()
        assert b"rome" in begun
        unfinished(out).write_bytes(begun.replace(b"rome", b"oslo"))  # to be told from what is computed
        annotate_files(settings_of(slow, given, out, part_rows=250, restart=restart))
        (part,) = parts_of(out, given.name)
        assert (b'"text":"oslo"' in part.read_bytes()) is not restart


def test_a_disk_that_is_full_costs_no_answers_that_are_there(slow: Path, tmp_path: Path) -> None:
    import resource

    given, out = tmp_path / "in.txt", tmp_path / "out"
    given.write_text(f"{SLOW_TEXT}\n" * 250, encoding="utf-8")
    out.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be larger; processes that are started inherit it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with running(slow, given, out, "--part-rows", "250") as driver:
            said = driver.communicate(timeout=PATIENCE_S)[1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert driver.returncode == 2, said
    assert "Make room, and give the same command again" in " ".join(said.split())
    begun = unfinished(out).read_bytes()
    assert b"rome" in begun
    unfinished(out).write_bytes(begun.replace(b"rome", b"oslo"))  # to be told from what is computed
    annotate_files(settings_of(slow, given, out, part_rows=250))
    (part,) = parts_of(out, given.name)
    assert b'"text":"oslo"' in part.read_bytes()
    assert b'"text":"rome"' in part.read_bytes()


def unfinished(out: Path) -> Path:
    """The file that keeps the answers of the one part that is begun."""
    (file,) = out.glob(".*.unfinished")
    return file


def has_parts(out: Path, count: int) -> bool:
    return len(list(out.glob("*.jsonl"))) >= count


def is_beyond(out: Path, batches: int) -> bool:
    return batches_in(out) > batches


def batches_in(out: Path) -> int:
    """The batches whose answers are kept; its first line says of what."""
    return sum(file.read_bytes().count(b"\n") - 1 for file in out.glob(".*.unfinished"))


def test_a_second_run_on_the_same_output_is_refused(plain: Path, inputs: Path, tmp_path: Path) -> None:
    import fcntl

    from stillroom.verbs.annotate.storage import LOCK

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another `annotate` is writing" in refused(plain, inputs, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [LOCK]
