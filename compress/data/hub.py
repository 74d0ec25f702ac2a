"""Names that may be on the Hub: which ones are asked for, and how: once, with one line said of it.

The Hub's library tries a request that fails six times, over half a minute, and logs each try; neither can be set. So one
request of ours goes first, and where that fails only the library's cache is looked in.
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
ASK_S = 10.0  # for the first request to be answered in
CALLED: dict[Kind, str] = {"model": "model", "dataset": "data set"}
OFFLINE = "it is not asked, as HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, and its cache here does not hold it"
LIBRARIES = ("huggingface_hub", "datasets")


def may_be_on_hub(name: str) -> bool:
    """Whether `name`, which is nothing here, may be the Hub's: `owner/name`, or an old name without an owner.

    What looks like a path is one, and nothing to ask a network for: a bare name with a dot, a separator at either end, a
    name under a folder that is here.
    """
    first, separator, _ = name.partition("/")
    if not HUB_NAME.fullmatch(name):
        return False
    return not Path(first).exists() if separator else "." not in name


@cache  # what was found is asked for once; what was not is raised, and not kept
def download_model(name: str, revision: str = "") -> Path:
    """The folder that the model `name` of the Hub lies in once it is downloaded, or as it was downloaded before.

    `revision` is a branch, a tag or a commit; none is the main branch. Who asks is known by `HF_TOKEN` or by the saved login,
    as for everything that the Hub's library downloads.

    Raises:
        LookupError: the Hub does not give it, and its cache does not hold it; says why.
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
            # Whatever the library raises is about the name given.
            raise LookupError(missed or _in_words(error)) from None


def load_dataset(name: str, revision: str = "") -> Any:
    """The splits of the data set `name` of the Hub by their names, downloaded now or before.

    `revision` is a branch, tag or commit of it. Private ones are read with the Hub's token of the environment (HF_TOKEN).

    Raises:
        LookupError: the Hub does not give it, and its cache does not hold it; says why.
    """
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE  # HF_DATASETS_OFFLINE sets it as well
    missed = OFFLINE if offline else _ask(name, "dataset", revision)
    with _quiet():
        try:
            datasets.config.HF_HUB_OFFLINE = offline or bool(missed)
            return datasets.load_dataset(name, revision=revision or None)
        except Exception as error:
            # Whatever the library raises (a broken cache, files of no known kind) is about the name given.
            raise LookupError(missed or _in_words(error)) from None
        finally:
            datasets.config.HF_HUB_OFFLINE = offline


def _ask(name: str, kind: Kind, revision: str = "") -> str:
    """Why the Hub does not give `name`, in words; empty where it does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    if distributed.main():
        # A warning, so that it is seen where a program has set up no logging.
        log.warning("%s is no folder here; asking the Hub for a %s of that name.", name, CALLED[kind])
    try:
        HfApi().repo_info(name, revision=revision or None, repo_type=kind, timeout=ASK_S)
    except RepositoryNotFoundError:
        return "it has none of that name that you may see"
    except RevisionNotFoundError:
        return f"it has no revision {revision} of that name"
    except Exception as error:
        # Whatever stands between us and the Hub: no network, a proxy, a certificate, a name that it takes for none.
        return f"it does not answer, {_in_words(error)}"
    return ""


def _in_words(error: Exception) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0] if said else 'no reason given'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it the libraries log nothing; what they raise says it, too."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
