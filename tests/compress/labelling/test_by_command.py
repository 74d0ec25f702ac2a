"""`label --with-command`: a command that answers, in any order, that dies, hangs, or prints what is no answer."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S
from processes import started
from small_task import examples, write_rows

import stillroom as face
from compress.tasks import TEXT_CLASSIFICATION
from serve.errors import BadInput
from stillroom.cli.main import app, guarded

# Answers with the label of the frame; what it does besides is put in its place.
RULES = """
import json, os, sys, time
for line in sys.stdin:
    row = json.loads(line)
    text = row["text"]
    label = "refund" if "refund" in text or "money" in text else "status" if "parcel" in text or "sent" in text else "praise"
    answer = {"id": row["id"], "label": label}
    INSERTED
    print(json.dumps(answer), flush=True)
"""


def command(tmp_path: Path, inserted: str = "pass") -> str:
    script = tmp_path / "rules.py"
    script.write_text(RULES.replace("INSERTED", inserted.replace("\n", "\n    ")))
    return shlex.join([sys.executable, str(script)])


def label(tmp_path: Path, given: str, count: int = 120, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    texts = write_rows(tmp_path / "texts.jsonl", examples(count, seed=3))
    out = tmp_path / "out.jsonl"
    document = face.label([texts], out, command=given, task="text-classification", **settings)
    return document, [json.loads(line) for line in out.read_text().splitlines()]


def right(rows: list[dict[str, Any]]) -> bool:
    wanted = examples(len(rows), seed=3)
    return [(row["text"], row.get("label")) for row in rows] == [(row["text"], row["label"]) for row in wanted]


def test_every_text_gets_its_answer_in_the_order_of_the_texts(tmp_path: Path) -> None:
    document, rows = label(tmp_path, command(tmp_path), label=["praise", "refund", "status"])
    assert right(rows)
    assert (document["texts"], document["unanswered"]) == (120, 0)
    # What a student then learns.
    from compress.data.teacher_labels import read_teacher_labels

    assert len(read_teacher_labels([tmp_path / "out.jsonl"], TEXT_CLASSIFICATION)) == 120


def test_answers_may_come_in_any_order(tmp_path: Path) -> None:
    backwards = """held = globals().setdefault("held", [])
held.append(answer)
if len(held) < 10:
    continue
for each in reversed(held):
    print(json.dumps(each), flush=True)
held.clear()
continue"""
    assert right(label(tmp_path, command(tmp_path, backwards))[1])


def test_a_command_that_dies_is_started_again_and_asked_for_what_is_missing(tmp_path: Path) -> None:
    dies = f"""with open({str(tmp_path / "asked")!r}, "a") as file: file.write(text + "\\n")
count = globals().get("count", 0) + 1
if count == 30: os._exit(9)"""
    document, rows = label(tmp_path, command(tmp_path, dies))
    assert right(rows)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(set(asked)) == 120
    assert len(asked) == 124  # a text a death, of which there are four
    assert document["unanswered"] == 0


@pytest.mark.parametrize("place", [57, 0])
def test_a_text_that_kills_it_again_has_an_error_and_is_asked_again_by_the_next_call(
    tmp_path: Path, place: int
) -> None:
    poison = examples(120, seed=3)[place]["text"]
    dies = command(tmp_path, f"if text == {poison!r}: os._exit(3)")
    for before in (0, 119):  # the second call asks about it alone, and nothing else is lost
        document, rows = label(tmp_path, dies)
        assert (document.get("texts_before", 0), document["unanswered"]) == (before, 1)
        assert rows[place] == {"text": poison, "error": "the command ended with status 3 when it was asked"}
        assert [row["text"] for row in rows if "label" not in row] == [poison]
    document, rows = label(tmp_path, command(tmp_path))  # mended
    assert (document["texts_before"], document["unanswered"]) == (119, 0)
    assert right(rows)


def test_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    hangs = examples(120, seed=3)[20]["text"]
    document, rows = label(tmp_path, command(tmp_path, f"if text == {hangs!r}: time.sleep(100)"), timeout_s=1.5)
    assert document["unanswered"] == 1
    assert rows[20]["error"] == "the command printed nothing for too long (--timeout-s) when it was asked"


def test_what_a_command_started_is_killed_with_it(tmp_path: Path) -> None:
    script = tmp_path / "wrapper.sh"
    script.write_text(f"#!/bin/sh\n{command(tmp_path, 'time.sleep(100_000)')}\necho over\n")
    with pytest.raises(BadInput, match="printed nothing for too long"):
        label(tmp_path, f"sh {script}", count=2, timeout_s=1.0)
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(each.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=PATIENCE_S)[1]


def test_the_text_of_an_answer_is_not_taken(tmp_path: Path) -> None:
    document, rows = label(tmp_path, command(tmp_path, 'answer |= {"text": text.upper(), "note": "seen"}'))
    assert right(rows)
    assert {row["note"] for row in rows} == {"seen"}
    assert document["unanswered"] == 0


def test_an_answer_that_cannot_be_used_is_an_error_of_its_text(tmp_path: Path) -> None:
    odd = """if row["id"] == 1: answer = {"id": 1, "label": "odd"}
