"""A command of the user's as the one that answers: JSON lines in, JSON lines out, in any order.

It gets `{"id": 7, "text": ...}` for each text and prints `{"id": 7, ...}` with the fields of an answer. What dies is started again, and
asked again for what it had not answered.
"""

import contextlib
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from compress.data.examples import Example
from compress.labelling.journal import ERROR, fields_of
from serve.errors import BadInput

MOST_FRUITLESS = 2  # starts in a row without an answer, after which the first text is given up
AHEAD = 64  # texts that the command is given before their answers are there
SHOWN_CHARACTERS = 200
CLOSING_S = 5.0  # that a command which closed its output has to end
SETTLING_S = 1.0  # without an answer, after a line that is none: others of that kind do not count
DIGESTED_BYTES = 1 << 26  # of a file that the command names
ID_FIRST = re.compile(r'\s*\{\s*"id"\s*:\s*(\d{1,12})\s*,')  # of a line that is no JSON
# Programs whose own version says nothing of what they are told to do.
INTERPRETERS = re.compile(r"(python|pypy|node|perl|ruby|php|java|Rscript|julia|[a-z]?(ba|da)?sh|env)[\d.]*(\.exe)?")

Check = Callable[[Example, dict[str, Any]], str]
"""Why an answer to a text cannot be used; empty if it can."""


def ask_command(
    command: str, texts: Sequence[Example], missing: Sequence[int], check: Check, *, timeout_s: float, fresh: bool
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """The answers of `command` to the `missing` of `texts`, as they come.

    A text with which the command dies twice without another answer in between has an error as its answer.

    Args:
        command: split as a shell does, and run without one.
        texts: all of them.
        missing: the indices of those to ask about.
        check: says why an answer cannot be used.
        timeout_s: seconds without any answer after which the command is killed and started again.
        fresh: whether it has answered nothing in earlier calls.

    Raises:
        BadInput: it cannot be started, answers neither of the first two texts, or prints what is no answer.
    """
    left = dict.fromkeys(missing)
    fruitless = given_up = 0  # starts in a row that answered nothing, and texts that were given up
    answered = not fresh
    while left:
        fault: BadInput | None = None
        with _Running(command, texts, list(left)) as running:
            before = len(left)
            settled_s = 0.0  # when it is ended, after a fault
            while left and (wait_s := settled_s - time.monotonic() if fault else timeout_s) > 0:
                if (line := running.next_line(wait_s)) is None:
                    break
                try:
                    index, fields = _parsed(line, left)
                except BadInput as error:
                    if not answered and len(left) == before:
                        raise
                    if not fault:  # answers to what it was given are taken, and it is given no more
                        fault, settled_s = error, time.monotonic() + SETTLING_S
                    continue
                del left[index]
                if not fault:
                    running.taken()
                reason = check(texts[index], fields)
                yield [(index, {ERROR: reason} if reason else fields)]
                settled_s = time.monotonic() + SETTLING_S
            if fault:
                raise fault
            ended = running.ended() if left else ""
        if len(left) < before:
            answered, fruitless = True, 0
            continue
        fruitless += 1
        if fruitless < MOST_FRUITLESS:
            continue
        given_up += 1
        if not answered and (given_up == MOST_FRUITLESS or len(left) == 1):
            raise BadInput(
                f"--with-command {command!r} {ended} before it answered anything. Its standard error is above."
            )
        poison = next(iter(left))
        del left[poison]
        yield [(poison, {ERROR: f"the command {ended} when it was asked"})]
        fruitless = 0


def files_of(command: str) -> dict[str, str]:
    """The digest of each file that `command` names, by its name: its script, its module, and what that is given to read."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"--with-command {command!r} cannot be started: {error}.") from error
    if not words:
        raise BadInput("--with-command names no program. Give a program with its arguments.")
    found: dict[str, str] = {}
    parts = (part for word in words for part in (word, *re.split(r"[\s=:;|&<>()'\"]+", word)))
    for word in dict.fromkeys(parts):
        for path in (word, f"{word.replace('.', '/')}.py", (shutil.which(word) or "") if word == words[0] else ""):
            if os.path.isfile(path) and not INTERPRETERS.fullmatch(os.path.basename(path)):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    digest = hashlib.sha256(file.read(DIGESTED_BYTES)).hexdigest()
                    found[path] = f"{os.path.getsize(path)} {digest}"
    return found


def _parsed(line: str, asked: Container[int]) -> tuple[int, dict[str, Any]]:
    shown = line.strip()[:SHOWN_CHARACTERS]
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        begun = ID_FIRST.match(line)
        found = {"id": int(begun[1]), ERROR: f"{shown!r} is not JSON"} if begun else None
    if not isinstance(found, dict) or type(found.get("id")) is not int:
        raise BadInput(
            f"--with-command printed {shown!r}, which is not a JSON object with the `id` of a text. Print one object a line, flush "
            "after each, and log to standard error."
        )
    index = found.pop("id")
    if index not in asked:
        raise BadInput(
            f"--with-command printed {shown!r}: the text of that `id` is answered already, or was never asked. Give the `id` of the line "
            "that is answered."
        )
    return index, found


class _Running:
    """The command at work: a thread feeds it, another reads it. It is killed on exit."""

    def __init__(self, command: str, texts: Sequence[Example], left: Sequence[int]) -> None:
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="backslashreplace",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise BadInput(f"--with-command {command!r} cannot be started: {error}.") from error
        # Kills the command with what it has started once its input ends: with this process, however that comes about.
        self._watcher = subprocess.Popen(
            ["sh", "-c", 'read _; kill -s KILL -- "-$1"', "sh", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._room = threading.Semaphore(AHEAD)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._timed_out = self._stopped = False
        lines = [json.dumps({"id": index} | fields_of(texts[index]), ensure_ascii=False) + "\n" for index in left]
        self._threads = [
            threading.Thread(target=self._feed, args=(lines,), daemon=True),
            threading.Thread(target=self._read, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._watcher.communicate()  # with what it has started, which may hold the pipes
        self._room.release()
        for thread in self._threads:
            thread.join(CLOSING_S)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it was not given any more
                pipe.close()  # type: ignore[union-attr]

    def next_line(self, timeout_s: float) -> str | None:
        """The next line that it prints; None when it ended, or printed nothing for so long."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._timed_out = True
            return None

    def taken(self) -> None:
        """Lets it have one more text: an answer was read."""
        self._room.release()

    def ended(self) -> str:
        """How it ended, for a message."""
        if self._timed_out:
            return "printed nothing for too long (--timeout-s)"
        try:
            return f"ended with status {self._process.wait(CLOSING_S)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def _feed(self, lines: Sequence[str]) -> None:
        assert self._process.stdin
        try:
            for line in lines:
                self._room.acquire()
                if self._stopped:
                    return
                self._process.stdin.write(line)
                self._process.stdin.flush()
            self._process.stdin.close()
        except (BrokenPipeError, ValueError):
            pass  # it ended; the reader says so

    def _read(self) -> None:
        assert self._process.stdout
        try:
            for line in self._process.stdout:
                if line.strip():
                    self._lines.put(line)
        finally:
            self._lines.put(None)
