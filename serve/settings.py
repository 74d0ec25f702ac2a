"""How bundles are served: every setting of the server in one place. A command line is made from it, see `serve.options`."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve.errors import BadInput
from serve.options import Option, check, described, group, make, options_of, setting


@dataclass(frozen=True)
class Limits:
    """What one server accepts at most."""

    body_bytes: int = setting(1_000_000, help="Bytes of one request's body.", at_least=1)
    texts: int = setting(1024, help="Texts in one request.", at_least=1, flag="--request-texts")
    text_characters: int = setting(
        100_000, help="Code points of one text. What is longer than the model is read in windows.", at_least=1
    )
    queued_texts: int = setting(
        4096, help="Texts that wait for one model; beyond it a request is answered 429.", at_least=1
    )
    queue_s: float = setting(
        0.5,
        help="Longest wait in seconds that is expected at the recent speed; a request that would wait longer is answered 429.",
        at_least=0,
    )
    batch_tokens: int = setting(
        512,
        help="Tokens that a process is given at once. More at once is up to 2 % more a second, and a longer wait for the next request.",
        at_least=1,
    )
    max_wait_ms: float = setting(
        20.0,
        help="Milliseconds for which a text may be passed over, in a queue, for later ones that fit a batch's lengths better.",
        at_least=0,
    )
    answer_s: float = setting(30.0, help="Seconds within which a request is answered, or refused with 504.", above=0)


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may occupy."""

    connections: int = setting(
        1024, help="Connections at once; for one more an idle one is closed, or it is refused with 503.", at_least=1
    )
    head_s: float = setting(
        10.0,
        help="Seconds in which a request's head (and the TLS handshake) must be there, or it is answered 408.",
        above=0,
    )
    body_s: float = setting(
        30.0, help="Seconds in which a request's body must be there, or it is answered 408.", above=0
    )
    write_s: float = setting(
        30.0, help="Seconds in which a client must take something of its answer, or it is cut off.", above=0
    )
    least_bytes_per_s: int = setting(
        1000,
        help="Bytes a second, on the average, that a client must at least send of a body or take of an answer.",
        at_least=1,
    )
    keep_alive_s: float = setting(75.0, help="Seconds that a connection may be idle between requests.", above=0)
    head_bytes: int = setting(32_768, help="Bytes of one request's head; beyond it is answered 431.", at_least=1)
    headers: int = setting(100, help="Headers of one request; beyond it is answered 431.", at_least=1)
    bodies_bytes: int = setting(
        67_108_864,
        help="Bytes of request bodies that are held at once, of all connections; beyond it a request is answered 429.",
        at_least=1,
    )
    unsent_bytes: int = setting(
        67_108_864,
        help="Bytes of answers that clients have not taken, of all connections; beyond it the worst of them is cut off.",
        at_least=1,
    )


@dataclass(frozen=True)
class ServeSettings:
    """The settings of one server. BadInput names every one that cannot be."""

    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8000, help="Port to listen on; 0 takes a free one.", at_least=0, at_most=65_535)
    variant: str | None = setting(
        None, help="Exported file that answers.", choices=("fp32", "fp16", "int8"), shown="the bundle's default"
    )
    threads: int | None = setting(None, help="Threads of one model call, in each process.", at_least=1, shown="1")
    processes: int | None = setting(
        None, help="Processes that compute for each model.", at_least=1, shown="as many as fit the cores"
    )
    alias: tuple[str, ...] = setting((), help="Another name for a model, OTHER=NAME, such as prod=support.")
    keys: Path | None = setting(
        None,
        help="File of API keys, one a line: `name:key` or `name sha256:HEX`. STILLROOM_KEYS in the environment holds more.",
    )
    open_metrics: bool = setting(False, help="Answer /metrics without a key, too.")
    allow_origin: tuple[str, ...] = setting(
        (), help="Origin whose pages may call this server from a browser, such as https://app.example."
    )
    log_format: Literal["json", "text"] | None = setting(
        None, help="One JSON object a line, or text for people.", shown="text where stderr is a terminal"
    )
    access_log: bool = setting(True, help="Log each request.")
    log_texts: bool = setting(False, help="Log the texts of each request, too.")
    tls_cert: Path | None = setting(None, help="Certificate chain, PEM: serve HTTPS.")
    tls_key: Path | None = setting(
        None,
        help="Its private key, PEM, where the chain's file has none. STILLROOM_TLS_PASSWORD in the environment decrypts it.",
    )
    tls_client_ca: Path | None = setting(
        None, help="Certificate authority, PEM, that must have signed each client's certificate."
    )
    linger_s: float = setting(
        0.5, help="Seconds after SIGTERM in which requests are still taken, while /readyz already says no.", at_least=0
    )
    drain_s: float = setting(30.0, help="Seconds that the requests under way then get.", above=0)
    limits: Limits = group(Limits, panel="What one request may ask")
    connections: ConnectionLimits = group(ConnectionLimits, panel="What clients may occupy")

    def __post_init__(self) -> None:
        check(self)
        if self.connections.bodies_bytes < self.limits.body_bytes:
            raise BadInput(
                f"--bodies-bytes is {self.connections.bodies_bytes:,}; it must hold one body of --body-bytes {self.limits.body_bytes:,}"
            )


def settings_of(given: Mapping[str, Any]) -> ServeSettings:
    """The settings of what a command line was given, by name; None and what is missing stay as they are by default."""
    known = {option.name for option in options_of(ServeSettings)}
    return make(ServeSettings, {name: value for name, value in given.items() if name in known})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every setting as an option of `parser`. Values stay text: `settings_of` reads them."""
    for option in options_of(ServeSettings):
        parser.add_argument(option.flag, help=_help(option), default=None, **_argument(option))


def _argument(option: Option) -> dict[str, Any]:
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if option.several:
        return {"action": "append", "metavar": option.kind.__name__.upper()}
    return {
        "type": option.kind,
        "choices": option.choices or None,
        "metavar": None if option.choices else option.kind.__name__.upper(),
    }


def _help(option: Option) -> str:
    # argparse reads a percent sign as a place to fill.
    shown = f" [{option.default_shown}]" if option.default_shown else ""
    return (option.help if option.choices else described(option)).replace("%", "%%") + shown
