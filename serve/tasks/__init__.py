"""The tasks that are served, one file each, and bundles opened with the checks of their task."""

import os
from pathlib import Path

from serve.bundle.fetched import open_remote
from serve.bundle.manifest import MANIFEST, Bundle, Manifest, read_bundle
from serve.bundle.remote_files import is_url, shown
from serve.errors import BundleError
from serve.tasks.feature_extraction import FEATURE_EXTRACTION, VectorAnswer
from serve.tasks.question_answering import QUESTION_ANSWERING, QuestionAnswer
from serve.tasks.relations import RELATIONS
from serve.tasks.served_task import ServedTask
from serve.tasks.text_classification import TEXT_CLASSIFICATION, LabelsAnswer
from serve.tasks.text_regression import TEXT_REGRESSION, NumberAnswer
from serve.tasks.token_classification import TOKEN_CLASSIFICATION, EntitiesAnswer

# Each has an endpoint of `/v1`.
SERVED_TASKS: tuple[ServedTask, ...] = (
    TOKEN_CLASSIFICATION,
    TEXT_CLASSIFICATION,
    TEXT_REGRESSION,
    QUESTION_ANSWERING,
    FEATURE_EXTRACTION,
    RELATIONS,
)
TASKS: dict[str, ServedTask] = {task.name: task for task in SERVED_TASKS if task is not RELATIONS}

Answer = EntitiesAnswer | LabelsAnswer | NumberAnswer | QuestionAnswer | VectorAnswer


def task_named(name: str) -> ServedTask:
    """The task called `name`. KeyError if none is."""
    return TASKS[name]


def task_of(manifest: Manifest) -> ServedTask:
    """The task of a bundle with this manifest."""
    return RELATIONS if manifest.relations else TASKS[manifest.task]


def open_bundle(path: Path | str, *, known: str = "") -> Bundle:
    """The bundle in folder `path`, or at this URL, with every file checked. BundleError lists what is wrong with it.

    A URL is not asked if the cache has the bundle with the digest `known`, which is the one that is meant.
    """
    if is_url(path):
        return open_remote(str(path), check=check_manifest, known=known)
    bundle = read_bundle(Path(os.path.expanduser(path)))
    check_manifest(bundle.manifest, path)
    return bundle


def check_manifest(manifest: Manifest, place: Path | str) -> None:
    """Check that the manifest of the bundle at `place` has what its task needs.

    Raises:
        BundleError: it has not.
    """
    # By the name of the task: whether it may have relations is what is checked.
    if faults := list(task_named(manifest.task).manifest_faults(manifest)):
        raise BundleError(f"{shown(place)}/{MANIFEST}: {'; '.join(faults)}; export the bundle again")