if row["id"] == 2: answer = {"id": 2}
if row["id"] == 3: answer = {"id": 3, "labels": {"refund": 7}}
if row["id"] == 4: answer = {"id": 4, "label": "refund", "error": None}
if row["id"] == 6: answer = {"id": 6, "label": "refund", "paid_tokens": "many"}
if row["id"] == 5: answer = {"id": 5, "label": "refund", "note": "\\ud800"}"""
    document, rows = label(tmp_path, command(tmp_path, odd), label=["praise", "refund", "status"])
    assert document["unanswered"] == 6
    assert [row["error"] for row in rows[1:7]] == [
        "'odd' is not one of the labels: praise, refund, status",
        "it has none of the fields of an answer: it is empty",
        "that of refund is 7; a probability from 0 to 1 is needed",
        "the command gives an error: None",
        "it holds half of a surrogate pair, which is not a character",
        "it has the field paid_tokens, which is kept for tokens that an endpoint counts",
    ]


@pytest.mark.parametrize(
    ("inserted", "message"),
    [
        ("print('loading...')", "printed 'loading...', which is not a JSON object"),
        ("sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush()", "which is not a JSON object"),
        ("answer['id'] = 500", "answered already, or was never asked"),
        ("os._exit(4)", "ended with status 4 before it answered"),
    ],
)
def test_a_useless_command_is_refused_at_once(tmp_path: Path, inserted: str, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        label(tmp_path, command(tmp_path, inserted))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.py", "texts.jsonl"]


def test_missing_commands_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be started"):
        label(tmp_path, str(tmp_path / "nothing here"))
    for empty, message in ((" ", "names no program"), ("'", "No closing quotation")):
        with pytest.raises(BadInput, match=message):
            label(tmp_path, empty)
    texts = write_rows(tmp_path / "texts.jsonl", examples(3, seed=3))
    with pytest.raises(BadInput, match="--task is needed"):
        face.label([texts], tmp_path / "out.jsonl", command="true")
    with pytest.raises(BadInput, match="Give one of --with, --with-command and --with-url"):
        face.label([texts], tmp_path / "out.jsonl", command="true", url="http://127.0.0.1:1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_a_command_ends_with_its_caller_and_with_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    """Though it reads no input any more, and prints nothing."""
    (tmp_path / "slow.sh").write_text("sleep 3600 &\nsleep 3600\n")
    given = {"task": "text-classification", "command": f"sh {tmp_path / 'slow.sh'}", "timeout_s": 3600}
    texts = write_rows(tmp_path / "texts.jsonl", examples(3, seed=3))
    program = f"import stillroom; stillroom.label([{str(texts)!r}], {str(tmp_path / 'out.jsonl')!r}, **{given!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with started([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL) as caller:
        deadline_s = time.monotonic() + PATIENCE_S
        children: list[psutil.Process] = []
        names: list[str] = []
        # The command, what it has started, and what watches them.
        while sorted(names) != ["sh", "sh", "sleep", "sleep"] and time.monotonic() < deadline_s:
            time.sleep(0.05)
            with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                children = psutil.Process(caller.pid).children(recursive=True)
                names = [child.name() for child in children]
        assert len(children) == 4
        caller.send_signal(number)  # to it alone
        left = psutil.wait_procs(children, timeout=PATIENCE_S)[1]
        for child in left:
            child.kill()
        assert not left


Lines = list[bytes]


@pytest.mark.parametrize(
    "edited",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:5] + lines[6:],
        lambda lines: lines[::-1],
        lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
        lambda lines: [b"\xef\xbb\xbf" + lines[0], b"\n", *lines[1:-1], lines[-1].strip()],
        lambda lines: [lines[0], *lines],
        lambda lines: [json.dumps({"text": json.loads(lines[0])["text"], "label": None}).encode() + b"\n", *lines[1:]],
    ],
)
def test_a_finished_file_that_was_edited_gets_each_text_once_with_its_own_answer(
    tmp_path: Path, edited: Callable[[Lines], Lines]
) -> None:
    given = command(tmp_path)
    label(tmp_path, given, count=12)
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(b"".join(edited(whole.splitlines(keepends=True))))
    label(tmp_path, given, count=12)
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'{"text"', b'"text"', r"out.jsonl, line 1: is no JSON object with a `text`"),
        (b'{"text"', b'{"texts"', r"out.jsonl, line 1: is no JSON object with a `text`"),
        (b'{"text"', b"[" * 100_000, r"out.jsonl, line 1: is no JSON object with a `text`"),
        (b'"label"', b'"paid_tokens":"many","label"', r"out.jsonl, line 1: is no JSON object with a `text`, or its `paid_tokens`"),
        (b'{"text":"', b'{"text":"Oh, ', r"holds other answers than these: 1 text that no --input has, the first in line 1"),
        (b"{", b'{"text":"TEXT","label":"other"}\n{', r"out.jsonl, line 2: answers a text otherwise than a line above"),
    ],
)  # fmt: skip
def test_an_edited_row_that_cannot_be_taken_is_refused_and_the_file_stays(
    tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    given = command(tmp_path)
    _, (row, *_) = label(tmp_path, given, count=12)
    out = tmp_path / "out.jsonl"
    out.write_bytes(edited := out.read_bytes().replace(old, new.replace(b"TEXT", row["text"].encode()), 1))
    with pytest.raises(BadInput, match=message):
        label(tmp_path, given, count=12)
    assert out.read_bytes() == edited
    assert not (tmp_path / "out.jsonl.part").exists()


def test_the_input_is_not_written(tmp_path: Path) -> None:
    """Nor is its removal advised, as that of a file that holds other answers is."""
    texts = write_rows(tmp_path / "texts.jsonl", examples(3, seed=3))
    (tmp_path / "link.jsonl").symlink_to(texts)
    for out in (texts, tmp_path / "link.jsonl"):
        with pytest.raises(BadInput, match=rf"^--out {out} is the input file\. Give another file\.$"):
            face.label([texts], out, command="cat", task="text-classification")


def test_answers_are_kept_when_texts_are_added_to_the_input(tmp_path: Path) -> None:
    given = command(tmp_path)
    label(tmp_path, given, count=12)
    document, rows = label(tmp_path, given, count=15)
    assert (document["texts_before"], document["texts"]) == (12, 15)
    assert right(rows)


def test_an_unfinished_file_goes_on_by_its_texts_and_not_by_the_numbers_of_earlier_versions(tmp_path: Path) -> None:
    given = command(tmp_path)
    label(tmp_path, given, count=12)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    lineage = json.loads((tmp_path / "out.jsonl.lineage.json").read_text())
    (tmp_path / "out.jsonl.lineage.json").write_text(json.dumps(lineage | {"texts": "of an earlier version"}))
    lines = out.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(b"%d\t%b" % (number, line) for number, line in enumerate(lines[6:])))
    out.unlink()
    document, rows = label(tmp_path, given, count=12)
    assert document["texts_before"] == 6
    assert right(rows)
    part.write_bytes(out.read_bytes())
    out.unlink()
    with pytest.raises(
        BadInput, match=r"out.jsonl.part exists, and holds other answers"
    ):  # it is asked for something else
        label(tmp_path, given, count=12, label=["refund", "status", "praise"])
    assert part.exists()


@pytest.mark.parametrize("left", [None, b"", b"{"])
def test_answers_without_the_file_that_says_what_gave_them_are_kept_and_told(
    tmp_path: Path, left: bytes | None
) -> None:
    given = command(tmp_path)
    label(tmp_path, given, count=12)
    part, lineage = tmp_path / "out.jsonl.part", tmp_path / "out.jsonl.lineage.json"
    (tmp_path / "out.jsonl").rename(part)
    rows, whole = part.read_bytes(), lineage.read_bytes()
    lineage.unlink()
    if left is not None:
        lineage.write_bytes(left)
    with pytest.raises(BadInput, match=r"out.jsonl.part has [\d,]+ bytes of answers, and .*lineage.json.*is missing"):
        label(tmp_path, given, count=12)
    assert part.read_bytes() == rows
    lineage.write_bytes(whole)  # put back, as the message says
    assert label(tmp_path, given, count=12)[0]["texts_before"] == 12


@pytest.mark.parametrize(
    "named", ["{python} {script}", "sh -c '{python} {script}'", "{python} -u tool.py --rules={script}"]
)
def test_a_script_that_changed_is_told(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command(tmp_path)
    (tmp_path / "tool.py").write_text("import sys\nexec(open(sys.argv[1].partition('=')[2]).read())\n")
    given = named.format(python=sys.executable, script="rules.py")
    label(tmp_path, given, count=12)
    told: list[str] = []
    monkeypatch.setattr("stillroom.verbs.label.show", lambda event: told.append(event.text))
    label(tmp_path, given, count=12)
    assert told == ["12 of 12 texts were answered before, and are not asked about again; if its rules changed, remove "
                    f"{tmp_path / 'out.jsonl'} to ask anew."]  # fmt: skip
    command(tmp_path, "answer['note'] = 'new'")
    warning = (
        f"texts were answered before rules.py changed; these answers stay; remove {tmp_path / 'out.jsonl'} to ask anew."
    )
    whole = (tmp_path / "out.jsonl").read_bytes()
    for _ in range(2):
        told.clear()
        document, _ = label(tmp_path, given, count=12)
        assert told == [f"warning: 12 of 12 {warning}"]
        assert (document["texts_before"], document["unanswered"]) == (12, 0)
        assert (tmp_path / "out.jsonl").read_bytes() == whole
    told.clear()
    _, rows = label(tmp_path, given, count=15)
    assert told[0] == f"warning: 12 of 15 {warning}"
    assert [row.get("note") for row in rows] == [None] * 12 + ["new"] * 3


def test_a_file_that_the_command_writes_is_none_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = command(tmp_path, "with open(sys.argv[1], 'a') as log: log.write(text)") + " run.log"
    (tmp_path / "run.log").write_text("earlier")
    for count, before in ((12, 0), (12, 12), (15, 12), (15, 15)):
        document, rows = label(tmp_path, given, count=count)
        assert document["texts_before"] == before
        assert right(rows)


def test_a_line_nested_too_deeply_costs_its_text(tmp_path: Path) -> None:
    deep = """if row["id"] in (2, 3):
    print('{"id": %d, "label": %s%s}' % (row["id"], "[" * 100_000, "]" * 100_000 * (row["id"] - 2)), flush=True)
    continue"""
    document, rows = label(tmp_path, command(tmp_path, deep))
    assert document["unanswered"] == 2
    assert [row["text"] for row in rows if "error" in row] == [row["text"] for row in rows[2:4]]


def test_answers_that_are_printed_with_a_line_that_is_none_are_kept(tmp_path: Path) -> None:
    log = """held = globals().setdefault("held", [])
