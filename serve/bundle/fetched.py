"""Bundles behind URLs: fetched once into a cache, by digest, and verified before anything opens them.

The cache is `~/.cache/stillroom`, or the folder that STILLROOM_CACHE names. `bundles/DIGEST` is a whole bundle: it was written beside,
verified, synced to the disk and renamed. `urls/` remembers the last digest of each URL, for when the URL cannot be reached.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from serve.bundle.manifest import (
    CARD,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Bundle,
    Manifest,
    canonical_json,
    parse_manifest,
    read_bundle,
)
from serve.bundle.remote_files import Unreachable, copy, read, shown
from serve.errors import BundleError
from serve.files import locked, no_room, replacing, replacing_folder

log = logging.getLogger("serve")

CACHE_VARIABLE = "STILLROOM_CACHE"
PRIVATE = 0o700  # the mode of a folder that its user alone may read
# Parameters of a query that change each time that a URL is signed. Others, such as a version, may name another bundle.
OF_SIGNATURES = re.compile(
    "(x-(amz|goog|oss)-.*|signature|sig|expires|se|st|skt|ske|policy|key-pair-id|awsaccesskeyid|googleaccessid|(access_)?token)",
    re.I,
)
DIGEST = re.compile(r"[0-9a-f]{64}")
FIRST_NEWS_S, NEWS_S = 2.0, 15.0  # when the log says how far a download is

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and those of the whole bundle."""


def open_remote(
    url: str, progress: Progress | None = None, *, check: Callable[[Manifest, str], None], known: str = ""
) -> Bundle:
    """The bundle at `url`, downloaded now or before, with every file checked.

    If `url` cannot be reached, its last bundle is taken from the cache, with a warning. The URL is not asked at all if the
    cache has the bundle with the digest `known`: that one is meant. `check` is called with a manifest and its place before anything of the
    bundle is fetched.

    Raises:
        BundleError: there is no bundle, it may not be read, it differs from its manifest, or it cannot be written to the cache.
    """
    if known and (known_bundle := _cached(known)):
        return known_bundle
    last = _remembered(url)
    try:
        manifest, content = remote_manifest(url)
        check(manifest, url)
        try:
            bundle = _cached(manifest.digest) or _download(url, manifest, content, progress or _logged(url))
        except Unreachable:
            raise
        except BundleError:
            # Perhaps the bundle was replaced between the reading of its manifest and that of its files.
            again, content = remote_manifest(url)
            if again.digest == manifest.digest:
                raise
            check(again, url)
            bundle = _cached(again.digest) or _download(url, again, content, progress or _logged(url))
    except Unreachable as fault:
        if not last:
            raise Unreachable(
                f"{fault.message}, and the cache {cache_folder()} has no bundle of it; check the network"
            ) from None
        kept_bundle = _cached(last)
        if kept_bundle is None:
            raise Unreachable(
                f"{fault.message}, and its bundle in the cache, {_folder_of(last)}, is missing or damaged; check the network"
            ) from None
        log.warning("%s; its last bundle, %s, is taken from the cache", fault.message, last[:12])
        return kept_bundle
    if bundle.manifest.digest != last:
        memory = _memory_of(url)
        with suppress(OSError):  # a cache that may only be read serves as well
            make_private(memory.parent)
            with replacing(memory) as file:
                file.write_bytes(canonical_json({"url": shown(url), "digest": bundle.manifest.digest}))
    return bundle


def remote_manifest(url: str) -> tuple[Manifest, bytes]:
    """The checked manifest at `url`, and its bytes. Errors as in `serve.bundle.remote_files.read`."""
    content = read(url, MANIFEST, MAX_MANIFEST_BYTES)
    return parse_manifest(content, f"{shown(url)}/{MANIFEST}"), content


def cache_folder() -> Path:
    """Where bundles of URLs are kept."""
    return Path(os.path.expanduser(os.environ.get(CACHE_VARIABLE) or "~/.cache/stillroom"))


