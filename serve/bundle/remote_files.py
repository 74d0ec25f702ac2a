"""Reads, lists and writes the files of a folder behind a URL, again after failures that may pass. No message holds a secret of the URL.

https, http and hf are read by the standard library, so the base install has all that they need: fsspec reads https by aiohttp, and
hf by the Hub's library, which the base install leaves out. fsspec reads the others, by the library that `LIBRARIES` names.
"""

import base64
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.message import Message
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from serve.errors import BadInput, BundleError, retry_after_s

# The library by which fsspec reads each scheme, and how a user proves who they are.
LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "file": "fsspec", "memory": "fsspec"}
EXTRAS = ("s3", "gs", "az")  # of pyproject.toml; each brings fsspec
CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "set HF_TOKEN, or run `hf auth login`",
    "https": "give a URL that may be read, such as https://USER:PASSWORD@HOST/...",
}
CREDENTIALS["http"] = CREDENTIALS["https"]
SCHEMES = (*LIBRARIES, "https", "http", "hf")

PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # before each further attempt; a server's Retry-After may make one longer
LONGEST_PAUSE_S = 30.0
TIMEOUT_S = 30.0  # without a byte
PIECE_BYTES = 1 << 20
PASSING = frozenset({408, 425, 429})  # statuses that may pass, beside those from 500
MISTAKES = (ValueError, TypeError, ImportError, NotADirectoryError, IsADirectoryError)  # of the URL, not of the network
HUB = "https://huggingface.co"
HUB_URL = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?")
SECRET = "..."  # noqa: S105 - what a message has in the place of one

T = TypeVar("T")


class Absent(BundleError):
    """There is no such file behind the URL."""


class Refused(BundleError):
    """The file may not be read; some stores also say so of a file that does not exist."""


class Unreachable(BundleError):
    """Whatever holds the files does not answer, after as many attempts as there are."""


class ReadFailed(Exception):
    """One attempt to read a file failed; the cause says why."""


