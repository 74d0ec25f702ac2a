"""Every setting of the server. The command line is made from these dataclasses, see `serve.options`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve.errors import BadInput
from serve.options import Settings, group, setting


@dataclass(frozen=True)
class Limits:
    """The most that one server accepts."""

    body_bytes: int = setting(1_000_000, help="Most bytes in one request's body; a larger one gets 413.", at_least=1)
    texts: int = setting(2048, help="Most texts in one request; more get 413.", at_least=1, flag="--request-texts")
    text_characters: int = setting(
        100_000,
        help="Most code points in one text; a longer one gets 413. A text longer than the model is read in windows.",
        at_least=1,
    )
    queued_texts: int = setting(
        4096,
        help="Most texts that wait for one model, and as many long ones; a request that does not fit gets 429.",
        at_least=1,
    )
    queue_s: float = setting(
        0.5,
        help="Longest expected wait for a process, in seconds, at the recent speed; a request that would wait longer, behind others or "
        "behind long texts that are being answered, gets 429.",
        at_least=0,
    )
    batch_tokens: int = setting(
        512,
        help="Most tokens in one batch. A larger batch gives up to 2 % more texts a second, and the next request waits longer.",
        at_least=1,
    )
    max_wait_ms: float = setting(
        20.0,
        help="Longest time, in milliseconds, that a waiting text may be passed over for later texts that fit a batch's length better.",
        at_least=0,
    )
    answer_bytes: int = setting(
        33_554_432,
        help="Most bytes in one answer, estimated before the work; a request for more gets 422, which says what makes it smaller.",
        at_least=1,
    )
    answer_s: float = setting(30.0, help="Seconds in which a request is answered; otherwise it gets 504.", above=0)


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may occupy."""

    connections: int = setting(
        1024,
        help="Most open connections. For one more, an idle one is closed, or else the new one gets 503.",
        at_least=1,
    )
    head_s: float = setting(
        10.0,
        help="Seconds in which a request's head (and before it the TLS handshake) must arrive; otherwise it gets 408.",
        above=0,
    )
    body_s: float = setting(30.0, help="Seconds in which a request's body must arrive; otherwise it gets 408.", above=0)
    write_s: float = setting(
        30.0, help="Longest time, in seconds, in which a client reads none of its answer; then it is cut off.", above=0
    )
    least_bytes_per_s: int = setting(
        1000,
        help="Lowest average rate, in bytes a second, at which a client may send a body or read an answer.",
        at_least=1,
    )
    keep_alive_s: float = setting(75.0, help="Seconds that a connection may be idle between requests.", above=0)
    head_bytes: int = setting(32_768, help="Most bytes in the head of one request; a larger one gets 431.", at_least=1)
    headers: int = setting(100, help="Most headers in one request; one with more gets 431.", at_least=1)
    bodies_bytes: int = setting(
        67_108_864,
        help="Most bytes of request bodies in memory, of all connections; a request that does not fit gets 429.",
        at_least=1,
    )
    unsent_bytes: int = setting(
        67_108_864,
        help="Most bytes of answers that clients have not read, over all connections. Above it a connection that holds more than an equal "
        "part gets 429, and clients too slow for --write-s are cut off, the one with most first; above twice as many, other clients too.",
        at_least=1,
    )


@dataclass(frozen=True)
class ServeSettings(Settings):
    """The settings of one server. BadInput names every one that is out of range."""

    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8000, help="Port to listen on; 0 takes a free one.", at_least=0, at_most=65_535)
    variant: str | None = setting(
        None, help="Exported file that answers.", choices=("fp32", "fp16", "int8"), shown="the bundle's default"
    )
    device: Literal["cpu", "cuda"] = setting(
        "cpu", help="Where the model runs; cuda is an NVIDIA GPU and needs onnxruntime-gpu."
    )
    threads: int | None = setting(None, help="Threads of one model call, in each process.", at_least=1, shown="1")
    processes: int | None = setting(
        None,
        help="Processes of the server, each of which reads requests and runs every model.",
        at_least=1,
        shown="as many as fit the cores; 1 on cuda",
    )
    memo_mib: float = setting(
        0.0,
        help="MiB of answers, over all processes, that are kept and given again, byte for byte, to the same text, options and API key.",
        at_least=0,
    )
    fronts: int | None = setting(None, help="Ignored, and gone in the next release: every process reads.", at_least=1)
    alias: tuple[str, ...] = setting((), help="Another name for a model: OTHER=NAME, such as prod=support.")
    keys: Path | None = setting(
        None,
        help="File of API keys, one a line: `name:key` or `name sha256:HEX`. The environment variable STILLROOM_KEYS adds more.",
    )
    open_metrics: bool = setting(False, help="Answer /metrics without a key.")
    allow_origin: tuple[str, ...] = setting(
        (), help="Origin whose pages may call this server from a browser, such as https://app.example."
    )
    allow_host: tuple[str, ...] = setting(
        (),
        help="Name that a request's Host may have beside localhost, addresses and --host, such as ner.example; * for any.",
        shown="any; on the loopback without keys none",
    )
    log_format: Literal["json", "text"] | None = setting(
        None, help="One JSON object a line, or text for people.", shown="text where stderr is a terminal"
    )
    access_log: bool = setting(True, help="Log each request.")
    log_texts: bool = setting(False, help="Log the texts of each request.")
    tls_cert: Path | None = setting(None, help="File with the certificate chain, in PEM; the server then uses HTTPS.")
    tls_key: Path | None = setting(
        None,
        needs="tls_cert",
        help="File with the private key, in PEM, if --tls-cert holds none. STILLROOM_TLS_PASSWORD is the password of an encrypted key.",
    )
    tls_client_ca: Path | None = setting(
        None,
        help="File with the certificate authority, in PEM, that must have signed each client's certificate.",
        needs="tls_cert",
    )
    linger_s: float = setting(
        0.5, help="Seconds after SIGTERM in which requests are still accepted, while /readyz answers 503.", at_least=0
    )
    drain_s: float = setting(30.0, help="Seconds that requests under way have after --linger-s to end.", above=0)
    limits: Limits = group(Limits, panel="What one request may ask")
    connections: ConnectionLimits = group(ConnectionLimits, panel="What clients may occupy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.connections.bodies_bytes < self.limits.body_bytes:
            raise BadInput(
                f"--bodies-bytes is {self.connections.bodies_bytes:,}; give at least the {self.limits.body_bytes:,} bytes of --body-bytes"
            )