held.append(json.dumps(answer))
if len(held) == 20:
    print("\\n".join([*held[:10], "Rate limit reached", *held[10:]]), flush=True)
    time.sleep(1000)
continue"""
    with pytest.raises(BadInput, match="printed 'Rate limit reached', which is not a JSON object"):
        label(tmp_path, command(tmp_path, log))
    assert len((tmp_path / "out.jsonl.part").read_text().splitlines()) == 20


def test_a_command_that_goes_on_printing_what_is_no_answer_is_ended(tmp_path: Path) -> None:
    beats = """if row["id"] == 1:
    for _ in range(100):
        print("still at work", flush=True)
        time.sleep(0.3)"""
    with pytest.raises(BadInput, match="printed 'still at work', which is not a JSON object"):
        label(tmp_path, command(tmp_path, beats))
    assert (
        len((tmp_path / "out.jsonl.part").read_text().splitlines()) == 1
    )  # what it answers after these is not waited for


@pytest.mark.parametrize(
    ("limit", "code"), [([], 3), (["--max-unanswered", "0.25"], 0), (["--max-unanswered", "0"], 3)]
)
def test_texts_without_an_answer_show_in_the_exit_code(
    tmp_path: Path, limit: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", examples(20, seed=3))
    given = command(tmp_path, 'if row["id"] < 5: answer["label"] = "nonsense"')
    names = [part for name in ("praise", "refund", "status") for part in ("--label", name)]
    arguments = [
        "label", "--with-command", given, "--task", "text-classification", *names, "--input", str(texts),
        "--out", str(tmp_path / "out.jsonl"), "--json", *limit,
    ]  # fmt: skip
    assert guarded(lambda: app(arguments)) == code
    printed = capfd.readouterr()
    assert json.loads(printed.out)["unanswered"] == 5
    assert (
        "5 of 20 texts have no answer, more than the share of --max-unanswered" in " ".join(printed.err.split())
    ) == (code == 3)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 20
    assert guarded(lambda: app([each for each in arguments if each != "--json"])) == code
    assert ("--teacher-labels" in capfd.readouterr().err) == (code == 0), "a next step for a file that lacks answers"
