"""The length of the text that a latency budget is about."""

import numpy as np

from compress.runs.task_inputs import TaskInputs
from serve.errors import BadInput

USUAL_SHARE = 95  # percent of the texts of validation that the usual length holds
LEAST_TOKENS = 8  # a text has special tokens too


def timed_tokens(inputs: TaskInputs, asked: int) -> int:
    """The tokens `asked` for; for 0 the length that `USUAL_SHARE` percent of the texts of validation stay within.

    Raises:
        BadInput: they are too few for a text, or more than the model reads.
    """
    if not asked:
        usual = int(np.percentile([len(ids) for ids in inputs.validation.ids], USUAL_SHARE, method="higher"))
        return min(max(usual, LEAST_TOKENS), inputs.max_length)
    if not LEAST_TOKENS <= asked <= inputs.max_length:
        raise BadInput(
            f"--tokens {asked} is not from {LEAST_TOKENS} to {inputs.max_length}, the tokens of the longest text that is read. Give a "
            "length of your texts."
        )
    return asked
