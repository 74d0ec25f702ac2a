"""API keys, their limits, and how much of them is used: counted by one process, or shared by all processes."""

import hashlib
import hmac
import logging
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from serve.errors import BadInput, RateLimited, Unauthorized

log = logging.getLogger("serve")

KEYS_VARIABLE = "STILLROOM_KEYS"
# 16 characters of at least 4 random bits each cannot be guessed; a short key can.
LEAST_CHARACTERS = 16
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")
RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h)")
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
# Weight of the newest request in the running estimate of how long one takes.
SMOOTHING = 0.1
# Keys with limits that the processes of one server can count, those that were withdrawn included.
MOST_KEYS = 4096


class Counts(NamedTuple):
    """Counts of one key, to be changed while `locked`."""

    bucket: "memoryview[float]"
    """Requests that may begin, and 1 + the time in seconds of that count; 0 before the first."""
    running: "memoryview[float]"
    """Requests under way, of each process."""
    process: int
    locked: AbstractContextManager[Any]


# Makes the counts of a key from a digest of it and its limits.
MakeCounts = Callable[[bytes], Counts]


def own_counts(digest: bytes) -> Counts:
    """New counts, of one process."""
    numbers = memoryview(bytearray(24)).cast("d")
    return Counts(numbers[:2], numbers[2:], 0, nullcontext())


class SharedCounts:
    """Counts in memory that all processes forked from this one share."""

    def __init__(self, processes: int) -> None:
        self._width = 2 + processes
        self._digests = mmap.mmap(-1, 32 * MOST_KEYS)
        self._numbers = memoryview(mmap.mmap(-1, 8 * self._width * MOST_KEYS)).cast("d")
        self._locked = FileLock()

    def of_process(self, process: int) -> Callable[[bytes], Counts]:
        """Makes the counts of a key for the process `process`, to be called there: it starts without requests under way.

        BadInput if there is no room for another key.
        """
        for slot in range(MOST_KEYS):
            self._numbers[slot * self._width + 2 + process] = 0.0
        return partial(self._counts, process)

    def _counts(self, process: int, digest: bytes) -> Counts:
        first = int.from_bytes(digest[:4])
        with self._locked:
            for slot in ((first + tried) % MOST_KEYS for tried in range(MOST_KEYS)):
                known = self._digests[32 * slot : 32 * slot + 32]
                if known == digest or not any(known):
                    self._digests[32 * slot : 32 * slot + 32] = digest
                    numbers = self._numbers[slot * self._width : (slot + 1) * self._width]
                    return Counts(numbers[:2], numbers[2:], process, self._locked)
        raise BadInput(
            f"this server has had {MOST_KEYS:,} keys with limits since it started; restart it, or give --processes 1"
        )


class FileLock:
    """A lock between processes that were forked from the one which made it. The system releases it if its owner dies."""

    def __init__(self) -> None:
        # No file of the file system, where there is another: that may be read-only.
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("stillroom-keys")
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())

    def __enter__(self) -> None:
        import fcntl  # not on Windows, where there is one process

        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        import fcntl

        fcntl.lockf(self._file, fcntl.LOCK_UN)


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key; None means no limit."""

    rate_per_s: float | None = None
    """Average requests a second. The requests of one second may come at once."""
    concurrency: int | None = None
    """Requests under way at the same time."""


class Key:
    """One client's key: its name, the SHA-256 of the secret (never the secret), and how much of its limits is used."""

    def __init__(self, name: str, digest: bytes, limits: KeyLimits, counts: MakeCounts = own_counts) -> None:
        self.name = name
        self.digest = digest
        self.limits = limits
        self._limited = limits != KeyLimits()
        counts = counts if self._limited else own_counts
        self._counts = counts(hashlib.sha256(repr((name, digest, limits)).encode()).digest())
        self._burst = max(1.0, limits.rate_per_s or 0.0)
        self._request_s = 0.0

    @property
    def running(self) -> int:
        """Requests under way with this key, if it has limits."""
        return int(sum(self._counts.running))

    def enter(self, now_s: float) -> None:
        """Counts a request that begins. RateLimited, with `retry_after_s`, if it is over the key's limits."""
        if not self._limited:
            return
        bucket, running, process, locked = self._counts
        most, rate_per_s = self.limits.concurrency, self.limits.rate_per_s
        with locked:
            if most is not None and self.running >= most:
                raise RateLimited(
                    f"key {self.name!r} has all of its {most:,} concurrent requests under way; wait for an answer",
                    retry_after_s=self._request_s / most,
                )
            if rate_per_s is not None:
                tokens, counted = bucket  # 0 at first; otherwise 1 + when the tokens were counted
                # Another process may have counted a request that began a little later.
                tokens = (
                    min(self._burst, tokens + max(0.0, 1 + now_s - counted) * rate_per_s) if counted else self._burst
                )
                bucket[0], bucket[1] = tokens, max(1 + now_s, counted)
                if tokens < 1:
                    wait_s = (1 - tokens) / rate_per_s
                    raise RateLimited(
                        f"key {self.name!r} may send {rate_per_s:g} requests/s; try again in {wait_s:.1f} s",
                        retry_after_s=wait_s,
                    )
                bucket[0] = tokens - 1
            running[process] += 1

    def leave(self, took_s: float) -> None:
        """Counts a request that ended."""
        if self._limited:
            self._counts.running[self._counts.process] -= 1  # no other process writes this number
        self._request_s += SMOOTHING * (took_s - self._request_s) if self._request_s else took_s


