"""`stillroom annotate`: every row answered once, in order, whatever happens on the way."""

import fcntl
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lookup_bundles import city_table, write_bundle, write_manifest
from patience import PATIENCE_S
from processes import started
from repository import ROOT

from serve.errors import BadInput
from serve.model.pipeline import Pipeline
from serve.text.answers import AnswerOptions
from stillroom.verbs.annotate import Annotation, answering, rows
from stillroom.verbs.annotate.run import annotate


def command(bundle: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "stillroom", "annotate", str(bundle), *map(str, arguments)]


def told(bundle: Path, *arguments: object, stdin: bytes = b"", **settings: Any) -> tuple[int, bytes, str]:
    """Exit code, standard output and, as one line, standard error."""
    ended = subprocess.run(
        command(bundle, *arguments), cwd=ROOT, input=stdin, check=False, **{"capture_output": True, **settings}
    )
    return ended.returncode, ended.stdout or b"", " ".join(ended.stderr.decode().split())


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


@pytest.mark.parametrize(
    ("name", "content", "fields"),
    [
        pytest.param("in.txt", "to rome\r\n\noslo", [{"text": "to rome"}, {"text": ""}, {"text": "oslo"}], id="txt"),
        pytest.param("in.csv", '\ufeffid,text\r\n1,"to ""rome"",\nplease"\r\n\r\n2,oslo\r\n',
                     [{"id": "1", "text": 'to "rome",\nplease'}, {"id": "2", "text": "oslo"}], id="csv"),
        pytest.param("in.tsv", "text\tid\nto rome\t1\n", [{"text": "to rome", "id": "1"}], id="tsv"),
        pytest.param("in.jsonl.gz", '{"text": "rome"}\n', [{"text": "rome"}], id="gz"),
    ],
)  # fmt: skip
def test_every_format_is_read(
    cities: Path, tmp_path: Path, name: str, content: str, fields: list[dict[str, str]]
) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    annotate(Annotation(cities, tmp_path / name, tmp_path / "out.jsonl"))
    pipeline = Pipeline(cities)
    assert lines(tmp_path / "out.jsonl") == [{**each, "answer": pipeline(each["text"])} for each in fields]


