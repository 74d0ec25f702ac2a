"""The endpoints of `/v1` and the pages, and what all endpoints share: models, limits, metrics."""

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve.errors import BadInput, BundleError, DeadlineExceeded, NotFound, Unavailable
from serve.http.connections.exchange import GONE
from serve.http.connections.sockets import reloading_on_hangup
from serve.http.deadlines import Deadlines
from serve.http.forms import tei
from serve.http.forms.form import Form
from serve.http.middleware import JsonResponse
from serve.http.openapi import ADDRESS, BASE, OpenaiModel, content_security_policy, docs_page, openapi, program_version
from serve.http.request_bodies import decode, read_json
from serve.observe.logs import FIELDS
from serve.observe.metrics import Metrics
from serve.observe.process_metrics import ProcessMetrics
from serve.observe.request_context import TIMEOUT_HEADER, TIMEOUT_NAME, client_timeout_s, context_of, headers_of
from serve.observe.tracing import Traces
from serve.settings import Limits
from serve.tasks.served_task import ServedTask
from serve.text.inputs import TextWork, Work
from serve.wording import counted
from serve.workers.model_threads import WorkOutput, in_a_thread
from serve.workers.served_model import ServedModel

log = logging.getLogger("serve")

# How long a bundle may take to be opened again, its download included.
OPEN_S = 600.0

# Of a float32 of /v2: in JSON, such as `-12.345678901,`; and sent as bytes.
BYTES_OF_LOGIT, BYTES_OF_BINARY_LOGIT = 14, 4
# Of an answer, beside its labels or numbers: names of fields, `truncated`, `abstained`.
BYTES_OF_ANSWER = 64

WARMING = Unavailable("the models are warming up; ask again in a second")

PAGE = Path(__file__).parent / "page" / "index.html"


class ApiDescription(NamedTuple):
    """The OpenAPI document, and the page of it, of the models with these digests."""

    digests: list[str]
    document: bytes
    page: str
    page_headers: dict[str, str]