class Keyring:
    """The keys of one server. Without keys, every client may ask."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = tuple(keys)

    def key_of(self, headers: Mapping[bytes, bytes]) -> Key:
        """The key of a request, sent as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. Unauthorized without a known key.

        All keys are compared, each in constant time, so that the time taken reveals nothing about them.
        """
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        given = given.strip()
        if not given:
            raise Unauthorized("this server needs a key; send it as Authorization: Bearer KEY, or as X-Api-Key: KEY")
        digest = hashlib.sha256(given).digest()
        match = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                match = key
        if match is None:
            raise Unauthorized("the key that was sent is not one of this server's; ask its operator for a key")
        return match

    def after(self, before: "Keyring") -> "Keyring":
        """These keys. A key that is also in `before` keeps its count of used limits."""
        known = {(key.name, key.digest, key.limits): key for key in before.keys}
        return Keyring([known.get((key.name, key.digest, key.limits), key) for key in self.keys])


def read_keys(
    file: Path | None, environment: Mapping[str, str] = os.environ, counts: MakeCounts = own_counts
) -> Keyring:
    """The keys of `file` and of STILLROOM_KEYS. `counts` makes a key's counts. Errors as of `key_texts` and `keyring_of`."""
    return keyring_of(key_texts(file, environment), counts)


def keyring_of(texts: Sequence[tuple[str, str]], counts: MakeCounts = own_counts) -> Keyring:
    """The keys of `texts`, each with the name of its source.

    BadInput names every line that cannot be read, and never quotes one. It is also raised for a source without a key, since a server
    that was meant to need keys must not start without them.
    """
    keys, wrong = [], []
    for source, text in texts:
        # A key may hold a #. A comment starts at the beginning of a line or after whitespace.
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
        if not any(lines):
            raise BadInput(
                f"{source} has no key; give one a line, as name:key, or leave it out to serve clients without a key"
            )
        for number, line in enumerate(lines, 1):
            try:
                keys += [_key(line, counts)] if line else []
            except BadInput as error:
                wrong.append(f"{source}, line {number}: {error.message}")
    for attribute, said in (("name", "the name"), ("digest", "the key")):
        values = [getattr(key, attribute) for key in keys]
        wrong += [
            f"{said} of {key.name!r} is given more than once"
            for key in keys
            if values.count(getattr(key, attribute)) > 1
        ]
    if wrong:
        raise BadInput("; ".join(dict.fromkeys(wrong)))
    return Keyring(keys)


def key_texts(file: Path | None, environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """The names and the texts of the sources of keys: `file`, and STILLROOM_KEYS, which has the same lines, also separated by commas.

    BadInput if the file cannot be read.
    """
    texts = []
    if file is not None:
        try:
            text, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"the keys in {file} cannot be read ({error}); give a UTF-8 text file of keys") from error
        if mode & stat.S_IROTH:
            log.warning("every user of this machine can read the keys in %s; run: chmod 600 %s", file, file)
        texts.append((str(file), text))
    if KEYS_VARIABLE in environment:
        texts.append((KEYS_VARIABLE, environment[KEYS_VARIABLE].replace(",", "\n")))
    return texts


def _key(line: str, counts: MakeCounts) -> Key:
    """The key of one line. The message of a BadInput never holds the key."""
    first, *rest = line.split()
    if rest and (hexadecimal := DIGEST.fullmatch(rest[0])):
        name, digest = first, bytes.fromhex(hexadecimal[1])
        rest = rest[1:]
    else:
        name, colon, secret = first.partition(":")
        if not colon or secret.startswith("sha256:"):
            raise BadInput("cannot be read; give `name:key`, or `name sha256:HEX` with 64 hexadecimal digits")
        if len(secret) < LEAST_CHARACTERS or not secret.isascii():
            raise BadInput(
                f"the key has {len(secret)} characters; give at least {LEAST_CHARACTERS}, all ASCII, such as from: openssl rand -hex 16"
            )
        digest = hashlib.sha256(secret.encode()).digest()
    if not NAME.fullmatch(name):
        raise BadInput("the name is not valid; give 1 to 64 of ASCII letters, digits, `.`, `_` and `-`")
    rate_per_s, concurrency = None, None
    for word in rest:
        what, _, amount = word.partition("=")
        if what == "rate" and (rate := RATE.fullmatch(amount)) and float(rate[1]) > 0:
            rate_per_s = float(rate[1]) / SECONDS[rate[2]]
        elif what == "concurrency" and amount.isascii() and amount.isdigit() and int(amount) > 0:
            concurrency = int(amount)
        else:
            raise BadInput("after the key give only limits: rate=NUMBER/s (or /min, /h) and concurrency=NUMBER")
    return Key(name, digest, KeyLimits(rate_per_s, concurrency), counts)
