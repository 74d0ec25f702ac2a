"""Upload a bundle to a URL, which `serve` and other verbs then take.

Every file is verified first, and the manifest is uploaded last. A bundle that is there already is not uploaded again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serve.bundle.fetched import remote_manifest
from serve.bundle.manifest import MANIFEST, Bundle
from serve.bundle.remote_files import (
    CREDENTIALS,
    LIBRARIES,
    Absent,
    Refused,
    Unreachable,
    describe_error,
    hub_repository,
    listed,
    removed,
    scheme_of,
    shown,
    store_of,
    tried,
)
from serve.errors import BadInput, BundleError
from serve.options import Settings, make, setting
from serve.tasks import open_bundle
from stillroom.console import bar, result, say
from stillroom.inputs.folders import MB, local_bundle
from stillroom.verb import Argument, Document, FolderOrUrl, Verb

HUB_FILES = (".gitattributes",)  # which the Hub makes with a repository
HUB_CARD = "README.md"


@dataclass(frozen=True)
class Pushing(Settings):
    """What an upload may do to what is there."""

    replace: bool = setting(False, help="Replace another bundle at the URL, or upload the same one again.")
    public: bool = setting(
        False, help="Create the repository on the Hub for everyone to read, or push to a public one."
    )


def push(bundle: Path | str, url: str, **settings: Any) -> dict[str, Any]:
    """Upload a bundle to `url`, which `Pipeline`, `evaluate` and `profile` then take in place of its folder.

    Settings are the fields of `Pushing`: replace, public. Returns the document that `stillroom push --json` prints.

    On the Hub all is one commit. Elsewhere the files come first and the manifest last; a bundle that is replaced loses its manifest
    first, so that a reader finds the old bundle, none, or the new one.

    Raises:
        BadInput: the bundle is damaged, the URL cannot be written, or it holds something else and `replace` is not given.
    """
    asked = make(Pushing, settings, verb="push")
    scheme = scheme_of(url)
    if scheme not in LIBRARIES and scheme != "hf":
        raise BadInput(
            f"{shown(url)} can only be read; give s3://, gs://, az://, hf:// or file://, or copy the folder to your web server"
        )
    if asked.public and scheme != "hf":
        raise BadInput(f"--public is for hf://; who may read {shown(url)} is set in its store")
    opened = open_bundle(local_bundle(bundle))
    before, digest = _there(url, asked)
    uploaded = asked.replace or digest != opened.manifest.digest
    if uploaded and digest and not asked.replace:
        raise BadInput(
            f"{shown(url)} holds another bundle ({digest[:12]}, and this one is {opened.manifest.digest[:12]}); give another URL, "
            "or --replace"
        )
    sizes = {name: (opened.path / name).stat().st_size for name in [*opened.manifest.files, MANIFEST]}
    if uploaded:
        say(f"uploading {sum(sizes.values()) / 1e6:.1f} MB to {shown(url)}")
        to_store = _to_hub if scheme == "hf" else _to_store
        to_store(opened, url, sizes, before, asked)
    return {
        "bundle": shown(bundle),
        "url": shown(url),
        "name": opened.manifest.name,
        "digest": opened.manifest.digest,
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "uploaded": uploaded,
        "replaced": uploaded and bool(digest),
    }


def _there(url: str, settings: Pushing) -> tuple[set[str], str]:
    """The files of the bundle that is at `url` already, and its digest. Without one, none and an empty text."""
    try:
        manifest, _ = remote_manifest(url)
    except Absent:
        return set(), ""
    except Refused:
        if scheme_of(url) != "hf":
            raise
        return set(), ""  # the Hub also refuses what does not exist; creating the repository tells the two apart
    except Unreachable:
        raise
    except BundleError:  # its manifest is damaged, or of something else
        if not settings.replace:
            raise
        return set(), ""
    return set(manifest.files), manifest.digest


def _to_store(bundle: Bundle, url: str, sizes: dict[str, int], before: set[str], settings: Pushing) -> None:
    store, folder = store_of(url)
    store.invalidate_cache()
    makes_folders = scheme_of(url) == "file"  # a store has none, and might make a bucket in their place
    if not before and not settings.replace:
        found = tried(url, "", lambda: listed(store, folder), does="written")
        if strange := sorted(name for name, size in found.items() if sizes.get(name) != size):
            raise _foreign(url, strange)
    if before or settings.replace:
        tried(url, MANIFEST, lambda: removed(store, f"{folder}/{MANIFEST}"), does="written")
    with _bar(sizes) as advance:
        for name in [*sorted(bundle.manifest.files), MANIFEST]:
            target = f"{folder}/{name}"
            if makes_folders:
                tried(url, name, partial(store.makedirs, target.rpartition("/")[0], exist_ok=True), does="written")
            tried(url, name, partial(store.put_file, str(bundle.path / name), target), does="written")
            advance(sizes[name])
    for name in sorted(before - set(sizes)):
        tried(url, name, partial(removed, store, f"{folder}/{name}"), does="written")


def _to_hub(bundle: Bundle, url: str, sizes: dict[str, int], before: set[str], settings: Pushing) -> None:
    repository, revision = hub_repository(url)
    try:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise BadInput(
            f"{url}: uploading to the Hub needs huggingface_hub; in a clone of stillroom, pip install '.[hf]'"
        ) from None
    api = HfApi()
    operations: list[Any] = [CommitOperationAdd(name, str(bundle.path / name)) for name in sorted(sizes)]
    operations += [CommitOperationDelete(name) for name in sorted(before - set(sizes))]
    try:
        api.create_repo(repository, private=not settings.public, exist_ok=True)
        found = api.model_info(repository)
        if found.private and settings.public:
            raise BadInput(f"{url} is private; leave out --public, or change on the Hub who may read it")
        if not found.private and not settings.public:
            raise BadInput(f"{url} is public, so everyone could read the bundle; give --public, or another name")
        strange = sorted({each.rfilename for each in found.siblings or ()} - {*HUB_FILES, HUB_CARD})
        if strange and not before and not settings.replace:
            raise _foreign(url, strange)
        # The Hub's library draws bars of its own.
        summary = f"{bundle.manifest.name}, bundle {bundle.manifest.digest[:12]}"
        api.create_commit(repository, operations, revision=revision or None, commit_message=summary)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise BadInput(f"{url} was not written ({describe_error(url, error)}); {CREDENTIALS['hf']}") from None


def _foreign(url: str, names: list[str]) -> BadInput:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return BadInput(
        f"{shown(url)} holds other files ({', '.join(names[:5])}{more}) and no bundle; give another URL, or --replace to write among them"
    )


@contextmanager
def _bar(sizes: dict[str, int]) -> Iterator[Callable[[int], None]]:
    """A bar for the upload; what it gives is called with the bytes of each file that is there."""
    whole, done = -(-sum(sizes.values()) // MB), 0
    with bar("upload, in MB") as drawn:

        def advance(size: int) -> None:
            nonlocal done
            done += size
            drawn(done // MB, whole)

        drawn(0, whole)
        yield advance


def show_push(document: Document) -> None:
    """Prints what is now where."""
    what = f"{document['name']} ({document['digest'][:12]}, {document['bytes'] / 1e6:.1f} MB)"
    if document["uploaded"]:
        result(f"{what} is at {document['url']}")
    else:
        result(f"{what} is at {document['url']} already; nothing was uploaded")


VERB = Verb(
    "push",
    push,
    Pushing,
    help=__doc__,
    arguments=(
        Argument("bundle", "A bundle: its folder or URL.", type=FolderOrUrl()),
        Argument("url", "Where to: s3://, gs://, az://, hf://OWNER/NAME or file://."),
    ),
    show=show_push,
    examples=(
        "stillroom push ner.bundle s3://models/ner",
        "stillroom push ner.bundle hf://OWNER/ner",
        "stillroom push ner.bundle gs://models/ner --replace",
    ),
)
