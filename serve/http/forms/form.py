"""What a form is: the path that texts are posted to, the models that may answer there, how a request is read and an answer written."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from serve.settings import Limits
from serve.tasks.served_task import Endpoint, ServedTask
from serve.text.inputs import TextWork
from serve.workers.served_model import ServedModel


class Form(NamedTuple):
    """A form of requests and answers. `Service.answer` does what all have in common."""

    endpoint: Endpoint
    tasks: tuple[ServedTask, ...]
    """Those of the models that it asks."""
    works_of: Callable[[Any, ServedModel, Limits], list[TextWork]]
    """The texts of a request with their options. BadInput or TooLarge, with the field, for what cannot be answered."""
    response: Callable[[Any, ServedModel, Sequence[bytes]], object]
    """The body of the response to a request, from the answers in JSON."""
    request_type: Callable[[bytes], type[msgspec.Struct]] | None = None
    """Which of the requests of the endpoint a body is, where there are several."""


def own_form(task: ServedTask) -> Form:
    """The form of the endpoint of `task` under `/v1`."""
    return Form(
        task.endpoint,
        (task,),
        lambda asked, model, limits: task.works_of(asked, limits),
        lambda asked, model, answers: task.response(model.manifest.name, model.variant, answers),
        task.request_type,
    )
