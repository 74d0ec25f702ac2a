"""The server's log: one line for each request and each event, as JSON or as text.

Everything that a client chose (path, address, request id, texts) is escaped, so that a client cannot forge a line or send control
characters to a terminal. A thread writes the lines. If the reader of the log stalls, lines are dropped and counted.
"""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Literal

import msgspec

Format = Literal["json", "text"]

access_log = logging.getLogger("serve.access")

# Characters of lines that wait to be written; further lines are dropped.
MOST_WAITING = 8_000_000
# Lines that arrive within this time are written together.
GATHER_S = 0.05
# How long a server that ends waits for its last lines to be written.
FLUSH_S = 2.0
# Longest logged part of a path or of another value that a client chose.
MOST_CHARACTERS = 1000
# What a pipe takes whole (POSIX: PIPE_BUF).
PIPE_BYTES = 4096
# What is logged, from which level.
LOGGERS = {"serve": logging.INFO, "asyncio": logging.WARNING}
# The attribute of a record that holds the fields of its line beside the message.
FIELDS = "fields"


class JsonLines(logging.Formatter):
    """A record as one JSON object in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without the newline."""
        said: dict[str, Any] = {"time": _time(record.created), "level": record.levelname.lower(), "logger": record.name}
        said["message"] = record.getMessage()
        said |= getattr(record, FIELDS, {})
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        line = msgspec.json.encode(said)
        return line.decode() if line.isascii() else json.dumps(said)  # json is slower, and escapes non-ASCII characters


class TextLines(logging.Formatter):
    """A record as one line of text. Further lines, such as a traceback, are indented; the first line of a record never is."""

    def format(self, record: logging.LogRecord) -> str:
        """The line and those of a traceback, without the last newline."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        first, *more = record.getMessage().splitlines() or [""]
        if record.exc_info:
            more += self.formatException(record.exc_info).splitlines()
        line = f"{_time(record.created)} {record.levelname.lower()} {plain(first)} {shown}".rstrip()
        return line + "".join(f"\n    | {plain(each)}" for each in more)


class QueuedLogHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own. If the reader is too slow, it drops lines and logs how many."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[str] = deque()
        self._waiting = 0
        self._dropped = 0
        self._some = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; never waits."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._waiting + len(line) > MOST_WAITING:
            self._dropped += 1
            return
        self._waiting += len(line)
        self._lines.append(line)
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Writes the remaining lines; gives up after `FLUSH_S`."""
        self._ending = True
        self._some.set()
        self._thread.join(FLUSH_S)
        super().close()

    def _write(self) -> None:
        while not (self._ending and not self._lines):
            self._some.wait()
            if not self._ending:
                time.sleep(GATHER_S)
            self._some.clear()
            if self._ending:
                self._some.set()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            taken = sum(map(len, lines))
            if dropped := self._dropped:
                self._dropped = 0
                record = logging.LogRecord(
                    "serve",
                    logging.WARNING,
                    "",
                    0,
                    "the reader of this log is too slow; lines dropped: %d",
                    (dropped,),
                    None,
                )
                lines.append(self.format(record))
            with suppress(OSError):  # the reader has gone, so there is no place to report it
                for part in _whole_lines(lines):
                    data = memoryview(part)
                    while data:
                        data = data[os.write(self._descriptor, data) :]
            with self.lock or nullcontext():  # `emit` is called with this lock held
                self._waiting -= taken


def _whole_lines(lines: Iterable[str]) -> Iterator[bytes]:
    """The lines in parts that a pipe takes whole, so that those of several processes do not mix. A longer line is a part by itself."""
    part = b""
    for line in lines:
        said = f"{line}\n".encode()
        if part and len(part) + len(said) > PIPE_BYTES:
            yield part
            part = b""
        part += said
    yield part


def stop_inherited() -> None:
    """Takes away what another process logs with, in one that was forked from it: its thread does not run here."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)


@contextmanager
def logging_to_stderr(log_format: Format | None, *, requests: bool, quiet: bool = False) -> Iterator[None]:
    """Within this context the server and its libraries log to stderr; with `requests` there is a line for each request.

    `log_format` None means text for a terminal and JSON otherwise. With `quiet` only errors are logged.
    """
    sys.stderr.flush()
    handler = QueuedLogHandler(sys.stderr.fileno())
    handler.setFormatter(
        TextLines() if (log_format or ("text" if sys.stderr.isatty() else "json")) == "text" else JsonLines()
    )
    for name, level in LOGGERS.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(max(level, logging.ERROR) if quiet else level)
    access_log.setLevel(logging.ERROR if quiet else logging.INFO if requests else logging.WARNING)
    try:
        yield
    finally:
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
        handler.close()


def note(what: str, fields: Mapping[str, object]) -> None:
    """Logs one line about a client, if requests are logged. Unlike `access_log.info` it does not search the stack for the caller."""
    if access_log.isEnabledFor(logging.INFO):
        record = logging.LogRecord(access_log.name, logging.INFO, "", 0, what, (), None)
        setattr(record, FIELDS, fields)
        access_log.handle(record)


def shortened(text: str) -> str:
    """`text`, cut to `MOST_CHARACTERS`."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... ({len(text)} characters)"


def _time(seconds: float) -> str:
    """UTC, RFC 3339, to the millisecond."""
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def plain(text: str, kept: str = "") -> str:
    """`text` with line ends, control characters and half surrogate pairs escaped, except the characters `kept`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in kept else ascii(each)[1:-1] for each in text)


def _shown(value: Any) -> str:
    """A field's value: unchanged if it is one plain word, otherwise quoted and escaped."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and not any(each in value for each in ' "='):
        return value
    return json.dumps(value)
