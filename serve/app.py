"""The server: bundles behind HTTP. `create_app` makes the ASGI app, `serve` runs it until it is told to stop."""

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from serve.answers import AnswerOptions
from serve.bundle import Manifest
from serve.docs_page import docs_page
from serve.edge import Edge, json_response, on_http_exception, on_stillroom_error
from serve.errors import BadInput, BundleError, DeadlineExceeded, NotFound, StillroomError, Unavailable
from serve.listen import listening, reloading_on_hangup, signals_kept_from_killing
from serve.metrics import Metrics
from serve.model_process import Answered
from serve.openapi import openapi
from serve.protocol_v2 import routes as v2_routes
from serve.relations import decode_relations, marked_texts
from serve.requests import ClassifyRequest, EntitiesRequest, Limits, check_limits, read_json, read_request
from serve.served import ServedModel
from serve.texts import as_texts, pairs_of
from serve.tracing import Traces, traces_from_environment
from serve.visit import visit_in
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

# How long a server that was told to stop waits for the answers under way.
DRAIN_S = 30

Value = TypeVar("Value")


class Service:
    """The endpoints, and what they share: the models by name and their other names, the limits, the counters."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits,
        metrics: Metrics,
        aliases: Mapping[str, str],
        traces: Traces | None = None,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self.traces = traces
        self.models = {model.manifest.name: model for model in models}
        self.aliases = dict(aliases)
        self.page = PAGE.read_bytes()
        self.page_headers = {"Content-Security-Policy": content_security_policy(self.page.decode("utf-8"))}
        self._warming: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Start the models' processes beside the first requests, which wait for them; at the end, finish what was accepted."""
        self._warming = asyncio.create_task(self._start())
        with reloading_on_hangup(self.reload):
            yield
        if not self._warming.done():
            self._warming.cancel()
        await asyncio.wait([self._warming])
        await asyncio.gather(*(model.stop() for model in self.models.values()))
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
        """GET /readyz: 200 once every model has run; 503 before, and for good when one failed to."""
        if reason := self.unready():
            raise reason
        return json_response({"status": "ready"})

    def unready(self) -> Unavailable | None:
        """Why not every model can answer now; None when all can."""
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
        page = docs_page(self._document())
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
        try:
            with model.held():
                async with asyncio.timeout(self.limits.answer_s):
                    return await unless_gone(request, model.answers(works, visit_in(request.scope)))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer within {self.limits.answer_s:g} s; send fewer texts at once, or try again later"
            ) from error

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
        """Opens every bundle again, and serves what lies there now once it is warm; what cannot be opened leaves the old one.

        Requests that were begun are answered by the model that they began with.
        """
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
            self.metrics.reloads.labels(name, "done").inc()
            log.warning("model %r is now %s", name, new.manifest.digest[:12])
            await old.stop()

    async def _start(self) -> None:
        for model in self.models.values():
            try:
                await model.start()
            except (StillroomError, OSError) as error:
                log.error("model %r cannot be served: %s", model.manifest.name, error)
                model.batcher.give_up(f"model {model.manifest.name!r} cannot be served; the server's log says why")


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
    aliases: Mapping[str, str] | None = None,
) -> Starlette:
    """The ASGI app that serves `bundles`; each is verified here.

    `variant`, `threads` and `processes` are as in `ServedModel`, for all of them; `aliases` are other names of
    models. BundleError when one is damaged; BadInput when there
    is none, or two have one name.
    """
    if not bundles:
        raise BadInput("no bundle was given; name at least one folder that `stillroom export` wrote")
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
    service = Service(models, limits, metrics, aliases, traces_from_environment())
    routes = [
        Route("/v1/entities", service.entities, methods=["POST"]),
        Route("/v1/classify", service.classify, methods=["POST"]),
        Route("/v1/relations", service.relations, methods=["POST"]),
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
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Edge, metrics=service.metrics, endpoints=endpoints, traces=service.traces)],
        exception_handlers={StillroomError: on_stillroom_error, HTTPException: on_http_exception},
        lifespan=service.lifespan,
    )
    app.router.redirect_slashes = False  # /v1/entities/ is answered 404 in our form, not redirected
    return app


def serve(
    bundles: Sequence[Path | str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    variant: str | None = None,
    threads: int | None = None,
    processes: int | None = None,
    limits: Limits | None = None,
    aliases: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve `bundles` until SIGTERM or SIGINT; then finish the requests under way and return.

    `port` 0 takes any free one. `announce` is told the server's URL once it listens. BadInput when the address cannot
    be listened on, and all that `create_app` raises.
    """
    app = create_app(bundles, variant=variant, threads=threads, processes=processes, limits=limits, aliases=aliases)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=DRAIN_S,
    )
    with listening(host, port) as listener, signals_kept_from_killing():
        shown_host = f"[{host}]" if ":" in host else host
        announce(f"http://{shown_host}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])


def aliases_of(given: Sequence[str]) -> dict[str, str]:
    """`OTHER=NAME` as other -> name. BadInput for anything else."""
    aliases = {}
    for each in given:
        other, equals, name = each.partition("=")
        if not (other and equals and name):
            raise BadInput(f"--alias {each!r}: give OTHER=NAME, such as prod=support")
        aliases[other] = name
    return aliases


async def unless_gone(request: Request, work: Coroutine[None, None, Value]) -> Value:
    """What `work` gives; ClientDisconnect, with `work` cancelled, when the client hangs up first."""
    working = asyncio.ensure_future(work)
    hanging_up = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait([working, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        hanging_up.cancel()


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
