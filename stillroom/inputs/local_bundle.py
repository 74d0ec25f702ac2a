"""A bundle that the command line names: a folder as it is, a URL by its copy in the cache."""

from pathlib import Path

from serve.bundle.fetched import open_remote
from serve.bundle.remote_files import is_url
from serve.tasks import check_manifest
from stillroom.console import bar

MB = 1_000_000


def local_bundle(place: Path | str) -> Path:
    """The folder `place`, or the folder in the cache of the bundle at the URL `place`, with a bar while it is fetched.

    Raises:
        BundleError: as `serve.bundle.fetched.open_remote`.
    """
    if not is_url(place):
        return Path(place)
    with bar("fetch, in MB") as shown:
        return open_remote(
            str(place), lambda done, whole: shown(done // MB, -(-whole // MB)), check=check_manifest
        ).path
