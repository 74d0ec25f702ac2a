"""A language model behind an endpoint as the one that answers, by the protocol of OpenAI's chat completions.

Several texts are asked at once. What fails in passing is asked again with growing pauses; what the endpoint says of its limits holds for
all. An answer that cannot be used is sent back once with what is wrong.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.examples import Example
from compress.data.task import Task
from compress.labelling.journal import ERROR, TOKENS
from compress.tasks.labels import REPLY_CHARACTERS
from serve.errors import BadInput, drawn_pause_s, retry_after_s

if TYPE_CHECKING:
    import httpx

# Pauses before a request is sent again, where the endpoint names none.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
LONGEST_ASKED_S = 600.0  # of what an endpoint asks to wait
OF_THE_TEXT = (400, 403, 413, 422)  # such as a text that is too long, or flagged
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
FIRST_TEXTS = 8  # if none of so many has an answer that can be used, the endpoint is not asked further
SHOWN_CHARACTERS = 300
CLOSING_S = 2.0
LABELS = "{labels}"  # in a template: the names of the labels, one a line


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask."""

    url: str
    model: str
    key: str
    """Sent as a bearer token; empty for none."""
    system: str
    task: Task
    labels: tuple[str, ...]
    concurrency: int
    per_minute: float
    """Most requests a minute; 0 for no limit."""
    timeout_s: float
    retries: int


@dataclass
class RequestCounts:
    """What was sent, of this call alone."""

    requests: int = 0
    retries: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, again: bool) -> None:
        """Count a request; `again` if it repeats one that failed."""
        with self.lock:
            self.requests += 1
            self.retries += again


class _Fatal(Exception):
    """The endpoint cannot be asked at all; the message says why."""


class _Refused(Exception):
    """The endpoint does not answer this text; the message says why."""


def ask_endpoint(
    endpoint: Endpoint, texts: Sequence[Example], missing: Sequence[int], asked: RequestCounts, *, fresh: bool
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """The answers of `endpoint` to the `missing` of `texts`, as they come; an error where it has none to give.

    `fresh` says whether it has answered nothing in earlier calls.

    Raises:
        BadInput: it cannot be reached, refuses the key or the model, or answers nothing that can be used.
    """
    import httpx

    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in missing:
        waiting.put(index)
    done: queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception] = queue.SimpleQueue()
    pace, stop = _Pace(endpoint.per_minute), threading.Event()
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = httpx.Limits(max_connections=endpoint.concurrency)
    with httpx.Client(headers=headers, timeout=endpoint.timeout_s, limits=limits) as client:
        talk = _Talk(endpoint, client, pace, asked, stop)

        def work() -> None:
            try:
                while not stop.is_set():
                    index = waiting.get_nowait()
                    done.put((index, talk.answer(texts[index])))
            except queue.Empty:
                pass
            except Exception as error:  # the caller raises it
                done.put(error)

        # After an error or Ctrl-C they are waited for shortly: a request may be under way for as long as --timeout-s.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(endpoint.concurrency, len(missing)))]
        for thread in threads:
            thread.start()
        try:
            yield from _collected(done, len(missing), endpoint, fresh=fresh)
        finally:
            stop.set()
            pace.release()
            until_s = time.monotonic() + CLOSING_S
            for thread in threads:
                thread.join(max(0.0, until_s - time.monotonic()))