def test_pairs_are_answered_as_pairs(intents: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,text_pair\ni love,it\nrefund,\n")
    annotate(Annotation(intents, tmp_path / "in.csv", tmp_path / "out.jsonl", AnswerOptions(top_k=1)))
    pipeline = Pipeline(intents)
    assert [each["answer"] for each in lines(tmp_path / "out.jsonl")] == [
        pipeline("i love", text_pair="it", top_k=1),
        pipeline("refund", top_k=1),
    ]


def test_from_standard_input_to_standard_output(cities: Path) -> None:
    arguments = ("--input", "-", "--format", "txt", "--output", "-", "--min-score", "0.99", "--field", "found")
    code, said, error = told(cities, *arguments, stdin=b"rome\n")
    assert (code, said) == (0, b'{"text":"rome","found":{"entities":[],"truncated":false}}\n'), error
    assert "1 row by cities (fp32)" in error
    code, said, error = told(cities, *arguments, "--json", stdin=b"rome\n")
    assert (code, said) == (2, b"")
    assert "both write to stdout" in error


def test_what_is_to_be_noted_of_a_bundle_is_told_once_and_not_by_each_process(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "cities", city_table())
    (folder / "README.md").write_text("as it was made")
    write_manifest(folder)
    (folder / "README.md").write_text("as somebody edited it")
    (tmp_path / "in.txt").write_text("rome\n")
    code, _, error = told(
        folder, "--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl", "--processes", "2"
    )
    assert code == 0
    assert error.count("was edited after the bundle was made") == 1


def killed(bundle: Path, given: Path, out: Path, beyond_bytes: int) -> bool:
    """Starts the command and kills it once the output is longer than that; False when it ended before."""
    arguments = command(bundle, "--input", given, "--output", out)
    with started(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not out.exists() or out.stat().st_size <= beyond_bytes):
            time.sleep(0.001)
    return process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_after_each_write_gets_on_long_before_a_window_is_full(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "slow", city_table(), layers=60)
    given, undisturbed, out = (tmp_path / name for name in ("in.jsonl", "undisturbed.jsonl", "out.jsonl"))
    given.write_text(many_rows(500))
    assert told(bundle, "--input", given, "--output", undisturbed)[0] == 0
    written = [0]
    for _ in range(2):
        assert killed(bundle, given, out, out.stat().st_size if out.exists() else 0)
        written.append(len(lines(out)))
    assert sorted({*written}) == written
    assert written[-1] < 500 < answering.WINDOW_ROWS
    assert told(bundle, "--input", given, "--output", out)[0] == 0
    assert out.read_bytes() == undisturbed.read_bytes()


def test_a_worker_that_dies_at_its_start_is_told_of_with_what_to_do(cities: Path, tmp_path: Path) -> None:
    # Stands where the module is looked for first: a worker is killed, as by a system without memory, or ends with an error.
    given, folder = tmp_path / "in.txt", tmp_path / "folder"
    given.write_text("rome\n")
    folder.mkdir()
    dies = "if 'serve.workers.worker' in sys.orig_argv or 'spawn_main' in ' '.join(sys.orig_argv):\n    "
    for how, said in (
        ("os.kill(os.getpid(), signal.SIGKILL)", "the worker process died at its start (signal 9)"),
        ("os._exit(print('no room', file=sys.stderr) or 3)", "the worker process died at its start (status 3)"),
    ):
        (tmp_path / "sitecustomize.py").write_text(f"import os, signal, sys\n{dies}{how}\n")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        for out in (tmp_path / "out.jsonl", folder):
            code, _, error = told(cities, "--input", given, "--output", out, "--processes", "1", env=environment)
            assert code == 2, error
            assert (said if out != folder else "worker processes died 3 times at their start") in error
            assert ("no room" in error) is ("print" in how)
            assert "perhaps for lack of memory" in error
            assert "give fewer" in error
            assert "fault of this program" not in error
            assert "Traceback" not in error
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bytes(cities: Path, tmp_path: Path) -> None:
    given, undisturbed, out = (tmp_path / name for name in ("in.jsonl", "undisturbed.jsonl", "out.jsonl"))
    given.write_text(many_rows(20_000))
    assert told(cities, "--input", given, "--output", undisturbed)[0] == 0
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
    code, said, error = told(cities, "--input", given, "--output", out, "--json")
    assert code == 0, error
    assert out.read_bytes() == whole
    assert 0 < json.loads(said)["rows_before"] < 20_000
    # And once it is complete, nothing is computed.
    assert json.loads(told(cities, "--input", given, "--output", out, "--json")[1])["texts_per_s"] is None
    assert out.read_bytes() == whole


def begun(bundle: Path, folder: Path, rows: int = 3) -> Annotation:
    """A job of which some rows are done and the rest is not."""
    (folder / "in.jsonl").write_text("".join(f'{{"text":"rome {number}"}}\n' for number in range(rows + 2)))
    job = Annotation(bundle, folder / "in.jsonl", folder / "out.jsonl")
    annotate(job)
    done = job.output.read_bytes().splitlines(keepends=True)
    job.output.write_bytes(b"".join(done[:rows]) + done[rows][:20])
    return job


def changed(job: Annotation, **changes: Any) -> Annotation:
    return Annotation(**{**vars(job), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": AnswerOptions(min_score=0.5)}, "was begun with min_score 0.0, now 0.5"),
        ({"answer_field": "other"}, 'was begun with field "answer", now "other"'),
        ({"threads": 2}, "was begun with threads 1, now 2"),
    ],
)
def test_it_goes_on_only_with_the_options_it_was_begun_with(
    cities: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    job = begun(cities, tmp_path)
    before = job.output.read_bytes()
    with pytest.raises(BadInput, match=said):
        annotate(changed(job, **changes))
    assert job.output.read_bytes() == before
    assert annotate(changed(job, restart=True, **changes))["rows_before"] == 0
    assert len(lines(job.output)) == 5


def test_it_goes_on_only_with_the_bundle_it_was_begun_with(cities: Path, intents: Path, tmp_path: Path) -> None:
    job = begun(cities, tmp_path)
    with pytest.raises(BadInput, match="was begun with bundle"):
        annotate(changed(job, bundle=intents))
    assert annotate(job)["rows_before"] == 3


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


def test_what_it_did_not_begin_is_left_alone(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n")
    (tmp_path / "notes.jsonl").write_text("mine\n")
    with pytest.raises(BadInput, match=r"was not begun by `annotate`: notes.jsonl.lineage.json is not beside it"):
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
            annotate(changed(job, restart=True))
    assert annotate(job)["rows"] == 5


BAD = [
    pytest.param(b"nope", "is not JSON", id="not-json"),
    pytest.param(b'{"id": 1}', "has no field \"text\"; its fields are 'id'", id="no-text"),
    pytest.param(b'{"text": 7}', "expected `str`, got `int` - at `$.text`", id="a-number", marks=pytest.mark.slow),
    pytest.param(b'["rome"]', "expected `object`, got `array`", id="a-list", marks=pytest.mark.slow),
    pytest.param(b'{"text": "a\\ud83d"}', "has half a surrogate pair", id="half-a-pair"),
    pytest.param(b'{"text": "a", "x": "\xff"}', "is not UTF-8", id="not-utf-8", marks=pytest.mark.slow),
    pytest.param(b'{"text": "a", "answer": 1}', "has a field 'answer' already", id="an-answer", marks=pytest.mark.slow),
    pytest.param(b'{"text": "a", "x": ' + b"[" * 10_000, "is not JSON", id="very-deep", marks=pytest.mark.slow),
    pytest.param(b'{"text": "' + b"a" * 3000 + b'"}', "is longer than 2,000 bytes", id="too-long"),
    pytest.param(
        b'{"text": "a", "text_pair": "b"}', "text_pair: 'cities' finds entities in one text", id="a-pair-for-entities"
    ),
]


@pytest.mark.parametrize(("bad", "fault"), BAD)
def test_a_bad_row_stops_the_work_before_it_or_is_told_in_its_place(
    cities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes, fault: str
) -> None:
    if len(bad) < 10_000:
        monkeypatch.setattr(rows, "MOST_ROW_BYTES", 2000)
    job = Annotation(cities, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    good = [b'{"text": "rome %d"}' % number for number in range(3)]
    job.input.write_bytes(b"\n".join([*good, bad, b'{"text": "oslo"}']))
    with pytest.raises(BadInput) as stopped:
        annotate(job)
    assert f"{job.input}, line 4: {fault}" in stopped.value.message
    assert [each["text"] for each in lines(job.output)] == ["rome 0", "rome 1", "rome 2"]

    document = annotate(changed(job, bad_rows="skip"))
    assert (document["rows"], document["rows_before"], document["bad_rows"]) == (5, 3, 1)
    found = lines(job.output)
    assert [each.get("text") for each in found] == ["rome 0", "rome 1", "rome 2", None, "oslo"]
    assert found[3]["error"]["line"] == 4
    assert fault in found[3]["error"]["message"]
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


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        pytest.param(b"text,x\na,b\nc\n", "line 3: has 1 column, and the header has 2", id="too-few-cells"),
        pytest.param(b"text\na\n\xff\n", "line 3: is not UTF-8", id="not-utf-8"),
        pytest.param(b"id\n1\n", "has the column id; it needs the column text", id="no-text"),
        pytest.param(b"text,answer\na,b\n", "and answer must not", id="an-answer"),
    ],
)
def test_a_table_that_cannot_be_used(cities: Path, tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(BadInput) as stopped:
        annotate(Annotation(cities, tmp_path / "in.csv", tmp_path / "out.jsonl"))
    assert fault in stopped.value.message


def test_a_damaged_archive_is_told(cities: Path, tmp_path: Path) -> None:
    whole = gzip.compress(random.Random(0).randbytes(100_000).hex().encode())
    for damaged in (whole[: len(whole) // 2], b"plain text\n"):
        (tmp_path / "in.txt.gz").write_bytes(damaged)
        with pytest.raises(BadInput, match="is damaged or incomplete"):
            annotate(Annotation(cities, tmp_path / "in.txt.gz", tmp_path / "out.jsonl", restart=True))


def test_a_full_disk_is_one_message_and_no_traceback(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n")
    code, _, error = told(cities, "--input", tmp_path / "in.txt", "--output", "/dev/full")
    assert code == 2
    assert error == "stillroom: /dev/full could not be written: No space left on device. Make room"

    (tmp_path / "in.txt").write_text("rome\n" * 20_000)
    out, limit = tmp_path / "out.jsonl", 1_500_000
    limited = ["sh", "-c", f'ulimit -f {limit // 512}; exec "$@"', "sh"]
    again = command(cities, "--input", tmp_path / "in.txt", "--output", out)
    ended = subprocess.run([*limited, *again], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Make room, and give the same command again to resume" in " ".join(ended.stderr.split())
    assert 0 < out.stat().st_size <= 2 * limit
    assert subprocess.run(again, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert len(lines(out)) == 20_000


def test_a_reader_that_goes_is_one_message_and_no_traceback(cities: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("rome\n" * 20_000)
    arguments = command(cities, "--input", tmp_path / "in.txt", "--output", "-")
    with started(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        said = " ".join(process.stderr.read().decode().split())
    assert process.returncode == 2
    assert said == "stillroom: the reader of standard output closed it; the rest was not annotated"


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
        yield process, job, psutil.Process(process.pid).children()


def test_a_process_that_dies_costs_no_row(
    slow_job: tuple[subprocess.Popen[str], Annotation, list[psutil.Process]],
) -> None:
    process, job, workers = slow_job
    assert len(workers) == 2
    workers[0].kill()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "died with status -9; starting another" in said
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
        (["--top-k", "2"], "--top-k has no effect on a model for token-classification"),
        (["--bad-rows", "drop"], "--bad-rows is 'drop'; give one of stop, skip"),
        (["--format", "xml"], "--format is 'xml'; give one of jsonl, json, csv, tsv, txt, parquet"),
        (["--field", "text"], "is empty or a field of the input"),
        (["--processes", "0"], "--processes is 0; give a whole number from 1 to 1,024"),
        (["--threads", "1025"], "--threads is 1,025; give a whole number from 1 to 1,024"),
        (["--input", "nowhere.txt"], "--input nowhere.txt cannot be read (No such file or directory)"),
        (["--input", "in.xml"], "in.xml is no known format; give --format jsonl, json, csv, tsv, txt or parquet"),
        (["--output", "nowhere/out.jsonl"], "there is no folder"),
        (
            ["--output", "."],
            "holds files that `annotate` did not write (in.txt); give a folder that is empty or not there",
        ),
        (["--variant", "int4"], "int4"),
    ],
)
def test_usage_that_cannot_be_meant_is_refused(
    cities: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], said: str,
) -> None:  # fmt: skip
    from stillroom.cli.main import app, guarded

    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("rome\n")
    given = ["--input", "in.txt", "--output", "out.jsonl", *arguments]
    monkeypatch.setattr(sys, "argv", ["stillroom", "annotate", str(cities), *given])
    assert guarded(app) == 2
    assert said in " ".join(capsys.readouterr().err.split())
