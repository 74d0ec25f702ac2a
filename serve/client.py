"""A client of the server: `Client(url)` gives the answers of `Pipeline` and raises the same errors.

It uses the standard library's `http.client`, so the base install has all it needs, and its import loads no other HTTP package.
It ignores proxy settings and does not follow redirects.
"""

import http.client
import re
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, overload
from urllib.parse import urlsplit

import msgspec

from serve.errors import (
    BadInput,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    StillroomError,
    TooLarge,
    Unavailable,
    drawn_pause_s,
    retry_after_s,
)
from serve.tasks.question_answering import QuestionAnswer
from serve.tasks.text_classification import LabelsAnswer
from serve.tasks.text_regression import NumberAnswer
from serve.tasks.token_classification import EntitiesAnswer
from serve.text.answers import OffsetUnit
from serve.text.inputs import pairs_of
from serve.text.spans import Aggregation

if TYPE_CHECKING:
    from serve.workers.served_model import ModelDescription

# Pauses before a retry, if the server sends no Retry-After.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
RETRIED = (Overloaded.http_status, Unavailable.http_status)
SHOWN_CHARACTERS = 200  # of an answer that does not come from this server
PIECE_BYTES = 1 << 16
# What one request holds, by the server's own defaults.
REQUEST_TEXTS = 2048
REQUEST_BYTES = 1_000_000


class AnswerOptions(TypedDict, total=False):
    """Optional arguments of `Client.answer`."""

    model: str | None
    min_score: float | None
    offsets: OffsetUnit | None


class EntitiesOptions(AnswerOptions, total=False):
    """Optional arguments of `Client.entities`."""

    aggregation: Aggregation | None
    constrained: bool | None
    truncate: bool | None
    promise: str | None


class ScoreOptions(TypedDict, total=False):
    """Optional arguments of `Client.score`."""

    model: str | None
    truncate: bool | None


class EmbedOptions(ScoreOptions, total=False):
    """Optional arguments of `Client.embed`."""

    dimensions: int | None


class ClassifyOptions(ScoreOptions, total=False):
    """Optional arguments of `Client.classify`."""

    top_k: int | None
    abstain: bool | None
    promise: str | None


class RelationsOptions(ClassifyOptions, total=False):
    """Optional arguments of `Client.relations`. `offsets` is the unit of `head` and `tail`."""

    offsets: OffsetUnit | None


class Part(TypedDict):
    """A part of a text, in code points unless `offsets` says otherwise; `end` is exclusive."""

    start: int
    end: int


class RelationItem(TypedDict):
    """A text and the two parts whose relation is asked for."""

    text: str
    head: Part
    tail: Part


class _Answer(NamedTuple):
    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes


