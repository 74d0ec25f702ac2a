"""How bundles are served: every setting of the server in one place, and its fields as options of a command line.

Imports nothing heavy: `stillroom --help` reads it.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from serve.errors import BadInput


@dataclass(frozen=True)
class Limits:
    """What one server accepts at most."""

    body_bytes: int = 1_000_000
    """Bytes of one request's body."""
    texts: int = 1024
    """Texts in one request."""
    text_characters: int = 100_000
    """Code points of one text. What is longer than the model is read in windows."""
    queued_texts: int = 4096
    """Texts that wait for one model; beyond it a request is answered 429."""
    queue_s: float = 0.5
    """Seconds that a text would wait at the speed of late; beyond it a request is answered 429."""
    batch_tokens: int = 512
    """Tokens that a process is given at once. More at once is up to 2 % more a second, and a longer wait for whoever comes next."""
    max_wait_ms: float = 20.0
    """Milliseconds for which a text may be passed over, in a queue, for later ones that fit a batch's lengths better."""
    answer_s: float = 30.0
    """Seconds within which a request is answered, or refused with 504."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may occupy."""

    connections: int = 1024
    """Connections at once; for one more an idle one is closed, or it is refused with 503."""
    head_s: float = 10.0
    """Seconds in which a request's head (and the TLS handshake) must be there, or it is answered 408."""
    body_s: float = 30.0
    """Seconds in which a request's body must be there, or it is answered 408."""
    write_s: float = 30.0
    """Seconds in which a client must take something of its answer, or it is cut off."""
    least_bytes_per_s: int = 1000
    """Bytes a second, on the average, that a client must at least send of a body or take of an answer."""
    keep_alive_s: float = 75.0
    """Seconds that a connection may be idle between requests."""
    head_bytes: int = 32_768
    """Bytes of one request's head; beyond it is answered 431."""
    headers: int = 100
    """Headers of one request; beyond it is answered 431."""
    bodies_bytes: int = 67_108_864
    """Bytes of request bodies that are held at once, of all connections; beyond it a request is answered 429."""
    unsent_bytes: int = 67_108_864
    """Bytes of answers that clients have not taken, of all connections; beyond it the worst of them is cut off."""


@dataclass(frozen=True)
class ServeSettings:
    """The settings of one server. BadInput names every one that cannot be."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    variant: str | None = None
    """Precision to serve: fp32 or int8; the bundle's default unless given."""
    threads: int | None = None
    """Threads of one process of a model; 1 unless given."""
    processes: int | None = None
    """Processes that compute for each model; as many as fit the cores unless given."""
    alias: tuple[str, ...] = ()
    """Another name for a model, OTHER=NAME, such as prod=support; may be given again."""
    keys: Path | None = None
    """File of API keys, one a line: `name:key` or `name sha256:HEX`. STILLROOM_KEYS in the environment holds more."""
    open_metrics: bool = False
    """Answer /metrics without a key, too."""
    allow_origin: tuple[str, ...] = ()
    """Origin whose pages may call this server from a browser, such as https://app.example; may be given again."""
    log_format: Literal["json", "text"] | None = None
    """One JSON object a line, or text for people; text where stderr is a terminal unless given."""
    access_log: bool = True
    """Log each request."""
    log_texts: bool = False
    """Log the texts of each request, too."""
    tls_cert: Path | None = None
    """Certificate chain, PEM: serve HTTPS."""
    tls_key: Path | None = None
    """Its private key, PEM, where the chain's file has none. STILLROOM_TLS_PASSWORD in the environment decrypts it."""
    tls_client_ca: Path | None = None
    """Certificate authority, PEM, that must have signed each client's certificate."""
    linger_s: float = 0.5
    """Seconds after SIGTERM in which requests are still taken, while /readyz already says no."""
    drain_s: float = 30.0
    """Seconds that the requests under way then get."""
    limits: Limits = field(default_factory=Limits)
    """What one request may ask."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """What one client, and all together, may occupy."""

    def __post_init__(self) -> None:
        wrong = [
            f"{option.flag} is {value}; it must be {'0 or more' if option.name in ZERO_IS_FINE else 'above 0'}"
            for option in options()
            if isinstance(value := option.value(self), int | float)
            and (value < 0 or (value == 0 and not isinstance(value, bool) and option.name not in ZERO_IS_FINE))
        ]
        if self.connections.bodies_bytes < self.limits.body_bytes:
            wrong.append(
                f"--bodies-bytes is {self.connections.bodies_bytes:,}; it must hold one body of --body-bytes {self.limits.body_bytes:,}"
            )
        if wrong:
            raise BadInput("; ".join(wrong))


# The fields that hold settings of their own.
GROUPS: dict[str, type[Any]] = {"limits": Limits, "connections": ConnectionLimits}

ZERO_IS_FINE = {"port", "linger_s", "queue_s", "max_wait_ms"}


@dataclass(frozen=True)
class Option:
    """One setting as a command line offers it."""

    name: str
    group: str | None
    """The field of `ServeSettings` that holds it, where that is not `ServeSettings` itself."""
    kind: type
    """Of one value: int, float, str, bool or Path."""
    choices: tuple[str, ...]
    several: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """`--name`."""
        return "--" + self.name.replace("_", "-")

    def value(self, settings: ServeSettings) -> Any:
        """What `settings` says of it."""
        return getattr(getattr(settings, self.group) if self.group else settings, self.name)


def options() -> Iterator[Option]:
    """Every setting, those of a group after the others."""
    for each in fields(ServeSettings):
        if each.name not in GROUPS:
            yield _option(ServeSettings, each, None)
    for group, kind in GROUPS.items():
        yield from (_option(kind, each, group) for each in fields(kind))


def settings_of(given: Mapping[str, Any]) -> ServeSettings:
    """The settings of what a command line was given, by name; None and what is missing stay as they are by default."""
    own: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for option in options():
        value = given.get(option.name)
        if value is None or (option.several and not value):
            continue
        into = groups.setdefault(option.group, {}) if option.group else own
        into[option.name] = tuple(value) if option.several else value
    nested = {name: GROUPS[name](**values) for name, values in groups.items()}
    return ServeSettings(**own, **nested)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every setting as an option of `parser`."""
    for option in options():
        # argparse reads a percent sign as a place to fill.
        help_text = option.help.replace("%", "%%") + ("" if option.default in (None, ()) else f" [{option.default}]")
        if option.kind is bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            parser.add_argument(
                option.flag,
                type=option.kind,
                choices=option.choices or None,
                action="append" if option.several else "store",
                help=help_text,
                metavar=None if option.choices else option.kind.__name__.upper(),
            )


def _option(holder: type, each: Field[Any], group: str | None) -> Option:
    kind, choices, several = get_type_hints(holder)[each.name], (), False
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    elif get_origin(kind) is tuple:
        kind, several = get_args(kind)[0], True
    default = each.default if each.default is not MISSING else None
    return Option(each.name, group, kind, choices, several, default, _documented(holder)[each.name])


def _documented(holder: type) -> dict[str, str]:
    """The line of doc that stands under each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(holder))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[before.target.id] = inspect.cleandoc(str(after.value.value))
    return docs
