"""The server: bundles behind HTTP. `create_app` makes the ASGI app, `serve` runs it until a signal stops it."""

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from serve.bundle.cpu import settle_threads
from serve.errors import BadInput, BundleError, StillroomError
from serve.files import drop_unwritten
from serve.http.access import Access, Bodies, Origins
from serve.http.api_keys import KEYS_VARIABLE, MakeCounts, SharedCounts, key_texts, keyring_of, own_counts, read_keys
from serve.http.connections.limits import Watch
from serve.http.connections.processes import HttpProcesses, ProcessShare
from serve.http.connections.server import CUT_OFF_S, LEAVE_S, Server
from serve.http.connections.sockets import is_loopback, listening, openable_connections, surviving_hangup, tls_context
from serve.http.forms import FORMS
from serve.http.middleware import RequestMiddleware, on_http_exception, on_stillroom_error
from serve.http.service import Service
from serve.http.v2_routes import V2
from serve.observe.logs import logging_to_stderr
from serve.observe.metrics import Counter, Metrics
from serve.observe.process_metrics import ProcessMetrics
from serve.observe.tracing import traces_from_environment
from serve.settings import ServeSettings
from serve.workers.batcher import Cores
from serve.workers.memo import Memo
from serve.workers.model_threads import in_a_thread
from serve.workers.served_model import ServedModel, processes_for

log = logging.getLogger("serve")

# How long the keys, and the certificate, may take to be read again.
READ_S = 10.0
# How long a process whose model is broken has for the requests of its other models before it ends.
BROKEN_S = 2.0


def create_app(
    bundles: Sequence[Path | str],
    settings: ServeSettings | None = None,
    access: Access | None = None,
    *,
    known: Mapping[str, str] | None = None,
    openvino: bool | None = None,
    cores: Cores | None = None,
) -> Starlette:
    """The ASGI app that serves `bundles`, folders or URLs, each verified here. Its `state.service` is the `Service`.

    The models run in threads of this process. Of `settings` those about connections, processes and the log are left to the caller.
    `access` checks keys and origins; without it every client may ask. `known` has the name and digest of each model that other processes
    of the server serve, in the order of `bundles`. `openvino` is as in `ServedModel`, for every bundle; `cores` counts the batches of all
    processes of the server, and by default those of this one.
    BundleError when a bundle is damaged; BadInput when there is none, two have the same name, or an alias is wrong.
    """
    if not bundles:
        raise BadInput("no bundle was given; name at least one folder that `stillroom run`, `demo` or `export` wrote")
    settings, metrics = settings or ServeSettings(), Metrics()
    cores = cores or cores_of(settings, [0])
    memo = Memo(int(settings.memo_mib * 2**20))
    metrics.memo_bytes.set_function(lambda: memo.held_bytes)
    aliases = aliases_of(settings.alias)
    models = [
        ServedModel(
            bundle,
            settings.limits,
            metrics,
            memo,
            cores,
            variant=settings.variant,
            threads=settings.threads,
            device=settings.device,
            openvino=openvino,
            known=digest,
            name=name,
        )
        for bundle, (name, digest) in zip(bundles, known.items() if known else [("", "")] * len(bundles), strict=True)
    ]
    check_names([model.manifest.name for model in models], aliases)
    traces = traces_from_environment()
    service = Service(models, settings.limits, metrics, aliases, traces, log_texts=settings.log_texts)
    forms = {form.endpoint.path: partial(service.answer, form) for form in FORMS}
    routes = [
        *(route(path, handler, "POST") for path, handler in forms.items() if path != "/"),  # other methods get 405
        route("/v1/models", service.describe_models),
        route("/v1/models/{name}", service.describe_model),
        route("/info", service.describe_for_tei),
        route("/healthz", service.healthz),
        route("/readyz", service.readyz),
        route("/metrics", service.metrics_text),
        route("/openapi.json", service.openapi),
        route("/docs", service.docs),
        route("/", service.try_page, "GET", "POST"),  # the middleware answers a POST, as to every form
        *(route(path, partial(handler, service), method) for path, handler, method in V2),
    ]
    middleware = Middleware(
        RequestMiddleware,
        metrics=metrics,
        endpoints=frozenset(each.path for each in routes),
        direct=forms,
        access=access or Access(),
        bodies=Bodies(settings.connections.bodies_bytes),
        traces=traces,
    )
    app = Starlette(
        routes=routes,
        middleware=[middleware],
        exception_handlers={StillroomError: on_stillroom_error, HTTPException: on_http_exception},
        lifespan=service.lifespan,
    )
    app.state.service = service
    app.router.redirect_slashes = False  # /v1/entities/ gets 404, not a redirect
    return app


