"""The server: bundles behind HTTP. `create_app` makes the ASGI app, `serve` runs it until it is told to stop."""

import asyncio
import base64
import hashlib
import logging
import math
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from serve.access import Access, Bodies
from serve.answers import AnswerOptions
from serve.bundle import Manifest
from serve.connections import GONE, Watch
from serve.docs_page import docs_page
from serve.drain import DrainingServer
from serve.edge import Edge, json_response, on_http_exception, on_stillroom_error
from serve.errors import BadInput, BundleError, DeadlineExceeded, NotFound, StillroomError, Unavailable
from serve.keys import read_keys
from serve.listen import listening, load_certificate, openable_connections, reloading_on_hangup, tls_context
from serve.logs import FIELDS, logging_to_stderr
from serve.metrics import Metrics
from serve.model_process import Answered
from serve.openapi import openapi
from serve.origins import Origins
from serve.protocol_v2 import routes as v2_routes
from serve.relations import decode_relations, marked_texts
from serve.requests import ClassifyRequest, EntitiesRequest, check_limits, read_json, read_request
from serve.served import ServedModel
from serve.settings import ConnectionLimits, Limits, ServeSettings
from serve.texts import as_texts, pairs_of
from serve.tracing import Traces, traces_from_environment
from serve.visit import TIMEOUT_HEADER, client_timeout_s, visit_in
from serve.work import TextWork, Work

log = logging.getLogger("serve")

PAGE = Path(__file__).parent / "page" / "index.html"

# What a model is for: its task, but that relations are a kind of their own.
Kind = Literal["token-classification", "text-classification", "relations"]
ENDPOINT_OF: dict[Kind, str] = {
    "token-classification": "/v1/entities",
    "text-classification": "/v1/classify",
    "relations": "/v1/relations",
}


