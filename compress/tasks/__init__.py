"""The tasks, each in one file: looked up by name once, and passed on as an object. No torch before a model or a loss is asked for."""

from typing import Any

from compress.data.task import Task
from compress.tasks.feature_extraction import FeatureExtraction
from compress.tasks.question_answering import QuestionAnswering
from compress.tasks.text_classification import TextClassification
from compress.tasks.text_regression import TextRegression
from compress.tasks.token_classification import TokenClassification
from serve.errors import BadInput
from serve.text.labels import MULTI_LABEL

TOKEN_CLASSIFICATION = TokenClassification()
TEXT_CLASSIFICATION = TextClassification()
TEXT_REGRESSION = TextRegression()
QUESTION_ANSWERING = QuestionAnswering()
FEATURE_EXTRACTION = FeatureExtraction()
# By name, those that labels teach; then all that can be served.
LABELLED: dict[str, Task] = {
    task.name: task for task in (TOKEN_CLASSIFICATION, TEXT_CLASSIFICATION, TEXT_REGRESSION, QUESTION_ANSWERING)
}
TASKS: dict[str, Task] = LABELLED | {FEATURE_EXTRACTION.name: FEATURE_EXTRACTION}


def task_named(name: str, *, multi_label: bool = False) -> Task:
    """The task of that name; with `multi_label` any number of labels may apply to a text.

    Raises:
        BadInput: there is none.
    """
    if name not in TASKS:
        raise BadInput(f"--task {name} is not known. Give {' or '.join(TASKS)}.")
    return TASKS[name].with_multi_label(multi_label)


def task_of(config: Any) -> Task | None:
    """The task that a model with the configuration `config` has a head for, of one label a text or any number; None if it has none."""
    task = next((task for task in LABELLED.values() if task.head and task.head.labels_in(config)), None)
    return task and task.with_multi_label(config.problem_type == MULTI_LABEL)