def route(path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
    """A route whose requests are counted by its pattern, and not by each model's name."""

    async def counted(request: Request) -> Response:
        request.scope["stillroom.endpoint"] = path
        return await handler(request)

    return Route(path, counted, methods=methods or ["GET"])


def cores_of(settings: ServeSettings, taken: MutableSequence[int] | memoryview, number: int = 0) -> Cores:
    """The cores of a server with these settings; `taken` and `number` as in `Cores`."""
    return Cores(taken, number, processes_for(settings.device, settings.threads or 1))


def check_names(names: Sequence[str], aliases: Mapping[str, str]) -> None:
    """BadInput if two models have one name, or an alias is of no model or has the name of one."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(
            f"several bundles have the name {', '.join(map(repr, twice))}; export one of them again with --name"
        )
    for alias, name in aliases.items():
        if name not in names or alias in names:
            reason = "a bundle has this name" if alias in names else f"the bundles are {', '.join(map(repr, names))}"
            raise BadInput(f"alias {alias!r} for {name!r}: {reason}; give --alias other=name-of-a-bundle")


def print_address(url: str) -> None:
    """Prints the server's URL at once, also into a pipe. A server whose output nobody reads goes on."""
    try:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("the address %s cannot be printed (%s)", url, error)
        drop_unwritten(sys.stdout)


def serve(
    bundles: Sequence[Path | str],
    settings: ServeSettings | None = None,
    *,
    announce: Callable[[str], None] = print_address,
    quiet: bool = False,
) -> None:
    """Serves `bundles` until SIGTERM or SIGINT; then finishes the requests under way and returns.

    `announce` is called with the server's URL once it accepts connections. With `quiet` only errors are logged. BadInput when the
    server cannot listen on the address, or the keys or the certificate cannot be used; and the errors of `create_app`.
    """
    settings = settings or ServeSettings()
    processes = processes_of(settings)
    logs = partial(logging_to_stderr, settings.log_format, requests=settings.access_log, quiet=quiet)
    with surviving_hangup(), logs():
        if settings.fronts:
            log.warning("--fronts is ignored: each of the %d processes reads requests; leave it out", processes)
        if not processes:
            settle_threads(settings.threads or 1)
        server = None if processes else _server(bundles, settings)
        with listening(settings.host, settings.port) as listener:
            if not (knows_clients(settings) or is_loopback(settings.host)):
                log.warning(
                    "listening without keys on %s: every client that reaches this address may ask; give --keys a file of keys, "
                    "or listen on --host 127.0.0.1",
                    settings.host,
                )
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            port = listener.getsockname()[1]
            opened = partial(announce, f"{'https' if settings.tls_cert else 'http'}://{host}:{port}")
            if server:
                server.run(listener, opened)
                return
            counts = SharedCounts(processes)

            def work(share: ProcessShare) -> None:
                with logs():
                    settle_threads(settings.threads or 1)
                    _server(bundles, of_process(settings, share), share, counts).run(
                        share.control, lambda: share.send({"digests": share.digests})
                    )

            leave_s = settings.drain_s + CUT_OFF_S + LEAVE_S
            HttpProcesses(listener, processes, work, linger_s=settings.linger_s, leave_s=leave_s, opened=opened).run()


def knows_clients(settings: ServeSettings) -> bool:
    """Whether a client needs a key or a certificate. A source of keys that holds none is refused."""
    return bool(settings.keys or KEYS_VARIABLE in os.environ or settings.tls_client_ca)


def hosts_of(settings: ServeSettings) -> frozenset[str]:
    """The names for which the server answers, beside localhost and addresses; empty for any. BadInput for what is no name.

    Only a server that any web page on this machine could reach is choosy by itself.
    """
    for name in settings.allow_host:
        if name != "*" and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise BadInput(f"--allow-host is {name!r}; give a name without scheme and port, such as ner.example, or *")
    by_itself = is_loopback(settings.host) and not knows_clients(settings)
    if "*" in settings.allow_host or not (settings.allow_host or by_itself):
        return frozenset()
    return frozenset({settings.host, *settings.allow_host})


def processes_of(settings: ServeSettings) -> int:
    """How many processes serve beside the one that starts them; 0 where the system cannot fork, and this one serves alone."""
    if hasattr(os, "fork"):
        return settings.processes or processes_for(settings.device, settings.threads or 1)
    if (settings.processes or 1) > 1:
        raise BadInput(f"--processes is {settings.processes}; this system cannot fork processes, give --processes 1")
    return 0


def of_process(settings: ServeSettings, share: ProcessShare) -> ServeSettings:
    """The settings of one process: its part of what is bounded for the whole server."""
    whole, most = settings.connections, settings.limits
    connections = replace(
        whole,
        connections=share.part(whole.connections),
        # A body that is allowed must fit, and so must one request's texts, and one answer that its client has not read.
        bodies_bytes=share.part(whole.bodies_bytes, most.body_bytes),
        unsent_bytes=share.part(whole.unsent_bytes, most.answer_bytes),
    )
    limits = replace(most, queued_texts=share.part(most.queued_texts, most.texts))
    return replace(settings, connections=connections, limits=limits, memo_mib=settings.memo_mib / share.processes)


def _server(
    bundles: Sequence[Path | str],
    settings: ServeSettings,
    share: ProcessShare | None = None,
    counts: SharedCounts | None = None,
) -> Server:
    """The server with these settings, or with `share` and `counts` one process of it."""
    key_counts = counts.of_process(share.number) if counts and share else own_counts
    access = Access(
        read_keys(settings.keys, counts=key_counts),
        Origins(settings.allow_origin),
        open_metrics=settings.open_metrics,
        hosts=hosts_of(settings),
    )
    tls = tls_context(settings)
    # A process that replaces another serves what the others do.
    known, openvino = (share.digests, share.openvino) if share else (None, None)
    cores = cores_of(settings, share.board.batches, share.number) if share else None
    app = create_app(bundles, settings, access, known=known, openvino=openvino, cores=cores)
    service: Service = app.state.service
    most = openable_connections(settings.connections.connections)
    watch = Watch(replace(settings.connections, connections=most), service.metrics)
    watch.full_s = service.full_s
    watch.origins, watch.tls = access.origins, tls
    service.stopping = lambda: watch.stopping
    service.read_again = partial(read_again, settings, key_counts, access, watch)
    if share:
        _join(service, watch, share)
    # The variable holds the addresses whose X-Forwarded-... headers are believed.
    trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1")
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=trusted)
    return Server(
        app,
        watch,
        linger_s=settings.linger_s,
        drain_s=settings.drain_s,
        handed=share is not None,
    )