class Service:
    """The endpoints, and what they share: the models by name and their other names, the limits, the counters."""

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
        self.read_again: Callable[[], None] = lambda: None
        self.metrics = metrics
        self.traces = traces
        self.models = {model.manifest.name: model for model in models}
        self._replaced: set[ServedModel] = set()  # and not stopped yet
        self.aliases = dict(aliases)
        self.page = PAGE.read_bytes()
        self.page_headers = {"Content-Security-Policy": content_security_policy(self.page.decode("utf-8"))}
        self._warming: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Start the models' processes beside the first requests, which wait for them; at the end, finish what was accepted."""
        self._warming = asyncio.create_task(self._start())
        try:
            async with reloading_on_hangup(self.reload):
                yield
        finally:  # whatever ended it, no process is left behind
            if not self._warming.done():
                self._warming.cancel()
            await asyncio.wait([self._warming])
            await asyncio.gather(*(model.stop() for model in [*self.models.values(), *self._replaced]))
            if self.traces:
                await asyncio.to_thread(self.traces.close)

    async def entities(self, request: Request) -> Response:
        """POST /v1/entities: entity spans in each text."""
        asked = await read_request(request, EntitiesRequest, self.limits)
        options = AnswerOptions(
            min_score=asked.min_score,
            offsets=asked.offsets,
            aggregation=asked.aggregation,
            constrained=asked.constrained,
            truncate=asked.truncate,
        )
        model = self._model(asked.model, "token-classification")
        return await self._answer(request, model, as_texts(asked.text), None, options)

    async def classify(self, request: Request) -> Response:
        """POST /v1/classify: labels with scores for each text."""
        asked = await read_request(request, ClassifyRequest, self.limits)
        pairs = pairs_of(asked.text, asked.text_pair)
        options = AnswerOptions(top_k=asked.top_k, truncate=asked.truncate, abstain=asked.abstain)
        model = self._model(asked.model, "text-classification")
        return await self._answer(request, model, as_texts(asked.text), pairs, options)

    async def relations(self, request: Request) -> Response:
        """POST /v1/relations: what one part of each text is to another."""
        asked = decode_relations(await read_json(request, self.limits.body_bytes))
        texts = marked_texts(asked, self.limits)
        options = AnswerOptions(top_k=asked.top_k, truncate=asked.truncate, abstain=asked.abstain)
        model = self._model(asked.model, "relations")
        return await self._answered(request, model, [TextWork(text, None, options) for text in texts])

    async def describe_models(self, request: Request) -> Response:
        """GET /v1/models: what is served."""
        return json_response({"models": [model.description() for model in self.models.values()]})

    async def healthz(self, request: Request) -> Response:
        """GET /healthz: 200 while the process answers at all."""
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """GET /readyz: 200 once every model has run; 503 before, once the server stops, and for good when one failed to."""
        if reason := self.unready():
            raise reason
        return json_response({"status": "ready"})

    def full_s(self) -> float:
        """Seconds until the queue of any model has room again; 0 where one has."""
        return min((model.batcher.full_s for model in self.models.values()), default=0.0)

    def unready(self) -> Unavailable | None:
        """Why not every model can answer now; None when all can."""
        if self.stopping():
            return Unavailable("this server is stopping; ask another one")
        if self._warming is None or not self._warming.done():
            return Unavailable("the models are warming up; ask again in a second")
        if idle := [name for name, model in self.models.items() if not model.ready]:
            return Unavailable(f"no process computes for {', '.join(map(repr, idle))}; the server's log says why")
        return None

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return json_response(self._document())

    async def docs(self, request: Request) -> Response:
        """GET /docs: the same for a person."""
        page = docs_page(self._document(), request.url.scheme, request.headers.get("host", ""))
        headers = {"Content-Security-Policy": content_security_policy(page)}
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    def _document(self) -> dict[str, object]:
        named = {name: model.manifest for name, model in self.models.items()}
        return openapi({**named, **{alias: named[name] for alias, name in self.aliases.items()}}, self.limits)

    async def try_page(self, request: Request) -> Response:
        """GET /: a page to try the models on."""
        return Response(self.page, headers=self.page_headers, media_type="text/html; charset=utf-8")

    async def _answer(
        self, request: Request, model: ServedModel, texts: list[str], pairs: list[str] | None, options: AnswerOptions
    ) -> Response:
        check_limits(texts, "text", self.limits)
        check_limits(pairs or [], "text_pair", self.limits)
        seconds: list[str] | list[None] = pairs or [None] * len(texts)
        return await self._answered(
            request, model, [TextWork(*pair, options) for pair in zip(texts, seconds, strict=True)]
        )

    async def _answered(self, request: Request, model: ServedModel, works: list[Work]) -> Response:
        answers = await self.answers(request, model, works)
        results = [msgspec.Raw(answer) for answer in answers if isinstance(answer, bytes)]
        return json_response({"model": model.manifest.name, "variant": model.variant, "results": results})

    async def answers(self, request: Request, model: ServedModel, works: list[Work]) -> list[Answered]:
        """The model's answers within the time allowed, dropped when the client hangs up; what goes wrong, as its error."""
        visit = visit_in(request.scope)
        if self.log_texts:
            visit.logged_texts = [work.text for work in works if isinstance(work, TextWork)]
        # The client's own time began when its request did.
        left_s = client_timeout_s(request.headers.get(TIMEOUT_HEADER)) - (time.perf_counter() - visit.begun_s)
        loop = asyncio.get_running_loop()
        # A server whose connections say when the client is gone saves a task that waits for it.
        gone: asyncio.Future[None] = request.scope.get(GONE) or asyncio.ensure_future(_hung_up(request))
        try:
            if gone.done():
                raise ClientDisconnect
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(min(left_s, self.limits.answer_s)) as waiting:

                def hung_up(_: object) -> None:
                    with suppress(RuntimeError):  # its answer came in this very turn
                        waiting.reschedule(loop.time())

                gone.add_done_callback(hung_up)
                try:
                    with model.held():
                        return await model.answers(works, visit)
                finally:
                    gone.remove_done_callback(hung_up)
        except TimeoutError as error:
            if gone.done():
                raise ClientDisconnect from error
            spent_s = time.perf_counter() - visit.begun_s
            raise DeadlineExceeded(
                f"no answer within {spent_s:.3g} s; send fewer texts at once, or try again later"
            ) from error
        finally:
            if isinstance(gone, asyncio.Task):
                gone.cancel()

    def _model(self, name: str | None, kind: Kind) -> ServedModel:
        """The model called `name`, or the first one of `kind`.

        A model of relations classifies texts that hold markers, when it is named or there is none that takes others.
        """
        if name is None:
            of_kind = [model for model in self.models.values() if kind_of(model.manifest) == kind]
            of_task = [model for model in self.models.values() if model.manifest.task == kind]
            if found := of_kind or of_task:
                return found[0]
        other = self.named(name) if name is not None else next(iter(self.models.values()))
        if kind not in {kind_of(other.manifest), other.manifest.task}:
            raise BadInput(
                f"{other.manifest.name!r} is for {kind_of(other.manifest)}; "
                f"post to {ENDPOINT_OF[kind_of(other.manifest)]} instead",
                field="model",
            )
        return other

    def named(self, name: str) -> ServedModel:
        """The model called `name`, or of that alias. NotFound when there is none."""
        model = self.models.get(self.aliases.get(name, name))
        if model is None:
            names = [*self.models, *self.aliases]
            raise NotFound(f"there is no model {name!r}; there is {', '.join(map(repr, names))}", field="model")
        return model

    async def reload(self) -> None:
        """Reads keys, certificate and bundles again, and serves what is there now once it is warm; what cannot be read stays as it was.

        Requests that were begun are answered by the model that they began with. Models that are still being started are waited for.
        """
        if self._warming is not None:
            await asyncio.wait([self._warming])
        self.read_again()
        for name, old in list(self.models.items()):
            try:
                new = await asyncio.to_thread(old.opened_again)
                if new.manifest.name != name:
                    raise BundleError(
                        f"{old.path} holds {new.manifest.name!r} now, not {name!r}; start the server anew"
                    )
                await new.start()
            except (StillroomError, OSError) as error:
                log.error("model %r stays as it was, the bundle cannot be opened again: %s", name, error)
                self.metrics.reloads.labels(name, "failed").inc()
                continue
            self.models[name] = new
            self._replaced.add(old)
            self.metrics.reloads.labels(name, "done").inc()
            log.warning("model %r is now %s", name, new.manifest.digest[:12])
            await old.stop()
            self._replaced.remove(old)

    async def _start(self) -> None:
        began_s, all_warm = time.perf_counter(), True
        for model in self.models.values():
            try:
                await model.start()
            except (StillroomError, OSError) as error:
                log.error("model %r cannot be served: %s", model.manifest.name, error)
                model.batcher.give_up(f"model {model.manifest.name!r} cannot be served; the server's log says why")
                all_warm = False
        if all_warm:
            fields = {"models": ",".join(self.models), "seconds": round(time.perf_counter() - began_s, 2)}
            log.info("ready", extra={FIELDS: fields})


