"""What the server writes down: one line for each request and each event, as JSON or for people, and never two by mistake.

Everything that a client chose (path, address, request id, texts) is escaped, so that no line can be forged and no terminal
steered. Lines are written beside the event loop: a reader of the log that stalls costs lines, which are counted, not answers.
"""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal

import msgspec

Format = Literal["json", "text"]

access_log = logging.getLogger("serve.access")

# Characters of lines that wait to be written; what is more is dropped.
MOST_WAITING = 8_000_000
# Lines that come within this time are written at once.
GATHER_S = 0.05
# How long a server that ends waits for its last lines to be written.
FLUSH_S = 2.0
# Of a path or another value that a client chose.
MOST_CHARACTERS = 1000
# The attribute of a record that holds what its line says beside the message.
FIELDS = "fields"


class JsonLines(logging.Formatter):
    """A record as one JSON object in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        said: dict[str, Any] = {"time": _time(record.created), "level": record.levelname.lower(), "logger": record.name}
        said["message"] = record.getMessage()
        said |= getattr(record, FIELDS, {})
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        line = msgspec.json.encode(said)
        return line.decode() if line.isascii() else json.dumps(said)  # the first is fast, the second escapes


class TextLines(logging.Formatter):
    """A record as one line for people; what more lines it has, such as a traceback, is indented: a new record never is."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and perhaps those of a traceback, without the last one's end."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        first, *more = record.getMessage().splitlines() or [""]
        if record.exc_info:
            more += self.formatException(record.exc_info).splitlines()
        line = f"{_time(record.created)} {record.levelname.lower()} {_plain(first)} {shown}".rstrip()
        return line + "".join(f"\n    | {_plain(each)}" for each in more)


class PatientWriter(logging.Handler):
    """Writes lines to a file descriptor from a thread of its own; when it cannot keep up, drops lines and says how many."""

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
        """Takes a record in; never waits."""
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
        """Writes what is left, if the reader takes it soon."""
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
                    "%d lines of this log were dropped: its reader is too slow",
                    (dropped,),
                    None,
                )
                lines.append(self.format(record))
            data = memoryview("".join(f"{line}\n" for line in lines).encode())
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                pass  # nobody reads any more: there is nobody to tell
            with self.lock or nullcontext():  # which `emit` is called with
                self._waiting -= taken


@contextmanager
def logging_to_stderr(log_format: Format | None, *, requests: bool, quiet: bool = False) -> Iterator[None]:
    """Within it, what the server and its libraries log goes to stderr; `requests`: a line for each request, too.

    `log_format` None is text for a terminal and JSON for anything else. `quiet` leaves errors alone.
    """
    sys.stderr.flush()
    handler = PatientWriter(sys.stderr.fileno())
    handler.setFormatter(
        TextLines() if (log_format or ("text" if sys.stderr.isatty() else "json")) == "text" else JsonLines()
    )
    levels = {
        "serve": logging.INFO,
        "uvicorn": logging.ERROR,
        "asyncio": logging.WARNING,
    }  # uvicorn warns of each malformed request
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(max(level, logging.ERROR) if quiet else level)
    access_log.setLevel(logging.ERROR if quiet else logging.INFO if requests else logging.WARNING)
    try:
        yield
    finally:
        for name in levels:
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
        handler.close()


def note(what: str, fields: Mapping[str, object]) -> None:
    """One line about a client, when such are wanted. Like `access_log.info`, without looking for who called."""
    if access_log.isEnabledFor(logging.INFO):
        record = logging.LogRecord(access_log.name, logging.INFO, "", 0, what, (), None)
        setattr(record, FIELDS, fields)
        access_log.handle(record)


def shortened(text: str) -> str:
    """`text`, cut where a client made it very long."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}... ({len(text)} characters)"


def _time(seconds: float) -> str:
    """UTC, RFC 3339, to the millisecond."""
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _plain(text: str) -> str:
    """`text` without what would end a line or steer a terminal."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shown(value: Any) -> str:
    """A field's value: as it is when it is one plain word, otherwise quoted and escaped."""
    if isinstance(value, str) and value.isascii() and value.isprintable() and not any(each in value for each in ' "='):
        return value
    return json.dumps(value)