def _join(service: Service, watch: Watch, share: ProcessShare) -> None:
    """Makes the server one of several processes. BundleError if the others serve another bundle."""

    def served() -> dict[str, str]:
        return {name: model.manifest.digest for name, model in service.models.items()}

    digests = served()
    if changed := [name for name, digest in digests.items() if share.digests.get(name) not in (None, "", digest)]:
        raise BundleError(
            f"the bundle of {', '.join(map(repr, changed))} was changed while it was served; send SIGHUP or restart the server to "
            "serve the new bundle, or put the old one back"
        )
    share.digests.update(digests)

    def reloaded() -> None:
        share.digests.update(served())
        share.send({"digests": share.digests})

    def warm() -> None:
        share.board.warm[share.number] = 1
        share.send({"warm": True})

    def count_closed() -> None:
        share.board.closed[share.number] += 1

    watch.on_closed = count_closed

    def note_life() -> None:
        share.board.lives_s[share.number] = int(time.monotonic())

    def end(reason: str) -> None:
        """Ends this process after `BROKEN_S`, since a thread cannot be ended. It gets no new connections, and another one is started."""
        share.send({"leaving": True})
        asyncio.get_running_loop().call_later(BROKEN_S, os._exit, 1)

    def try_again(reason: str) -> None:
        """Ends a process that replaces another and cannot do its work; the next one is started after a pause."""
        if share.board.starts[share.number] > 1:
            share.send({"error": "Unavailable", "message": reason})
            end(reason)

    watch.on_turn = note_life
    service.on_broken, service.on_unopened = end, try_again
    service.process_metrics = ProcessMetrics(service.metrics, share.sockets, share.number, share.processes)
    restarts = Counter(
        "stillroom_process_restarts", "Processes that replaced this one after it died", [], service.metrics.registry
    )
    restarts.labels().inc(share.board.starts[share.number] - 1)
    service.on_warm = warm
    service.all_warm = lambda: all(share.board.warm)
    service.on_reloaded = reloaded


async def read_again(settings: ServeSettings, counts: MakeCounts, access: Access, watch: Watch) -> None:
    """Reads the keys and the certificate again, for new requests and connections; what cannot be read stays and is logged.

    Neither waits for the other, and for neither it takes longer than `READ_S`: a file may be a pipe, or on a disk that hangs.
    """

    async def keys() -> None:
        try:
            texts = await in_a_thread(partial(key_texts, settings.keys), READ_S)
            access.keyring = keyring_of(texts, counts).after(access.keyring)
        except (BadInput, TimeoutError) as error:
            log.error("keys stay as they were: %s", error)

    async def certificate() -> None:
        try:
            # The thread of a read that took too long goes on, and must not undo a later one: so it sets nothing itself.
            watch.tls = await in_a_thread(partial(tls_context, settings), READ_S)
        except (BadInput, TimeoutError) as error:
            log.error("the certificate stays as it was: %s", error)

    await asyncio.gather(keys(), certificate())


def aliases_of(given: Sequence[str]) -> dict[str, str]:
    """The aliases in `given`, each `OTHER=NAME`, as other -> name. BadInput for anything else."""
    aliases = {}
    for each in given:
        other, equals, name = each.partition("=")
        if not (other and equals and name):
            raise BadInput(f"--alias is {each!r}; give OTHER=NAME, such as prod=support")
        aliases[other] = name
    return aliases