def kind_of(manifest: Manifest) -> Kind:
    """What a model is asked for."""
    return "relations" if manifest.relations else manifest.task


def create_app(
    bundles: Sequence[Path | str],
    *,
    variant: str | None = None,
    threads: int | None = None,
    processes: int | None = None,
    limits: Limits | None = None,
    access: Access | None = None,
    bodies_bytes: int = ConnectionLimits.bodies_bytes,
    log_texts: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> Starlette:
    """The ASGI app that serves `bundles`; each is verified here. Its `state.service` is the `Service`.

    `variant`, `threads` and `processes` are as in `ServedModel`, for all of them; `aliases` are other names of models; `access`
    says who may ask, everybody unless given; `bodies_bytes` of request bodies are held at once. BundleError when one is
    damaged; BadInput when there is none, or two have one name.
    """
    if not bundles:
        raise BadInput("no bundle was given; name at least one folder that `stillroom run`, `demo` or `export` wrote")
    limits, metrics = limits or Limits(), Metrics()
    models = [
        ServedModel(bundle, limits, metrics, variant=variant, threads=threads, processes=processes)
        for bundle in bundles
    ]
    names = [model.manifest.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"several bundles are called {', '.join(map(repr, twice))}; a request could not tell them apart")
    aliases = aliases or {}
    for alias, name in aliases.items():
        if name not in names or alias in names:
            reason = "that is a bundle's own name" if alias in names else f"there is {', '.join(map(repr, names))}"
            raise BadInput(f"alias {alias!r} for {name!r}: {reason}; give --alias other=name-of-a-bundle")
    service = Service(models, limits, metrics, aliases, traces_from_environment(), log_texts=log_texts)
    direct = {
        "/v1/entities": service.entities,
        "/v1/classify": service.classify,
        "/v1/relations": service.relations,
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in direct.items()),  # for other methods, and lists
        Route("/v1/models", service.describe_models),
        Route("/healthz", service.healthz),
        Route("/readyz", service.readyz),
        Route("/metrics", service.metrics_text),
        Route("/openapi.json", service.openapi),
        Route("/docs", service.docs),
        Route("/", service.try_page),
        *v2_routes(service),
    ]
    endpoints = frozenset(route.path for route in routes)
    edge = Middleware(
        Edge,
        metrics=metrics,
        endpoints=endpoints,
        direct=direct,
        access=access or Access(),
        bodies=Bodies(bodies_bytes),
        traces=service.traces,
    )
    app = Starlette(
        routes=routes,
        middleware=[edge],
        exception_handlers={StillroomError: on_stillroom_error, HTTPException: on_http_exception},
        lifespan=service.lifespan,
    )
    app.state.service = service
    app.router.redirect_slashes = False  # /v1/entities/ is answered 404 in our form, not redirected
    return app


