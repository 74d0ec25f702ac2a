"""Downloads models and data sets from the Hub, after one request that checks the name.

The Hub's library repeats a failing request 6 times over 30 s and logs each, and neither can be configured. So this module
sends one request first; if that fails, only the library's cache is read.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from compress import distributed

log = logging.getLogger("compress")

Kind = Literal["model", "dataset"]

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
COMMIT = re.compile("[0-9a-f]{7,40}")
ASK_S = 10.0  # timeout of the first request
CALLED: dict[Kind, str] = {"model": "model", "dataset": "data set"}
OFFLINE = "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, and the local cache does not hold it"
LIBRARIES = ("huggingface_hub", "datasets")


def may_be_on_hub(name: str) -> bool:
    """Whether `name`, which is no local path, may be on the Hub: `owner/name`, or an old name without an owner.

    Names that look like paths are not sent to the Hub: a bare name with a dot, a separator at either end, or a name below an
    existing folder.
    """
    first, separator, _ = name.partition("/")
    if not HUB_NAME.fullmatch(name):
        return False
    return not Path(first).exists() if separator else "." not in name


@cache  # a found model is looked up once; errors are not cached
def download_model(name: str, revision: str = "") -> Path:
    """The folder of the Hub's model `name`, downloaded now or before.

    `revision` is a branch, tag or commit; empty for the main branch. Private models need `HF_TOKEN` or a saved login.

    Raises:
        LookupError: neither the Hub nor the local cache has it; the message gives the reason.
    """
    from huggingface_hub import snapshot_download

    missed = _ask(name, "model", revision)
    with _quiet():
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision or None,
                    allow_patterns=["*.json", "*.txt", "*.safetensors", "*.model"],
                    local_files_only=bool(missed),
                )
            )
        except Exception as error:
            # The library raises any kind of error about the name.
            raise LookupError(missed or _in_words(error)) from None


def load_dataset(name: str, revision: str = "") -> Any:
    """The splits of the Hub's data set `name` by name, downloaded now or before.

    `revision` is a branch, tag or commit. Private data sets need `HF_TOKEN` or a saved login.

    Raises:
        LookupError: neither the Hub nor the local cache has it; the message gives the reason.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE  # HF_DATASETS_OFFLINE sets it as well
    missed = OFFLINE if offline else _ask(name, "dataset", revision)
    with _quiet():
        try:
            datasets.config.HF_HUB_OFFLINE = offline or bool(missed)
            splits = datasets.load_dataset(name, revision=revision or None)
        except Exception as error:
            # The library raises any kind of error about the name: a broken cache, unknown files.
            raise LookupError(missed or _in_words(error)) from None
        finally:
            datasets.config.HF_HUB_OFFLINE = offline
    # Without the Hub, the library gives whichever revision its cache has. The addresses of the files that it read have their commit.
    if missed and revision and not all(f"@{revision}" in address for address in _addresses(splits)):
        held = (
            "has another revision"
            if COMMIT.fullmatch(revision)
            else f"names its data by commits: give the commit of {revision}"
        )
        raise LookupError(f"{missed}; the local cache {held}")
    return splits


def _addresses(splits: Any) -> list[str]:
    """Where the files of `splits` were read from, as `hf://datasets/NAME@COMMIT/FILE`; `[""]` where that is not known."""
    return [address for each in splits.values() for address in each.info.download_checksums or {}] or [""]


def _ask(name: str, kind: Kind, revision: str = "") -> str:
    """Why the Hub does not provide `name`, as text; empty if it does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    if distributed.main():
        # A warning, so that it is seen where a program has set up no logging.
        log.warning("%s is not a local folder; looking for a %s of that name on the Hub.", name, CALLED[kind])
    try:
        HfApi().repo_info(name, revision=revision or None, repo_type=kind, timeout=ASK_S)
    except RepositoryNotFoundError:
        return "the Hub has none of that name that you may read"
    except RevisionNotFoundError:
        return f"the Hub has no revision {revision} of that name"
    except Exception as error:
        # Any other failure: no network, a proxy, a certificate, a name that the library does not accept.
        return f"the Hub does not answer, {_in_words(error)}"
    return ""


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which the libraries log nothing; their exceptions carry the same text."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
