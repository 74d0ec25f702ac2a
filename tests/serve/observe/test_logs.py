"""The writer of the log, with a reader that stalls."""

import json
import logging
import os
from collections.abc import Iterator

import pytest
from server_process import Server, until

from serve.observe.logs import MOST_WAITING, JsonLines, QueuedLogHandler, TextLines


def record(message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("serve", logging.INFO, "", 0, message, (), None)
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_reader_that_stalls_costs_lines_which_are_counted_and_no_more_memory(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    writer = QueuedLogHandler(descriptor)
    writer.setFormatter(JsonLines())
    line = "x" * 100_000
    for _ in range(3 * MOST_WAITING // len(line)):
        writer.handle(record(line))
    assert sum(map(len, writer._lines)) <= MOST_WAITING

    data = b""
    while b"lines dropped" not in data or not data.endswith(b"\n"):
        data += os.read(reader, 1 << 20)
        if b"lines dropped" not in data and data.endswith(b"\n"):
            writer.handle(record("again"))  # the next line reports the dropped ones
    entries = [json.loads(each) for each in data.splitlines()]
    (told,) = [int(entry["message"].split()[-1]) for entry in entries if "lines dropped" in entry["message"]]
    written = sum(entry["message"] == line for entry in entries)
    assert told + written == 3 * MOST_WAITING // len(line)
    assert MOST_WAITING // len(line) - 1 <= written <= MOST_WAITING // len(line) + 1

    until(lambda: writer._waiting == 0)
    writer.handle(record("after all"))
    writer.close()
    while b"after all" not in data:
        data += os.read(reader, 1 << 20)


def test_a_record_that_cannot_be_written_costs_no_other(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    reader, descriptor = pipe
    writer = QueuedLogHandler(descriptor)
    writer.setFormatter(JsonLines())
    writer.handle(logging.LogRecord("serve", logging.INFO, "", 0, "%d texts", ("many",), None))
    assert "'many'" in capsys.readouterr().err
    writer.handle(record("the next"))
    writer.close()
    assert [json.loads(line)["message"] for line in os.read(reader, 1 << 20).splitlines()] == ["the next"]


def test_a_log_whose_reader_has_gone_holds_nobody_up_and_keeps_nothing() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = QueuedLogHandler(descriptor)
    writer.setFormatter(TextLines())
    try:
        for _ in range(3):
            writer.handle(record("to nobody"))
            until(lambda: writer._waiting == 0)
        assert writer._thread.is_alive()
        writer.close()
    finally:
        os.close(descriptor)


def test_lines_for_people_keep_what_is_foreign_in_its_place() -> None:
    try:
        raise ValueError("of a client\n2026-01-01T00:00:00.000Z info forged \x1b[2J")
    except ValueError as error:
        failed = record("it failed\nfor long", exc_info=(ValueError, error, error.__traceback__))
    said = TextLines().format(failed).split("\n")
    assert said[0].endswith(" info it failed")
    assert len(said) > 5
    assert all(line.startswith("    | ") for line in said[1:])
    assert all(line.isprintable() for line in said)
    odd = record("request", fields={"path": '/a b="c"\n\x9b', "key": None, "status": 200, "method": "GET"})
    assert TextLines().format(odd).endswith(r' request path="/a b=\"c\"\n\u009b" status=200 method=GET')


def test_a_line_says_once_that_all_models_are_warm(plain_server: Server) -> None:
    line = plain_server.logged(lambda _: True, "ready")
    assert (line["level"], line["models"]) == ("info", "cities")
    assert line["seconds"] > 0
    assert len(plain_server.entries("ready")) == 1
