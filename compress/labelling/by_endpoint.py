"""A language model behind an endpoint as the one that answers, by the protocol of OpenAI's chat completions.

Several texts are asked at once. What fails in passing is asked again with growing pauses; what the endpoint says of its limits holds for
all. An answer that cannot be used is sent back once with what is wrong.
"""

import asyncio
import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.data.examples import Example
from compress.data.task import Task
from compress.labelling.journal import ERROR, TOKENS
from compress.labelling.prompts import answer_of, user_prompt
from serve.errors import BadInput, drawn_pause_s, retry_after_s

if TYPE_CHECKING:
    import httpx

# Pauses before a request is sent again, where the endpoint names none.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
LONGEST_ASKED_S = 600.0  # of what an endpoint asks to wait
REFUSES_TEXT = (400, 413, 422)  # such as a text that is too long, or flagged
# A text that is flagged, as OpenRouter and gateways say it, if the endpoint still answers a text that it answered before; else the key.
FORBIDDEN = 403
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
# What an error says that the next request meets too, whatever its status: the account pays for no more, or has no such key.
OF_THE_ACCOUNT = re.compile(
    r'"(code|type)"\s*:\s*"[^"]*(insufficient_|current_quota|billing|budget|payment|api_key)', re.IGNORECASE
)
FIRST_TEXTS = 8  # if none of so many has an answer that can be used, the endpoint is not asked further
SHOWN_CHARACTERS = 300
SENT_BACK_CHARACTERS = 4_000  # of an answer that cannot be used
CLOSING_S = 2.0
KEPT = "What was answered is kept: give the same command again when that is mended."

_Done = queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception | None]


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


class _Stopped(Exception):
    """No more requests are sent; the text is left for the next call."""


class _Refused(Exception):
    """The endpoint does not answer this text; the message says why."""