def _collected(
    done: "queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception]", count: int, endpoint: Endpoint, *, fresh: bool
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    used = not fresh
    first: list[tuple[int, dict[str, Any]]] = []
    for number in range(1, count + 1):
        got = done.get()
        if isinstance(got, _Fatal):
            raise BadInput(f"--with-url {endpoint.url}: {got}")
        if isinstance(got, Exception):
            raise got
        used = used or ERROR not in got[1]
        if used:
            yield [*first, got]
            first = []
            continue
        first.append(got)
        if number == min(FIRST_TEXTS, count):
            raise BadInput(
                f"--with-url {endpoint.url}: none of the first {number} answers of {endpoint.model} can be used: {got[1][ERROR]}. Give "
                "another model, or instructions that it follows (--prompt)."
            )


class _Pace:
    """When the next request may be sent: at most so many a minute, and none before a time that the endpoint named."""

    def __init__(self, per_minute: float) -> None:
        self._gap_s = 60 / per_minute if per_minute else 0.0
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def wait(self) -> None:
        """Return when it is this caller's turn."""
        while not self._stopped.is_set():
            with self._lock:
                left_s = self._next_s - time.monotonic()
                if left_s <= 0:
                    self._next_s = time.monotonic() + self._gap_s
                    return
            self.sleep(left_s)

    def hold(self, seconds: float) -> None:
        """Let nobody send for so long."""
        with self._lock:
            self._next_s = max(self._next_s, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Sleep, or until `release`."""
        if seconds > 0:
            self._stopped.wait(seconds)

    def release(self) -> None:
        """Wake all who sleep; nobody sleeps from now on."""
        self._stopped.set()


@dataclass
class _Talk:
    """Asks about one text at a time; several threads share it."""

    endpoint: Endpoint
    client: "httpx.Client"
    pace: _Pace
    asked: RequestCounts
    stop: threading.Event

    def answer(self, example: Example) -> dict[str, Any]:
        """The fields of the answer to `example`, or the reason why there is none, and the tokens that were paid for it."""
        given = self.endpoint
        messages = [
            {"role": "system", "content": given.system},
            {"role": "user", "content": user_prompt(example)},
        ]
        spent = [0, 0]
        fault = ""
        for _ in range(2):
            try:
                said = self._said(messages, spent, again=bool(fault))
            except _Refused as reason:
                fault = str(reason)
                break
            try:
                fields = answer_of(said, example, given.task, given.labels)
            except ValueError as reason:
                fault = str(reason)
                messages += [
                    {"role": "assistant", "content": said},
                    {
                        "role": "user",
                        "content": f"This cannot be used: {fault}. Answer again, with the JSON object alone.",
                    },
                ]
            else:
                return fields | {TOKENS: spent}
        return {ERROR: fault, TOKENS: spent}

    def _said(self, messages: list[dict[str, str]], spent: list[int], *, again: bool) -> str:
        """What the model says; `spent` gets its tokens."""
        import httpx

        why, cut = "", False
        for number in range(self.endpoint.retries + 1):
            if number:
                self.pace.sleep(drawn_pause_s(number - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            self.pace.wait()
            if self.stop.is_set():
                raise _Fatal("stopped")
            self.asked.count(again=bool(number) or again)
            try:
                response = self.client.post(
                    f"{self.endpoint.url}/chat/completions",
                    json={"model": self.endpoint.model, "messages": messages, "temperature": 0},
                )
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                cut = not isinstance(error, httpx.TimeoutException)
                continue
            cut = False
            if response.status_code in AGAIN:
                why = _status(response)
                self.pace.hold(min(LONGEST_ASKED_S, retry_after_s(response.headers.get("Retry-After")) or 0.0))
                continue
            if response.status_code != 200:
                raise (_Refused if response.status_code in OF_THE_TEXT else _Fatal)(_status(response))
            try:
                return _content(response.json(), spent)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                why = f"answers what is no chat completion: {response.text[:SHOWN_CHARACTERS]!r}"
        told = f"asked {self.endpoint.retries + 1} times, and the last time: {why}"
        if cut:
            raise _Fatal(f"{told}. Give the same command again when it is well; what was answered is kept.")
        raise _Refused(told)


def _content(document: dict[str, Any], spent: list[int]) -> str:
    usage = document.get("usage") or {}
    spent[0] += int(usage.get("prompt_tokens") or 0)
    spent[1] += int(usage.get("completion_tokens") or 0)
    content = document["choices"][0]["message"]["content"]
    if content is None:  # a filter, or a refusal
        raise _Refused("the model said nothing of this text")
    if not isinstance(content, str):
        raise TypeError("no text")
    return content


def _status(response: "httpx.Response") -> str:
    return f"status {response.status_code}: {' '.join(response.text.split())[:SHOWN_CHARACTERS]}"


def system_prompt(template: Path | None, task: Task, labels: Sequence[str]) -> str:
    """The instructions of `template`, or those of `task`, with the names of the labels.

    Raises:
        BadInput: the template cannot be read, or has no place for the labels.
    """
    if template is None:
        text = task.instructions()
    else:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--prompt {template} cannot be read ({error}). Give a file of text.") from error
        if LABELS not in text:
            raise BadInput(f"--prompt {template} has no {LABELS}, where the names of the labels are put. Add it.")
    return text.replace(LABELS, "\n".join(f"- {label}" for label in labels))


def user_prompt(example: Example) -> str:
    """The text that is asked about, or both of a pair."""
    if example.text_pair:
        return f"First text:\n{example.text}\n\nSecond text:\n{example.text_pair}"
    return example.text_read


def answer_of(said: str, example: Example, task: Task, labels: Sequence[str]) -> dict[str, Any]:
    """The fields of the answer in `said`, what a model said of `example`.

    ValueError if it is no such answer; its message tells the model what is wrong.
    """
    text = said.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") + 1 : -3]  # a fence of Markdown, which models add although they are told not to
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(f"the answer is not JSON: {said.strip()[:REPLY_CHARACTERS]!r}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the answer is not a JSON object: {said.strip()[:REPLY_CHARACTERS]!r}")
    return task.read_reply(found, example, labels)