class Client:
    """A server's models as methods. Use it as a context manager, or call `close` at the end.

    `url` is the server's address, such as `http://127.0.0.1:8000`, with a path if a proxy serves it under one. `timeout_s` bounds
    one call, retries included. A request is sent again, at most `retries` times, if the server answers 429 or 503 or the
    connection fails. Requests change nothing on the server, so sending one twice is safe. The client waits as long as
    `Retry-After` says; if less time is left, it raises the error at once.

    A list that is too long for one request is sent in several, each of at most `request_texts` texts and `request_bytes` bytes. At
    most `connections` of them are under way at a time, and the answers come in the order of the list.

    Threads may share a client. Each request uses a connection of its own, which stays open for later ones of any thread.

    Methods raise BadInput or a subclass of it, with `field`, if the server cannot use the request; Overloaded or Unavailable if
    the last attempt ended so; DeadlineExceeded if the time is up; InternalError if the server failed.

    >>> with Client("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     client.entities("fly to Rome")
    {'entities': [{'label': 'city', 'text': 'Rome', 'start': 7, 'end': 11, 'score': 0.998}], 'truncated': False}
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 3,
        *,
        request_texts: int = REQUEST_TEXTS,
        request_bytes: int = REQUEST_BYTES,
        connections: int = 1,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.username:
            raise BadInput(f"url is {url!r}; give a server's address, such as http://127.0.0.1:8000", field="url")
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise BadInput("api_key has characters that HTTP headers cannot hold; give ASCII", field="api_key")
        if not timeout_s > 0 or retries < 0:
            raise BadInput(f"timeout_s is {timeout_s}, retries is {retries}; give more than 0 s, and 0 or more retries")
        if min(request_texts, request_bytes, connections) < 1:
            raise BadInput(
                f"request_texts is {request_texts}, request_bytes is {request_bytes}, connections is {connections}; give 1 or more of each"
            )
        self.url = url.rstrip("/")
        self.request_texts, self.request_bytes, self.connections = request_texts, request_bytes, connections
        self.timeout_s = timeout_s
        self.retries = retries
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json", "User-Agent": "stillroom"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: deque[http.client.HTTPConnection] = deque()  # append and pop of a deque are thread-safe

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the idle connections. A later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    @overload
    def entities(self, text: str, **options: Unpack[EntitiesOptions]) -> EntitiesAnswer: ...

    @overload
    def entities(self, text: list[str], **options: Unpack[EntitiesOptions]) -> list[EntitiesAnswer]: ...

    def entities(
        self, text: str | list[str], **options: Unpack[EntitiesOptions]
    ) -> EntitiesAnswer | list[EntitiesAnswer]:
        """The entities of one text, or of each text of a list, in order."""
        results: list[EntitiesAnswer] = self._results("/v1/entities", {"text": text, **options})
        return results[0] if isinstance(text, str) else results

    @overload
    def classify(self, text: str, text_pair: str | None = None, **options: Unpack[ClassifyOptions]) -> LabelsAnswer: ...

    @overload
    def classify(
        self, text: list[str], text_pair: list[str] | None = None, **options: Unpack[ClassifyOptions]
    ) -> list[LabelsAnswer]: ...

    def classify(
        self,
        text: str | list[str],
        text_pair: str | list[str] | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> LabelsAnswer | list[LabelsAnswer]:
        """The labels of one text or pair, or of each text or pair of a list, in order."""
        pairs_of(text, text_pair)
        pairs = {} if text_pair is None else {"text_pair": text_pair}
        results: list[LabelsAnswer] = self._results("/v1/classify", {"text": text, **pairs, **options})
        return results[0] if isinstance(text, str) else results

    @overload
    def score(self, text: str, text_pair: str | None = None, **options: Unpack[ScoreOptions]) -> NumberAnswer: ...

    @overload
    def score(
        self, text: list[str], text_pair: list[str] | None = None, **options: Unpack[ScoreOptions]
    ) -> list[NumberAnswer]: ...

    def score(
        self, text: str | list[str], text_pair: str | list[str] | None = None, **options: Unpack[ScoreOptions]
    ) -> NumberAnswer | list[NumberAnswer]:
        """The number of one text or pair, or of each text or pair of a list, in order."""
        pairs_of(text, text_pair)
        pairs = {} if text_pair is None else {"text_pair": text_pair}
        results: list[NumberAnswer] = self._results("/v1/score", {"text": text, **pairs, **options})
        return results[0] if isinstance(text, str) else results

    @overload
    def answer(self, question: str, context: str, **options: Unpack[AnswerOptions]) -> QuestionAnswer: ...

    @overload
    def answer(
        self, question: list[str], context: str | list[str], **options: Unpack[AnswerOptions]
    ) -> list[QuestionAnswer]: ...

    def answer(
        self, question: str | list[str], context: str | list[str], **options: Unpack[AnswerOptions]
    ) -> QuestionAnswer | list[QuestionAnswer]:
        """The answer to one question from its context, or to each of a list from its own or all from one, in order."""
        lists = not isinstance(context, str)
        if lists and (isinstance(question, str) or len(question) != len(context)):
            raise BadInput("context: give a string, or for a list of questions a list as long", field="context")
        results: list[QuestionAnswer] = self._results(
            "/v1/answer", {"question": question, "context": context, **options}
        )
        return results[0] if isinstance(question, str) else results

    @overload
    def embed(self, text: str, **options: Unpack[EmbedOptions]) -> list[float]: ...

    @overload
    def embed(self, text: list[str], **options: Unpack[EmbedOptions]) -> list[list[float]]: ...

    def embed(self, text: str | list[str], **options: Unpack[EmbedOptions]) -> list[float] | list[list[float]]:
        """The vector of one text, or of each text of a list, in order."""
        vectors: list[list[float]] = [
            each["embedding"] for each in self._results("/v1/embeddings", {"input": text, **options}, "data")
        ]
        return vectors[0] if isinstance(text, str) else vectors

    @overload
    def relations(self, items: RelationItem, **options: Unpack[RelationsOptions]) -> LabelsAnswer: ...

    @overload
    def relations(self, items: list[RelationItem], **options: Unpack[RelationsOptions]) -> list[LabelsAnswer]: ...

    def relations(
        self, items: RelationItem | list[RelationItem], **options: Unpack[RelationsOptions]
    ) -> LabelsAnswer | list[LabelsAnswer]:
        """The relation of `head` to `tail` in one item, or in each item of a list, in order."""
        asked = {"items": items} if isinstance(items, list) else items
        results: list[LabelsAnswer] = self._results("/v1/relations", {**asked, **options})
        return results if isinstance(items, list) else results[0]

    def models(self) -> "list[ModelDescription]":
        """The models that are served. The first one for an endpoint answers its requests without `model`."""
        return self._fields("GET", "/v1/models", None, "models", time.monotonic() + self.timeout_s)

    def ready(self) -> bool:
        """Whether every model can answer; False also if the connection fails. It asks once, without retries."""
        try:
            answer = self._exchange("GET", "/readyz", None, time.monotonic() + self.timeout_s)
        except (OSError, http.client.HTTPException):
            return False
        if answer.status in (200, Unavailable.http_status):
            return answer.status == 200
        raise error_of(answer, self.url)

    def _results(self, path: str, asked: Mapping[str, object], name: str = "results") -> list[Any]:
        """The answers to `asked`, which the server's answer has as `name`, in several requests if its lists are too long for one."""
        deadline_s = time.monotonic() + self.timeout_s
        body = encoded(asked)
        lists = {name: each for name, each in asked.items() if isinstance(each, list)}
        if len(body) <= self.request_bytes and all(len(each) <= self.request_texts for each in lists.values()):
            return self._fields("POST", path, body, name, deadline_s)
        sizes_bytes = [len(encoded(items)) for items in zip(*lists.values(), strict=True)]
        most_bytes = self.request_bytes - len(encoded({**asked, **dict.fromkeys(lists)}))
        parts = list(parts_of(sizes_bytes, self.request_texts, most_bytes))

        def ask(part: slice) -> list[Any]:
            of_part = {**asked, **{name: each[part] for name, each in lists.items()}}
            try:
                return self._fields("POST", path, encoded(of_part), name, deadline_s)
            except StillroomError as error:
                name_place(error, part, list(lists))
                raise

        if self.connections == 1:
            return [answer for part in parts for answer in ask(part)]
        threads = ThreadPoolExecutor(self.connections)
        try:
            return [answer for answers in threads.map(ask, parts) for answer in answers]
        finally:  # after an error or an interrupt nobody waits for the others
            threads.shutdown(wait=False, cancel_futures=True)

    def _fields(self, method: str, path: str, body: bytes | None, name: str, deadline_s: float) -> list[Any]:
        """The list called `name` in the answer."""
        answer = self._answered(method, path, body, deadline_s)
        try:
            values = msgspec.json.decode(answer.body)[name]
        except (ValueError, KeyError, TypeError):
            values = None
        if not isinstance(values, list):
            raise InternalError(f"{self.url}{path} answered 200 without {name}; check that this is a stillroom server")
        return values

    def _answered(self, method: str, path: str, body: bytes | None, deadline_s: float) -> _Answer:
        """The answer with status 200, after as many attempts as it takes and the client allows."""
        retry = 0
        while True:
            try:
                answer = self._exchange(method, path, body, deadline_s)
                if answer.status == 200:
                    return answer
                error = error_of(answer, self.url)
                again = answer.status in RETRIED
                wait_s = retry_after_s(answer.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as failure:
                reason = " ".join(str(failure).split()) or type(failure).__name__
                error = Unavailable(f"the connection to {self.url} failed ({reason}); check address and server")
                if isinstance(failure, TimeoutError):
                    error = DeadlineExceeded(
                        f"no answer from {self.url} within {self.timeout_s:g} s; send fewer texts at once, or give a larger timeout_s"
                    )
                again = not isinstance(failure, TimeoutError | ssl.SSLError)
                wait_s = None
            if wait_s is None:
                wait_s = drawn_pause_s(retry, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            if retry == self.retries or not again or time.monotonic() + wait_s >= deadline_s:
                raise error
            time.sleep(wait_s)
            retry += 1

    def _exchange(self, method: str, path: str, body: bytes | None, deadline_s: float) -> _Answer:
        """One request and its answer. OSError or HTTPException when the connection fails, TimeoutError at the deadline.

        The server may have closed an idle connection meanwhile; then the next one is used.
        """
        while True:
            try:
                connection, kept = self._idle.pop(), True
            except IndexError:
                kept = False
                if self._tls:
                    connection = http.client.HTTPSConnection(self._host, self._port, context=self._tls)
                else:
                    connection = http.client.HTTPConnection(self._host, self._port)
            try:
                answer = self._ask(connection, method, path, body, deadline_s)
            except BaseException as error:
                connection.close()
                if kept and isinstance(error, ConnectionError):
                    continue
                raise
            self._idle.append(connection)
            return answer

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, deadline_s: float
    ) -> _Answer:
        connection.timeout = left_s(deadline_s)
        if connection.sock is None:
            connection.connect()
        else:
            connection.sock.settimeout(left_s(deadline_s))
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        pieces = []
        while True:
            if connection.sock is not None:  # None if the answer ends with the connection: the response has the socket
                connection.sock.settimeout(left_s(deadline_s))
            piece = response.read1(PIECE_BYTES)
            if not piece:
                break
            left_s(deadline_s)
            pieces.append(piece)
        if response.length:  # unlike read, read1 does not raise for an answer that is cut short
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # read1 does not close it at its end, and the connection cannot be used again before
        return _Answer(response.status, response.reason, response.headers, b"".join(pieces))


def encoded(asked: object) -> bytes:
    """`asked` as JSON. BadInput if JSON cannot carry it."""
    try:
        return msgspec.json.encode(asked)
    except UnicodeEncodeError as error:
        raise BadInput("text has half a surrogate pair; send whole characters") from error
    except TypeError as error:
        raise BadInput(f"the arguments cannot be written as JSON ({error}); give strings and numbers") from error


def parts_of(sizes_bytes: Sequence[int], most: int, most_bytes: int) -> Iterator[slice]:
    """Slices of items of these sizes, in order, each of at most `most` items and `most_bytes`, or of one item."""
    start, held_bytes = 0, 0
    for place, size_bytes in enumerate(sizes_bytes):
        if place > start and (place - start == most or held_bytes + size_bytes > most_bytes):
            yield slice(start, place)
            start, held_bytes = place, 0
        held_bytes += size_bytes
    yield slice(start, len(sizes_bytes))


def name_place(error: StillroomError, part: slice, lists: Sequence[str]) -> None:
    """Makes `error`, of a request with the items of `part`, name the place in the whole of the `lists`."""
    here, there = error.field, None
    if match := re.match(r"(\w+)\[(\d+)\]", error.field or ""):
        here, there = match[0], f"{match[1]}[{int(match[2]) + part.start}]"
    # The server names no place in a list of one.
    elif part.stop - part.start == 1 and (here in lists or isinstance(error, TooLarge)):
        there = f"{here or lists[0]}[{part.start}]"
    if there is not None:
        if here is not None and error.message.startswith(here):
            error.message = there + error.message[len(here) :]
        else:
            error.message = f"{there}: {error.message}"
        error.field = there if here is None else (error.field or "").replace(here, there, 1)
        error.args = (error.message,)


def left_s(deadline_s: float) -> float:
    """Seconds until `deadline_s` of the monotonic clock. TimeoutError when it has passed."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def error_of(answer: _Answer, url: str) -> StillroomError:
    """The error that the server raised, found by its code, with its message and field.

    For an answer of something else, such as a proxy, the status decides the class.
    """
    try:
        described = msgspec.json.decode(answer.body)["error"]
        code, message, field = str(described["code"]), str(described["message"]), described.get("field")
    except (ValueError, KeyError, TypeError, AttributeError):
        shown = " ".join(answer.body[:SHOWN_CHARACTERS].decode("utf-8", errors="replace").split())
        code, message, field = "", f"{url} answered {answer.status} {answer.reason}: {shown or 'an empty body'}", None
    kinds = list(_kinds(StillroomError))
    by_code = [kind for kind in kinds if kind.code == code and kind is not StillroomError]
    by_status = [
        kind for kind in kinds if kind.http_status == answer.status and answer.status != StillroomError.http_status
    ]
    kind = next(
        iter(by_code or by_status),
        BadInput if answer.status < 500 else InternalError if answer.status == 500 else Unavailable,
    )
    if issubclass(kind, Overloaded):
        return kind(message, retry_after_s=retry_after_s(answer.headers.get("Retry-After")) or 1.0)
    return kind(message, field=field if isinstance(field, str) else None)


def _kinds(kind: type[StillroomError]) -> Iterator[type[StillroomError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)