def ask_endpoint(
    endpoint: Endpoint, texts: Sequence[Example], missing: Sequence[int], asked: RequestCounts, *, fresh: bool
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """The answers of `endpoint` to the `missing` of `texts`, as they come; an error where it has none to give.

    `fresh` says whether it has answered nothing in earlier calls. Before an error is raised, the answers of all requests that are under
    way are waited for: they are paid.

    Raises:
        BadInput: it cannot be reached, refuses the key, the account or the model, or answers nothing that can be used; or a proxy or the
            certificates that the environment names cannot be used.
    """
    done: _Done = queue.SimpleQueue()
    answered = [] if fresh else sorted({*range(len(texts))} - {*missing})[:1]
    known = _messages(endpoint, texts[answered[0]]) if answered else []
    talk = _Talk(endpoint, asked, _Pace(endpoint.per_minute), known)
    loop = asyncio.new_event_loop()
    task = loop.create_task(_ask_all(talk, texts, missing, done))
    thread = threading.Thread(target=loop.run_until_complete, args=(task,), daemon=True)
    thread.start()
    try:
        stop = partial(loop.call_soon_threadsafe, talk.pace.stop.set)
        yield from _collected(done, len(missing), endpoint, stop, fresh=fresh)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(CLOSING_S)
        if not thread.is_alive():
            loop.close()


async def _ask_all(talk: "_Talk", texts: Sequence[Example], missing: Sequence[int], done: "_Done") -> None:
    """Put the answers into `done`, the error that ends the work, and None at the end."""
    import httpx

    waiting = iter(missing)

    async def work() -> None:
        try:
            while not talk.pace.stop.is_set() and (index := next(waiting, None)) is not None:
                done.put((index, await talk.answer(texts[index])))
        except _Stopped:
            pass
        except Exception as error:  # the caller raises it
            talk.pace.stop.set()
            done.put(error)

    endpoint = talk.endpoint
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = httpx.Limits(max_connections=endpoint.concurrency)
    try:
        async with httpx.AsyncClient(headers=headers, timeout=endpoint.timeout_s, limits=limits) as talk.client:
            await asyncio.gather(*(work() for _ in range(min(endpoint.concurrency, len(missing)))))
    except asyncio.CancelledError:  # nobody waits any more
        pass
    except (ImportError, OSError, ValueError) as error:  # of the client itself: `work` tells the errors of requests
        fault = BadInput(
            "A proxy or certificates are named in the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE, SSL_CERT_DIR) that "
            f"cannot be used: {error}. Correct or unset the variable. {KEPT}"
        )
        fault.__cause__ = error
        done.put(fault)
    except Exception as error:  # the caller raises it
        done.put(error)
    finally:
        done.put(None)


def _collected(
    done: _Done, count: int, endpoint: Endpoint, stop: Callable[[], object], *, fresh: bool
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    used, answers = not fresh, 0
    first: list[tuple[int, dict[str, Any]]] = []
    fault: Exception | None = None
    while (got := done.get()) is not None:
        if isinstance(got, Exception):
            fault = fault or got
            continue
        used, answers = used or ERROR not in got[1], answers + 1
        first.append(got)
        if used:
            yield first
            first = []
        elif len(first) == min(FIRST_TEXTS, count) and not fault:
            fault = BadInput(
                f"--with-url {endpoint.url}: none of the first {len(first)} answers of {endpoint.model} can be used: {got[1][ERROR]}. "
                "Give another model, or instructions that it follows (--prompt)."
            )
            stop()
    if fault:
        raise fault
    if answers < count:
        raise RuntimeError(
            f"--with-url {endpoint.url}: the requests ended with {answers} of {count} texts answered. {KEPT}"
        )


class _Pace:
    """When the next request may be sent: at most so many a minute, none before a time that the endpoint named, and none after `stop`."""

    def __init__(self, per_minute: float) -> None:
        self._gap_s = 60 / per_minute if per_minute else 0.0
        self._next_s = 0.0
        self.stop = asyncio.Event()

    async def wait(self, pause_s: float = 0.0) -> None:
        """Return when it is this caller's turn, `pause_s` from now or later. `_Stopped` after `stop`."""
        await self._sleep(pause_s)
        while (left_s := self._next_s - time.monotonic()) > 0:
            await self._sleep(left_s)
        self._next_s = time.monotonic() + self._gap_s

    def hold(self, seconds: float) -> None:
        """Let nobody send for so long."""
        self._next_s = max(self._next_s, time.monotonic() + seconds)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)
        if self.stop.is_set():
            raise _Stopped


@dataclass
class _Talk:
    """Asks about one text at a time; several coroutines share it."""

    endpoint: Endpoint
    asked: RequestCounts
    pace: _Pace
    known: list[dict[str, str]]
    """What it was asked of a text that it has answered, in this call or an earlier one; empty at first."""
    client: "httpx.AsyncClient" = field(init=False)
    temperature: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    """Empty once the model has answered without one what it had refused with one: some take none but their own."""

    async def answer(self, example: Example) -> dict[str, Any]:
        """The fields of the answer to `example`, or the reason why there is none, and the tokens that were paid for it."""
        given = self.endpoint
        messages = _messages(given, example)
        spent = [0, 0]
        fault = ""
        for _ in range(2):
            try:
                said = await self._said(messages, spent, again=bool(fault))
            except _Refused as reason:
                fault = str(reason)
                break
            try:
                fields = answer_of(said, example, given.task, given.labels)
            except ValueError as reason:
                fault = str(reason)
                messages += [
                    {"role": "assistant", "content": said[-SENT_BACK_CHARACTERS:]},
                    {
                        "role": "user",
                        "content": f"This cannot be used: {fault}. Answer again, with the JSON object alone.",
                    },
                ]
            else:
                return fields | {TOKENS: spent}
        return {ERROR: fault, TOKENS: spent}

    async def _said(
        self, messages: list[dict[str, str]], spent: list[int], *, again: bool, of_known: bool = False
    ) -> str:
        """What the model says; `spent` gets its tokens."""
        import httpx

        url = self.endpoint.url
        why, cut = "", False
        for number in range(self.endpoint.retries + 1):
            pause_s = drawn_pause_s(number - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S) if number else 0.0
            temperature = self.temperature
            try:
                response = await self._response(messages, temperature, pause_s, again=bool(number) or again)
                if temperature and response.status_code in (400, 422) and "temperature" in response.text.lower():
                    # A word of the text, or the field: it was the field if there is an answer without it.
                    response = await self._response(messages, {}, 0.0, again=True)
                    self.temperature = {} if response.status_code == 200 else self.temperature
            except (httpx.HTTPError, TimeoutError, ExceptionGroup) as error:  # a group of anyio's: no such port
                cut = not isinstance(error, httpx.TimeoutException | TimeoutError)
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
                why = why if cut else f"no whole answer came in {self.endpoint.timeout_s:g} s (--timeout-s)"
                continue
            cut, why = False, f"status {response.status_code}: {' '.join(response.text.split())[:SHOWN_CHARACTERS]}"
            if response.status_code == FORBIDDEN and self.known and not of_known:
                with contextlib.suppress(_Refused):
                    await self._said(self.known, spent, again=True, of_known=True)  # BadInput if that is forbidden too
                raise _Refused(why)
            if response.status_code == 200:
                try:
                    content = _content(response.json(), spent)
                    self.known = messages[:2]
                    return content
                except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
                    why = f"answers what is no chat completion: {response.text[:SHOWN_CHARACTERS]!r}"
            elif response.status_code not in (*AGAIN, *REFUSES_TEXT) or OF_THE_ACCOUNT.search(response.text):
                raise BadInput(f"--with-url {url}: {why}. {KEPT}")
            elif response.status_code in REFUSES_TEXT:
                raise _Refused(why)
            else:
                self.pace.hold(min(LONGEST_ASKED_S, retry_after_s(response.headers.get("Retry-After")) or 0.0))
        told = f"asked {self.endpoint.retries + 1} times, and the last time: {why}"
        if cut:
            raise BadInput(f"--with-url {url}: {told}. {KEPT}")
        raise _Refused(told)

    async def _response(
        self, messages: list[dict[str, str]], temperature: dict[str, float], pause_s: float, *, again: bool
    ) -> "httpx.Response":
        await self.pace.wait(pause_s)
        self.asked.requests += 1
        self.asked.retries += again
        body = {"model": self.endpoint.model, "messages": messages} | temperature
        async with asyncio.timeout(self.endpoint.timeout_s):
            return await self.client.post(f"{self.endpoint.url}/chat/completions", json=body)


def _messages(endpoint: Endpoint, example: Example) -> list[dict[str, str]]:
    """What is asked of `example` first."""
    return [{"role": "system", "content": endpoint.system}, {"role": "user", "content": user_prompt(example)}]


def _content(document: dict[str, Any], spent: list[int]) -> str:
    usage = document.get("usage") or {}
    for place, name in enumerate(("prompt_tokens", "completion_tokens")):
        spent[place] += usage[name] if type(usage.get(name)) is int else 0
    content = document["choices"][0]["message"]["content"]
    if content is None:  # a filter, or a refusal
        raise _Refused("the model said nothing of this text")
    if isinstance(content, list):  # parts, of which those that are thoughts have no text
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError("no text")
    return content.encode("utf-8", "replace").decode()  # half of a surrogate pair could not be sent back
