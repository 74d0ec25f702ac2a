"""`stillroom annotate`: every row answered once, in order, whatever happens on the way."""

import fcntl
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from in_process import command as stillroom
from lookup_bundles import city_table, write_bundle, write_manifest
from patience import PATIENCE_S
from processes import started
from repository import ROOT

from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, answering
from stillroom.verbs.annotate.run import annotate

pytestmark = pytest.mark.usefixtures("forked_workers")


def command(bundle: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "stillroom", "annotate", str(bundle), *map(str, arguments)]


def ended(bundle: Path, *arguments: object, stdin: bytes = b"", **settings: Any) -> tuple[int, bytes, str]:
    """Exit code, standard output and, as one line, standard error of a process."""
    done = subprocess.run(
        command(bundle, *arguments), cwd=ROOT, input=stdin, check=False, **{"capture_output": True, **settings}
    )
    return done.returncode, done.stdout or b"", " ".join(done.stderr.decode().split())


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def many_rows(count: int) -> str:
    drawn = random.Random(0)
    rows = []
    for number in range(count):
        words = [drawn.choice(["fly", "to", "rome", "oslo", "new york", "please", "😀"]) for _ in range(number % 23)]
        rows.append(json.dumps({"id": number, "text": " ".join(words)}) + "\n")
    return "".join(rows)