def make_private(folder: Path) -> None:
    """Makes a folder of the cache, and the cache, which no other user may read. Folders that are there stay as they are."""
    for each in (cache_folder(), folder):
        each.mkdir(PRIVATE, parents=True, exist_ok=True)


def _folder_of(digest: str) -> Path:
    return cache_folder() / "bundles" / digest


def _cached(digest: str) -> Bundle | None:
    """The bundle of that digest in the cache, verified; None if there is none, or a damaged one."""
    if not _folder_of(digest).is_dir():
        return None
    try:
        bundle = read_bundle(_folder_of(digest))
    except (BundleError, OSError):
        return None
    return bundle if bundle.manifest.digest == digest else None


def _download(url: str, manifest: Manifest, content: bytes, progress: Progress) -> Bundle:
    whole_bytes = sum(file.bytes for file in manifest.files.values())

    def fetch(partial: Path) -> Bundle:
        before = 0
        for name, file in sorted(manifest.files.items()):
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # A model card may be edited where it is, as on the Hub. The names were checked: none leads out of the folder.
            most = max(file.bytes, MAX_MANIFEST_BYTES) if name == CARD else file.bytes
            copy(url, name, target, most, lambda done, before=before: progress(before + done, whole_bytes))  # type: ignore[misc]
            before += file.bytes
        (partial / MANIFEST).write_bytes(content)
        try:
            return read_bundle(partial)
        except BundleError as fault:
            why = fault.message.replace(str(partial), shown(url))
            raise BundleError(f"{why}, or upload it again: `stillroom push BUNDLE URL --replace`") from None

    return kept(manifest.digest, fetch, shown(url), whole_bytes)


def kept(digest: str, fetch: Callable[[Path], Bundle], source: str, whole_bytes: int) -> Bundle:
    """The bundle `digest` of the cache. If it is not there, `fetch` writes it to the new folder that it gets, and opens it.

    Raises:
        BundleError: it cannot be written to the cache; or what `fetch` raises. `source` and `whole_bytes` are for the message.
    """
    folder = _folder_of(digest)

    def wait() -> None:
        log.info("another process fetches %s; waiting for it", digest[:12])

    try:
        make_private(folder.parent)
        with locked(folder.with_name(f".{digest}.lock"), waiting=wait):
            if bundle := _cached(digest):  # another process has fetched it meanwhile
                return bundle
            with replacing_folder(folder, alone=True, synced=True) as partial:
                bundle = fetch(partial)
                for each in (partial, *partial.rglob("*/")):
                    each.chmod(PRIVATE)
                if os.path.lexists(folder):
                    log.warning("the bundle %s in the cache is damaged; it was fetched again", folder)
    except OSError as error:
        what = f"there is no room for its {whole_bytes:,} bytes" if no_room(error) else "it cannot be written"
        remedy = "make room, or set" if no_room(error) else "set"
        raise BundleError(
            f"{source} was not fetched into the cache {cache_folder()}: {what} ({error.strerror or error}); "
            f"{remedy} {CACHE_VARIABLE} to another folder"
        ) from None
    return replace(bundle, path=folder)


def _memory_of(url: str) -> Path:
    # Without user, password and signature, so that no secret gets onto the disk, and a new signature finds the old bundle.
    query = parse_qsl(url.partition("#")[0].partition("?")[2], keep_blank_values=True)
    kept_query = urlencode([(name, value) for name, value in query if not OF_SIGNATURES.fullmatch(name)])
    name = f"{shown(url)}?{kept_query}" if kept_query else shown(url)
    return cache_folder() / "urls" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"


def _remembered(url: str) -> str:
    """The digest of the last bundle of `url`; empty if none is known."""
    try:
        digest = json.loads(_memory_of(url).read_bytes())["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return digest if isinstance(digest, str) and DIGEST.fullmatch(digest) else ""


def _logged(url: str) -> Progress:
    """Writes to the log how far a download is, once it has taken two seconds."""
    due_s = time.monotonic() + FIRST_NEWS_S

    def progress(done: int, whole: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + NEWS_S
            log.info("fetching %s: %.1f of %.1f MB", shown(url), done / 1e6, whole / 1e6)

    return progress
