"""`serve.tasks`: one object for every name, and one endpoint for every object."""

from pathlib import Path
from typing import get_args

import pytest

from serve.bundle.manifest import TaskName
from serve.tasks import SERVED_TASKS, TASKS, open_bundle, task_named, task_of
from serve.tasks.relations import RELATIONS


def test_every_name_has_one_task() -> None:
    assert set(TASKS) == set(get_args(TaskName))
    assert all(task_named(name).name == name for name in TASKS)


def test_every_task_has_an_endpoint_with_an_example_that_its_requests_take() -> None:
    assert len({task.endpoint.path for task in SERVED_TASKS}) == len(SERVED_TASKS)
    for task in SERVED_TASKS:
        request = task.endpoint.requests[0](**task.endpoint.example)
        assert "model" in request.__struct_fields__


@pytest.mark.parametrize("task", SERVED_TASKS, ids=lambda task: task.kind)
def test_a_task_that_reads_one_text_says_so(task) -> None:
    assert bool(task.one_text) is not task.reads_pairs


def test_a_bundle_has_the_task_of_its_manifest(bundle_of_each_kind: list[Path]) -> None:
    found = [task_of(open_bundle(bundle).manifest) for bundle in bundle_of_each_kind]
    assert sorted(task.kind for task in found) == sorted(task.kind for task in SERVED_TASKS)
    assert RELATIONS in found