def is_url(place: object) -> bool:
    """Whether `place` is a URL and not a path."""
    return isinstance(place, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", place) is not None


def scheme_of(url: str) -> str:
    """The scheme of `url`. BundleError where none can read it."""
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise BundleError(
            f"{shown(url)}: bundles are read from {', '.join(f'{each}://' for each in SCHEMES)} and folders; give one"
        )
    return scheme


def shown(place: Path | str) -> str:
    """`place` as messages and files show it: a URL without user, password, query and fragment."""
    if not is_url(place):
        return str(place)
    scheme, _, rest = str(place).partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


def pauses_s(url: str) -> tuple[float, ...]:
    """The pauses before further attempts at `url`. The libraries of s3, gs and az try again by themselves in each attempt."""
    return PAUSES_S[:1] if scheme_of(url) in EXTRAS else PAUSES_S


def read(url: str, name: str, most_bytes: int) -> bytes:
    """The content of the file `name` of the folder `url`.

    Raises:
        Absent: there is none.
        Refused: it may not be read.
        Unreachable: the server does not answer.
        BundleError: it has more than `most_bytes`.
    """

    def joined(pieces: Iterator[bytes]) -> bytes:
        content = bytearray()
        for piece in pieces:
            content += piece
            if len(content) > most_bytes:
                raise BundleError(f"{shown(url)}/{name} has more than {most_bytes:,} bytes; a bundle's has fewer")
        return bytes(content)

    return _retried(url, name, joined)


def copy(url: str, name: str, target: Path, most_bytes: int, advance: Callable[[int], None]) -> None:
    """Copies the file `name` of the folder `url` to `target`, and stops once it has more than `most_bytes`.

    `advance` is called with the bytes of this file that are there. Errors as in `read`, and OSError when `target` cannot be written.
    """

    def written(pieces: Iterator[bytes]) -> None:
        done = 0
        with target.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                done += len(piece)
                advance(done)
                if done > most_bytes:
                    raise BundleError(f"{shown(url)}/{name} has more than {most_bytes:,} bytes")

    _retried(url, name, written)


def store_of(url: str) -> tuple[Any, str]:
    """The file system of fsspec that reads `url`, and its name of the folder.

    Raises:
        BundleError: its library is not installed.
    """
    scheme = scheme_of(url)
    try:
        import fsspec

        store = fsspec.filesystem(scheme)  # not by the whole URL: fsspec would follow `::` in it to other places
    except ImportError:
        how = f"in a clone of stillroom, pip install '.[{scheme}]'" if scheme in EXTRAS else "pip install fsspec"
        raise BundleError(f"{shown(url)}: {scheme}:// needs {LIBRARIES[scheme]}; {how}") from None
    return store, str(store._strip_protocol(url)).rstrip("/")


def hub_repository(url: str) -> tuple[str, str]:
    """The repository and the revision of `hf://OWNER/NAME@REVISION`; the revision is empty for the main branch."""
    if not (match := HUB_URL.fullmatch(url)):
        raise BundleError(f"{shown(url)} is no repository of the Hub; give hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return match[1], match[2] or ""


def describe_error(url: str, error: BaseException) -> str:
    """`error` in a message: its type and its first line, without the secrets of `url`."""
    lines = str(getattr(error, "reason", "") or error).strip().splitlines()
    text = lines[0] if lines else "no reason given"
    parts = urlsplit(url)
    for secret in (parts.netloc.rpartition("@")[0], parts.password, parts.query):
        text = text.replace(secret, SECRET) if secret else text
    return f"{type(error).__name__}: {text}"


def definite(url: str, name: str, error: BaseException) -> BundleError | None:
    """The error for the user, or None where another attempt may end better."""
    if isinstance(error, BundleError):
        return error
    place, scheme = f"{shown(url)}/{name}", scheme_of(url)
    why, hint = describe_error(url, error), CREDENTIALS.get(scheme, "change its permissions")
    status = 0
    if isinstance(error, HTTPError):
        status, why = error.code, f"HTTP {error.code}"
        error.close()
    fault: BundleError | None = None
    if status in (404, 410) or isinstance(error, FileNotFoundError):
        fault = Absent(f"there is no {place}; give the URL of a bundle's folder, such as `stillroom push` fills")
    # The libraries of the stores have errors of their own for keys that are missing.
    elif status in (401, 403) or isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        fault = Refused(f"{place} may not be read ({why}), or does not exist; {hint}")
    elif isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
        fault = BundleError(
            f"{place}: the server's certificate is not trusted ({why}); SSL_CERT_FILE names a file of authorities"
        )
    elif 0 < status < 500 and status not in PASSING:
        fault = BundleError(f"{place} is answered with {why}; give the URL of a bundle's folder")
    elif isinstance(error, MISTAKES) or "Validation" in type(error).__name__:
        fault = BundleError(f"{place} cannot be read ({why}); check the URL, or {hint}")
    return fault


def tried(url: str, name: str, act: Callable[[], T], *, does: str = "", caught: type[Exception] = Exception) -> T:
    """What `act` gives, which is called again after a failure that may pass; `does` says what it does with the file `name` of `url`.

    Exceptions other than `caught` are not caught.

    Raises:
        BadInput: it failed for a reason that stays, or too often; without `does`, the errors of `read`.
    """
    pauses = pauses_s(url)
    for pause_s in (*pauses, None):
        try:
            return act()
        except caught as failed:
            error: BaseException = (failed.__cause__ if isinstance(failed, ReadFailed) else None) or failed
        fault = definite(url, name, error)
        if fault is None and pause_s is not None:
            asked_s = retry_after_s(error.headers.get("Retry-After")) if isinstance(error, HTTPError) else None
            time.sleep(max(pause_s, min(LONGEST_PAUSE_S, asked_s or 0.0)))
            continue
        place, why = f"{shown(url)}/{name}", describe_error(url, error)
        if not does:
            raise fault or Unreachable(f"{place} cannot be reached after {len(pauses) + 1} attempts ({why})") from None
        if fault is None:
            raise BadInput(f"{place} cannot be {does} ({why}); give the same command again") from None
        if isinstance(fault, Absent):
            raise BadInput(
                f"{shown(url)} cannot be {does}: there is no such bucket or container; create it first"
            ) from None
        raise BadInput(fault.message.replace(" be read", f" be {does}")) from None
    raise AssertionError("the last attempt returns or raises")


def _retried(url: str, name: str, use: Callable[[Iterator[bytes]], T]) -> T:
    """What `use` makes of the pieces of the file; it is called again after a failure that may pass."""
    if scheme_of(url) == "hf":
        hub_repository(url)  # a name that is none is told first
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise Unreachable(f"{shown(url)} was not asked for: HF_HUB_OFFLINE is set")
    return tried(url, name, lambda: use(_pieces(url, name)), caught=ReadFailed)


def _pieces(url: str, name: str) -> Iterator[bytes]:
    """The file in pieces, in one attempt. ReadFailed for every error of its source; errors of whoever takes the pieces are not caught."""
    try:
        with _opened(url, name) as source:
            while piece := source.read(PIECE_BYTES):
                yield piece
            # http.client ends a body that is shorter than its length without an error.
            if getattr(source, "length", None):
                raise ConnectionError("the connection ended before the file")
    except Exception as error:
        raise ReadFailed from error


def _opened(url: str, name: str) -> IO[bytes]:
    scheme = scheme_of(url)
    if scheme in LIBRARIES:
        store, folder = store_of(url)
        store.invalidate_cache()
        return store.open(f"{folder}/{name}", "rb")  # type: ignore[no-any-return]
    if scheme == "hf":
        repository, revision = hub_repository(url)
        endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
        token = _hub_token()
        authorization = f"Bearer {token}" if token else ""
        address = f"{endpoint}/{repository}/resolve/{quote(revision or 'main', safe='')}/{quote(name)}"
    else:
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        authorization = f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if at else ""
        # With the query of the folder's URL, which may be what signs it.
        address = urlunsplit((parts.scheme, host, f"{parts.path.rstrip('/')}/{quote(name)}", parts.query, ""))
    request = Request(address, headers={"User-Agent": "stillroom"})  # noqa: S310 - the scheme was checked
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    return build_opener(_Redirects).open(request, timeout=TIMEOUT_S)  # type: ignore[no-any-return]


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, but never from https to http, and keeps the key to the place that it is for."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> Request | None:
        old, target = urlsplit(req.full_url), urlsplit(newurl)
        if target.scheme != "https" and (target.scheme != "http" or old.scheme == "https"):
            fp.close()
            raise BundleError(
                f"{shown(req.full_url)} leads to {shown(newurl)}, which is not https; give the URL that it should be"
            )
        further = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        authorization = req.get_header("Authorization")
        if further and authorization and (old.scheme, old.netloc) == (target.scheme, target.netloc):
            further.add_unredirected_header("Authorization", authorization)
        return further


def _hub_token() -> str:
    """The token of the environment, or the one that `hf auth login` saved; empty without one."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    saved = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")))
    try:
        return saved.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def listed(store: Any, folder: str) -> dict[str, int]:
    """Sizes of the files in the folder and those below it, by their names in it."""
    try:
        files = store.find(folder, detail=True)
    except FileNotFoundError:
        return {}
    return {path.removeprefix(folder).lstrip("/"): int(each["size"]) for path, each in files.items()}


def removed(store: Any, path: str) -> None:
    """Removes a file, if it is there."""
    with suppress(FileNotFoundError):
        store.rm_file(path)