class Service:
    """The endpoints, and what they share: the models by name, their aliases, the limits, the metrics."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits,
        metrics: Metrics,
        aliases: Mapping[str, str],
        traces: Traces | None = None,
        *,
        log_texts: bool = False,
    ) -> None:
        self.limits = limits
        self.log_texts = log_texts
        self.stopping: Callable[[], bool] = lambda: False
        self.read_again: Callable[[], Awaitable[None]] | None = None
        """Reads keys and certificate again."""
        self.metrics = metrics
        self.traces = traces
        self.models = {model.manifest.name: model for model in models}
        self._replaced: set[ServedModel] = set()  # replaced models that have not stopped yet
        self.aliases = dict(aliases)
        self.page = PAGE.read_bytes()
        self.page_headers = {"Content-Security-Policy": content_security_policy(self.page.decode("utf-8"))}
        self.process_metrics: ProcessMetrics | None = None
        """The metrics of all processes, if there are several."""
        self.on_warm: Callable[[], None] = lambda: None
        self.all_warm: Callable[[], bool] = lambda: True
        """Whether every process has had its models."""
        self.on_broken: Callable[[str], None] = lambda reason: None
        """Called with the reason when only a new process can run a model."""
        self.on_unopened: Callable[[str], None] = lambda reason: None
        """Called with the reason when a model cannot be opened at the start."""
        self.on_reloaded: Callable[[], None] = lambda: None
        self._warming: asyncio.Task[None] | None = None
        self._last_api_description: ApiDescription | None = None
        self._deadlines = Deadlines()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Opens the models in the background; first requests wait for them. At the end it finishes accepted requests."""
        self._warming = asyncio.create_task(self._start())
        try:
            reloads = filter(None, [self.read_again, self.reload])
            others = self.process_metrics.answering() if self.process_metrics else nullcontext()
            async with reloading_on_hangup(*reloads), others:
                yield
        finally:
            if not self._warming.done():
                self._warming.cancel()
            await asyncio.wait([self._warming])
            await asyncio.gather(*(model.stop() for model in [*self.models.values(), *self._replaced]))
            if self.traces:
                await asyncio.to_thread(self.traces.close)

    async def warm(self) -> None:
        """Waits, within `lifespan`, until every model can answer. Unavailable if one cannot."""
        if self._warming is not None:
            await asyncio.wait([self._warming])
        if reason := self.unready():
            raise reason

    async def answer(self, form: Form, request: Request) -> Response:
        """POST to the path of `form`: an answer to each text, of the model that the request or its path names."""
        body = await read_json(request, self.limits.body_bytes)
        asked: Any = decode(body, form.request_type(body) if form.request_type else form.endpoint.requests[0])
        model = self._model(request.path_params.get("name") or getattr(asked, "model", None), form.tasks)
        works = form.works_of(asked, model, self.limits)
        answers = await self.answers(request, model, works)
        return JsonResponse(form.response(asked, model, [answer for answer in answers if isinstance(answer, bytes)]))

    async def describe_models(self, request: Request) -> Response:
        """GET /v1/models: the models that are served, and the same list in the form of OpenAI's endpoint of this name."""
        described = [
            model.description([alias for alias, of in self.aliases.items() if of == name])
            for name, model in self.models.items()
        ]
        data = [openai_model(name) for name in self.models]
        return JsonResponse({"object": "list", "data": data, "models": described})

    async def describe_model(self, request: Request) -> Response:
        """GET /v1/models/NAME: one of the models, in the form of OpenAI's endpoint of this name."""
        return JsonResponse(openai_model(self.named(request.path_params["name"]).manifest.name))

    async def describe_for_tei(self, request: Request) -> Response:
        """GET /info: the first model of a task that has a form of TEI, in the form of TEI's endpoint of this name."""
        return JsonResponse({**tei.info(self._model(None, tei.TASKS), self.limits), "version": program_version()})

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: 200 while the process runs."""
        return JsonResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """GET /readyz: 200 while every model can answer; otherwise 503, also while the server stops."""
        if reason := self.unready():
            raise reason
        return JsonResponse({"status": "ready"})

    def full_s(self) -> float:
        """Estimated seconds until the queue of one of the models has room; 0 if one has room."""
        return min((model.full_s for model in self.models.values()), default=0.0)

    def unready(self) -> Unavailable | None:
        """Why some model cannot answer now; None if all can."""
        if self.stopping():
            return Unavailable("this server is stopping; ask another one")
        if self._warming is None or not self._warming.done():
            return WARMING
        if idle := [name for name, model in self.models.items() if not model.ready]:
            return Unavailable(f"no model runs for {', '.join(map(repr, idle))}; see the server's log")
        if not self.all_warm():
            return WARMING
        return None

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        text = await self.process_metrics.text() if self.process_metrics else self.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Response(self._api_description().document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        """GET /docs: the same as a web page."""
        described = self._api_description()
        page, host = described.page, request.headers.get("host", "")
        if ADDRESS.fullmatch(host):  # so that its commands can be copied
            page = page.replace(BASE, f"{request.url.scheme}://{host}")
        return Response(page, headers=described.page_headers, media_type="text/html; charset=utf-8")

    def _api_description(self) -> ApiDescription:
        """The document and its page, built once for the models that are served now: building takes milliseconds of this process."""
        named = {name: model.manifest for name, model in self.models.items()}
        digests = [manifest.digest for manifest in named.values()]
        if self._last_api_description is None or self._last_api_description.digests != digests:
            document = openapi({**named, **{alias: named[name] for alias, name in self.aliases.items()}}, self.limits)
            page = docs_page(document)
            headers = {"Content-Security-Policy": content_security_policy(page)}
            self._last_api_description = ApiDescription(digests, msgspec.json.encode(document), page, headers)
        return self._last_api_description

    async def try_page(self, request: Request) -> Response:
        """GET /: a page to try the models on."""
        return Response(self.page, headers=self.page_headers, media_type="text/html; charset=utf-8")

    async def answers(
        self, request: Request, model: ServedModel, works: Sequence[Work], *, binary_logits: bool = False
    ) -> list[WorkOutput]:
        """The model's answers, of which logits are sent in JSON or as bytes.

        DeadlineExceeded after the time allowed; ClientDisconnect once the client has gone.
        """
        logit_bytes = BYTES_OF_BINARY_LOGIT if binary_logits else BYTES_OF_LOGIT
        self._check_size(sum(_answer_bytes(model, work, logit_bytes) for work in works), model, works)
        context = context_of(request.scope)
        if self.log_texts:
            context.logged_texts = [work.text for work in works if isinstance(work, TextWork)]
        # The client's time-out counts from the start of its request.
        allowed_s = client_timeout_s(headers_of(request.scope).get(TIMEOUT_NAME))
        left_s = allowed_s - (time.perf_counter() - context.begun_s)
        # Our own connections give a future for this; under another server a task waits for the client to disconnect.
        gone: asyncio.Future[None] = request.scope.get(GONE) or asyncio.ensure_future(_hung_up(request))
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hung_up(_: object) -> None:
            if not answered.done():  # the answer may have come in the same iteration of the loop
                answered.set_exception(ClientDisconnect())

        gone.add_done_callback(hung_up)
        tick = self._deadlines.add(answered, min(left_s, self.limits.answer_s))
        model.retain()
        try:
            if gone.done():
                raise ClientDisconnect
            if left_s <= 0:
                raise TimeoutError
            answers = await model.answers(works, context, answered)
            self._check_size(sum(len(answer) for answer in answers if isinstance(answer, bytes)), model, works)
            return answers
        except TimeoutError as error:
            limit_s = min(allowed_s, self.limits.answer_s)
            whose = f"{TIMEOUT_HEADER.title()} allows" if allowed_s <= self.limits.answer_s else "this server allows"
            raise DeadlineExceeded(
                f"no answer within the {1000 * limit_s:,.4g} ms that {whose}; send fewer texts at once, or try again later"
            ) from error
        finally:
            model.release()
            answered.cancel()  # if nobody waited for it, so that no error is set any more
            self._deadlines.remove(answered, tick)
            gone.remove_done_callback(hung_up)
            if isinstance(gone, asyncio.Task):
                gone.cancel()

    def _check_size(self, size_bytes: int, model: ServedModel, works: Sequence[Work]) -> None:
        """BadInput if an answer of `size_bytes` to `works` is over the limit."""
        if size_bytes <= self.limits.answer_bytes:
            return
        smaller = model.task.smaller_by if isinstance(works[0], TextWork) else ""
        raise BadInput(
            f"the answer to {counted(len(works), 'text')} may have {size_bytes:,} bytes; this server answers with "
            f"{self.limits.answer_bytes:,} at most: {f'give a smaller {smaller}, or ' if smaller else ''}ask about fewer texts at once",
            field=smaller or None,
        )

    def _model(self, name: str | None, tasks: Collection[ServedTask]) -> ServedModel:
        """The model called `name`, or the first one of `tasks`. BadInput if it is of another one."""
        if name is None and (fitting := [each for each in self.models.values() if each.task in tasks]):
            return fitting[0]
        other = self.named(name) if name is not None else next(iter(self.models.values()))
        if other.task not in tasks:
            raise BadInput(
                f"{other.manifest.name!r} is for {other.task.kind}; post to {other.task.endpoint.path} instead",
                field="model",
            )
        return other

    def named(self, name: str) -> ServedModel:
        """The model with the name or alias `name`. NotFound if there is none."""
        model = self.models.get(self.aliases.get(name, name))
        if model is None:
            names = [*self.models, *self.aliases]
            raise NotFound(f"there is no model {name!r}; the models are {', '.join(map(repr, names))}", field="model")
        return model

    async def reload(self) -> None:
        """Opens the bundles again, each within `OPEN_S`. A new model serves once it is warm; what cannot be opened stays as it was.

        Requests under way are answered by the old model. Models that are still starting are waited for.
        """
        if self._warming is not None:
            await asyncio.wait([self._warming])
        for name, old in list(self.models.items()):
            try:
                new = await in_a_thread(old.opened_again, OPEN_S)
                if new.task is not old.task:
                    raise BundleError(
                        f"it is for {new.task.kind} now, not for {old.task.kind}; restart the server to serve it"
                    )
                new.on_broken = self.on_broken
                await new.start()
            except Exception as error:  # runtimes have their own, such as for lack of memory
                log.error("model %r stays as it was; its bundle cannot be opened again: %s", name, error)
                self.metrics.reloads.labels(name, "failed").inc()
                continue
            self.models[name] = new
            self._replaced.add(old)
            self.metrics.reloads.labels(name, "done").inc()
            log.info("model %r is now %s", name, new.manifest.digest[:12])
            await old.stop()
            self._replaced.remove(old)
            del old
            free_memory()
        if all(model.ready for model in self.models.values()):
            self.on_warm()
        self.on_reloaded()

    async def _start(self) -> None:
        began_s, all_warm = time.perf_counter(), True
        for model in self.models.values():
            model.on_broken = self.on_broken
            try:
                await model.start()
            except Exception as error:  # runtimes have their own, such as for lack of memory
                log.error("model %r cannot be served: %s", model.manifest.name, error)
                model.give_up(f"model {model.manifest.name!r} cannot be served; see the server's log")
                all_warm = False
                self.on_unopened(f"model {model.manifest.name!r} cannot be served: {error}")
        if all_warm:
            self.on_warm()
            fields = {"models": ",".join(self.models), "seconds": round(time.perf_counter() - began_s, 2)}
            log.info("ready", extra={FIELDS: fields})


def openai_model(name: str) -> OpenaiModel:
    """A model as OpenAI's endpoints describe it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "stillroom"}


def free_memory() -> None:
    """Gives the memory of a model that was replaced back to the system: whole collections are rare, and glibc keeps what threads freed."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None:
        trim(0)


def _answer_bytes(model: ServedModel, work: Work, logit_bytes: int) -> int:
    """The most bytes of the model's answer, as far as they are known before the work."""
    if isinstance(work, TextWork):
        return BYTES_OF_ANSWER + model.text_answer_bytes(work.options)
    rows = len(work.input_ids) if model.task.per_token else 1
    return rows * model.manifest.outputs * logit_bytes


async def _hung_up(request: Request) -> None:
    # The body has been read, so the next message says that the client has disconnected.
    while (await request.receive())["type"] != "http.disconnect":
        pass
