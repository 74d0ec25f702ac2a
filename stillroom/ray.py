"""Bundles as an application of Ray Serve: `serve run stillroom.ray:application bundle=PATH`.

A replica is one process of the server but for its connections, which Ray Serve has: the same app, the same queue, models of its own.
So answers are those of `stillroom serve`, and texts that wait share a batch; Ray replaces a replica that crashes.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from compress.input_errors import Faults
from serve.bundle.cpu import settle_threads
from serve.bundle.remote_files import is_url
from serve.errors import BadInput, BundleError, StillroomError
from serve.http.access import Access, Origins
from serve.http.api_keys import KEYS_VARIABLE, read_keys
from serve.http.app import aliases_of, check_names, create_app
from serve.http.service import Service
from serve.options import Option, Settings, make, options_of, setting, unknown_setting
from serve.settings import ServeSettings
from serve.tasks import open_bundle

if TYPE_CHECKING:
    from ray.serve import Application

# Options of `stillroom serve` about its connections, its processes and its log, all of which Ray Serve has.
OF_THE_SERVER = {
    option.name
    for option in options_of(ServeSettings)
    if option.within == "connections" or option.name.startswith(("tls_", "log_"))
} - {"bodies_bytes"} | {"host", "port", "allow_host", "fronts", "processes", "access_log", "linger_s", "drain_s"}
# How much longer than a request may take a stopping replica has.
LEAVE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class RayServing(Settings):
    """What Ray Serve is told of a deployment."""

    bundle: tuple[str, ...] = setting(
        help="Folder or URL of a bundle; a folder must be at the same path on every machine."
    )
    replicas: int = setting(1, help="Replicas; with max_replicas the fewest.", at_least=1)
    max_replicas: int | None = setting(
        None, help="Most replicas that Ray Serve's autoscaler starts.", at_least=1, shown="no autoscaling"
    )
    target_ongoing_requests: float = setting(
        8.0, help="Requests under way in a replica, on average, that the autoscaler aims at.", above=0
    )
    max_ongoing_requests: int = setting(
        1000,
        help="Most requests under way in a replica; others wait at Ray Serve's proxy, where no limit of stillroom holds.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadInput(
                f"max_replicas is {self.max_replicas}, and replicas, the fewest, is {self.replicas}; give at least as many"
            )


def application(given: Mapping[str, Any]) -> "Application":
    """The application of Ray Serve. `given` are settings by name: those of `RayServing`, and of `ServeSettings` what Ray Serve has not.

    Values may be text, as `serve run` gives them; several values are then set apart by commas.

    Raises:
        BadInput: Ray Serve is not installed; or all that is wrong with the settings, the keys and the bundles. For the command
            `serve run` it is an error of click, which that command shows without a traceback.
    """
    try:
        return _application(given)
    except StillroomError as error:
        if click.get_current_context(silent=True):
            raise click.ClickException(error.message) from error
        raise


def _application(given: Mapping[str, Any]) -> "Application":
    try:
        from ray import serve as ray_serve
    except ImportError as error:
        raise BadInput(f'Ray Serve is not installed ({error}). Run: pip install "stillroom[ray]"') from error
    scale, settings = _settings(given)
    bundles = [place if is_url(place) else str(Path(place).resolve()) for place in scale.bundle]
    digests = _checked(bundles, settings)
    settings = replace(
        settings,
        keys=settings.keys and settings.keys.resolve(),  # a replica has another current folder
        threads=settings.threads or 1,
    )
    number: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas is not None:
        limits = {"min_replicas": scale.replicas, "max_replicas": scale.max_replicas}
        number = {"autoscaling_config": limits | {"target_ongoing_requests": scale.target_ongoing_requests}}
    on_gpu = {"num_gpus": 1} if settings.device == "cuda" else {}
    deployment = ray_serve.deployment(
        ray_serve.ingress(app_builder(bundles, settings, digests, needs_keys=KEYS_VARIABLE in os.environ))(Replica),
        name="stillroom",
        max_ongoing_requests=scale.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.threads or 1, **on_gpu},
        graceful_shutdown_timeout_s=settings.limits.answer_s + LEAVE_S,
        **number,
    )
    return deployment.bind()


def _checked(bundles: list[str], settings: ServeSettings) -> dict[str, str]:
    """The digest of each bundle, by name. BadInput names all that a replica would refuse, but for what depends on its machine."""
    faults = Faults()
    opened = [bundle for place in bundles if (bundle := faults.check(partial(open_bundle, place)))]
    for bundle in opened:
        faults.check(partial(bundle.variant, settings.variant))
    aliases = faults.check(partial(aliases_of, settings.alias)) or {}
    faults.check(partial(read_keys, settings.keys))
    if len(opened) == len(bundles):
        faults.check(partial(check_names, [bundle.manifest.name for bundle in opened], aliases))
    faults.raise_if_any()
    return {bundle.manifest.name: bundle.manifest.digest for bundle in opened}


class Replica:
    """What a replica is beside its app."""

    app: Starlette  # set by Ray Serve

    async def check_health(self) -> None:
        """Raises Unavailable where /readyz answers 503. Ray Serve replaces a replica in which that happens three times in a row."""
        service: Service = self.app.state.service
        if reason := service.unready():
            raise reason


def app_builder(
    bundles: list[str], settings: ServeSettings, digests: dict[str, str], *, needs_keys: bool
) -> Callable[[], Starlette]:
    """What makes the app of a replica, there."""

    def build() -> Starlette:
        if needs_keys and KEYS_VARIABLE not in os.environ:
            raise BadInput(
                f"{KEYS_VARIABLE} is set where the application was started, and not in this replica; set it before `ray start` on "
                "every machine, or give keys=FILE"
            )
        settle_threads(settings.threads or 1)
        access = Access(read_keys(settings.keys), Origins(settings.allow_origin), open_metrics=settings.open_metrics)
        # A replica that replaces another serves what the others do, though a URL may have a new bundle by now.
        app = create_app(bundles, settings, access, known=digests)
        service: Service = app.state.service
        found = {name: model.manifest.digest for name, model in service.models.items()}
        if changed := [name for name in digests if found.get(name) != digests[name]]:
            raise BundleError(
                f"the bundle of {', '.join(map(repr, changed))} is not the one with which the application was started; put that one back, "
                "or deploy the application again"
            )
        lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def until_warm(app: Starlette) -> AsyncIterator[None]:
            async with lifespan(app):
                await service.warm()  # until then Ray Serve sends nothing to this replica
                yield

        app.router.lifespan_context = until_warm
        app.add_middleware(WithoutPrefix)
        return app

    return build


class WithoutPrefix:
    """ASGI middleware that takes the application's route prefix from the path, so that the app finds its own paths."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        prefix = scope.get("root_path", "")
        if prefix and f"{scope['path']}/".startswith(f"{prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "root_path": ""}
        await self.app(scope, receive, send)


def _settings(given: Mapping[str, Any]) -> tuple[RayServing, ServeSettings]:
    """The settings of both kinds. BadInput names all that are wrong."""
    scale = {option.name: option for option in options_of(RayServing)}
    served = {option.name: option for option in options_of(ServeSettings) if option.name not in OF_THE_SERVER}
    known, faults = {**scale, **served}, Faults()
    for name in given:
        if name in OF_THE_SERVER:
            faults.messages.append(
                f"{name} is of `stillroom serve`; Ray Serve has settings of its own for its connections and its log"
            )
        elif name not in known:
            faults.messages.append(unknown_setting(name, known))
    values = {name: _from_text(known[name], value) for name, value in given.items() if name in known}
    own = faults.check(partial(make, RayServing, {name: value for name, value in values.items() if name in scale}))
    settings = faults.check(
        partial(make, ServeSettings, {name: value for name, value in values.items() if name in served})
    )
    faults.raise_if_any()
    assert own is not None
    assert settings is not None
    return own, settings


def _from_text(option: Option, value: Any) -> Any:
    """`value` in the type of the option, if it is text that can be read as that; otherwise as it is, for the check to name it."""
    if not isinstance(value, str):
        return value
    if option.several:
        return value.split(",")
    if option.kind is bool:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return option.kind(value)
    except ValueError:
        return value