def serve(
    bundles: Sequence[Path | str],
    settings: ServeSettings | None = None,
    *,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve `bundles` until SIGTERM or SIGINT; then finish the requests under way and return.

    `announce` is told the server's URL once it takes connections. BadInput when the address cannot be listened on, the keys or
    the certificate cannot be used, and all that `create_app` raises.
    """
    settings = settings or ServeSettings()
    with logging_to_stderr(settings.log_format, requests=settings.access_log):
        server = _server(bundles, settings, announce)
        with listening(settings.host, settings.port) as listener:
            server.run(sockets=[listener])


def _server(bundles: Sequence[Path | str], settings: ServeSettings, announce: Callable[[str], None]) -> DrainingServer:
    """The server that these settings make."""
    access = Access(read_keys(settings.keys), Origins(settings.allow_origin), open_metrics=settings.open_metrics)
    context = tls_context(settings)
    app = create_app(
        bundles,
        variant=settings.variant,
        threads=settings.threads,
        processes=settings.processes,
        limits=settings.limits,
        aliases=aliases_of(settings.alias),
        access=access,
        bodies_bytes=settings.connections.bodies_bytes,
        log_texts=settings.log_texts,
    )
    service: Service = app.state.service
    most = openable_connections(settings.connections.connections)
    watch = Watch(replace(settings.connections, connections=most), service.metrics)
    watch.full_s = service.full_s
    watch.origins = access.origins
    service.stopping = lambda: watch.stopping
    service.read_again = partial(read_again, settings, access, context)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=math.ceil(settings.connections.keep_alive_s),
    )
    shown_host = f"[{settings.host}]" if ":" in settings.host else settings.host
    shown = f"{'https' if context else 'http'}://{shown_host}"
    return DrainingServer(
        config,
        watch,
        context=context,
        linger_s=settings.linger_s,
        drain_s=settings.drain_s,
        opened=lambda port: announce(f"{shown}:{port}"),
    )


def read_again(settings: ServeSettings, access: Access, context: ssl.SSLContext | None) -> None:
    """Reads the keys and the certificate once more, for what comes from now on; what cannot be read leaves the old ones."""
    try:
        access.keyring = read_keys(settings.keys).after(access.keyring)
        if context is not None:
            load_certificate(context, settings)
    except BadInput as error:
        log.error("keys or certificate stay as they were: %s", error)


def aliases_of(given: Sequence[str]) -> dict[str, str]:
    """`OTHER=NAME` as other -> name. BadInput for anything else."""
    aliases = {}
    for each in given:
        other, equals, name = each.partition("=")
        if not (other and equals and name):
            raise BadInput(f"--alias {each!r}: give OTHER=NAME, such as prod=support")
        aliases[other] = name
    return aliases


def content_security_policy(page: str) -> str:
    """A policy that lets `page` run its own inline style and script, by their hashes, call this server, and no more."""
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
            for inline in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("style", "script")
    }
    return (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _hung_up(request: Request) -> None:
    # The body was read, so the next message is that the client has gone.
    while (await request.receive())["type"] != "http.disconnect":
        pass