def test_rows_come_back_as_they_were_with_the_answers_of_the_pipeline(
    cities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "WINDOW_ROWS", 5)
    texts = ["please " * (number % 7) + ["rome", "a 😀 oslo", ""][number % 3] for number in range(23)]
    written = [f'{{"n": 1.50, "text":{json.dumps(text)} , "e\\u00e9":[{{}}]}}' for text in texts]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\n\n".join(written), encoding="utf-8")
    document = annotate(Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl"))

    answers = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    for line, row, answer in zip(answers, written, Pipeline(cities)(texts), strict=True):
        assert line.startswith(row[:-1].rstrip() + ',"answer":')
        assert json.loads(line)["answer"] == answer
    assert (document["rows"], document["rows_before"], document["bad_rows"]) == (23, 0, 0)
    assert document["digest"] == Pipeline(cities).manifest.digest
    assert document["threads"] == 1


def test_from_standard_input_to_standard_output(cities: Path) -> None:
    arguments = ("--input", "-", "--format", "txt", "--output", "-", "--min-score", "0.99", "--field", "found")
    code, said, error = ended(cities, *arguments, stdin=b"rome\n")
    assert (code, said) == (0, b'{"text":"rome","found":{"entities":[],"truncated":false}}\n'), error
    assert "1 row by cities (fp32)" in error


def test_a_note_on_the_bundle_is_told_once_and_not_by_each_process(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "cities", city_table())
    (folder / "README.md").write_text("as it was made")
    write_manifest(folder)
    (folder / "README.md").write_text("as somebody edited it")
    (tmp_path / "in.txt").write_text("rome\n")
    given = ("--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl", "--processes", "2")
    code, _, error = ended(folder, *given)
    assert code == 0
    assert error.count("was edited after the bundle was made") == 1


def killed(bundle: Path, given: Path, out: Path, beyond_bytes: int) -> bool:
    """Starts the command and kills it once the output is longer than that; False when it ended before."""
    arguments = command(bundle, "--input", given, "--output", out)
    with started(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not out.exists() or out.stat().st_size <= beyond_bytes):
            time.sleep(0.001)
    return process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_after_each_write_gets_on_long_before_a_window_is_full(slow: Path, tmp_path: Path) -> None:
    given, undisturbed, out = (tmp_path / name for name in ("in.jsonl", "undisturbed.jsonl", "out.jsonl"))
    given.write_text(many_rows(500))
    annotate(Annotation(slow, given, undisturbed))
    written = [0]
    for _ in range(2):
        assert killed(slow, given, out, out.stat().st_size if out.exists() else 0)
        written.append(out.read_bytes().count(b"\n"))  # the last line may be half written
    assert sorted({*written}) == written
    assert written[-1] < 500 < answering.WINDOW_ROWS
    assert annotate(Annotation(slow, given, out))["rows_before"] == written[-1]
    assert out.read_bytes() == undisturbed.read_bytes()


@pytest.mark.parametrize(
    ("dies", "to_a_folder", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "the worker process died at its start"),
        ("os._exit(print('no room', file=sys.stderr) or 3)", False, "the worker process died at its start"),
        ("os.kill(os.getpid(), signal.SIGKILL)", True, "worker processes died 3 times at their start"),
    ],
)
def test_a_worker_that_dies_at_its_start_is_told_of_with_what_to_do(
    cities: Path, tmp_path: Path, dies: str, to_a_folder: bool, said: str
) -> None:
    # Stands where the module is looked for first: a worker is killed, as by a system without memory, or ends with an error.
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, signal, sys\nif 'spawn_main' in ' '.join(sys.orig_argv):\n    {dies}\n"
    )
    given, out = tmp_path / "in.txt", tmp_path / ("folder" if to_a_folder else "out.jsonl")
    given.write_text("rome\n")
    if to_a_folder:
        out.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code, _, error = ended(cities, "--input", given, "--output", out, "--processes", "1", env=environment)
    assert code == 2, error
    assert said in error
    assert ("no room" in error) is ("print" in dies)
    assert "perhaps for lack of memory" in error
    assert "give fewer" in error
    assert "fault of this program" not in error
    assert "Traceback" not in error
    assert out.exists() is to_a_folder


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bytes(cities: Path, tmp_path: Path) -> None:
    given, undisturbed, out = (tmp_path / name for name in ("in.jsonl", "undisturbed.jsonl", "out.jsonl"))
    given.write_text(many_rows(20_000))
    assert ended(cities, "--input", given, "--output", undisturbed)[0] == 0
    whole = undisturbed.read_bytes()
    drawn = random.Random(time.time_ns())
    kills = 0
    for least in (0, *sorted(drawn.randrange(len(whole) // 2) for _ in range(3))):
        kills += killed(cities, given, out, least)
        # A kill between two writes leaves whole lines; a write that was cut is made here.
        if out.stat().st_size > 1000:
            os.truncate(out, out.stat().st_size - drawn.randrange(1000))
    assert kills >= 2
    assert 0 < out.stat().st_size < len(whole)
    code, said, error = ended(cities, "--input", given, "--output", out, "--json")
    assert code == 0, error
    assert out.read_bytes() == whole
    assert 0 < json.loads(said)["rows_before"] < 20_000
    # And once it is complete, nothing is computed.
    assert json.loads(ended(cities, "--input", given, "--output", out, "--json")[1])["texts_per_s"] is None
    assert out.read_bytes() == whole


def begun(bundle: Path, folder: Path, rows: int = 3) -> Annotation:
    """A job of which some rows are done and the rest is not."""
    (folder / "in.jsonl").write_text("".join(f'{{"text":"rome {number}"}}\n' for number in range(rows + 2)))
    job = Annotation(bundle, folder / "in.jsonl", folder / "out.jsonl")
    annotate(job)
    done = job.output.read_bytes().splitlines(keepends=True)
    job.output.write_bytes(b"".join(done[:rows]) + done[rows][:20])
    return job


def test_it_goes_on_only_with_the_options_and_the_bundle_that_it_was_begun_with(
    cities: Path, intents: Path, tmp_path: Path
) -> None:
    job = begun(cities, tmp_path)
    before = job.output.read_bytes()
    other: dict[str, Any] = {}
    for other, said in (
        ({"options": AnswerOptions(min_score=0.5)}, "min_score 0.0, now 0.5"),
        ({"answer_field": "other"}, 'field "answer", now "other"'),
        ({"threads": 2}, "threads 1, now 2"),
        ({"bundle": intents}, "bundle"),
    ):
        with pytest.raises(BadInput, match=f"was begun with {said}"):
            annotate(replace(job, **other))
        assert job.output.read_bytes() == before
    assert annotate(replace(job, restart=True, **other))["rows_before"] == 0
    assert len(lines(job.output)) == 5


def test_it_goes_on_only_after_the_answers_to_the_rows_that_the_input_has(cities: Path, tmp_path: Path) -> None:
    job = begun(cities, tmp_path)
    given = job.input.read_text()
    job.input.write_text(given.replace("rome 1", "oslo 1"))
    with pytest.raises(BadInput, match=r"line 2 of .* is not the answer to row 2 \(line 2\)"):
        annotate(job)
    job.input.write_text(given.splitlines(keepends=True)[0])
    with pytest.raises(BadInput, match=r"line 2 of .* is not the answer to row 2, which does not exist"):
        annotate(job)
    # What comes after the last answer may have changed, and may have grown.
    job.input.write_text(given.replace("rome 4", "oslo 4") + '{"text": "paris"}\n')
    assert annotate(job)["rows"] == 6
    assert [each["text"] for each in lines(job.output)][3:] == ["rome 3", "oslo 4", "paris"]


def test_files_that_annotate_did_not_begin_are_left_alone(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n")
    (tmp_path / "notes.jsonl").write_text("mine\n")
    with pytest.raises(BadInput, match=r"notes.jsonl.lineage.json is not beside it"):
        annotate(Annotation(cities, tmp_path / "in.txt", tmp_path / "notes.jsonl"))
    with pytest.raises(BadInput, match="is the input file"):
        annotate(Annotation(cities, tmp_path / "in.txt", tmp_path / "in.txt", restart=True))
    assert (tmp_path / "notes.jsonl").read_text() == "mine\n"
    assert (tmp_path / "in.txt").read_text() == "rome\n"


def test_two_at_once_do_not_write_one_file(cities: Path, tmp_path: Path) -> None:
    job = begun(cities, tmp_path)
    with job.output.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another `annotate` is writing"):
            annotate(replace(job, restart=True))
    assert annotate(job)["rows"] == 5


BAD = [
    pytest.param(b"nope", "is not JSON", id="not JSON"),
    pytest.param(b'{"id": 1}', "has no field \"text\"; its fields are 'id'", id="without a text"),
    pytest.param(b'{"text": "a", "text_pair": "b"}', "text_pair: 'cities' finds entities in one text", id="a pair for entities"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "fault"), BAD)
def test_a_bad_row_stops_the_work_before_it_or_is_told_in_its_place(
    cities: Path, tmp_path: Path, bad: bytes, fault: str
) -> None:
    job = Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    good = [b'{"text": "rome %d"}' % number for number in range(3)]
    job.input.write_bytes(b"\n".join([*good, bad, b'{"text": "oslo"}']))
    with pytest.raises(BadInput) as stopped:
        annotate(job)
    assert f"{job.input}, line 4: {fault}" in stopped.value.message
    assert [each["text"] for each in lines(job.output)] == ["rome 0", "rome 1", "rome 2"]

    document = annotate(replace(job, bad_rows="skip"))
    assert (document["rows"], document["rows_before"], document["bad_rows"]) == (5, 3, 1)
    found = lines(job.output)
    assert [each.get("text") for each in found] == ["rome 0", "rome 1", "rome 2", None, "oslo"]
    assert fault in found[3]["error"].pop("message")
    # What the reader refuses is known again by its bytes, and what the model refuses by its fields.
    code, read = ("invalid_input", bad[:-1]) if b"text_pair" in bad else ("bad_row", bad)
    assert found[3]["error"] == {"line": 4, "row_sha256": hashlib.sha256(read).hexdigest(), "code": code}
    # An error in a finished row's place does not stand in the way of going on.
    assert annotate(job)["rows_before"] == 5


def test_all_bad_rows_at_hand_are_told_at_once_and_a_mended_file_goes_on(cities: Path, tmp_path: Path) -> None:
    job = Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    job.input.write_text('{"text": "rome"}\nnope\n' + "{}\n" * 30)
    with pytest.raises(BadInput) as stopped:
        annotate(job)
    assert stopped.value.message.startswith("1 row is in ")
    assert "line 2: is not JSON" in stopped.value.message
    assert "lines 3, 4, 5, 6, 7 and 25 more: has no field" in stopped.value.message
    assert len(stopped.value.message.splitlines()) == 4
    job.input.write_text('{"text": "rome"}\n{"text": "oslo"}\n')
    document = annotate(job)
    assert (document["rows"], document["rows_before"]) == (2, 1)


def test_a_full_disk_is_one_message_and_no_traceback(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n")
    done = stillroom("annotate", cities, "--input", tmp_path / "in.txt", "--output", "/dev/full")
    assert (done.code, "/dev/full could not be written: No space left on device. Make room" in done.said) == (2, True)

    (tmp_path / "in.txt").write_text("rome\n" * 6_000)
    out, limit = tmp_path / "out.jsonl", 400_000
    limited = ["sh", "-c", f'ulimit -f {limit // 512}; exec "$@"', "sh"]
    again = command(cities, "--input", tmp_path / "in.txt", "--output", out)
    process = subprocess.run([*limited, *again], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "Make room, and give the same command again to resume" in " ".join(process.stderr.split())
    assert 0 < out.stat().st_size <= 2 * limit
    assert annotate(Annotation(cities, tmp_path / "in.txt", out))["rows_before"] > 0
    assert len(lines(out)) == 6_000


def test_a_reader_that_goes_is_one_message_and_no_traceback(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n" * 6_000)
    arguments = command(cities, "--input", tmp_path / "in.txt", "--output", "-")
    with started(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        said = " ".join(process.stderr.read().decode().split())
    assert process.returncode == 2
    assert said.startswith("stillroom: the reader of standard output closed it")


SLOW_ROWS = 12_000  # more than a process answers while it is being killed


@pytest.fixture
def slow_job(tmp_path: Path, cities: Path) -> Iterator[tuple[subprocess.Popen[str], Annotation, list[psutil.Process]]]:
    """A job under way, with the processes that compute for it."""
    job = Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    job.input.write_text(many_rows(SLOW_ROWS))
    arguments = [*command(cities, "--input", job.input, "--output", job.output), "--processes", "2"]
    with started(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not job.output.exists() or job.output.stat().st_size == 0:
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        children = psutil.Process(process.pid).children()
        yield process, job, [each for each in children if "spawn_main" in " ".join(each.cmdline())]


def test_a_process_that_dies_costs_no_row(
    slow_job: tuple[subprocess.Popen[str], Annotation, list[psutil.Process]],
) -> None:
    process, job, workers = slow_job
    assert len(workers) == 2
    workers[0].kill()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "a worker process of model 'cities' died; starting another" in said
    found = lines(job.output)
    assert [each["id"] for each in found] == list(range(SLOW_ROWS))
    assert [each["answer"] for each in found[-40:]] == Pipeline(job.bundle)([each["text"] for each in found[-40:]])


def test_no_process_outlives_a_kill_or_ctrl_c(
    slow_job: tuple[subprocess.Popen[str], Annotation, list[psutil.Process]],
) -> None:
    process, _, workers = slow_job
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "give the same command again" in " ".join(said.split())
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--top-k 2", "--top-k has no effect"),
        ("--bad-rows drop", "--bad-rows is 'drop'; give one of stop, skip"),
        ("--format xml", "--format is 'xml'; give one of jsonl, json, csv"),
        ("--field text", "is empty or a field of the input"),
        ("--processes 0", "--processes is 0"),
        ("--threads 1025", "--threads is 1,025"),
        ("--input nowhere.txt", "--input nowhere.txt cannot be read"),
        ("--input in.xml", "in.xml is no known format"),
        ("--input - --format parquet", "standard input cannot be parquet, which is read from its end"),
        ("--input in.parquet.gz", "cannot be parquet, which is read from its end"),
        ("--output nowhere/out.jsonl", "there is no folder"),
        ("--output .", "holds files that `annotate` did not write (in.parquet.gz, in.txt)"),
        ("--output - --json", "both write to stdout"),
        ("--variant int4", "int4"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(
    cities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("rome\n")
    Path("in.parquet.gz").write_bytes(gzip.compress(b"a"))
    done = stillroom("annotate", cities, "--input", "in.txt", "--output", "out.jsonl", *arguments.split())
    assert done.code == 2
    assert said in done.said
